#include "kernels/simulated/runtime/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>

#include "kernels/simulated/machine.hpp"
#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/devices.hpp"
#include "kernels/simulated/runtime/settings.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace longspan::simulated {
namespace {

constexpr std::size_t kAlign = 256, kPage = 4096;
constexpr unsigned char kAround =
    0x5c;  // what lies between an allocation and the ends of its pages
constexpr std::size_t kMostFreed = 4096;

struct Freed {
  std::byte* reserved;
  std::size_t bytes;
};

struct Memory {
  std::map<const std::byte*, Allocation> by_reserved;
  std::deque<Freed> freed;           // whose addresses are not reused for a while
  std::map<int, std::size_t> taken;  // of each GPU
};

Memory& memory() {
  static Memory* const all = new Memory;
  return *all;
}

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// Calls use(first, bytes) for the parts before and after the data in its pages.
template <class Use>
void for_each_margin(const Allocation& a, const Use& use) {
  use(a.pages, static_cast<std::size_t>(a.data - a.pages));
  std::byte* const end = a.data + a.bytes;
  use(end, static_cast<std::size_t>(a.pages + a.page_bytes - end));
}

/// Reserves addresses for `bytes`, with a page on either side. False: there are none.
bool reserve(Allocation& a, std::size_t bytes) {
  a.bytes = bytes;
  a.page_bytes = round_up(round_up(bytes, kAlign), kPage);
  a.reserved_bytes = a.page_bytes + 2 * kPage;
  void* const reserved = mmap(nullptr, a.reserved_bytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return false;
  a.reserved = static_cast<std::byte*>(reserved);
  a.pages = a.reserved + kPage;
  a.data = a.pages + a.page_bytes - round_up(bytes, kAlign);
  return true;
}

Allocation* keep(const Allocation& a) { return &(memory().by_reserved[a.reserved] = a); }

/// The allocation, its pages included, or the nearest one before this address.
Allocation* at_or_before(const void* address) {
  auto& all = memory().by_reserved;
  auto next = all.upper_bound(static_cast<const std::byte*>(address));
  return next == all.begin() ? nullptr : &std::prev(next)->second;
}

bool reserves(const std::byte* reserved, std::size_t bytes, const void* address) {
  const auto* at = static_cast<const std::byte*>(address);
  return at >= reserved && at < reserved + bytes;
}

}  // namespace

Allocation* allocate(std::size_t bytes, Allocation::Kind kind) {
  Allocation a;
  a.kind = kind;
  a.device = device_on_node(current_device());
  if (kind == Allocation::Kind::device && bytes > free_memory(a.device)) return nullptr;
  if (!reserve(a, bytes)) return nullptr;
  // All of it is written below, and the kernel populates many pages at once in a tenth of the time
  // that page faults take.
  if (mmap(a.pages, a.page_bytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE, -1, 0) == MAP_FAILED) {
    munmap(a.reserved, a.reserved_bytes);
    return nullptr;
  }
  std::memset(a.data, kFresh, a.bytes);
  for_each_margin(a, [](std::byte* first, std::size_t count) {
    std::memset(first, kAround, count);
    ASAN_POISON_MEMORY_REGION(first, count);
  });
  if (kind == Allocation::Kind::device) memory().taken[a.device] += round_up(bytes, kAlign);
  return keep(a);
}

Allocation* import_pages(int file, const Allocation& as) {
  Allocation a = as;
  if (!reserve(a, as.bytes)) return nullptr;
  if (mmap(a.pages, a.page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
      MAP_FAILED) {
    munmap(a.reserved, a.reserved_bytes);
    return nullptr;
  }
  for_each_margin(
      a, [](std::byte* first, std::size_t count) { ASAN_POISON_MEMORY_REGION(first, count); });
  return keep(a);
}

bool put_into_file(Allocation& a, std::size_t more) {
  if (a.file >= 0) return true;
  const int file = memfd_create("longspan-gpu-memory", MFD_CLOEXEC);
  if (file < 0) return false;
  for_each_margin(
      a, [](std::byte* first, std::size_t count) { ASAN_UNPOISON_MEMORY_REGION(first, count); });
  bool good = true;
  for (std::size_t done = 0; good && done < a.page_bytes;) {
    const ssize_t wrote = write(file, a.pages + done, a.page_bytes - done);
    good = wrote > 0;
    if (good) done += static_cast<std::size_t>(wrote);
  }
  good = good && ftruncate(file, static_cast<off_t>(a.page_bytes + more)) == 0;
  good = good && mmap(a.pages, a.page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                      0) != MAP_FAILED;
  for_each_margin(
      a, [](std::byte* first, std::size_t count) { ASAN_POISON_MEMORY_REGION(first, count); });
  if (good)
    a.file = file;
  else
    close(file);
  return good;
}

void release(Allocation* allocation) {
  const Allocation a = *allocation;
  ASAN_UNPOISON_MEMORY_REGION(a.pages, a.page_bytes);
  if (a.kind != Allocation::Kind::imported)
    for_each_margin(a, [&](const std::byte* first, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i)
        if (first[i] != std::byte{kAround})
          fail("something wrote outside of an allocation: " + describe_address(first + i));
    });
  if (a.kind == Allocation::Kind::device) memory().taken[a.device] -= round_up(a.bytes, kAlign);
  memory().by_reserved.erase(a.reserved);
  if (a.file >= 0) close(a.file);
  // The addresses stay reserved for a while, so that later accesses are found.
  mmap(a.reserved, a.reserved_bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  memory().freed.push_back({a.reserved, a.reserved_bytes});
  if (memory().freed.size() <= kMostFreed) return;
  munmap(memory().freed.front().reserved, memory().freed.front().bytes);
  memory().freed.pop_front();
}

Allocation* find_allocation(const void* data) {
  Allocation* const found = at_or_before(data);
  return found != nullptr && found->data == data ? found : nullptr;
}

void for_each_allocation(const std::function<void(Allocation&)>& use) {
  for (auto& [reserved, allocation] : memory().by_reserved) use(allocation);
}

Found look_up(const void* data, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  if (const Allocation* a = at_or_before(data);
      a != nullptr && reserves(a->reserved, a->reserved_bytes, data)) {
    const bool fits = first >= a->data && first <= a->data + a->bytes &&
                      bytes <= static_cast<std::size_t>(a->data + a->bytes - first);
    return {fits ? Where::inside : Where::outside, a};
  }
  for (const Freed& freed : memory().freed)
    if (reserves(freed.reserved, freed.bytes, data)) return {Where::outside, nullptr};
  return {};
}

std::string describe_address(const void* address) {
  char text[200];
  const Allocation* const a = at_or_before(address);
  if (a != nullptr && reserves(a->reserved, a->reserved_bytes, address)) {
    const auto offset = static_cast<const std::byte*>(address) - a->data;
    const char* const kinds[] = {"of GPU", "pinned, by GPU", "of another process's GPU"};
    std::snprintf(text, sizeof text, "%p is at byte %td of an allocation of %zu bytes %s %d",
                  address, offset, a->bytes, kinds[static_cast<int>(a->kind)], a->device);
    return text;
  }
  for (const Freed& freed : memory().freed)
    if (reserves(freed.reserved, freed.bytes, address)) {
      std::snprintf(text, sizeof text, "%p is in memory that was freed", address);
      return text;
    }
  std::snprintf(text, sizeof text, "%p is in no allocation", address);
  return text;
}

std::size_t free_memory(int device) {
  const std::size_t taken = memory().taken[device], all = settings().memory_bytes;
  return taken < all ? all - taken : 0;
}

}  // namespace longspan::simulated

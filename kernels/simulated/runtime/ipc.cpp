// Memory of a GPU mapped into other processes. A handle names the process and the file behind its
// memory; another process opens it by mapping that file. Threads of one process open handles too,
// since ranks of a simulation may be threads, and get the memory at its own address.
//
// Behind the memory the file has a page where every process that has mapped it enters its number.
// Memory must not be freed while a peer has it mapped; a process that does so gets an error.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "kernels/simulated/machine.hpp"
#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/devices.hpp"
#include "kernels/simulated/runtime/ipc.hpp"
#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/streams.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kMagic = 0x6c736970;

struct Handle {
  std::uint32_t magic;
  int process, file, device;
  std::uint64_t bytes;
  std::uint64_t data;  // its address in that process
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

/// The page behind the memory: processes that have it mapped; 0: a free entry.
struct Users {
  static constexpr std::size_t kMost = 64;
  std::atomic<int> process[kMost];
};
static_assert(sizeof(Users) <= kPage && std::atomic<int>::is_always_lock_free);

/// The page of a file, mapped during this object's lifetime.
class UsersPage {
 public:
  UsersPage(int file, std::size_t page_bytes) {
    void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                            static_cast<off_t>(page_bytes));
    users_ = page == MAP_FAILED ? nullptr : static_cast<Users*>(page);
  }
  ~UsersPage() {
    if (users_ != nullptr) munmap(users_, kPage);
  }
  UsersPage(const UsersPage&) = delete;
  UsersPage& operator=(const UsersPage&) = delete;

  /// Changes one entry from `from` to `to`. False: no entry holds it.
  bool replace(int from, int to) {
    if (users_ == nullptr) return false;
    for (auto& process : users_->process) {
      int expected = from;
      if (process.compare_exchange_strong(expected, to)) return true;
    }
    return false;
  }
  /// A live process that has the memory mapped; 0: none.
  int living_user() const {
    if (users_ == nullptr) return 0;
    for (const auto& process : users_->process)
      if (const int number = process; number != 0 && kill(number, 0) == 0) return number;
    return 0;
  }

 private:
  Users* users_;
};

/// The other process's file; below 0: it cannot be opened.
int open_file_of(const Handle& handle) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
  return open(path, O_RDWR | O_CLOEXEC);
}

Allocation* find_imported(const Handle& handle);

cudaError_t open_handle(void** data, const Handle& handle) {
  if (handle.magic != kMagic) return cudaErrorInvalidResourceHandle;
  const bool is_own = handle.process == getpid();
  Allocation* allocation =
      is_own ? find_allocation(reinterpret_cast<const void*>(handle.data)) : find_imported(handle);
  if (allocation != nullptr) {
    ++allocation->opened;
    *data = allocation->data;
    return cudaSuccess;
  }
  if (is_own) return cudaErrorInvalidResourceHandle;
  const int file = open_file_of(handle);
  if (file < 0) {
    std::fprintf(stderr, "simulated: memory of process %d cannot be opened: %s\n", handle.process,
                 std::strerror(errno));
    return cudaErrorMapBufferObjectFailed;
  }
  Allocation as;
  as.kind = Allocation::Kind::imported;
  as.device = handle.device;
  as.bytes = static_cast<std::size_t>(handle.bytes);
  as.owner = handle.process;
  as.owner_file = handle.file;
  as.opened = 1;
  allocation = import_pages(file, as);
  if (allocation == nullptr) {
    close(file);
    return cudaErrorMapBufferObjectFailed;
  }
  allocation->file = file;
  UsersPage(file, allocation->page_bytes).replace(0, getpid());
  meet_other_processes();
  *data = allocation->data;
  return cudaSuccess;
}

Allocation* find_imported(const Handle& handle) {
  Allocation* found = nullptr;
  for_each_allocation([&](Allocation& a) {
    const bool same = a.kind == Allocation::Kind::imported && a.owner == handle.process &&
                      a.owner_file == handle.file;
    if (same) found = &a;
  });
  return found;
}

}  // namespace

void check_unused(const Allocation& a) {
  if (a.kind == Allocation::Kind::imported) return;
  if (a.opened > 0)
    fail("memory is freed while a thread of this process has it open as a peer's: " +
         describe_address(a.data));
  if (a.file < 0) return;
  if (const int user = UsersPage(a.file, a.page_bytes).living_user(); user != 0)
    fail("memory is freed while process " + std::to_string(user) +
         " has it mapped: " + describe_address(a.data));
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  return call("cudaIpcGetMemHandle", [&](Lock&) {
    Allocation* const a = find_allocation(data);
    if (handle == nullptr || a == nullptr || a->kind != Allocation::Kind::device)
      return cudaErrorInvalidValue;
    if (!put_into_file(*a, kPage)) return cudaErrorMemoryAllocation;
    const Handle named{kMagic,    getpid(), a->file,
                       a->device, a->bytes, reinterpret_cast<std::uint64_t>(a->data)};
    *handle = {};
    std::memcpy(handle->reserved, &named, sizeof named);
    return cudaSuccess;
  });
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags) {
  return call("cudaIpcOpenMemHandle", [&](Lock&) {
    if (data == nullptr || flags != cudaIpcMemLazyEnablePeerAccess) return cudaErrorInvalidValue;
    if (const cudaError_t error = refuse_in_capture(); error != cudaSuccess) return error;
    Handle named;
    std::memcpy(&named, handle.reserved, sizeof named);
    return open_handle(data, named);
  });
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  return call("cudaIpcCloseMemHandle", [&](Lock& lock) {
    if (const cudaError_t error = refuse_in_capture(); error != cudaSuccess) return error;
    wait_for_device(lock, current_device());
    Allocation* const a = find_allocation(data);
    if (a == nullptr || a->opened == 0) return cudaErrorInvalidValue;
    if (--a->opened > 0 || a->kind != Allocation::Kind::imported) return cudaSuccess;
    UsersPage(a->file, a->page_bytes).replace(getpid(), 0);
    release(a);
    return cudaSuccess;
  });
}

}  // extern "C"

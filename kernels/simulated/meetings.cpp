// Synchronisation of threads: lanes of a warp, threads of a block, and mbarriers. Also shared
// memory.
#include <algorithm>
#include <cstring>

#include "kernels/simulated/state.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace longspan::simulated {
namespace {

constexpr std::uint32_t kWindow = 1024;  // address of the shared window's first object, as on
                                         // Hopper
constexpr std::size_t kOwnVariables = std::size_t{48} << 10;

/// After the last one has arrived: it continues, or others do.
void after_meeting(const char* what, Site site) {
  if (yields.comes_true()) leave_warp(what, site, false);
}

/// At a barrier the asynchronous proxy learns what the proxies of the others know.
void release_proxy(Order& order) { current->warp->proxy.release(order); }
void acquire_proxy(Order& order) { current->warp->proxy.acquire(order); }

}  // namespace

// ---- shared memory -----------------------------------------------------------------------------

std::uint32_t shared_address(const void* pointer, Site site) {
  const Block& block = *current->warp->block;
  const std::ptrdiff_t at = static_cast<const std::byte*>(pointer) - block.shared;
  const auto most = block.own_variables + kOwnVariables - block.shared;
  if (at < 0 || at > most) fail("an address of the shared window of what is not there", site);
  return static_cast<std::uint32_t>(at) + kWindow;
}

std::byte* find_shared(std::uint32_t address, int bytes, int align, const char* what, Site site) {
  const Block& block = *current->warp->block;
  const auto at = static_cast<std::size_t>(address) - kWindow;
  const std::size_t end = at + static_cast<std::size_t>(bytes);
  const auto own = static_cast<std::size_t>(block.own_variables - block.shared);
  const bool inside = address >= kWindow && (end <= block.grid->kernel.shared_bytes ||
                                             (at >= own && end <= own + block.own_bytes));
  if (!inside)
    fail(std::string(what) + ": shared memory out of bounds, " + std::to_string(bytes) +
             " bytes at " + std::to_string(static_cast<std::int64_t>(address) - kWindow) + " of " +
             std::to_string(block.grid->kernel.shared_bytes),
         site);
  if (address % static_cast<unsigned>(align) != 0)
    fail(std::string(what) + ": shared address " + std::to_string(address) +
             " is not a multiple of " + std::to_string(align),
         site);
  return block.shared + at;
}
std::byte* shared_pointer(std::uint32_t address, int bytes, int align, const char* what,
                          Site site) {
  std::byte* const found = find_shared(address, bytes, align, what, site);
  if (is_awaited(*current->warp->block, found, static_cast<std::size_t>(bytes)))
    fail(std::string(what) + ": shared memory into which a copy has not landed, at " +
             std::to_string(address - kWindow),
         site);
  return found;
}

std::byte* dynamic_shared() { return current->warp->block->shared; }

void store_quietly(void* to, const void* from, std::size_t bytes, bool has_proxies) {
  const Quiet quiet;
  std::memcpy(to, from, bytes);
  if (has_proxies) current->warp->unfenced.push_back({to, bytes, current});
}

void* static_shared(const void* key, std::size_t bytes, std::size_t align) {
  const Quiet quiet;
  Block& block = *current->warp->block;
  if (const auto found = block.variables.find(key); found != block.variables.end())
    return found->second;
  block.own_bytes = (block.own_bytes + align - 1) / align * align;
  std::byte* const place = block.own_variables + block.own_bytes;
  block.own_bytes += bytes;
  if (block.own_bytes > kOwnVariables) fail("more than 48 KB of shared variables in a block");
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(place, bytes);
#endif
  block.variables[key] = place;
  return place;
}

// ---- warps -------------------------------------------------------------------------------------

void meet(unsigned mask, const char* what, void* data, Complete complete, bool orders_memory,
          Site site) {
  const Quiet quiet;
  Lane& lane = *current;
  Warp& warp = *lane.warp;
  if ((mask >> lane.number & 1) == 0)
    fail(std::string(what) + " by a lane that its mask leaves out", site);
  Meeting* meeting = nullptr;
  for (const auto& each : warp.meetings)
    if (each->mask == mask) meeting = each.get();
  if (meeting == nullptr) {
    warp.meetings.push_back(std::make_unique<Meeting>());
    meeting = warp.meetings.back().get();
    meeting->mask = mask;
  }
  if (meeting->arrived == 0)
    meeting->what = what, meeting->complete = complete, meeting->orders_memory = orders_memory;
  else if (meeting->what != what && std::strcmp(meeting->what, what) != 0)
    fail(std::string("lanes of a warp are at ") + meeting->what + " and at " + what +
             " with the same mask",
         site);
  meeting->data[lane.number] = data;
  meeting->arrived |= 1u << lane.number;
  const unsigned turn = meeting->turn & 1;
  if (orders_memory) {
    meeting->order[turn].release();
    release_proxy(meeting->proxy_order[turn]);
  }
  if (meeting->arrived == (mask & warp.alive)) {
    const unsigned all = meeting->arrived;
    for (int l = 0; l < 32; ++l)
      if ((all >> l & 1) == 0) meeting->data[l] = nullptr;
    if (complete != nullptr) complete(meeting->data, all);
    meeting->arrived = 0;
    ++meeting->turn;
    if (const unsigned others = all & ~(1u << lane.number); others != 0) wake(warp, others);
    after_meeting(what, site);
  } else {
    wait_here(what, site);
  }
  if (orders_memory) {
    meeting->order[turn].acquire();
    acquire_proxy(meeting->proxy_order[turn]);
  }
}

void meet_all(const char* what, void* data, Complete complete, Site site) {
  if (current->warp->alive != ~0u)
    fail(std::string(what) + " by a warp of which not all 32 lanes are there", site);
  meet(~0u, what, data, complete, false, site);
}

// ---- blocks ------------------------------------------------------------------------------------

bool block_barrier(int id, int threads, bool waits, bool predicate, const char* what, Site site) {
  const Quiet quiet;
  Lane& lane = *current;
  Block& block = *lane.warp->block;
  if (id < 0 || id > 15) fail(std::string(what) + ": there are barriers 0 to 15", site);
  if (threads % 32 != 0)
    fail(std::string(what) + ": the number of threads is not a multiple of 32", site);
  NamedBarrier& barrier = block.barriers[id];
  const int expected = threads == 0 ? block.live : threads;
  if (barrier.arrived == 0)
    barrier.expected = expected;
  else if (threads != 0 && barrier.expected != threads)
    fail(std::string(what) + " " + std::to_string(id) + ": for " + std::to_string(threads) +
             " threads, and others came for " + std::to_string(barrier.expected),
         site);
  else if (threads == 0)
    barrier.expected = expected;
  const unsigned turn = barrier.turn & 1;
  barrier.order[turn].release();
  release_proxy(barrier.proxy_order[turn]);
  barrier.any |= predicate;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.result[turn] = barrier.any;
    barrier.any = false;
    ++barrier.turn;
    barrier.waiting.wake_all();
    note_progress();
    if (waits) after_meeting(what, site);
  } else if (waits) {
    barrier.waiting.add();
    wait_here(what, site);
  }
  if (!waits) return false;
  barrier.order[turn].acquire();
  acquire_proxy(barrier.proxy_order[turn]);
  return barrier.result[turn];
}

// ---- mbarriers ---------------------------------------------------------------------------------

namespace {

/// The contents of an mbarrier's word: its index among those of the block, and a mark that nothing
/// else would write.
constexpr int kPlaceBits = 16;
std::uint64_t mark_of(const void* word) {
  return reinterpret_cast<std::uintptr_t>(word) * 0x9e3779b97f4a7c15u >> kPlaceBits;
}

void settle(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.waiting.wake_all();
  note_progress();
}

}  // namespace

MBarrier& mbarrier_at(Block& block, void* word, Site site) {
  std::uint64_t found = 0;
  std::memcpy(&found, word, sizeof found);
  const std::size_t place = found & ((1u << kPlaceBits) - 1);
  if (found >> kPlaceBits == mark_of(word) && place < block.mbarriers.size() &&
      block.mbarriers[place].word == word)
    return block.mbarriers[place];
  const bool is_known = std::any_of(block.mbarriers.begin(), block.mbarriers.end(),
                                    [&](const MBarrier& each) { return each.word == word; });
  fail(is_known ? "an mbarrier that something has overwritten"
                : "an mbarrier that was not initialised",
       site);
}

void barrier_init(void* word, int arrivals, Site site) {
  const Quiet quiet;
  if (arrivals < 1) fail("an mbarrier for fewer than one arrival", site);
  shared_pointer(shared_address(word, site), 8, 8, "mbarrier.init", site);
  Block& block = *current->warp->block;
  auto known = std::find_if(block.mbarriers.begin(), block.mbarriers.end(),
                            [&](const MBarrier& each) { return each.word == word; });
  if (known == block.mbarriers.end()) known = block.mbarriers.emplace(known);
  MBarrier& barrier = *known;
  barrier.word = word;
  if (!barrier.waiting.empty()) fail("an mbarrier is made again while threads wait at it", site);
  barrier.expected = barrier.pending = arrivals;
  barrier.bytes = 0;
  barrier.phase = 0;
  barrier.site = site;
  const std::uint64_t mark =
      mark_of(word) << kPlaceBits | static_cast<std::uint64_t>(known - block.mbarriers.begin());
  std::memcpy(word, &mark, sizeof mark);
  note_write(word, 8);
}

void arrive_at(MBarrier& barrier, int arrivals, int announced, int landed, Site site) {
  if (arrivals > barrier.pending) fail("more arrivals at an mbarrier than its phase awaits", site);
  barrier.bytes += announced - landed;
  barrier.pending -= arrivals;
  if (barrier.bytes < -(1 << 20) || barrier.bytes > 1 << 20)
    fail("an mbarrier counts more bytes than it can", site);
  settle(barrier);
}

void barrier_arrive(void* word, int bytes, Site site) {
  may_yield(site);
  const Quiet quiet;
  MBarrier& barrier = mbarrier_at(*current->warp->block, word, site);
  barrier.order[barrier.phase & 1].release();
  release_proxy(barrier.proxy_order[barrier.phase & 1]);
  arrive_at(barrier, 1, bytes, 0, site);
}

void barrier_wait(void* word, std::uint32_t parity, Site site) {
  may_yield(site);
  const Quiet quiet;
  MBarrier& barrier = mbarrier_at(*current->warp->block, word, site);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.add();
    wait_here("mbarrier", site);
  }
  barrier.order[parity].acquire();
  acquire_proxy(barrier.proxy_order[parity]);
}

// ---- kernels that overlap ----------------------------------------------------------------------

void let_next_kernel_start() {
  const Quiet quiet;
  Block& block = *current->warp->block;
  if (block.lets_next_start) return;
  // One call by a block's threads is enough (PTX, griddepcontrol).
  block.lets_next_start = true;
  release(*block.grid);
  note_progress();
}

void wait_for_kernels_before(Site site) {
  may_yield(site);
  const Quiet quiet;
  Grid& grid = *current->warp->block->grid;
  const GridHandle before = grid.before;
  if (before == nullptr) return;
  while (!has_ended(*before)) {
    before->waiting_for_end.add();
    wait_here("the kernel before", site);
  }
  before->done.acquire();
  current->warp->proxy.acquire(before->done);
}

}  // namespace longspan::simulated

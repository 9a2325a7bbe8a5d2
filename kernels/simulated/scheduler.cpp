// Makes blocks resident, gives warps their turns, and ends the process if nothing can move.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "kernels/simulated/state.hpp"
#include "src/base/env.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// The built-ins of device code (builtins.hpp).
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace longspan::simulated {

Lane* current = nullptr;

namespace {

constexpr std::size_t kOwnVariables = std::size_t{48} << 10;  // of a block, besides dynamic memory
constexpr std::size_t kArena = (std::size_t{228} << 10) + kOwnVariables;
// Turns of each warp in which nothing moves: if time passes, ten minutes of the GPU's clock.
constexpr std::uint64_t kMostStill = 2'400'000;

struct Multiprocessor {
  int threads = 0, bytes = 0;
};
struct Device {
  std::vector<Multiprocessor> multiprocessors;
  std::deque<GridHandle> grids;  // with blocks that have not begun
};

std::map<int, Device> devices;
int waiting_grids = 0;  // of all devices
std::vector<std::unique_ptr<Block>> resident;
std::vector<Warp*> ready;         // in no order
std::vector<std::uint64_t> keys;  // of each of them: the least runs next, unless chance decides
std::vector<std::byte*> arenas;
Warp* last = nullptr;  // that ran
bool leaves = false;   // the running warp leaves after this lane
bool moved = false;    // something happened that others may wait for
std::uint64_t clock_now = 1'000'000'000, lowest_priority = std::uint64_t{1} << 62;
std::uint64_t idle_slices = 0, turn = 0;
std::uint64_t still_slices = 0;  // since anything moved
std::uint64_t grid_events = 0;   // launches that have ended, or have let the next one start
std::atomic<std::uint64_t> slices{0};
std::atomic<bool> inside{false};
bool hosts_clock = false;
Order hosts, kernels;

Device& device_of(int number) {
  Device& device = devices[number];
  if (device.multiprocessors.empty())
    device.multiprocessors.resize(static_cast<std::size_t>(properties().multiprocessors));
  return device;
}

int bytes_of(const Grid& grid) {
  return static_cast<int>(grid.kernel.shared_bytes) + properties().own_shared_bytes;
}
int threads_of(const Grid& grid) {
  const dim3& block = grid.kernel.block;
  return static_cast<int>(block.x * block.y * block.z + 31) / 32 * 32;
}

// ---- turns -------------------------------------------------------------------------------------

std::uint64_t key_of(const Warp& warp) {
  return schedule().policy == Schedule::Policy::priorities ? ~warp.priority : warp.last_turn;
}
/// Its key has changed.
void set_key(const Warp& warp) {
  if (warp.place >= 0) keys[static_cast<std::size_t>(warp.place)] = key_of(warp);
}
void make_ready(Warp& warp, unsigned lanes) {
  warp.ready |= lanes;
  warp.spins = false;
  if (warp.place >= 0) return;
  warp.place = static_cast<int>(ready.size());
  ready.push_back(&warp);
  keys.push_back(key_of(warp));
}
void remove_ready(Warp& warp) {
  if (warp.place < 0) return;
  const auto place = static_cast<std::size_t>(warp.place);
  ready[place] = ready.back();
  keys[place] = keys.back();
  ready.back()->place = warp.place;
  ready.pop_back();
  keys.pop_back();
  warp.place = -1;
}
void make_last(Warp& warp) {
  warp.priority = --lowest_priority;
  set_key(warp);
}

/// Vectorised, which -O2 alone does not do.
__attribute__((optimize("O3"))) std::uint64_t least_key() {
  std::uint64_t least = ~std::uint64_t{0};
  for (const std::uint64_t key : keys) least = key < least ? key : least;
  return least;
}

/// The index of the set bit that has `below` set bits below it.
int set_bit(unsigned bits, unsigned below) {
#ifdef __BMI2__
  return __builtin_ctz(_pdep_u32(1u << below, bits));
#else
  while (below-- > 0) bits &= bits - 1;
  return __builtin_ctz(bits);
#endif
}

int choose_lane(const Warp& warp) {
  if (!schedule().shuffled_lanes) {  // the next one: a lane that waits in a loop holds up no other
    const unsigned behind = warp.ready & ~((2u << warp.last_lane) - 1);
    return __builtin_ctz(behind != 0 ? behind : warp.ready);
  }
  return set_bit(warp.ready, pick(static_cast<unsigned>(__builtin_popcount(warp.ready))));
}

Warp* choose_warp() {
  using Policy = Schedule::Policy;
  if (schedule().policy == Policy::random) return ready[pick(static_cast<unsigned>(ready.size()))];
  if (schedule().policy == Policy::priorities && last != nullptr && changes.comes_true())
    make_last(*last);
  return ready[static_cast<std::size_t>(std::find(keys.begin(), keys.end(), least_key()) -
                                        keys.begin())];
}

/// Returns the lane to run, and marks it as running.
Lane& take_lane(Warp& warp) {
  Lane& lane = *warp.lanes[choose_lane(warp)];
  warp.ready &= ~(1u << lane.number);
  warp.last_lane = lane.number;
  current = &lane;
  threadIdx = lane.index;
  return lane;
}

/// The running thread stops here, and another lane of its warp continues at once, if one can and
/// the warp's turn is not over.
void stop_here(bool for_good) {
  Lane& lane = *current;
  if (leaves || lane.warp->ready == 0)
    lane.fiber.leave(for_good);
  else
    lane.fiber.hand_over(take_lane(*lane.warp).fiber, for_good);
}

void end_lane(Lane& lane);

void entry() {
  Fiber::arrive();
  Lane* const lane = current;
  lane->warp->block->grid->kernel.body();
  {
    const Quiet quiet;
    end_lane(*lane);
  }
  stop_here(true);
  std::abort();  // it is never entered again
}

void run_warp(Warp& warp) {
  last = &warp;
  warp.last_turn = ++turn;
  set_key(warp);
  blockIdx = warp.block->index;
  blockDim = warp.block->grid->kernel.block;
  gridDim = warp.block->grid->kernel.grid;
  leaves = false;
  take_lane(warp).fiber.enter();  // until none of its lanes can continue, or it leaves
  current = nullptr;
  if (warp.ready == 0) remove_ready(warp);
}

// ---- blocks ------------------------------------------------------------------------------------

std::byte* take_arena() {
  if (!arenas.empty()) {
    std::byte* arena = arenas.back();
    arenas.pop_back();
    forget_accesses(arena, kArena);
    return arena;
  }
  void* memory = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

uint3 index_in(unsigned number, dim3 size) {
  return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

void begin_block(const GridHandle& grid, unsigned number, int multiprocessor) {
  const dim3 size = grid->kernel.block;
  const unsigned threads = size.x * size.y * size.z;
  resident.push_back(std::make_unique<Block>(threads));
  Block& block = *resident.back();
  block.grid = grid;
  block.index = index_in(number, grid->kernel.grid);
  block.multiprocessor = multiprocessor;
  block.live = static_cast<int>(threads);
  block.under_way.resize(kArena / kPiece / 64);
  block.shared = take_arena();
  const std::size_t dynamic = (grid->kernel.shared_bytes + 1023) / 1024 * 1024;
  block.own_variables = block.shared + dynamic;
  // It is uninitialised: NaN, and bytes past the end belong to nothing.
  std::memset(block.shared, 0xff, dynamic + kOwnVariables);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(block.shared + grid->kernel.shared_bytes,
                            kArena - grid->kernel.shared_bytes);
#endif
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = block.lanes[i];
    Warp& warp = block.warps[i / 32];
    lane.index = index_in(i, size);
    lane.number = static_cast<int>(i % 32);
    lane.warp = &warp;
    warp.block = &block;
    warp.number = static_cast<int>(i / 32);
    warp.lanes[i % 32] = &lane;
    warp.alive |= 1u << i % 32;
    lane.fiber.begin(&entry);
  }
  for (Warp& warp : block.warps) {
    warp.priority = (std::uint64_t{1} << 62) + pick(1u << 30);
    make_ready(warp, warp.alive);
    if (kDetectsRaces) warp.proxy.begin(), warp.engine.begin();
  }
}

void begin_blocks() {
  for (auto& [number, device] : devices)
    for (auto grid = device.grids.begin(); grid != device.grids.end();) {
      Grid& g = **grid;
      while (g.next < g.order.size()) {
        int place = -1;
        for (std::size_t i = 0; i < device.multiprocessors.size() && place < 0; ++i) {
          const Multiprocessor& m = device.multiprocessors[i];
          if (m.threads + threads_of(g) <= properties().most_threads &&
              m.bytes + bytes_of(g) <= properties().shared_bytes)
            place = static_cast<int>(i);
        }
        if (place < 0) break;
        device.multiprocessors[static_cast<std::size_t>(place)].threads += threads_of(g);
        device.multiprocessors[static_cast<std::size_t>(place)].bytes += bytes_of(g);
        begin_block(*grid, g.order[g.next++], place);
      }
      if (g.next < g.order.size()) break;  // blocks of later kernels wait behind those of this one
      grid = device.grids.erase(grid);
      --waiting_grids;
    }
}

void end_block(Block& block) {
  Grid& grid = *block.grid;
  finish_copies(block);
  for (const MBarrier& barrier : block.mbarriers)
    if (!barrier.waiting.empty()) fail("a block ended while threads wait at its mbarrier");
  Multiprocessor& place =
      device_of(grid.device).multiprocessors[static_cast<std::size_t>(block.multiprocessor)];
  place.threads -= threads_of(grid);
  place.bytes -= bytes_of(grid);
  if (!block.lets_next_start) release(grid);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(block.shared, kArena);
#endif
  arenas.push_back(block.shared);
  for (Warp& warp : block.warps) {
    if (last == &warp) last = nullptr;
    remove_ready(warp);
  }
  const GridHandle held = block.grid;
  resident.erase(std::find_if(resident.begin(), resident.end(),
                              [&](const auto& each) { return each.get() == &block; }));
  if (++grid.ended < grid.blocks) return;
  ++grid_events;
  grid.done.acquire();
  deliver_all(&grid);
  grid.waiting_for_end.wake_all();
  grid.before = nullptr;
}

void end_lane(Lane& lane) {
  Warp& warp = *lane.warp;
  Block& block = *warp.block;
  warp.alive &= ~(1u << lane.number);
  block.grid->done.release();
  note_progress();
  // Threads that have ended hold up no other.
  for (auto& meeting : warp.meetings)
    if (meeting->arrived != 0 && meeting->arrived == (meeting->mask & warp.alive)) {
      if (meeting->complete) meeting->complete(meeting->data, meeting->arrived);
      const unsigned all = meeting->arrived;
      meeting->arrived = 0;
      ++meeting->turn;
      wake(warp, all);
    }
  NamedBarrier& all = block.barriers[0];
  --block.live;
  if (all.arrived > 0 && all.arrived == block.live) {
    all.result[all.turn & 1] = all.any;
    all.any = false;
    all.arrived = 0;
    ++all.turn;
    all.waiting.wake_all();
  }
}

// ---- reports -----------------------------------------------------------------------------------

const char* file_name(const char* path) {
  const char* slash = std::strstr(path, "kernels/");
  return slash != nullptr ? slash : path;
}
void print_places() {
  for (const auto& block : resident) {
    std::map<std::string, std::vector<int>> places;
    for (const Lane& lane : block->lanes) {
      if ((lane.warp->alive >> lane.number & 1) == 0) continue;
      char line[512];
      std::snprintf(line, sizeof line, "warp %d: %s at %s:%u%s", lane.warp->number, lane.what,
                    file_name(lane.site.file_name()), static_cast<unsigned>(lane.site.line()),
                    (lane.warp->ready >> lane.number & 1) != 0 ? " (can go on)" : "");
      places[line].push_back(lane.number);
    }
    for (const auto& [line, lanes] : places)
      std::fprintf(stderr, "  %s device %d block %u,%u,%u %s (%zu lanes, first %d)\n",
                   block->grid->kernel.name, block->grid->device, block->index.x, block->index.y,
                   block->index.z, line.c_str(), lanes.size(), lanes.front());
  }
}
[[noreturn]] void end_process() {
  std::fprintf(stderr, "  This schedule again: LONGSPAN_SIMULATED_SEED=%llu\n",
               static_cast<unsigned long long>(schedule_seed()));
  std::fflush(stderr);
  std::abort();
}

/// A watchdog for a kernel that never gives others a turn.
void watch() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto text = env_text("LONGSPAN_SIMULATED_PATIENCE_S");
    const int patience = text ? std::max(1, std::atoi(text->c_str())) : 120;
    std::thread([patience] {
      std::uint64_t seen = 0;
      for (int stuck = 0;;) {
        std::this_thread::sleep_for(std::chrono::seconds(1));
        const std::uint64_t now = slices;
        stuck = inside && now == seen ? stuck + 1 : 0;
        seen = now;
        if (stuck < patience) continue;
        std::fprintf(stderr,
                     "longspan's simulator: a thread has run for %d s without an instruction at "
                     "which others could go on. It was last at:\n",
                     patience);
        print_places();
        end_process();
      }
    }).detach();
  });
}

/// Lets copies land, and delivers as many of the words in flight as bring the end near.
bool let_something_happen() {
  if (land_one()) return true;
  bool any = false;
  for (std::size_t count = 1 + stores_in_flight() / 16; count > 0 && deliver_one(); --count)
    any = true;
  return any;
}

[[noreturn]] void report_waiting_for_ever() {
  std::fprintf(stderr,
               "longspan's simulator: threads take turns, and nothing that they could wait for has "
               "happened for a long time (a loop that never ends?). They are at:\n");
  print_places();
  end_process();
}

/// A turn of one warp.
bool run_slice() {
  const Quiet quiet;
  hosts.acquire();
  kernels.acquire();
  inside = true;
  slices.fetch_add(1, std::memory_order_relaxed);
  clock_now += 100;
  moved = false;
  if (waiting_grids > 0) begin_blocks();
  if (is_under_way() && chance(schedule().land))
    while (land_one() && (schedule().land >= 1 || chance(schedule().burst))) {
    }
  if (stores_in_flight() > 0 && chance(schedule().deliver))
    while (deliver_one() && (schedule().deliver >= 1 || chance(schedule().burst))) {
    }
  bool ran = true;
  if (!ready.empty()) {
    Warp& warp = *choose_warp();
    run_warp(warp);
    Block& block = *warp.block;
    if (block.live == 0) end_block(block);
  } else {
    ran = land_one() || deliver_one();
  }
  // If all warps that could run only wait in loops, words arrive, and then time passes. A warp that
  // gave up its turn between two polls may or may not wait in a loop.
  if (moved || !last)
    idle_slices = still_slices = 0;
  else if (last->spins && ++idle_slices > 4 * ready.size() && !let_something_happen() &&
           !hosts_clock)
    clock_now += 1'000'000;
  if (++still_slices > kMostStill * std::max<std::size_t>(ready.size(), 1) && !hosts_clock)
    report_waiting_for_ever();
  inside = false;
  kernels.release();
  return ran;
}

}  // namespace

void fail(const std::string& what, Site site) {
  std::fprintf(stderr, "longspan's simulator: %s\n  at %s:%u\n", what.c_str(),
               file_name(site.file_name()), static_cast<unsigned>(site.line()));
  if (current != nullptr) {
    const Block& block = *current->warp->block;
    std::fprintf(stderr, "  by %s device %d block %u,%u,%u thread %u,%u,%u\n",
                 block.grid->kernel.name, block.grid->device, block.index.x, block.index.y,
                 block.index.z, current->index.x, current->index.y, current->index.z);
  }
  print_places();
  end_process();
}

void report_standstill() {
  std::fprintf(stderr, "longspan's simulator: nothing can go on (deadlock). All wait:\n");
  print_places();
  end_process();
}

void wait_here(const char* what, Site site) {
  current->what = what;
  current->site = site;
  stop_here(false);
}
void wake(Warp& warp, unsigned lanes) {
  const bool runs = current != nullptr && current->warp == &warp;
  if ((lanes & (warp.ready | ~warp.alive)) != 0 || (runs && (lanes >> current->number & 1) != 0))
    fail("the simulator woke a thread that did not wait");
  make_ready(warp, lanes);
  note_progress();
  if (schedule().policy == Schedule::Policy::priorities && last != nullptr &&
      warp.priority > last->priority)
    leaves = true;
}
void Waiting::add() {
  Warp* const warp = current->warp;
  const unsigned lane = 1u << current->number;
  if (!all_.empty() && all_.back().warp == warp)
    all_.back().lanes |= lane;
  else
    all_.push_back({warp, lane});
}
void Waiting::wake_all() {
  for (const Some& some : all_) wake(*some.warp, some.lanes);
  all_.clear();
}
void leave_warp(const char* what, Site site, bool spins) {
  Lane& lane = *current;
  lane.what = what;
  lane.site = site;
  make_ready(*lane.warp, 1u << lane.number);
  leaves = true;
  if (spins) {
    lane.warp->spins = true;
    if (schedule().policy == Schedule::Policy::priorities) make_last(*lane.warp);
  }
  lane.fiber.leave(false);
}
void note_progress() { moved = true; }
void release(Grid& grid) {
  if (++grid.released == grid.blocks) ++grid_events;
}
void begin_turns() {
  turn = 0, idle_slices = still_slices = 0;
  for (const Warp* warp : ready) set_key(*warp);
}

void may_yield(Site site) {
  if (!yields.comes_true()) return;
  const Quiet quiet;
  leave_warp("a turn given to others", site, false);
}
void spin(Site site) {
  const Quiet quiet;
  leave_warp("a loop that waits", site, true);
}

int lane() { return current->number; }
int dynamic_shared_bytes() {
  return static_cast<int>(current->warp->block->grid->kernel.shared_bytes);
}

// ---- for the runtime ---------------------------------------------------------------------------

GridHandle start(Kernel kernel, int device, GridHandle before) {
  const Quiet quiet;
  watch();
  auto grid = std::make_shared<Grid>();
  grid->kernel = std::move(kernel);
  grid->device = device;
  if (before && !has_ended(*before)) grid->before = std::move(before);
  const dim3 size = grid->kernel.grid;
  grid->blocks = size.x * size.y * size.z;
  grid->order.resize(grid->blocks);
  for (unsigned i = 0; i < grid->blocks; ++i) grid->order[i] = i;
  if (schedule().shuffled_blocks)
    for (unsigned i = grid->blocks; i > 1; --i) std::swap(grid->order[i - 1], grid->order[pick(i)]);
  device_of(device).grids.push_back(grid);
  ++waiting_grids;
  return grid;
}
bool has_ended(const Grid& grid) { return grid.ended == grid.blocks; }
bool lets_next_start(const Grid& grid) { return grid.released == grid.blocks; }

bool run_slices(int most) {
  const std::uint64_t before = grid_events;
  bool any = false;
  while (most-- > 0 && run_slice()) {
    any = true;
    if (grid_events != before) break;
  }
  return any;
}

void order_host_before_kernels() { hosts.release(); }
void order_kernels_before_host() { kernels.acquire(); }

std::uint64_t nanoseconds() {
  if (!hosts_clock) return clock_now += 20;
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}
void use_host_clock() { hosts_clock = true; }

const Properties& properties() {
  static const Properties found = [] {
    const auto number = [](const char* name, int otherwise) {
      const auto text = env_text(name);
      return text ? std::atoi(text->c_str()) : otherwise;
    };
    const int arch = LONGSPAN_SIMULATED_ARCH;
    const int kilobytes = arch >= 90 ? 228 : arch == 80 ? 164 : 100;
    Properties p{.major = arch / 10,
                 .minor = arch % 10,
                 .multiprocessors = number("LONGSPAN_SIMULATED_MULTIPROCESSORS", 3),
                 .shared_bytes = kilobytes << 10,
                 .block_shared_bytes = (kilobytes - 1) << 10,
                 .own_shared_bytes = 1 << 10,
                 .most_threads = arch == 89 ? 1536 : 2048};
    // A GPU with this code but less shared memory: blocks of 99 KB on 8.6, 8.9 and 12.0.
    if (const int most = number("LONGSPAN_SIMULATED_SHARED_KB", 0); most > 0) {
      p.block_shared_bytes = most << 10;
      p.shared_bytes = (most + 1) << 10;
    }
    return p;
  }();
  return found;
}
int resident_blocks(int threads, std::size_t shared_bytes) {
  const Properties& p = properties();
  const int by_threads = p.most_threads / std::max(32, (threads + 31) / 32 * 32);
  const int by_bytes = p.shared_bytes / (static_cast<int>(shared_bytes) + p.own_shared_bytes);
  return std::min({by_threads, by_bytes, 32});
}

}  // namespace longspan::simulated

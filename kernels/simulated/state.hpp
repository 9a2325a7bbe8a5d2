// The state of the machine, for its own files.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/simulated/fiber.hpp"
#include "kernels/simulated/race_detector.hpp"
#include "kernels/simulated/thread.hpp"

namespace longspan::simulated {

struct Block;
struct Warp;

/// An asynchronous copy of a thread (cp.async), or, with a barrier, the arrival after those before
/// it.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int size = 0, bytes = 0;
  void* barrier = nullptr;
  std::uint64_t number = 0;  // of those that the thread has queued
  Site site = {};
};

/// A CUDA thread.
struct Lane {
  uint3 index{};
  int number = 0;  // in its warp
  Warp* warp = nullptr;
  Fiber fiber;
  const char* what = "start";
  Site site = {};
  unsigned fetches = 0;

  std::vector<Copy> copies;           // in flight
  std::vector<std::uint64_t> groups;  // committed and not waited for: the copies up to here
  std::uint64_t queued = 0;           // copies so far
  Agent copier;
  Order copies_queued, copies_landed;
};

struct Meeting {
  unsigned mask = 0, arrived = 0;
  const char* what = nullptr;
  Complete complete = nullptr;
  void* data[32] = {};
  Order order[2], proxy_order[2];
  unsigned turn = 0;
  bool orders_memory = false;
};

/// The registers of a warp to which products add, while products are in flight.
struct Accumulators {
  std::array<float*, 32> registers{};
  int count = 0;
  std::vector<float> values;  // [32, count]
  int pending = 0;
};
struct QueuedProduct {
  std::vector<std::byte> data;  // [32] of the lanes' inputs
  std::size_t bytes = 0;
  Accumulators* accumulators = nullptr;
  Product run;
  Site site = {};
};

/// A store by store_quietly that no fence of its thread has made visible to the asynchronous proxy.
struct Unfenced {
  void* place;
  std::size_t bytes;
  const Lane* by;
};

struct Warp {
  Block* block = nullptr;
  int number = 0;
  Lane* lanes[32] = {};
  unsigned alive = 0, ready = 0;  // by lane; a lane that is alive, not ready and not running waits
  int place = -1;                 // among the warps that are ready
  int last_lane = 31;             // that ran
  bool spins = false;
  std::uint64_t priority = 0, last_turn = 0;
  std::vector<std::unique_ptr<Meeting>> meetings;

  std::deque<std::unique_ptr<Accumulators>> accumulators;
  std::vector<QueuedProduct> open;                // not committed
  std::deque<std::vector<QueuedProduct>> groups;  // committed
  bool may_queue = false;                         // after a wgmma.fence
  Agent proxy, engine;  // accesses by the asynchronous proxy: reads; TMA's writes
  Order fenced, products_done;
  std::vector<Unfenced> unfenced;
};

/// Lanes that wait for something, in the order in which their warps arrived.
class Waiting {
 public:
  bool empty() const { return all_.empty(); }
  /// Adds the running thread.
  void add();
  void wake_all();

 private:
  struct Some {
    Warp* warp;
    unsigned lanes;
  };
  std::vector<Some> all_;
};

struct NamedBarrier {
  int arrived = 0, expected = 0;
  bool any = false, result[2] = {};
  unsigned turn = 0;
  Order order[2], proxy_order[2];
  Waiting waiting;
};

struct MBarrier {
  void* word = nullptr;
  int expected = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
  Order order[2], proxy_order[2];
  Waiting waiting;
  Site site = {};
};

struct EngineCopy {
  Warp* warp = nullptr;
  std::byte* to = nullptr;
  int bytes = 0;
  void* barrier = nullptr;
  std::function<void()> land;
  Order queued;
  Site site = {};
};

constexpr std::size_t kPiece = 4;  // bytes; no copy is smaller

struct Block {
  std::shared_ptr<Grid> grid;
  uint3 index{};
  int multiprocessor = 0;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  int live = 0;
  NamedBarrier barriers[16];
  std::deque<MBarrier> mbarriers;
  std::byte* shared = nullptr;  // dynamic, then the block's own variables
  std::byte* own_variables = nullptr;
  std::size_t own_bytes = 0;
  std::map<const void*, void*> variables;
  bool lets_next_start = false;
  int engine_copies = 0;
  std::vector<std::uint64_t> under_way;  // bits of the pieces of `shared` that copies will write

  explicit Block(std::size_t threads) : lanes(threads), warps((threads + 31) / 32) {}
};

class Grid {
 public:
  Kernel kernel;
  int device = 0;
  GridHandle before;
  std::vector<unsigned> order;  // in which its blocks begin
  std::size_t next = 0;
  unsigned blocks = 0, ended = 0, released = 0;
  Waiting waiting_for_end;  // of kernels that overlap this one
  Order done;
};

/// The parameters of a schedule.
struct Schedule {
  enum class Policy { in_order, random, priorities };
  Policy policy = Policy::in_order;
  double yield = 0;    // before anything that others can see
  double land = 1;     // of a copy, at each slice; 1: at once
  double burst = 0;    // that more of them land together
  double deliver = 1;  // of a word to another GPU, at each slice; 1: at once
  double change = 0;   // of priorities, at each slice
  bool shuffled_blocks = false, shuffled_lanes = false;
};
const Schedule& schedule();

/// A probability that is tested often: it draws once how many more tests will fail, which is
/// equivalent to a draw for each.
class Rarely {
 public:
  void begin(double probability);
  bool comes_true() {
    if (left_ > 0) return --left_, false;
    begin(probability_);
    return true;
  }

 private:
  double probability_ = 0;
  std::uint64_t left_ = ~std::uint64_t{0};
};
/// Of the schedule: `yield` and `change`.
extern Rarely yields, changes;

/// The scheduler forgets its earlier choices.
void begin_turns();

/// The running thread; null: the scheduler.
extern Lane* current;

/// `current` waits at `what` until another thread calls wake.
void wait_here(const char* what, Site site);
void wake(Warp& warp, unsigned lanes);
/// A block of it lets the next kernel start, or has ended.
void release(Grid& grid);
/// Lets another warp run, if the schedule decides so; `current` stays ready.
void leave_warp(const char* what, Site site, bool spins);

// ---- later.cpp ---------------------------------------------------------------------------------

/// Completes one operation in flight; false: there is none.
bool land_one();
bool is_under_way();
/// Whether a copy that has not landed writes there.
bool is_awaited(const Block& block, const std::byte* at, std::size_t bytes);
/// The same for words to other GPUs.
bool deliver_one();
void deliver_all(const Grid* of);
std::size_t stores_in_flight();
/// Completes the operations in flight for a block that has ended.
void finish_copies(Block& block);
/// The block's mbarrier in this word.
MBarrier& mbarrier_at(Block& block, void* word, Site site);
/// Counts arrivals, announced bytes, and bytes that have landed.
void arrive_at(MBarrier& barrier, int arrivals, int announced, int landed, Site site);
/// Records that something moved for which others may have waited.
void note_progress();

}  // namespace longspan::simulated

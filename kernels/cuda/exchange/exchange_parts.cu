// The exchange (exchange.cu, the variant one-trip) after the fold of this rank's states. The splits
// that attention left of every row become its state in registers, and are sent to the peers from
// there. It replaces fold_parts and the exchange in two kernels, and saves a launch, and a write
// and a read of the states on the way to the peers.
//
//     a block: threadIdx.x = four columns, threadIdx.y = rows, threadIdx.z = splits of the rows
//
// Threads of a row are adjacent with four columns each, as a send to a peer requires. So the
// threads that hold a folded row (plane 0) send it, in whole lines. A plane folds up to eight
// splits of its own, all requested at once, and the planes fold through shared memory. This is the
// tree of fold_parts_kernel, so the bits are the same. Later each plane merges other rows.
//
// Columns of a row stay in one block, whereas fold_parts spreads them. The row's statistics travel
// once, and the thread that resets their word to 0 must know that all have read them. A block may
// therefore have twice the threads of an exchange, and a multiprocessor is sure to hold one.
//
// The rank's own state is stored too, after it has been sent, for the merge: it is read back with
// the first poll for the peers' words.
#include <algorithm>

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/combine/fold_slots.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/overlap.hpp"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/exchange/exchange.hpp"
#include "kernels/cuda/exchange/exchange_words.cuh"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 512;  // most of a block
constexpr int kFewestThreads = 32;
constexpr int kAloneLevels = 3;  // of the tree, which a thread folds with all its loads at once

/// What the kernel needs of WorkPlan::parts to read its rows. Offsets within a slot have 32 bits,
/// like those in a peer buffer.
struct Parts {
  const std::byte* slots;
  std::uint64_t slot_bytes;
  std::uint32_t o;       // offset of o in a slot
  std::uint32_t tokens;  // of a sequence; 0 if the rows are those of the states
  std::uint32_t heads;
  int levels;  // of the tree over the splits
  SplitNumbers numbers;
};

struct PartsTask {
  Parts parts;
  ExchangeRoute route;
  ExchangeParams params;
  bool wide;
};

/// The row of the parts with the splits of a row of the states. For a row without a sequence it may
/// be any: the words sent for such a row are not used.
__device__ std::uint32_t row_of_parts(const Parts& parts, const ExchangeRoute& r,
                                      const Batch& batch, std::uint32_t row) {
  if (parts.tokens == 0) return row;
  const std::uint32_t token = r.heads(row);
  const int sequence = last_start(batch.size, token, [&](int b) { return batch.query_start[b]; });
  const std::uint32_t own =
      min(token - static_cast<std::uint32_t>(batch.query_start[sequence]), parts.tokens - 1);
  return (static_cast<std::uint32_t>(sequence) * parts.tokens + own) * parts.heads + row -
         token * parts.heads;
}

/// Four columns of the splits of a row that this thread folds alone.
struct PartLoad {
  const std::byte* stats;  // of the first split
  const std::byte* o;
  std::uint64_t slot_bytes;

  /// `row` is a row of the parts.
  __device__ PartLoad(const Parts& parts, const ExchangeRoute& r, std::uint32_t row,
                      unsigned column)
      : slot_bytes(parts.slot_bytes) {
    const int alone = parts.levels - (__ffs(static_cast<int>(blockDim.z)) - 1);
    const std::byte* first = parts.slots + (std::uint64_t{threadIdx.z} << alone) * slot_bytes;
    stats = first + row * 8;
    o = first + parts.o + row * r.row_bytes + column * 4;
  }
};

/// Gives plane 0 the state of the row whose splits `load` loads. All threads call this, with a
/// barrier between calls. A kAlone above kAloneLevels stands for that many levels, or more.
template <int kAlone>
__device__ StateColumns<4> fold_planes(const PartLoad& load, const Parts& parts,
                                       Waiting<kThreads>& waiting) {
  constexpr int kGroup = std::min(kAlone, kAloneLevels);
  const int alone = parts.levels - (__ffs(static_cast<int>(blockDim.z)) - 1);
  const int first = static_cast<int>(threadIdx.z) << alone;
  const TakenSplits taken(parts.numbers);
  const auto group_of = [&](int index) {
    const int in_plane = index << kGroup;
    const std::uint64_t at = static_cast<unsigned>(in_plane) * load.slot_bytes;
    return fold_slots<kGroup>(load.stats + at, load.o + at, load.slot_bytes,
                              [&](int i) { return taken.hold(first + in_plane + i); });
  };
  StateColumns<4> state =
      kAlone > kGroup ? fold_groups(group_of, alone - kGroup, LogBase::two) : group_of(0);
  fold_threads(state, waiting, threadIdx.z, blockDim.z, thread(), blockDim.y * blockDim.x);
  return state;
}

/// Sends the rows from `first` on to every peer, then to the own slot; plane 0 does it.
template <int kLevels>
__device__ void send_rows(const ExchangeRoute& r, const Turn& turn, std::uint32_t first,
                          unsigned column, const StateColumns<4>& state) {
  const std::uint32_t row = first + threadIdx.y;
  if (threadIdx.z != 0 || row >= r.rows) return;
  const uint4 four = {__float_as_uint(state.o[0]), __float_as_uint(state.o[1]),
                      __float_as_uint(state.o[2]), __float_as_uint(state.o[3])};
  const uint2 two = {__float_as_uint(state.stats.max), __float_as_uint(state.stats.sum)};
  const std::uint32_t at = columns_at(r, row, column);
#pragma unroll
  for (int step = 0; step < (1 << kLevels) - 1; ++step) {
    if (step >= static_cast<int>(r.peers)) break;
    std::byte* slot = r.peer_buffer[step] + turn.copy + r.slot;
    arch::store_volatile(slot + at, sent(four));
    if (column == 0) arch::store_volatile(slot + row * 8, sent(two));
  }
  std::byte* own = const_cast<std::byte*>(r.own_state);
  *reinterpret_cast<uint4*>(own + at) = four;
  if (column == 0) reinterpret_cast<uint2*>(own)[row] = two;
}

template <int kAlone, int kLevels>
__global__ __launch_bounds__(kThreads,
                             1) void exchange_parts_kernel(const __grid_constant__ PartsTask task) {
  auto& waiting = arch::shared_variable<Waiting<kThreads>>();
  const ExchangeRoute& r = task.route;
  const ExchangeParams& p = task.params;
  if (blockIdx.x == 0) return compare_headers(r, p);
  const Parts& parts = task.parts;
  const unsigned column = threadIdx.x * 4;
  const std::uint32_t first = first_rows();
  const auto load_of = [&](std::uint32_t rows) {
    const std::uint32_t row = min(rows + threadIdx.y, r.rows - 1);
    return PartLoad(parts, r, row_of_parts(parts, r, p.merge.batch, row), column);
  };
  // Work before the wait costs no time: finding the splits, and which exchange this is. The lengths
  // are available and the exchange before has ended, since attention waited for them before it let
  // this kernel start.
  const PartLoad load = load_of(first);
  arch::prefetch(load.o);
  const Turn turn(r);
  arch::wait_for_kernels_before();
  StateColumns<4> state = fold_planes<kAlone>(load, parts, waiting);
  for (std::uint32_t next = first;;) {
    send_rows<kLevels>(r, turn, next, column, state);
    next += row_step();
    if (next >= r.rows) break;
    __syncthreads();
    state = fold_planes<kAlone>(load_of(next), parts, waiting);
  }
  __syncthreads();  // the own states are seen, and every thread has its epoch
  const Departure departure(p);
  BoundedWait wait(p, r, turn.epoch, r.own + turn.copy);
  const std::uint32_t plane_first = first + threadIdx.z * row_step();
  const std::uint32_t plane_step = row_step() * blockDim.z;
  for (std::uint32_t row = plane_first + threadIdx.y; row < r.rows; row += plane_step) {
    const ResultRow result(p.merge, r, row, column);
    StateColumns<4> merged;
    if (!collect<kLevels>(r, turn, row, column, wait, merged)) break;
    result.end.finish(merged);
    result.store(p.merge, merged, task.wide);
  }
  __syncthreads();
  clear_slots<kLevels>(r, turn, plane_first, r.rows, plane_step, column);
  departure.leave(p, turn);
}

// ---- launch ------------------------------------------------------------------------------------

/// Computes the grid, which is block 0 and the blocks that carry states, with as few rows each as
/// the multiprocessors allow. Returns the levels that a thread folds alone.
int launch_of(const ExchangeParams& p, int levels, int multiprocessors, dim3& grid, dim3& block) {
  const auto divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const int columns = p.merge.states.columns() / 4;
  int alone = std::min(levels, kAloneLevels);
  while (columns << (levels - alone) > kThreads) ++alone;
  const int planes = 1 << (levels - alone), threads = columns * planes;  // of a row
  const std::int64_t rows = p.merge.states.rows, most = kThreads / threads;
  const std::int64_t least = std::min<std::int64_t>(most, divide(kFewestThreads, threads));
  const std::int64_t held = std::max(1, multiprocessors - 1);
  const std::int64_t carriers = p.blocks > 0 ? std::min<std::int64_t>(p.blocks, held) : held;
  const std::int64_t side = std::clamp(divide(rows, carriers), least, most);
  block = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(side),
               static_cast<unsigned>(planes));
  grid = dim3(1 + static_cast<unsigned>(std::min(divide(rows, side), carriers)));
  return alone;
}

}  // namespace

void exchange_parts(const WorkPlan& plan, const ExchangeParams& p, int multiprocessors,
                    cudaStream_t stream) {
  const StateSlots& slots = plan.parts;
  const auto small = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const Parts parts{slots.data,
                    static_cast<std::uint64_t>(slots.slot_bytes()),
                    small(StateSlots::stats_bytes(slots.rows)),
                    small(plan.part_tokens),
                    small(p.merge.heads),
                    log2_ceil(plan.splits),
                    plan.numbers};
  const PartsTask task{parts, make_route(p), p, is_wide_result<4>(p.merge, p.merge.states.dim)};
  dim3 grid, block;
  const int alone = launch_of(p, parts.levels, multiprocessors, grid, block);
  for_levels<kAloneLevels + 1>(alone, [&](auto alone_levels) {
    for_levels<3>(log2_ceil(p.peers.ranks), [&](auto levels) {
      constexpr int kAlone = std::max(1, decltype(alone_levels)::value);
      constexpr int kLevels = std::max(1, decltype(levels)::value);
      launch_overlapping<exchange_parts_kernel<kAlone, kLevels>>(task, grid, block, p.overlap,
                                                                 stream);
    });
  });
}

}  // namespace longspan::kernels::cuda

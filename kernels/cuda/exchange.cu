// The variants of the exchange (kernels/exchange.hpp). A block serves the same rows on every
// rank, so it waits for the blocks of its own number only. Threads of a row stand side by side, so
// that what a warp writes to a peer is one run of whole lines. States of a row fold in the tree of
// merge.cu.
//
// Everything that can be known before data is there is found out before it: the host computes where
// words go (exchange_route.hpp), and rows, sinks and scales are looked up while states travel.
#include "kernels/cuda/exchange.hpp"

#include <algorithm>
#include <string>

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/exchange_wait.cuh"
#include "kernels/cuda/fold_tree.cuh"
#include "kernels/cuda/row_end.cuh"
#include "src/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kFewestThreads = 32;
constexpr int kBlocks = 128;  // about one for each multiprocessor, as long as there are rows

// ---- one exchange as a block sees it -----------------------------------------------------------

/// What a kernel is told. The route comes first: see there.
struct Task {
  Route route;
  ExchangeParams params;
  bool wide;  // results may be stored as many columns at a time as a thread has
};

__device__ unsigned thread() { return threadIdx.y * blockDim.x + threadIdx.x; }

/// Block 0 compares what the ranks mean; the others carry states, and are counted from 0.
__device__ unsigned carrier() { return blockIdx.x - 1; }
/// Rows that a carrier takes at once, one for each threadIdx.y; `row_step` further on are its next.
__device__ std::uint32_t first_rows() { return carrier() * blockDim.y; }
__device__ std::uint32_t row_step() { return (gridDim.x - 1) * blockDim.y; }

/// Which exchange this is. Made after the loads of the first own rows, which are then on their way
/// together with the epoch.
struct Turn {
  std::uint32_t epoch;
  std::uint32_t index;  // of the copy
  std::uint64_t copy;   // from the start of every window

  __device__ explicit Turn(const Route& r)
      : epoch(next_epoch(arch::load_relaxed(r.epoch))),
        index(copy_of(epoch)),
        copy(r.copies + std::uint64_t{index} * r.copy_bytes) {}
};

/// The last block that has read the epoch makes it this exchange's. Made after a barrier that all
/// threads came to with their epoch in hand; the answer is looked at when the kernel ends.
class Departure {
 public:
  __device__ explicit Departure(const ExchangeParams& p) {
    if (thread() == 0) before_ = atomicAdd(p.peers.epoch + 1, 1u);
  }
  __device__ void leave(const ExchangeParams& p, const Turn& turn) const {
    if (thread() != 0 || before_ + 1 != gridDim.x) return;
    p.peers.epoch[1] = 0;
    p.peers.epoch[0] = turn.epoch;
  }

 private:
  unsigned before_ = 0;
};

/// The work of block 0: what the ranks must agree on travels as a line of its own, a thread for
/// each peer. It is there before the states are, and no carrier has to look for it.
__device__ void compare_headers(const Route& r, const ExchangeParams& p) {
  arch::wait_for_kernels_before();
  const Turn turn(r);
  if (thread() < r.peers) {
    arch::store_volatile(r.window[thread()] + turn.copy + WindowLayout::header(p.peers.rank),
                         header_of(p, turn.epoch));
    const int from = r.rank[thread()];
    const std::byte* headers = r.own + turn.copy;
    BoundedWait wait(p, turn.epoch, headers);
    for (;;) {
      const uint4 header = arch::load_volatile(headers + WindowLayout::header(from));
      if (differs(p, header, turn.epoch)) wait.fail(PeerReport::differs, from);
      if (arrived(header, turn.epoch) || !wait.go_on(from)) break;
    }
  }
  __syncthreads();
  Departure(p).leave(p, turn);
}

// Flags: carrier b of a rank tells carrier b of the others that a stage of its work is there.

/// All threads call it.
__device__ void announce(const Route& r, const Turn& turn, int stage) {
  __syncthreads();
  if (thread() < r.peers)
    arch::release(reinterpret_cast<std::uint32_t*>(r.window[thread()] + r.flags[stage]) + carrier(),
                  turn.epoch);
}
/// All threads call it; false: give up.
__device__ bool await(const Route& r, const Turn& turn, int stage, BoundedWait& wait) {
  bool good = true;
  if (thread() < r.peers) {
    const int from = r.rank[thread()];
    const auto* flag = reinterpret_cast<const std::uint32_t*>(
        r.own + WindowLayout::flag(stage, from, static_cast<int>(carrier())));
    while (good && !is_reached(arch::acquire(flag), turn.epoch)) good = wait.go_on(from);
  }
  return __syncthreads_and(good);
}

// ---- states ------------------------------------------------------------------------------------

/// Where four columns of a row stand in a slot.
__device__ std::uint32_t columns_at(const Route& r, std::uint32_t row, unsigned column) {
  return r.o + row * r.row_bytes + column * 4;
}

/// Waits for attention to have left its states. What is found out ahead of it costs no time: where
/// the own row stands, and, by a prefetch, where that is in memory.
__device__ void wait_for_states(const Route& r, std::uint32_t row, unsigned column) {
  arch::prefetch(r.own_state + columns_at(r, min(row, r.rows - 1), column));
  arch::wait_for_kernels_before();
}

/// Own rows `first` and on of a block. The statistics of all of them are carried by the block's
/// first threads, so that they go together.
struct OwnRows {
  float4 o;
  float2 stats;

  OwnRows() = default;
  /// Past the last row: what is not stored.
  __device__ OwnRows(const Route& r, std::uint32_t first, unsigned column) {
    const std::uint32_t row = min(first + threadIdx.y, r.rows - 1);
    const std::uint32_t stats_row = min(first + min(thread(), blockDim.y - 1), r.rows - 1);
    o = __ldcg(reinterpret_cast<const float4*>(r.own_state + columns_at(r, row, column)));
    stats = __ldcg(reinterpret_cast<const float2*>(r.own_state) + stats_row);
  }
  /// To a slot; rows from `end` on are left out.
  __device__ void store(const Route& r, std::byte* slot, std::uint32_t first, std::uint32_t end,
                        unsigned column) const {
    const std::uint32_t row = first + threadIdx.y, stats_row = first + thread();
    if (row < end) *reinterpret_cast<float4*>(slot + columns_at(r, row, column)) = o;
    if (thread() < blockDim.y && stats_row < end)
      reinterpret_cast<float2*>(slot)[stats_row] = stats;
  }
  /// To a slot of words.
  __device__ void send(const Route& r, std::byte* slot, std::uint32_t first, std::uint32_t end,
                       unsigned column) const {
    const std::uint32_t row = first + threadIdx.y, stats_row = first + thread();
    const uint4 four = {__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z),
                        __float_as_uint(o.w)};
    const uint2 two = {__float_as_uint(stats.x), __float_as_uint(stats.y)};
    if (row < end) arch::store_volatile(slot + columns_at(r, row, column), sent(four));
    if (thread() < blockDim.y && stats_row < end)
      arch::store_volatile(slot + stats_row * 8, sent(two));
  }
};

/// The merged state of a row whose parts are there.
template <int kLevels>
__device__ Piece<4> merged(const Route& r, const Turn& turn, std::uint32_t row, unsigned column) {
  constexpr int kPlaces = 1 << kLevels;
  Piece<4> pieces[kPlaces];
#pragma unroll
  for (int place = 0; place < kPlaces; ++place) {
    const std::byte* slot = r.place[place] + std::uint64_t{turn.index} * r.place_stride[place];
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(slot) + row);
    const float4 o = __ldcg(reinterpret_cast<const float4*>(slot + columns_at(r, row, column)));
    pieces[place] = {{stats.x, stats.y}, {o.x, o.y, o.z, o.w}};
    if (r.empty_places >> place & 1) pieces[place].stats = empty_stats();
  }
  return fold_subtree<kLevels>([&](int place) { return pieces[place]; }, 0);
}

/// The merged state of a row whose words are there, or on their way; false: give up. All ranks'
/// words are asked for at once, then those that were missing.
template <int kLevels>
__device__ bool collect(const Route& r, const Turn& turn, std::uint32_t row, unsigned column,
                        BoundedWait& wait, Piece<4>& state) {
  constexpr int kPlaces = 1 << kLevels;
  uint2 stats[kPlaces] = {};
  uint4 o[kPlaces] = {};
  const std::uint32_t o_at = columns_at(r, row, column);
  for (std::uint32_t missing = (1u << kPlaces) - 1;;) {
#pragma unroll
    for (int place = 0; place < kPlaces; ++place) {
      const std::byte* slot =
          r.place_words[place] + std::uint64_t{turn.index} * r.place_stride[place];
      arch::load_volatile_if(missing >> place & 1, slot + row * 8, stats[place]);
      arch::load_volatile_if(missing >> place & 1, slot + o_at, o[place]);
    }
    missing = 0;
#pragma unroll
    for (int place = 0; place < kPlaces; ++place)
      if (!arrived(stats[place]) || !arrived(o[place])) missing |= 1u << place;
    missing &= r.peer_places;
    if (missing == 0) break;
    if (!wait.go_on(r.place_rank[__ffs(missing) - 1])) return false;
  }
  state = fold_subtree<kLevels>(
      [&](int place) {
        const std::uint32_t inverted = r.peer_places >> place & 1 ? ~0u : 0;
        const auto value = [&](std::uint32_t word) { return __uint_as_float(word ^ inverted); };
        Piece<4> piece = {
            {value(stats[place].x), value(stats[place].y)},
            {value(o[place].x), value(o[place].y), value(o[place].z), value(o[place].w)}};
        if (r.empty_places >> place & 1) piece.stats = empty_stats();
        return piece;
      },
      0);
  return true;
}

/// Puts rows [first, end) of the peers' slots of words to rest, those of this block. Called by all
/// threads after a barrier: the threads of a row have all read its statistics.
template <int kLevels>
__device__ void rest(const Route& r, const Turn& turn, std::uint32_t first, std::uint32_t end,
                     unsigned column) {
  for (; first < end; first += row_step()) {
    const std::uint32_t row = first + threadIdx.y, stats_row = first + thread();
#pragma unroll
    for (int place = 0; place < 1 << kLevels; ++place) {
      if ((r.peer_places >> place & 1) == 0) continue;
      std::byte* slot = const_cast<std::byte*>(r.place_words[place]) +
                        std::uint64_t{turn.index} * r.place_stride[place];
      if (row < end) *reinterpret_cast<uint4*>(slot + columns_at(r, row, column)) = uint4{};
      if (thread() < blockDim.y && stats_row < end)
        reinterpret_cast<uint2*>(slot)[stats_row] = uint2{};
    }
  }
}

/// A row of the result, looked up where this is made: while states are on their way. Rows that are
/// not in the batch are left alone.
struct ResultRow {
  std::uint32_t token;
  RowEnd end;
  ResultPlace place;
  bool is_wanted;

  __device__ ResultRow(const MergeParams& m, const Route& r, std::uint32_t row, unsigned column)
      : token(r.heads(row)),
        end(m, static_cast<int>(row - token * m.heads)),
        place(m, token, static_cast<int>(row - token * m.heads), static_cast<int>(column)),
        is_wanted(in_batch(m.batch, token)) {}

  template <int kColumns>
  __device__ void store(const MergeParams& m, const Piece<kColumns>& row, bool wide) const {
    if (is_wanted) store_result(m, place, row, wide);
  }
};

// ---- flags beside the data ---------------------------------------------------------------------

/// A thread carries two columns: a line. Each of them also reads the line of the statistics.
template <int kLevels>
__global__ __launch_bounds__(kThreads, 2) void beside_kernel(const __grid_constant__ Task task) {
  const Route& r = task.route;
  const ExchangeParams& p = task.params;
  if (blockIdx.x == 0) return compare_headers(r, p);
  constexpr int kPlaces = 1 << kLevels;
  const unsigned column = threadIdx.x * 2;
  const std::uint32_t row_lines = r.row_bytes * 2 + 16;
  const auto load_own = [&](std::uint32_t row) -> Piece<2> {
    const std::uint32_t from = min(row, r.rows - 1);
    const float2 o =
        __ldcg(reinterpret_cast<const float2*>(r.own_state + columns_at(r, from, column)));
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(r.own_state) + from);
    return {{stats.x, stats.y}, {o.x, o.y}};
  };
  std::uint32_t row = first_rows() + threadIdx.y;
  wait_for_states(r, row, column);
  Piece<2> own = load_own(row);
  const Turn turn(r);
  for (std::uint32_t next = row;;) {
    const uint4 stats_line = line_of(own.stats.max, own.stats.sum, turn.epoch);
    const uint4 line = line_of(own.o[0], own.o[1], turn.epoch);
#pragma unroll
    for (int step = 0; step < kPlaces - 1; ++step) {
      if (step >= static_cast<int>(r.peers)) break;
      std::byte* lines = r.window[step] + turn.copy + r.beside + next * row_lines;
      if (next < r.rows) arch::store_volatile(lines + 16 + column * 8, line);
      if (next < r.rows && column == 0) arch::store_volatile(lines, stats_line);
    }
    next += row_step();
    if (next >= r.rows) break;
    own = load_own(next);
  }
  __syncthreads();
  const Departure departure(p);

  BoundedWait wait(p, turn.epoch, r.own + turn.copy);
  for (; row < r.rows; row += row_step()) {
    const ResultRow result(p.merge, r, row, column);
    if (row_step() < r.rows) own = load_own(row);
    // All ranks' lines are asked for at once, until all are there.
    Piece<2> pieces[kPlaces];
    bool good = true;
    for (;;) {
      uint4 lines[kPlaces][2];
#pragma unroll
      for (int place = 0; place < kPlaces; ++place) {
        const std::byte* from = r.own + turn.copy + r.place_beside[place] + row * row_lines;
        lines[place][0] = arch::load_volatile(from);
        lines[place][1] = arch::load_volatile(from + 16 + column * 8);
      }
      int missing = -1;
#pragma unroll
      for (int place = 0; place < kPlaces; ++place) {
        const bool there =
            arrived(lines[place][0], turn.epoch) && arrived(lines[place][1], turn.epoch);
        if (!there && r.peer_places >> place & 1) missing = place;
        pieces[place] = {{__uint_as_float(lines[place][0].x), __uint_as_float(lines[place][0].z)},
                         {__uint_as_float(lines[place][1].x), __uint_as_float(lines[place][1].z)}};
        if (r.own_places >> place & 1) pieces[place] = own;
        if (r.empty_places >> place & 1) pieces[place].stats = empty_stats();
      }
      if (missing < 0) break;
      good = wait.go_on(r.place_rank[missing]);
      if (!good) break;
    }
    if (good) {
      Piece<2> state = fold_subtree<kLevels>([&](int place) { return pieces[place]; }, 0);
      result.end.finish(state);
      result.store(p.merge, state, task.wide);
    }
  }
  departure.leave(p, turn);
}

// ---- data, then a flag -------------------------------------------------------------------------

template <int kLevels>
__global__ __launch_bounds__(kThreads, 2) void flags_kernel(const __grid_constant__ Task task) {
  const Route& r = task.route;
  const ExchangeParams& p = task.params;
  if (blockIdx.x == 0) return compare_headers(r, p);
  const unsigned column = threadIdx.x * 4;
  const std::uint32_t first = first_rows();
  wait_for_states(r, first + threadIdx.y, column);
  OwnRows own(r, first, column);
  const Turn turn(r);
  for (std::uint32_t next = first;;) {
#pragma unroll
    for (int step = 0; step < (1 << kLevels) - 1; ++step) {
      if (step >= static_cast<int>(r.peers)) break;
      own.store(r, r.window[step] + turn.copy + r.slot, next, r.rows, column);
    }
    next += row_step();
    if (next >= r.rows) break;
    own = OwnRows(r, next, column);
  }
  announce(r, turn, 0);
  const Departure departure(p);
  BoundedWait wait(p, turn.epoch, r.own + turn.copy);
  std::uint32_t row = first + threadIdx.y;
  ResultRow result(p.merge, r, min(row, r.rows - 1), column);
  if (await(r, turn, 0, wait)) {
    while (row < r.rows) {
      Piece<4> state = merged<kLevels>(r, turn, row, column);
      result.end.finish(state);
      result.store(p.merge, state, task.wide);
      row += row_step();
      if (row < r.rows) result = ResultRow(p.merge, r, row, column);
    }
  }
  departure.leave(p, turn);
}

// ---- shares ------------------------------------------------------------------------------------

/// Four elements of a dense `out`, as they lie there.
__device__ uint4 load_elements(const std::byte* from, DType dtype, std::uint32_t at) {
  if (dtype == DType::fp32) return __ldcg(reinterpret_cast<const uint4*>(from) + at / 4);
  if (is_fp8(dtype)) return {__ldcg(reinterpret_cast<const unsigned*>(from) + at / 4), 0, 0, 0};
  const uint2 two = __ldcg(reinterpret_cast<const uint2*>(from) + at / 4);
  return {two.x, two.y, 0, 0};
}

/// The results travel rounded: in the window they lie as in a dense `out`.
template <int kLevels>
__global__ __launch_bounds__(kThreads, 2) void shares_kernel(const __grid_constant__ Task task) {
  const Route& r = task.route;
  const ExchangeParams& p = task.params;
  if (blockIdx.x == 0) return compare_headers(r, p);
  constexpr int kPeers = (1 << kLevels) - 1;
  const MergeParams& m = p.merge;
  const unsigned column = threadIdx.x * 4;
  const std::uint32_t dim = r.row_bytes / 4;
  const auto load_own = [&](OwnRows(&own)[kPeers], std::uint32_t first) {
#pragma unroll
    for (int step = 0; step < kPeers; ++step)
      own[step] = OwnRows(r, r.share_first[step] + first, column);
  };
  OwnRows own[kPeers];
  wait_for_states(r, r.share_first[0] + first_rows() + threadIdx.y, column);
  load_own(own, first_rows());
  const Turn turn(r);
  for (std::uint32_t next = first_rows();;) {
#pragma unroll
    for (int step = 0; step < kPeers; ++step)
      own[step].store(r, r.window[step] + turn.copy + r.slot, r.share_first[step] + next,
                      r.share_first[step] + r.share_count[step], column);
    next += row_step();
    if (next >= r.share_count_most) break;
    load_own(own, next);
  }
  announce(r, turn, 0);
  const Departure departure(p);
  BoundedWait wait(p, turn.epoch, r.own + turn.copy);
  const std::uint32_t first = first_rows() + threadIdx.y;
  std::uint32_t row = r.own_first + first;
  ResultRow result(m, r, min(row, r.rows - 1), column);
  bool good = await(r, turn, 0, wait);
  if (good) {
    while (row < r.own_first + r.own_count) {
      Piece<4> state = merged<kLevels>(r, turn, row, column);
      result.end.finish(state);
#pragma unroll
      for (int step = 0; step < kPeers; ++step) {
        if (step >= static_cast<int>(r.peers)) break;
        store_elements(r.window[step] + turn.copy + r.result, m.dtype, row * dim + column, state.o);
      }
      if (column == 0) {
        const float lse = finish(state.stats).lse;
#pragma unroll
        for (int step = 0; step < kPeers; ++step) {
          if (step >= static_cast<int>(r.peers)) break;
          reinterpret_cast<float*>(r.window[step] + turn.copy + r.lse)[row] = lse;
        }
      }
      result.store(m, state, task.wide);
      row += row_step();
      if (row < r.own_first + r.own_count) result = ResultRow(m, r, row, column);
    }
  }
  announce(r, turn, 1);
  if (good && await(r, turn, 1, wait)) {
    const std::byte* results = r.own + turn.copy + r.result;
    const float* lses = reinterpret_cast<const float*>(r.own + turn.copy + r.lse);
    for (std::uint32_t i = first; i < r.share_count_most; i += row_step()) {
      uint4 words[kPeers];
      float lse[kPeers];
#pragma unroll
      for (int step = 0; step < kPeers; ++step) {
        const std::uint32_t from = min(r.share_first[step] + i, r.rows - 1);
        words[step] = load_elements(results, m.dtype, from * dim + column);
        lse[step] = __ldcg(lses + from);
      }
#pragma unroll
      for (int step = 0; step < kPeers; ++step) {
        if (i >= r.share_count[step]) continue;
        const std::uint32_t to = r.share_first[step] + i, token = r.heads(to);
        const int head = static_cast<int>(to - token * m.heads);
        if (!in_batch(m.batch, token)) continue;
        const ResultPlace place(m, token, head, static_cast<int>(column));
        copy_elements(m, place, words[step], task.wide);
        if (place.lse != nullptr) *place.lse = lse[step];
      }
    }
  }
  departure.leave(p, turn);
}

// ---- words that are their own flags ------------------------------------------------------------

template <int kLevels>
__global__ __launch_bounds__(kThreads, 2) void words_kernel(const __grid_constant__ Task task) {
  const Route& r = task.route;
  const ExchangeParams& p = task.params;
  if (blockIdx.x == 0) return compare_headers(r, p);
  const unsigned column = threadIdx.x * 4;
  const std::uint32_t first = first_rows();
  wait_for_states(r, first + threadIdx.y, column);
  OwnRows own(r, first, column);
  const Turn turn(r);
  for (std::uint32_t next = first;;) {
#pragma unroll
    for (int step = 0; step < (1 << kLevels) - 1; ++step) {
      if (step >= static_cast<int>(r.peers)) break;
      own.send(r, r.window[step] + turn.copy + r.words, next, r.rows, column);
    }
    next += row_step();
    if (next >= r.rows) break;
    own = OwnRows(r, next, column);
  }
  __syncthreads();
  const Departure departure(p);
  BoundedWait wait(p, turn.epoch, r.own + turn.copy);
  for (std::uint32_t row = first + threadIdx.y; row < r.rows; row += row_step()) {
    const ResultRow result(p.merge, r, row, column);
    Piece<4> state;
    if (!collect<kLevels>(r, turn, row, column, wait, state)) break;
    result.end.finish(state);
    result.store(p.merge, state, task.wide);
  }
  __syncthreads();
  rest<kLevels>(r, turn, first, r.rows, column);
  departure.leave(p, turn);
}

/// Four elements of a dense `out` whose words are their own flags.
__device__ void ask_elements(bool wanted, const std::byte* from, int size, std::uint32_t at,
                             uint4& words) {
  if (size == 4) return arch::load_volatile_if(wanted, from + at * 4, words);
  uint2 two = {words.x, words.y};
  if (size == 2)
    arch::load_volatile_if(wanted, from + at * 2, two);
  else
    arch::load_volatile_if(wanted, from + at, two.x);
  words.x = two.x, words.y = two.y;
}
__device__ bool elements_arrived(uint4 words, int size) {
  return size == 4   ? arrived(words)
         : size == 2 ? arrived(uint2{words.x, words.y})
                     : arrived(words.x);
}
__device__ void send_elements(std::byte* to, int size, std::uint32_t at, uint4 words) {
  if (size == 4)
    arch::store_volatile(to + at * 4, sent(words));
  else if (size == 2)
    arch::store_volatile(to + at * 2, sent(uint2{words.x, words.y}));
  else
    arch::store_volatile(to + at, sent(words.x));
}
__device__ void rest_elements(std::byte* at, int size) {
  if (size == 4)
    *reinterpret_cast<uint4*>(at) = uint4{};
  else if (size == 2)
    *reinterpret_cast<uint2*>(at) = uint2{};
  else
    *reinterpret_cast<std::uint32_t*>(at) = 0;
}

template <int kLevels>
__global__ __launch_bounds__(kThreads,
                             2) void word_shares_kernel(const __grid_constant__ Task task) {
  const Route& r = task.route;
  const ExchangeParams& p = task.params;
  if (blockIdx.x == 0) return compare_headers(r, p);
  constexpr int kPeers = (1 << kLevels) - 1;
  const MergeParams& m = p.merge;
  const unsigned column = threadIdx.x * 4;
  const std::uint32_t dim = r.row_bytes / 4, own_end = r.own_first + r.own_count;
  const auto load_own = [&](OwnRows(&own)[kPeers], std::uint32_t first) {
#pragma unroll
    for (int step = 0; step < kPeers; ++step)
      own[step] = OwnRows(r, r.share_first[step] + first, column);
  };
  OwnRows own[kPeers];
  wait_for_states(r, r.share_first[0] + first_rows() + threadIdx.y, column);
  load_own(own, first_rows());
  const Turn turn(r);
  for (std::uint32_t next = first_rows();;) {
#pragma unroll
    for (int step = 0; step < kPeers; ++step)
      own[step].send(r, r.window[step] + turn.copy + r.words, r.share_first[step] + next,
                     r.share_first[step] + r.share_count[step], column);
    next += row_step();
    if (next >= r.share_count_most) break;
    load_own(own, next);
  }
  __syncthreads();
  const Departure departure(p);
  BoundedWait wait(p, turn.epoch, r.own + turn.copy);

  const int size = static_cast<int>(size_of(m.dtype));
  bool good = true;
  for (std::uint32_t row = r.own_first + first_rows() + threadIdx.y; row < own_end && good;
       row += row_step()) {
    const ResultRow result(m, r, row, column);
    Piece<4> state;
    good = collect<kLevels>(r, turn, row, column, wait, state);
    if (!good) break;
    result.end.finish(state);
    uint4 words = {};
    store_elements(&words, m.dtype, 0, state.o);
#pragma unroll
    for (int step = 0; step < kPeers; ++step) {
      if (step >= static_cast<int>(r.peers)) break;
      send_elements(r.window[step] + turn.copy + r.words_result, size, row * dim + column, words);
    }
    if (result.is_wanted) copy_elements(m, result.place, words, task.wide);
    if (column == 0) {  // a long way to the logarithm: after what others wait for
      const float lse = finish(state.stats).lse;
#pragma unroll
      for (int step = 0; step < kPeers; ++step) {
        if (step >= static_cast<int>(r.peers)) break;
        arch::store_volatile(r.window[step] + turn.copy + r.words_lse + row * 4,
                             sent(__float_as_uint(lse)));
      }
      if (result.is_wanted && result.place.lse != nullptr) *result.place.lse = lse;
    }
  }
  __syncthreads();
  rest<kLevels>(r, turn, r.own_first + first_rows(), own_end, column);

  std::byte* results = r.own + turn.copy + r.words_result;
  std::byte* lses = r.own + turn.copy + r.words_lse;
  for (std::uint32_t i = first_rows() + threadIdx.y; i < r.share_count_most && good;
       i += row_step()) {
    uint4 words[kPeers] = {};
    std::uint32_t lse[kPeers] = {}, wanted = 0, skipped = 0;
    ResultPlace places[kPeers];
#pragma unroll
    for (int step = 0; step < kPeers; ++step) {
      if (i >= r.share_count[step]) continue;
      const std::uint32_t row = r.share_first[step] + i, token = r.heads(row);
      places[step] =
          ResultPlace(m, token, static_cast<int>(row - token * m.heads), static_cast<int>(column));
      wanted |= 1u << step;
      if (!in_batch(m.batch, token)) skipped |= 1u << step;
    }
    for (std::uint32_t missing = wanted; missing != 0;) {
#pragma unroll
      for (int step = 0; step < kPeers; ++step) {
        const std::uint32_t row = r.share_first[step] + i;
        const bool is_missing = missing >> step & 1;
        ask_elements(is_missing, results, size, row * dim + column, words[step]);
        arch::load_volatile_if(is_missing && column == 0, lses + row * 4, lse[step]);
      }
#pragma unroll
      for (int step = 0; step < kPeers; ++step)
        if (elements_arrived(words[step], size) && (column != 0 || arrived(lse[step])))
          missing &= ~(1u << step);
      if (missing == 0) break;
      good = wait.go_on(r.rank[__ffs(missing) - 1]);
      if (!good) break;
    }
    if (!good) break;
#pragma unroll
    for (int step = 0; step < kPeers; ++step) {
      if ((wanted >> step & 1) == 0) continue;
      const std::uint32_t row = r.share_first[step] + i;
      if ((skipped >> step & 1) == 0) {
        const uint4 values = {~words[step].x, ~words[step].y, ~words[step].z, ~words[step].w};
        copy_elements(m, places[step], values, task.wide);
        if (places[step].lse != nullptr) *places[step].lse = __uint_as_float(~lse[step]);
      }
      // Nobody else reads these words.
      rest_elements(results + (row * dim + column) * static_cast<unsigned>(size), size);
      if (column == 0) *reinterpret_cast<std::uint32_t*>(lses + row * 4) = 0;
    }
  }
  departure.leave(p, turn);
}

// ---- launch ------------------------------------------------------------------------------------

/// Block 0, and the carriers. Few rows are spread over many multiprocessors, so that each of them
/// has little to read when it looks for what has come.
void launch_of(const ExchangeParams& p, int columns, std::int64_t rows, dim3& grid, dim3& block) {
  const auto divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const int threads = p.merge.states.dim / columns;  // of a row
  const std::int64_t most = std::max(1, kThreads / threads);
  const std::int64_t least = std::min<std::int64_t>(most, divide(kFewestThreads, threads));
  const std::int64_t wanted = p.blocks > 0 ? std::min(p.blocks, kMostBlocks) : kBlocks;
  const std::int64_t side = std::clamp(divide(rows, wanted), least, most);
  const std::int64_t cap = p.blocks > 0 ? wanted : kMostBlocks / 2;
  block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(side));
  grid = dim3(1 + static_cast<unsigned>(std::min(divide(rows, side), cap)));
}

/// Whether the code that runs here is of the kind that waits for the kernels before it.
template <auto* kKernel>
bool can_overlap() {
  static const bool can = [] {
    cudaFuncAttributes attributes{};
    LONGSPAN_CUDA(cudaFuncGetAttributes(&attributes, kKernel));
    return attributes.ptxVersion >= 90;
  }();
  return can;
}

template <auto* kKernel>
void launch(const ExchangeParams& p, const Route& route, int columns, std::int64_t rows, bool wide,
            cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  launch_of(p, columns, rows, config.gridDim, config.blockDim);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = p.overlap && can_overlap<kKernel>() ? 1 : 0;
  LONGSPAN_CUDA(cudaLaunchKernelEx(&config, kKernel, Task{route, p, wide}));
}

template <int kLevels>
void launch(const ExchangeParams& p, Push push, cudaStream_t stream) {
  const Route route = make_route(p);
  const Rows& out = p.merge.out;
  const bool two = is_aligned<2>(out, p.merge.dtype), four = is_aligned<4>(out, p.merge.dtype);
  if (push == Push::beside)
    launch<beside_kernel<kLevels>>(p, route, 2, route.rows, two, stream);
  else if (push == Push::flags)
    launch<flags_kernel<kLevels>>(p, route, 4, route.rows, four, stream);
  else if (push == Push::shares)
    launch<shares_kernel<kLevels>>(p, route, 4, route.share_count_most, four, stream);
  else if (push == Push::words)
    launch<words_kernel<kLevels>>(p, route, 4, route.rows, four, stream);
  else
    launch<word_shares_kernel<kLevels>>(p, route, 4, route.share_count_most, four, stream);
}

[[noreturn]] void refuse(const std::string& what) {
  throw Unsupported("exchange by windows: " + what);
}

}  // namespace

void exchange(const ExchangeParams& p, cudaStream_t stream) {
  const MergeParams& m = p.merge;
  if (m.states.rows == 0) return;
  if (p.peers.ranks > PeerView::kMostRanks) refuse(std::to_string(p.peers.ranks) + " ranks");
  if (m.states.dim % 8 != 0 || m.states.dim > 256)
    refuse("head dim " + std::to_string(m.states.dim));
  if (m.rows != nullptr) refuse("sharded queries");
  if (m.states.rows > p.capacity)
    throw InputError("exchange of " + std::to_string(m.states.rows) +
                     " states; the windows were made for " + std::to_string(p.capacity));
  const WindowLayout layout{p.capacity, m.states.dim, p.peers.ranks};
  if (layout.total() >= std::int64_t{1} << 32)  // offsets in a window have 32 bits
    refuse("windows of " + std::to_string(layout.total()) + " bytes");
  const Push push =
      p.push == Push::automatic ? choose_push(m.states.rows, m.states.dim, p.peers.ranks) : p.push;
  if (push == Push::beside && m.states.rows > layout.beside_rows())
    refuse(std::to_string(m.states.rows) + " states with flags beside the data");
  for_levels<3>(log2_ceil(p.peers.ranks), [&](auto levels) {
    launch<std::max(1, decltype(levels)::value)>(p, push, stream);
  });
  LONGSPAN_CUDA(cudaGetLastError());
}

std::size_t window_bytes(std::int64_t rows, int dim, int ranks) {
  return static_cast<std::size_t>(WindowLayout{rows, dim, ranks}.total());
}

// Measured crossovers (docs/performance-exchange.md): flags beside the data double the bytes, and
// win while latency is all; shares send each state once, and win when bytes are all.
Push choose_push(std::int64_t rows, int dim, int ranks) {
  const std::int64_t state = rows * (dim + 2) * 4;
  const std::int64_t beside = (ranks <= 2 ? 288 : 64) << 10;
  if (state <= beside && rows <= kMostBesideRows) return Push::beside;
  return ranks > 2 && state > (800 << 10) ? Push::shares : Push::flags;
}

}  // namespace longspan::kernels::cuda

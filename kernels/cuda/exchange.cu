// The three variants of the exchange (kernels/exchange.hpp). A block serves a range of rows, the
// same range on every rank, so it waits for the blocks of its own number only. Threads of a row
// stand side by side, so that what a warp writes to a peer is one run of whole lines. States of a
// row fold in the tree of merge.cu.
#include "kernels/cuda/exchange.hpp"

#include <algorithm>
#include <string>

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/fold_tree.cuh"
#include "kernels/cuda/row_end.cuh"
#include "kernels/cuda/window_layout.hpp"
#include "src/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr unsigned kLooksBetweenClocks = 64;

// ---- lines: 16 bytes that carry their epoch -----------------------------------------------------

__device__ uint4 line_of(std::uint32_t a, std::uint32_t b, std::uint32_t epoch) {
  return {a, epoch, b, epoch};
}
__device__ uint4 line_of(float a, float b, std::uint32_t epoch) {
  return line_of(__float_as_uint(a), __float_as_uint(b), epoch);
}
__device__ bool arrived(uint4 line, std::uint32_t epoch) {
  return line.y == epoch && line.w == epoch;
}

/// Whether what a rank says of its states is there, and is something else than ours.
__device__ bool differs(const ExchangeParams& p, uint4 header, std::uint32_t epoch) {
  return arrived(header, epoch) &&
         (header.x != p.shape || header.z != static_cast<std::uint32_t>(p.merge.states.rows));
}

// ---- waiting ----------------------------------------------------------------------------------

/// A wait that ends: for data, for the deadline, or for the abort word.
class BoundedWait {
 public:
  __device__ BoundedWait(const ExchangeParams& params, std::uint32_t epoch)
      : p_(params), peers_(params.peers), epoch_(epoch) {}

  /// Called after a look that found nothing; false: give up. `rank`: who is waited for.
  __device__ bool go_on(int rank) {
    if (++looks_ % kLooksBetweenClocks != 0) return true;
    const std::uint64_t now = arch::nanoseconds();
    if (start_ == 0) start_ = now;  // not before: reading the clock takes longer than most waits
    // One deadline for all waits of an exchange: whoever comes later does not wait again.
    if (arch::load_relaxed(&peers_.report->kind) != PeerReport::none) return false;
    if (arch::load_relaxed(peers_.abort) != 0) return fail(PeerReport::aborted, rank);
    if (now - start_ > peers_.deadline_ns) return time_out(rank);
    return true;
  }

  /// The first report of a window stays.
  __device__ bool fail(PeerReport::Kind kind, int rank) {
    PeerReport* report = peers_.report;
    if (atomicCAS_system(&report->kind, PeerReport::none, kind) == PeerReport::none) {
      report->rank = static_cast<std::uint32_t>(rank);
      report->epoch = epoch_;
      __threadfence_system();
    }
    return false;
  }

 private:
  /// Ranks with another number of rows may take another variant, and then wait for what is never
  /// sent: their headers tell.
  __device__ bool time_out(int rank) {
    const WindowLayout layout{p_.capacity, p_.merge.states.dim, peers_.ranks};
    for (int from = 0; from < peers_.ranks; ++from) {
      if (from == peers_.rank) continue;
      const std::byte* header = peers_.window[peers_.rank] + layout.header(epoch_ & 1u, from);
      if (differs(p_, arch::load_volatile(header), epoch_)) return fail(PeerReport::differs, from);
    }
    return fail(PeerReport::timeout, rank);
  }

  const ExchangeParams& p_;
  const PeerView& peers_;
  std::uint32_t epoch_;
  std::uint64_t start_ = 0;
  unsigned looks_ = 0;
};

// ---- one exchange as a block sees it -----------------------------------------------------------

struct Exchange {
  const ExchangeParams& p;
  const int rank, ranks;
  const WindowLayout layout;
  std::uint32_t epoch;
  unsigned parity;

  /// All threads call it. The last block that has read the epoch makes it this exchange's.
  __device__ explicit Exchange(const ExchangeParams& params)
      : p(params),
        rank(params.peers.rank),
        ranks(params.peers.ranks),
        layout{params.capacity, params.merge.states.dim, params.peers.ranks},
        epoch(arch::load_relaxed(params.peers.epoch) + 1),
        parity(epoch & 1u) {
    __syncthreads();
    if (thread() != 0) return;
    std::uint32_t* started = params.peers.epoch + 1;
    if (atomicAdd(started, 1u) + 1 < gridDim.x) return;
    *started = 0;
    params.peers.epoch[0] = epoch;
  }

  __device__ static int thread() {
    return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  }
  __device__ std::int64_t rows() const { return p.merge.states.rows; }
  __device__ std::byte* window(int of) const { return p.peers.window[of]; }
  /// The step-th peer from this rank on, so that ranks do not all write to one.
  __device__ int peer(int step) const {
    const int other = rank + step;
    return other < ranks ? other : other - ranks;
  }

  // What the ranks must agree on travels as a line of its own, in block 0.

  __device__ void send_header() const {
    const int to = thread();
    if (blockIdx.x == 0 && to < ranks && to != rank)
      arch::store_volatile(window(to) + layout.header(parity, rank),
                           line_of(p.shape, static_cast<std::uint32_t>(rows()), epoch));
  }
  __device__ void check_header() const {
    const int from = thread();
    if (blockIdx.x != 0 || from >= ranks || from == rank) return;
    BoundedWait wait(p, epoch);
    for (;;) {
      const uint4 line = arch::load_volatile(window(rank) + layout.header(parity, from));
      if (arrived(line, epoch)) {
        if (differs(p, line, epoch)) wait.fail(PeerReport::differs, from);
        return;
      }
      if (!wait.go_on(from)) return;
    }
  }

  // Flags: block b of a rank tells block b of the others that a stage of its work is there.

  __device__ std::uint32_t* flag(int of, int stage, int from) const {
    return reinterpret_cast<std::uint32_t*>(window(of) +
                                            layout.flag(stage, from, static_cast<int>(blockIdx.x)));
  }
  /// All threads call it.
  __device__ void announce(int stage) const {
    __syncthreads();
    const int to = thread();
    if (to < ranks && to != rank) arch::release(flag(to, stage, rank), epoch);
  }
  /// All threads call it; false: give up.
  __device__ bool await(int stage) const {
    const int from = thread();
    bool good = true;
    if (from < ranks && from != rank) {
      BoundedWait wait(p, epoch);
      const std::uint32_t* there = flag(rank, stage, from);
      while (good && static_cast<std::int32_t>(arch::acquire(there) - epoch) < 0)
        good = wait.go_on(from);
    }
    return __syncthreads_and(good);
  }

  // Four columns of a state, in a slot of `capacity` rows: statistics, then o.

  __device__ Piece<4> load(const std::byte* slot, std::int64_t capacity, std::int64_t row,
                           int column) const {
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(slot) + row);
    const float4 o = __ldcg(reinterpret_cast<const float4*>(
        slot + StateSlots::stats_bytes(capacity) + (row * layout.dim + column) * 4));
    return {{stats.x, stats.y}, {o.x, o.y, o.z, o.w}};
  }
  __device__ const std::byte* own_slot() const {
    return reinterpret_cast<const std::byte*>(p.merge.states.stats(rank));
  }
  __device__ Piece<4> own(std::int64_t row, int column) const {
    return load(own_slot(), rows(), row, column);
  }
  __device__ void push(int to, std::int64_t row, int column, const Piece<4>& piece) const {
    std::byte* slot = window(to) + layout.slot(parity, rank);
    if (column == 0)
      reinterpret_cast<float2*>(slot)[row] = make_float2(piece.stats.max, piece.stats.sum);
    *reinterpret_cast<float4*>(slot + StateSlots::stats_bytes(layout.rows) +
                               (row * layout.dim + column) * 4) =
        make_float4(piece.o[0], piece.o[1], piece.o[2], piece.o[3]);
  }

  /// The merged state of a row whose parts lie in this rank's window.
  template <int kLevels>
  __device__ Piece<4> merged(std::int64_t row, int column) const {
    return fold_subtree<kLevels>(
        [&](int place) {
          const int slot = p.merge.interleaved ? reverse_bits(place, log2_ceil(ranks)) : place;
          const int from = min(slot, ranks - 1);  // past the last rank: a load without a branch
          const bool local = from == rank;
          Piece<4> piece = load(local ? own_slot() : window(rank) + layout.slot(parity, from),
                                local ? rows() : layout.rows, row, column);
          if (slot >= ranks) piece.stats = empty_stats();
          return piece;
        },
        0);
  }
};

// ---- the end of a row
// -----------------------------------------------------------------------------

/// Rounds and stores; rows that are not in the batch are left alone.
template <int kColumns>
__device__ void store_row(const MergeParams& m, std::int64_t row, int column,
                          const float (&values)[kColumns], float lse, bool wide) {
  const std::int64_t token = row / m.heads;
  const int head = static_cast<int>(row - token * m.heads);
  if (!in_batch(m.batch, token)) return;
  store_result(m, token, head, column, values, lse, wide);
}

// ---- flags beside the data
// ------------------------------------------------------------------------

/// A thread carries two columns: a line. Each of them also reads the line of the statistics.
template <int kLevels>
__global__ __launch_bounds__(kThreads) void exchange_beside_kernel(
    const __grid_constant__ ExchangeParams p, bool wide) {
  Exchange x(p);
  x.send_header();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int column = static_cast<int>(threadIdx.x) * 2;
  if (row < x.rows()) {
    const StateSlots& states = p.merge.states;
    const Stats stats = states.stats(x.rank)[row];
    const float2 o = *reinterpret_cast<const float2*>(states.o(x.rank, row) + column);
    const std::int64_t stats_at = row * x.layout.beside_row(), at = stats_at + 16 + column * 8;
    for (int step = 1; step < x.ranks; ++step) {
      const int to = x.peer(step);
      std::byte* slot = x.window(to) + x.layout.beside(x.parity, x.rank);
      arch::store_volatile(slot + at, line_of(o.x, o.y, x.epoch));
      if (column == 0)
        arch::store_volatile(slot + stats_at, line_of(stats.max, stats.sum, x.epoch));
    }

    // All ranks' lines are asked for at once, until all are there.
    constexpr int kSlots = 1 << kLevels;
    Piece<2> pieces[kSlots];
    BoundedWait wait(p, x.epoch);
    bool good = true;
    for (;;) {
      uint4 lines[kSlots][2];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const std::byte* from =
            x.window(x.rank) + x.layout.beside(x.parity, min(slot, x.ranks - 1));
        lines[slot][0] = arch::load_volatile(from + stats_at);
        lines[slot][1] = arch::load_volatile(from + at);
      }
      int missing = -1;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const bool there = arrived(lines[slot][0], x.epoch) && arrived(lines[slot][1], x.epoch);
        if (!there && slot < x.ranks && slot != x.rank) missing = slot;
        pieces[slot] = {{__uint_as_float(lines[slot][0].x), __uint_as_float(lines[slot][0].z)},
                        {__uint_as_float(lines[slot][1].x), __uint_as_float(lines[slot][1].z)}};
        if (slot == x.rank) pieces[slot] = {stats, {o.x, o.y}};
        if (slot >= x.ranks) pieces[slot].stats = empty_stats();
      }
      if (missing < 0) break;
      good = wait.go_on(missing);
      if (!good) break;
    }
    if (good) {
      Piece<2> state = fold_subtree<kLevels>(
          [&](int place) {
            const Piece<2> straight = pieces[place], crossed = pieces[reverse_bits(place, kLevels)];
            return p.merge.interleaved ? crossed : straight;
          },
          0);
      const float lse = finish_piece(p.merge, static_cast<int>(row % p.merge.heads), state);
      store_row(p.merge, row, column, state.o, lse, wide);
    }
  }
  x.check_header();
}

// ---- data, then a flag
// ------------------------------------------------------------------------------

/// Rows [first, last) of `rows` are the block's.
__device__ void block_rows(std::int64_t rows, std::int64_t& first, std::int64_t& last) {
  first = rows * blockIdx.x / gridDim.x;
  last = rows * (blockIdx.x + 1) / gridDim.x;
}

template <int kLevels>
__global__ __launch_bounds__(kThreads) void exchange_flags_kernel(
    const __grid_constant__ ExchangeParams p, bool wide) {
  Exchange x(p);
  x.send_header();
  const int column = static_cast<int>(threadIdx.x) * 4;
  std::int64_t first, last;
  block_rows(x.rows(), first, last);
  for (std::int64_t row = first + threadIdx.y; row < last; row += blockDim.y) {
    const Piece<4> own = x.own(row, column);
    for (int step = 1; step < x.ranks; ++step) x.push(x.peer(step), row, column, own);
  }
  x.announce(0);
  if (x.await(0)) {
    for (std::int64_t row = first + threadIdx.y; row < last; row += blockDim.y) {
      Piece<4> state = x.merged<kLevels>(row, column);
      const float lse = finish_piece(p.merge, static_cast<int>(row % p.merge.heads), state);
      store_row(p.merge, row, column, state.o, lse, wide);
    }
  }
  x.check_header();
}

// ---- shares
// -----------------------------------------------------------------------------------------

/// Rows of rank r's share that are the block's.
__device__ void share_rows(std::int64_t rows, int ranks, int r, std::int64_t& first,
                           std::int64_t& last) {
  const std::int64_t begin = rows * r / ranks, end = rows * (r + 1) / ranks;
  block_rows(end - begin, first, last);
  first += begin;
  last += begin;
}

template <int kLevels>
__global__ __launch_bounds__(kThreads) void exchange_shares_kernel(
    const __grid_constant__ ExchangeParams p, bool wide) {
  Exchange x(p);
  x.send_header();
  const MergeParams& m = p.merge;
  const int column = static_cast<int>(threadIdx.x) * 4;
  std::int64_t first, last;
  for (int step = 1; step < x.ranks; ++step) {
    share_rows(x.rows(), x.ranks, x.peer(step), first, last);
    for (std::int64_t row = first + threadIdx.y; row < last; row += blockDim.y)
      x.push(x.peer(step), row, column, x.own(row, column));
  }
  x.announce(0);
  // The results travel rounded: in the window they lie as in a dense `out`.
  const std::int64_t lse_at = x.layout.rows * x.layout.dim * 4;
  bool good = x.await(0);
  if (good) {
    share_rows(x.rows(), x.ranks, x.rank, first, last);
    for (std::int64_t row = first + threadIdx.y; row < last; row += blockDim.y) {
      Piece<4> state = x.merged<kLevels>(row, column);
      const float lse = finish_piece(m, static_cast<int>(row % m.heads), state);
      for (int step = 1; step < x.ranks; ++step) {
        std::byte* results = x.window(x.peer(step)) + x.layout.result(x.parity);
        store_elements(results, m.dtype, row * x.layout.dim + column, state.o);
        if (column == 0) reinterpret_cast<float*>(results + lse_at)[row] = lse;
      }
      store_row(m, row, column, state.o, lse, wide);
    }
  }
  x.announce(1);
  if (good && x.await(1)) {
    const std::byte* results = x.window(x.rank) + x.layout.result(x.parity);
    for (int step = 1; step < x.ranks; ++step) {
      share_rows(x.rows(), x.ranks, x.peer(step), first, last);
      for (std::int64_t row = first + threadIdx.y; row < last; row += blockDim.y) {
        float values[4];  // rounding what is rounded already changes nothing
        const std::int64_t at = row * x.layout.dim + column;
        if (m.dtype == DType::fp32) {
          const float4 four = __ldcg(reinterpret_cast<const float4*>(results) + at / 4);
          values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
        } else if (is_fp8(m.dtype)) {
          const std::uint32_t four = __ldcg(reinterpret_cast<const unsigned*>(results) + at / 4);
          for (int i = 0; i < 4; ++i) values[i] = load_element(&four, m.dtype, i);
        } else {
          const uint2 four = __ldcg(reinterpret_cast<const uint2*>(results) + at / 4);
          for (int i = 0; i < 4; ++i) values[i] = load_element(&four, m.dtype, i);
        }
        const float lse = __ldcg(reinterpret_cast<const float*>(results + lse_at) + row);
        store_row(m, row, column, values, lse, wide);
      }
    }
  }
  x.check_header();
}

// ---- launch
// -----------------------------------------------------------------------------------------

template <int kLevels>
void launch(const ExchangeParams& p, Push push, cudaStream_t stream) {
  const int columns = push == Push::beside ? 2 : 4, threads = p.merge.states.dim / columns;
  const std::int64_t rows = p.merge.states.rows;
  const dim3 block(static_cast<unsigned>(threads),
                   static_cast<unsigned>(std::max(1, kThreads / threads)));
  const auto blocks_of = [&](std::int64_t some) { return (some + block.y - 1) / block.y; };
  const bool wide = push == Push::beside ? is_aligned<2>(p.merge.out, p.merge.dtype)
                                         : is_aligned<4>(p.merge.out, p.merge.dtype);
  if (push == Push::beside) {
    exchange_beside_kernel<kLevels>
        <<<static_cast<unsigned>(blocks_of(rows)), block, 0, stream>>>(p, wide);
    return;
  }
  const std::int64_t share =
      push == Push::flags ? rows : (rows + p.peers.ranks - 1) / p.peers.ranks;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(blocks_of(share), kMostBlocks / 2));
  if (push == Push::flags)
    exchange_flags_kernel<kLevels><<<blocks, block, 0, stream>>>(p, wide);
  else
    exchange_shares_kernel<kLevels><<<blocks, block, 0, stream>>>(p, wide);
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
  const Push push =
      p.push == Push::automatic ? choose_push(m.states.rows, m.states.dim, p.peers.ranks) : p.push;
  const WindowLayout layout{p.capacity, m.states.dim, p.peers.ranks};
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

// The kernels of the exchange (kernels/exchange.hpp), in its two variants. The threads of a row are
// adjacent, so that a warp writes one run of whole lines to a peer. The states of a row fold in the
// tree of merge.cu.
//
// Everything that does not depend on the data is computed before it arrives: the host computes the
// destinations of words (exchange_route.hpp), and rows, sinks and scales are looked up while states
// travel.
//
// There is no deadlock: a block pushes all its states before it waits for any, and a grid is no
// larger than what the GPU holds at once. All states are therefore pushed, all merges end, and all
// results are pushed. When the blocks of an exchange start, all blocks of the kernel before are
// resident or done (overlap.cuh), and the kernel after starts when they have ended.
#include "kernels/cuda/exchange/exchange.hpp"

#include <algorithm>
#include <string>

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/overlap.hpp"
#include "kernels/cuda/exchange/exchange_words.cuh"
#include "longspan/limits.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // most of a block
constexpr int kFewestThreads = 32;
constexpr int kBlocks = 128;  // about one for each multiprocessor, as long as there are rows
constexpr int kResident = 2;  // blocks that every multiprocessor holds

template <int kLevels>
__global__ __launch_bounds__(kThreads,
                             kResident) void one_trip_kernel(const __grid_constant__ Task task) {
  const ExchangeRoute& r = task.route;
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
      own.send(r, r.peer_buffer[step] + turn.copy + r.slot, next, r.rows, column);
    }
    next += row_step();
    if (next >= r.rows) break;
    own = OwnRows(r, next, column);
  }
  __syncthreads();
  const Departure departure(p);
  BoundedWait wait(p, r, turn.epoch, r.own + turn.copy);
  for (std::uint32_t row = first + threadIdx.y; row < r.rows; row += row_step()) {
    const ResultRow result(p.merge, r, row, column);
    StateColumns<4> state;
    if (!collect<kLevels>(r, turn, row, column, wait, state)) break;
    result.end.finish(state);
    result.store(p.merge, state, task.wide);
  }
  __syncthreads();
  clear_slots<kLevels>(r, turn, first, r.rows, row_step(), column);
  departure.leave(p, turn);
}

template <int kLevels>
__global__ __launch_bounds__(kThreads,
                             kResident) void two_trips_kernel(const __grid_constant__ Task task) {
  const ExchangeRoute& r = task.route;
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
      own[step].send(r, r.peer_buffer[step] + turn.copy + r.slot, r.share_first[step] + next,
                     r.share_first[step] + r.share_count[step], column);
    next += row_step();
    if (next >= r.share_count_most) break;
    load_own(own, next);
  }
  __syncthreads();
  const Departure departure(p);
  BoundedWait wait(p, r, turn.epoch, r.own + turn.copy);

  const int size = static_cast<int>(size_of(m.dtype));
  bool good = true;
  for (std::uint32_t row = r.own_first + first_rows() + threadIdx.y; row < own_end && good;
       row += row_step()) {
    const ResultRow result(m, r, row, column);
    StateColumns<4> state;
    good = collect<kLevels>(r, turn, row, column, wait, state);
    if (!good) break;
    result.end.finish(state);
    uint4 words = {};
    store_elements(&words, m.dtype, 0, state.o);
#pragma unroll
    for (int step = 0; step < kPeers; ++step) {
      if (step >= static_cast<int>(r.peers)) break;
      send_elements(r.peer_buffer[step] + turn.copy + r.result, size, row * dim + column, words);
    }
    if (result.is_wanted)
      copy_elements(m, result.place, words, m.states.dim - static_cast<int>(column), task.wide);
    if (column == 0) {  // the logarithm takes long, so it comes after what others wait for
      const float lse = finish(state.stats).lse;
#pragma unroll
      for (int step = 0; step < kPeers; ++step) {
        if (step >= static_cast<int>(r.peers)) break;
        arch::store_volatile(r.peer_buffer[step] + turn.copy + r.lse + row * 4,
                             sent(__float_as_uint(lse)));
      }
      if (result.is_wanted && result.place.lse != nullptr) *result.place.lse = lse;
    }
  }
  __syncthreads();
  clear_slots<kLevels>(r, turn, r.own_first + first_rows(), own_end, row_step(), column);

  std::byte* results = r.own + turn.copy + r.result;
  std::byte* lses = r.own + turn.copy + r.lse;
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
        request_elements(is_missing, results, size, row * dim + column, words[step]);
        arch::load_volatile_if(is_missing && column == 0, lses + row * 4, lse[step]);
      }
#pragma unroll
      for (int step = 0; step < kPeers; ++step)
        if (elements_have_arrived(words[step], size) && (column != 0 || has_arrived(lse[step])))
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
        copy_elements(m, places[step], values, m.states.dim - static_cast<int>(column), task.wide);
        if (places[step].lse != nullptr) *places[step].lse = __uint_as_float(~lse[step]);
      }
      // No other thread reads these words.
      clear_elements(results + (row * dim + column) * static_cast<unsigned>(size), size);
      if (column == 0) *reinterpret_cast<std::uint32_t*>(lses + row * 4) = 0;
    }
  }
  departure.leave(p, turn);
}

// ---- launch ------------------------------------------------------------------------------------

/// The number of blocks that the GPU is sure to hold at once, when it has nothing else to do.
std::int64_t resident_blocks() {
  int device = 0, multiprocessors = 0;
  LONGSPAN_CUDA(cudaGetDevice(&device));
  LONGSPAN_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return std::int64_t{kResident} * multiprocessors;
}

/// Computes the grid, which is block 0 and the blocks that carry states, and the size of a block.
/// Few rows are spread over many multiprocessors, so that each has little to read when it polls for
/// arrivals.
void launch_of(const ExchangeParams& p, std::int64_t rows, dim3& grid, dim3& block) {
  const auto divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const int threads = p.merge.states.columns() / 4;  // of a row
  const std::int64_t most = std::max(1, kThreads / threads);
  const std::int64_t least = std::min<std::int64_t>(most, divide(kFewestThreads, threads));
  const std::int64_t held = std::max<std::int64_t>(1, resident_blocks() - 1);
  const std::int64_t asked = p.blocks > 0 ? std::min<std::int64_t>(p.blocks, held) : 0;
  const std::int64_t side = std::clamp(divide(rows, asked > 0 ? asked : kBlocks), least, most);
  block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(side));
  grid = dim3(1 + static_cast<unsigned>(std::min(divide(rows, side), asked > 0 ? asked : held)));
}

template <auto* kKernel>
void launch(const ExchangeParams& p, const ExchangeRoute& route, std::int64_t rows,
            cudaStream_t stream) {
  dim3 grid, block;
  launch_of(p, rows, grid, block);
  const bool wide = is_wide_result<4>(p.merge, p.merge.states.dim);
  launch_overlapping<kKernel>(Task{route, p, wide}, grid, block, p.overlap, stream);
}

[[noreturn]] void refuse(const std::string& what) {
  throw Unsupported("exchange by peer buffers: " + what);
}

}  // namespace

Push push_of(const ExchangeParams& p) {
  const MergeParams& m = p.merge;
  if (p.peers.ranks > PeerView::kMostRanks) refuse(std::to_string(p.peers.ranks) + " ranks");
  if (m.states.dim > kMaxValueDim) refuse("value_dim " + std::to_string(m.states.dim));
  if (m.rows != nullptr) refuse("sharded queries");
  if (m.states.rows > p.capacity)
    throw InputError("exchange of " + std::to_string(m.states.rows) +
                     " states; the peer buffers were made for " + std::to_string(p.capacity));
  const PeerBufferLayout layout{p.capacity, m.states.columns(), p.peers.ranks};
  if (layout.total() >= std::int64_t{1} << 32)  // offsets in a peer buffer have 32 bits
    refuse("peer buffers of " + std::to_string(layout.total()) + " bytes");
  if (p.push != Push::automatic) return p.push;
  return choose_push(m.states.rows, m.states.columns(), p.peers.ranks, p.pushed);
}

void exchange(const ExchangeParams& p, cudaStream_t stream) {
  if (p.merge.states.rows == 0) return;
  const Push push = push_of(p);
  const ExchangeRoute route = make_route(p);
  for_levels<3>(log2_ceil(p.peers.ranks), [&](auto levels) {
    constexpr int kLevels = std::max(1, decltype(levels)::value);
    if (push == Push::one_trip)
      launch<one_trip_kernel<kLevels>>(p, route, route.rows, stream);
    else
      launch<two_trips_kernel<kLevels>>(p, route, route.share_count_most, stream);
  });
}

std::size_t peer_buffer_bytes(std::int64_t rows, int dim, int ranks) {
  return static_cast<std::size_t>(PeerBufferLayout{rows, padded_dim(dim), ranks}.total());
}

// On two H200s (docs/notes/exchange.md) the bytes and merges that the second trip saves pay for it
// from 750 KB of states on; on four between 266 and 532 KB, by the slopes from 325 KB. For other
// numbers of ranks this is derived from four ranks and from the bytes, and still to be measured:
// one trip sends (P - 1) s bytes from each rank, two send (P - 1) / P (s + results), results of 16
// bits being s / 2. So what is saved has to be 610 KB: s = 106 KB on 8 ranks. States that attention
// pushes itself use one trip, and at 532 KB on four ranks that is still faster, by 2 us.
Push choose_push(std::int64_t rows, int dim, int ranks, bool pushed) {
  const std::int64_t s = rows * (dim + 2) * 4;
  const std::int64_t saved = s * (ranks - 1) * (2 * ranks - 3) / (2 * ranks);
  const bool pays = ranks == 2 ? s > 750'000 : saved > (pushed ? 1'150'000 : 610'000);
  return pays ? Push::two_trips : Push::one_trip;
}

}  // namespace longspan::kernels::cuda

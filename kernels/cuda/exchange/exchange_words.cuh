// Sends states and results in words that are their own flags, without a fence, a flag after the
// data or a second read. The only assumption on memory is that four aligned bytes move as a unit.
#pragma once

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/combine/fold_tree.cuh"
#include "kernels/cuda/combine/row_epilogue.cuh"
#include "kernels/cuda/exchange/exchange_turn.cuh"

namespace longspan::kernels::cuda {

// A word travels inverted, and its destination was 0. The one word that would be 0 is a NaN with
// all bits set, which no arithmetic makes; it is sent as another NaN, in fp32 and in the narrower
// types that may share the word. The thread that has read a word resets it to 0, which is its state
// at rest.

__device__ inline std::uint32_t sent(std::uint32_t word) {
  return word == ~0u ? 0x80000000u : ~word;
}
__device__ inline uint2 sent(uint2 two) { return {sent(two.x), sent(two.y)}; }
__device__ inline uint4 sent(uint4 four) {
  return {sent(four.x), sent(four.y), sent(four.z), sent(four.w)};
}
__device__ inline bool has_arrived(std::uint32_t word) { return word != 0; }
__device__ inline bool has_arrived(uint2 two) { return min(two.x, two.y) != 0; }
__device__ inline bool has_arrived(uint4 four) {
  return min(min(four.x, four.y), min(four.z, four.w)) != 0;
}

// ---- states ------------------------------------------------------------------------------------

/// The offset of four columns of a row in a slot.
__device__ inline std::uint32_t columns_at(const ExchangeRoute& r, std::uint32_t row,
                                           unsigned column) {
  return r.o + row * r.row_bytes + column * 4;
}

/// Waits until attention has written its states. Work before that costs no time: finding this
/// rank's row, and prefetching its memory.
__device__ inline void wait_for_states(const ExchangeRoute& r, std::uint32_t row, unsigned column) {
  arch::prefetch(r.own_state + columns_at(r, min(row, r.rows - 1), column));
  arch::wait_for_kernels_before();
}

/// This rank's rows that a block takes at once, from `first` on. The block's first threads carry
/// the statistics of all of them, so that these are sent together.
struct OwnRows {
  float4 o;
  float2 stats;

  OwnRows() = default;
  /// Past the last row it loads the last one, which `send` leaves out.
  __device__ OwnRows(const ExchangeRoute& r, std::uint32_t first, unsigned column) {
    const std::uint32_t row = min(first + threadIdx.y, r.rows - 1);
    const std::uint32_t stats_row = min(first + min(thread(), blockDim.y - 1), r.rows - 1);
    o = __ldcg(reinterpret_cast<const float4*>(r.own_state + columns_at(r, row, column)));
    stats = __ldcg(reinterpret_cast<const float2*>(r.own_state) + stats_row);
  }
  /// Stores the rows to a slot; rows from `end` on are left out.
  __device__ void send(const ExchangeRoute& r, std::byte* slot, std::uint32_t first,
                       std::uint32_t end, unsigned column) const {
    const std::uint32_t row = first + threadIdx.y, stats_row = first + thread();
    const uint4 four = {__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z),
                        __float_as_uint(o.w)};
    const uint2 two = {__float_as_uint(stats.x), __float_as_uint(stats.y)};
    if (row < end) arch::store_volatile(slot + columns_at(r, row, column), sent(four));
    if (thread() < blockDim.y && stats_row < end)
      arch::store_volatile(slot + stats_row * 8, sent(two));
  }
};

/// Returns the merged state of a row whose words have arrived, or are in flight; false if the wait
/// has to end. It requests the words of all ranks at once, then those that were missing.
template <int kLevels>
__device__ bool collect(const ExchangeRoute& r, const Turn& turn, std::uint32_t row,
                        unsigned column, BoundedWait& wait, StateColumns<4>& state) {
  constexpr int kPlaces = 1 << kLevels;
  uint2 stats[kPlaces] = {};
  uint4 o[kPlaces] = {};
  const std::uint32_t o_at = columns_at(r, row, column);
  for (std::uint32_t missing = (1u << kPlaces) - 1;;) {
#pragma unroll
    for (int place = 0; place < kPlaces; ++place) {
      const std::byte* slot = r.place[place] + std::uint64_t{turn.index} * r.place_stride[place];
      arch::load_volatile_if(missing >> place & 1, slot + row * 8, stats[place]);
      arch::load_volatile_if(missing >> place & 1, slot + o_at, o[place]);
    }
    missing = 0;
#pragma unroll
    for (int place = 0; place < kPlaces; ++place)
      if (!has_arrived(stats[place]) || !has_arrived(o[place])) missing |= 1u << place;
    missing &= r.peer_places;
    if (missing == 0) break;
    if (!wait.go_on(r.place_rank[__ffs(missing) - 1])) return false;
  }
  state = fold_subtree<kLevels>(
      [&](int place) {
        const std::uint32_t inverted = r.peer_places >> place & 1 ? ~0u : 0;
        const auto value = [&](std::uint32_t word) { return __uint_as_float(word ^ inverted); };
        StateColumns<4> piece = {
            {value(stats[place].x), value(stats[place].y)},
            {value(o[place].x), value(o[place].y), value(o[place].z), value(o[place].w)}};
        if (r.empty_places >> place & 1) piece.stats = empty_stats();
        return piece;
      },
      0);
  return true;
}

/// Resets rows of the peers' slots to 0: those that this plane takes at `first`, and `step` further
/// on, up to `end`. All threads call it after a barrier, when the threads of a row have all read
/// its statistics.
template <int kLevels>
__device__ void clear_slots(const ExchangeRoute& r, const Turn& turn, std::uint32_t first,
                            std::uint32_t end, std::uint32_t step, unsigned column) {
  for (; first < end; first += step) {
    const std::uint32_t row = first + threadIdx.y, stats_row = first + plane_thread();
#pragma unroll
    for (int place = 0; place < 1 << kLevels; ++place) {
      if ((r.peer_places >> place & 1) == 0) continue;
      std::byte* slot = const_cast<std::byte*>(r.place[place]) +
                        std::uint64_t{turn.index} * r.place_stride[place];
      if (row < end) *reinterpret_cast<uint4*>(slot + columns_at(r, row, column)) = uint4{};
      if (plane_thread() < blockDim.y && stats_row < end)
        reinterpret_cast<uint2*>(slot)[stats_row] = uint2{};
    }
  }
}

// ---- results -----------------------------------------------------------------------------------

/// A row of the result, looked up on construction, while states are in flight. Rows that are not in
/// the batch are left alone.
struct ResultRow {
  std::uint32_t token;
  int column;
  RowEpilogue end;
  ResultPlace place;
  bool is_wanted;

  __device__ ResultRow(const MergeParams& m, const ExchangeRoute& r, std::uint32_t row,
                       unsigned of_column)
      : token(r.heads(row)),
        column(static_cast<int>(of_column)),
        end(m, static_cast<int>(row - token * m.heads)),
        place(m, token, static_cast<int>(row - token * m.heads), column),
        is_wanted(in_batch(m.batch, token)) {}

  template <int kColumns>
  __device__ void store(const MergeParams& m, const StateColumns<kColumns>& row, bool wide) const {
    if (is_wanted) store_result(m, place, row, m.states.dim - column, wide);
  }
};

/// Requests four elements of a dense `out` in a peer buffer.
__device__ inline void request_elements(bool wanted, const std::byte* from, int size,
                                        std::uint32_t at, uint4& words) {
  if (size == 4) return arch::load_volatile_if(wanted, from + at * 4, words);
  uint2 two = {words.x, words.y};
  if (size == 2)
    arch::load_volatile_if(wanted, from + at * 2, two);
  else
    arch::load_volatile_if(wanted, from + at, two.x);
  words.x = two.x, words.y = two.y;
}
__device__ inline bool elements_have_arrived(uint4 words, int size) {
  return size == 4   ? has_arrived(words)
         : size == 2 ? has_arrived(uint2{words.x, words.y})
                     : has_arrived(words.x);
}
__device__ inline void send_elements(std::byte* to, int size, std::uint32_t at, uint4 words) {
  if (size == 4)
    arch::store_volatile(to + at * 4, sent(words));
  else if (size == 2)
    arch::store_volatile(to + at * 2, sent(uint2{words.x, words.y}));
  else
    arch::store_volatile(to + at, sent(words.x));
}
__device__ inline void clear_elements(std::byte* at, int size) {
  if (size == 4)
    *reinterpret_cast<uint4*>(at) = uint4{};
  else if (size == 2)
    *reinterpret_cast<uint2*>(at) = uint2{};
  else
    *reinterpret_cast<std::uint32_t*>(at) = 0;
}

}  // namespace longspan::kernels::cuda

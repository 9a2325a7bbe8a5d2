// Attention forward on Hopper: what it takes and what it gives. See attend_sm90.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/merge_params.hpp"
#include "kernels/params.hpp"

struct CUstream_st;

namespace longspan::kernels::sm90 {

/// Where the finished result goes when no state has to travel: the sink is folded in and the one
/// rounding, to the dtype of q, is done here. Rows of `out` start at multiples of 16 bytes.
struct Finished {
  TokenRows out;       // [tokens, heads, dim]; data null: the state is written instead
  TokenLse lse;        // [tokens, heads], natural log; with data null where it is not wanted
  Floats sinks;        // [heads], natural units; or null
  RunHeaders headers;  // of what was gathered; where they differ, nothing is attended or written
  RowPlaces places;    // or none: all rows end in `out` and `lse`
};

/// Whether this build and the current GPU have the kernel.
bool runs_here();

// ---- what the kernels take, where they run (rules.cpp) ------------------------------------------

/// The least head_dim.
inline constexpr int kLeastDim = 48;

/// Whether the call is for products of 16 bits: queries that are one sequence behind the other or
/// dense [batch, heads, tokens, dim], layouts whose positions ascend, a positive scale, ALiBi where
/// a rank's query rows follow on each other, no qq_bias, no segments handed out, fewer than 2^30
/// rows and keys; pages for dims from 81 to 192, where the elements of a row lie together.
bool takes_16_bits(const AttendParams& params);

/// Whether it is for products of e4m3 (fp8_products): the same with rows at multiples of 16 bytes,
/// dims a multiple of 16, no softcap, no ALiBi and no pages.
bool takes_e4m3(const AttendParams& params);

/// Whether it is for the fixed order (invariant): 16-bit elements of one type, dims up to 128,
/// layouts whose positions ascend, a positive scale, no softcap, no biases, no scales of stored
/// elements, no segments handed out. Where rows lie, in pages or at any strides, does not count.
bool takes_in_order(const AttendParams& params);

/// Whether `attend` may be queued for one sequence while keys, or queries, of other ranks still
/// come (AttendParams::arrivals), and its rows may end in several ranks' memory
/// (Finished::places), of a call that one of the first two `takes`. Pages have a producer that does
/// not wait. So does the fixed order, and an epilogue of its own.
bool takes_arrivals(const AttendParams& params, bool (*takes)(const AttendParams&));

/// Whether the queries' sequences follow each other, or lie as a dense [batch, heads, tokens, dim].
inline bool fits_query_map(const AttendParams& params) {
  const TokenRows& q = params.q;
  return q.gap.rows == 0 ||
         q.gap.elements + q.gap.rows * q.row_stride == params.heads * q.head_stride;
}

/// Bytes of AttendParams::scratch that attend needs, but for the fixed order; and for any call that
/// the kernels take.
inline constexpr std::size_t kScratchBytes = 16;
std::size_t scratch_bytes(const AttendParams& params, int multiprocessors);

/// The fixed order's scratch is a counter and a stack of states for each block. The rest of the
/// counter's bytes keeps the stack aligned.
inline constexpr std::size_t kCounterBytes = 256;
int depth_in_order(const AttendParams& params);
/// Of a block's rows: each of two threads a row has elements of O by fours, and statistics.
constexpr std::size_t state_bytes_in_order(int dim, int rows) {
  return std::size_t{16} * (dim / 8 + 1) * 2 * rows;
}

// ---- the kernels
// ---------------------------------------------------------------------------------

/// Queues the kernel for the sequences of at least `least_rows` query rows; rows of the others are
/// not touched. Writes the state, or, with finished.out, the finished result; with params.resume
/// both begin from the states in params.slot.
void attend(const AttendParams& params, const Finished& finished, int least_rows,
            CUstream_st* stream);
/// The same in the fixed order, which `attend` calls.
void attend_in_order(const AttendParams& params, const Finished& finished, int least_rows,
                     CUstream_st* stream);

}  // namespace longspan::kernels::sm90

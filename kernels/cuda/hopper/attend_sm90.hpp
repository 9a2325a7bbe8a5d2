// Attention forward on Hopper: inputs and outputs. See attend_sm90.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/merge_params.hpp"
#include "kernels/params.hpp"

struct CUstream_st;

namespace longspan::kernels::sm90 {

/// The destination of the finished result if no state has to travel: the sink is folded in and the
/// one rounding, to the dtype of q, is done here. Rows of `out` start at multiples of 16 bytes.
struct Finished {
  TokenRows out;       // [tokens, heads, value_dim]; data null: the state is written instead
  TokenLse lse;        // [tokens, heads], natural log; data is null if it is not wanted
  Floats sinks;        // [heads], natural units; or null
  RunHeaders headers;  // of the gathered data; if they differ, nothing is attended or written
  RowPlaces places;    // or none: all rows end in `out` and `lse`
};

/// Whether this build and the current GPU have the kernel.
bool runs_here();

// ---- the calls that the kernels accept, where they run (rules.cpp) ------------------------------

/// The least head_dim.
inline constexpr int kLeastDim = 48;

/// Whether products of 16 bits can serve the call. They support queries with one sequence after
/// another or dense [batch, heads, tokens, dim], layouts whose positions ascend, a positive scale,
/// and ALiBi if a rank's query rows are consecutive. There must be no qq_bias, no segments handed
/// out, and fewer than 2^30 rows and keys. Values may be narrower or wider than keys: both dims are
/// multiples of 8, up to 256. They support pages if the wider dim is from 81 to 192 and the
/// elements of a row are adjacent.
bool takes_16_bits(const AttendParams& params);

/// Whether products of e4m3 can (fp8_products): the same with rows at multiples of 16 bytes, one
/// dim, a multiple of 16, no softcap, no ALiBi and no pages.
bool takes_e4m3(const AttendParams& params);

/// Whether the fixed order can (invariant): 16-bit elements of one type, one dim up to 128, layouts
/// whose positions ascend, a positive scale, no softcap, no biases, no scales of stored elements,
/// no segments handed out. Pages and strides do not matter.
bool takes_in_order(const AttendParams& params);

/// Whether `attend` may be queued for one sequence before all keys, or queries, of other ranks have
/// arrived (AttendParams::arrivals). Its rows may then end in several ranks' memory
/// (Finished::places). The call must be one that one of the first two `takes`. Pages have a
/// producer that does not wait. So does the fixed order, which also has its own epilogue.
bool takes_arrivals(const AttendParams& params, bool (*takes)(const AttendParams&));

/// Whether the queries' sequences follow each other, or are a dense [batch, heads, tokens, dim].
inline bool fits_query_map(const AttendParams& params) {
  const TokenRows& q = params.q;
  return q.gap.rows == 0 ||
         q.gap.elements + q.gap.rows * q.row_stride == params.heads * q.head_stride;
}

/// Bytes of AttendParams::scratch that attend needs, without the fixed order; and for any call that
/// the kernels accept.
inline constexpr std::size_t kScratchBytes = 16;
std::size_t scratch_bytes(const AttendParams& params, int multiprocessors);

/// The fixed order's scratch is a counter and a stack of states for each block. The padding of the
/// counter keeps the stack aligned.
inline constexpr std::size_t kCounterBytes = 256;
int depth_in_order(const AttendParams& params);
/// Of a block's rows: each of two threads per row has elements of O in fours, and statistics.
constexpr std::size_t state_bytes_in_order(int dim, int rows) {
  return std::size_t{16} * (dim / 8 + 1) * 2 * rows;
}

// ---- the kernels
// ---------------------------------------------------------------------------------

/// Queues the kernel for the sequences of at least `least_rows` query rows; rows of the others are
/// not touched. Writes the state, or, with finished.out, the finished result; with params.resume
/// both start from the states in params.slot.
void attend(const AttendParams& params, const Finished& finished, int least_rows,
            CUstream_st* stream);
/// The same in the fixed order, which `attend` calls.
void attend_in_order(const AttendParams& params, const Finished& finished, int least_rows,
                     CUstream_st* stream);

}  // namespace longspan::kernels::sm90

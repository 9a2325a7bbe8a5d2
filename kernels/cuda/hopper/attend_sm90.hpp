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

/// Whether this kernel takes the call on the current GPU: Hopper, 16-bit elements, dims from 48,
/// queries that are one sequence behind the other or dense [batch, heads, tokens, dim], layouts
/// whose positions ascend, a positive scale, ALiBi where a rank's query rows follow on each other,
/// no qq_bias, no segments handed out, fewer than 2^30 rows and keys; pages for dims from 81 to
/// 192, where the elements of a row lie together. With fp8_products: e4m3 in rows at multiples of
/// 16 bytes, dims a multiple of 16, no softcap and no ALiBi. In the fixed order: as
/// accepts_in_order says. Everything else is the portable kernel's.
bool accepts(const AttendParams& params);

/// Whether attend may be queued for one sequence while keys, or queries, of other ranks still come
/// (AttendParams::arrivals), and its rows may end in several ranks' memory (Finished::places). The
/// fixed order and pages have producers that do not wait, and the fixed order an epilogue of its
/// own.
bool takes_arrivals(const AttendParams& params);

/// Bytes of AttendParams::scratch that attend needs, but for the fixed order.
inline constexpr std::size_t kScratchBytes = 16;

/// Bytes of AttendParams::scratch that attend needs for these params.
std::size_t scratch_bytes(const AttendParams& params);

/// Queues the kernel for the sequences of at least `least_rows` query rows; rows of the others are
/// not touched. Writes the state, or, with finished.out, the finished result; with params.resume
/// both begin from the states in params.slot.
void attend(const AttendParams& params, const Finished& finished, int least_rows,
            CUstream_st* stream);

// ---- the fixed order (params.invariant); accepts, scratch_bytes and attend call these -----------

/// Whether it is this kernel's: 16-bit elements of one type, dims from 48 to 128, layouts whose
/// positions ascend, a positive scale, no softcap, no biases, no scales of stored elements, no
/// segments handed out. Where rows lie, in pages or at any strides, does not count.
bool accepts_in_order(const AttendParams& params);
std::size_t scratch_bytes_in_order(const AttendParams& params);
void attend_in_order(const AttendParams& params, const Finished& finished, int least_rows,
                     CUstream_st* stream);

}  // namespace longspan::kernels::sm90

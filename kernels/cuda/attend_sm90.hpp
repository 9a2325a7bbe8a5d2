// Attention forward on Hopper: what it takes and what it gives. See attend_sm90.cuh.
#pragma once

#include "kernels/params.hpp"

struct CUstream_st;

namespace longspan::kernels::sm90 {

/// Where the finished result goes when no state has to travel: the sink is folded in and the one
/// rounding to the output dtype (that of q) is done here.
struct Finished {
  Rows out;                      // [tokens, heads, dim]; data null: the state is written instead
  float* lse = nullptr;          // [tokens, heads], natural log; or null
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
  const float* sinks = nullptr;  // [heads], natural units; or null
};

/// Whether this kernel takes the call: 16-bit elements, dims of its tiles, shards whose positions
/// ascend, 16-byte strides, no softcap, no fixed order. Everything else is the portable kernel's.
bool accepts(const AttendParams& params);

/// Bytes of AttendParams::scratch that attend needs.
inline constexpr std::size_t kScratchBytes = 256;

/// Queues the kernel. Writes the state, or, with finished.out, the finished result.
void attend(const AttendParams& params, const Finished& finished, CUstream_st* stream);

}  // namespace longspan::kernels::sm90

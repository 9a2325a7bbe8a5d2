// The number of splits of the keys of each row tile.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// The most keys of a sequence of unknown length.
inline constexpr std::int64_t kMostKeys = std::int64_t{1} << 31;

/// The most work tiles per resident block on the GPU; and the most if lengths may differ.
inline constexpr int kPieces = 4, kSharedPieces = 8;

/// The most keys, on all ranks, of a sequence of the call.
std::int64_t most_keys(const AttendParams& p);

/// Chooses WorkPlan::splits and their numbers. `works` = tiles x kv heads; `places` is the number
/// of pieces that run at a time; `decodes`: a kernel for short queries runs them; `one_pass`: it is
/// bound by products, and its states are large. Returns true if
/// the kernel chooses among the splits by the lengths, and needs SplitNumbers::taken.
bool plan_splits(const AttendParams& p, std::int64_t works, int places, bool decodes, bool one_pass,
                 WorkPlan& plan);

}  // namespace longspan::kernels::cuda

// Into how many splits the keys of each row tile are cut.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// Keys of a sequence whose length is unknown.
inline constexpr std::int64_t kMostKeys = std::int64_t{1} << 31;

/// Work tiles for each place on the GPU, at most; and where lengths may differ.
inline constexpr int kPieces = 4, kSharedPieces = 8;

/// Keys of the longest sequence that a call may have, on all ranks.
std::int64_t most_keys(const AttendParams& p);

/// Plan::splits and their numbers. `works`: tiles x kv heads; `places`: of pieces at work at a
/// time; `decodes`: by the kernel for short queries. True: the kernel chooses among them by the
/// lengths, and wants SplitNumbers::taken.
bool plan_splits(const AttendParams& p, std::int64_t works, int places, bool decodes, Plan& plan);

}  // namespace longspan::kernels::cuda

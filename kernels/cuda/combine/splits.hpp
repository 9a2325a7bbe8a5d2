// Tells into how many splits the keys of each row tile are cut.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// The keys that a sequence of unknown length may have.
inline constexpr std::int64_t kMostKeys = std::int64_t{1} << 31;

/// The most work tiles for each place on the GPU; and the most where lengths may differ.
inline constexpr int kPieces = 4, kSharedPieces = 8;

/// The most keys, on all ranks, that a sequence of the call may have.
std::int64_t most_keys(const AttendParams& p);

/// Chooses Plan::splits and their numbers. `works` = tiles x kv heads; `places` are the pieces at
/// work at a time; `decodes` says that the kernel for short queries takes them. Returns true where
/// the kernel chooses among the splits by the lengths, and needs SplitNumbers::taken.
bool plan_splits(const AttendParams& p, std::int64_t works, int places, bool decodes, Plan& plan);

}  // namespace longspan::kernels::cuda

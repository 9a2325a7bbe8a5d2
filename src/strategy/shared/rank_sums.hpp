// Sums over all ranks: each rank folds an equal share of every rank's part, and the shares go to
// all ranks, which so have the same bits.
//
//     share r of every part  ->  rank r folds them  ->  every rank
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/types.hpp"
#include "src/strategy/shared/rank_fold.hpp"

namespace longspan {

/// The names of the two exchanges in errors.
struct SumSteps {
  const char* exchange;
  const char* gather;
};

/// The memory for a part of `bytes` bytes, and once more for the parts that arrive.
std::int64_t rank_sum_room(std::int64_t bytes, int ranks);

/// Replaces this rank's part, fp32, by the sum of all ranks' parts. `part` and `arriving` have
/// rank_sum_room(bytes). `digests` is as in Transport::all_to_all.
void add_up_ranks(std::byte* part, std::byte* arriving, std::int64_t bytes, const RankFold& fold,
                  const kernels::GradientKernels& kernels, comm::Transport& comm, Stream stream,
                  const SumSteps& steps, std::uint64_t* digests = nullptr);

}  // namespace longspan

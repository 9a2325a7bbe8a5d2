// The rows, or keys, that ranks send while the receivers already attend with others: the number of
// pieces, and the arguments of a kernel that waits for them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/key_arrivals.hpp"
#include "src/strategy/shared/stretches.hpp"

namespace longspan {

/// The number of pieces for `bytes` that a rank puts while others attend: the first must arrive
/// early, and after each piece all warps that put synchronise.
int pieces_of_bytes(double bytes);

/// The first and the last `most` rows of each stretch; shorter ones whole.
std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most);

/// Lists the stretches of all ranks in `table`, for a kernel of the rank `own`. Returns the number
/// of portions.
int list_portions(const StretchesOfRanks& ranks, int own, kernels::KeyArrivals::Portion* table);

}  // namespace longspan

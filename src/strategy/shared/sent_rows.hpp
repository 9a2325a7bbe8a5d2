// The rows, or keys, that ranks send while those who receive them already attend with others: in
// how many pieces they go, and what a kernel that waits for them is told.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/key_arrivals.hpp"
#include "src/strategy/shared/stretches.hpp"

namespace longspan {

/// In how many pieces the `bytes` travel that a rank puts while others attend: the first must come
/// early, and behind each all warps that put meet.
int pieces_of_bytes(double bytes);

/// The first and the last `most` rows of each stretch, of shorter ones all.
std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most);

/// Lists what all ranks have in `table`, for a kernel of the rank `own`. Returns the number of
/// portions.
int list_portions(const StretchesOfRanks& ranks, int own, kernels::KeyArrivals::Portion* table);

}  // namespace longspan

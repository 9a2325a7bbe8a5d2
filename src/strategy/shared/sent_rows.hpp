// The rows, or keys, that ranks send while those who receive them already attend with others: in
// how many pieces they go, and what a kernel that waits for them is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/key_arrivals.hpp"
#include "src/strategy/shared/stretches.hpp"

namespace longspan {

/// In how many pieces the `bytes` travel that a rank sends to one that attends meanwhile: the first
/// must come early, and each costs the host and a copy engine two microseconds a copy.
int pieces_of_bytes(double bytes);

/// The first and the last `most` rows of each stretch, of shorter ones all.
std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most);

/// The put of what this rank says of a run, a word of its receive memory, to the rank `to`.
comm::Put put_of_word(std::uint64_t* word, int to);

/// Lists what all ranks have in `table`, for a kernel of the rank `own`. Returns the number of
/// portions.
int list_portions(const StretchesOfRanks& ranks, int own, kernels::KeyArrivals::Portion* table);

}  // namespace longspan

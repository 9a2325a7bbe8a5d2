// The most rows, or keys, of a rank under a rule. Memory is allocated by these bounds, and ranks
// send by them if only the device knows lengths. A table (ranges, listed positions) may give all of
// them to one rank.
#pragma once

#include <cstdint>

#include "longspan/options.hpp"
#include "longspan/shard.hpp"

namespace longspan {

/// Bounds a rank's share of `rows` rows in `sequences` sequences.
std::int64_t most_rows_of_a_rank(const Sharding& rule, std::int64_t rows, std::int64_t sequences,
                                 int ranks);

/// The most keys of a run of `batch` sequences, on all ranks together, within the limits of a
/// layer.
std::int64_t most_keys(const Limits& limits, std::int64_t batch);

/// Bounds a rank's keys of a sequence of up to `keys` keys.
std::int64_t most_keys_of_a_rank(const Sharding& rule, std::int64_t keys, int ranks);
/// The same in doubles, for RunCost, over all sequences.
double most_keys_of_a_rank(const Sharding& rule, double keys, int ranks);
/// Bounds a rank's keys in a run of `batch` sequences, within the limits of a layer.
std::int64_t most_keys_of_a_rank(const Sharding& rule, const Limits& limits, std::int64_t batch,
                                 int ranks);

}  // namespace longspan

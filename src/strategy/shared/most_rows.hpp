// How many rows, or keys, a rank can have of what is dealt out by a rule: the bounds by which
// memory is taken, and by which ranks send where only the device knows lengths. A table (ranges,
// listed positions) may give all of them to one rank.
#pragma once

#include <cstdint>

#include "longspan/options.hpp"
#include "longspan/shard.hpp"

namespace longspan {

/// Bounds the rows that a rank has of so many rows of so many sequences.
std::int64_t most_rows_of_a_rank(const Sharding& rule, std::int64_t rows, std::int64_t sequences,
                                 int ranks);

/// The most keys of a run of `batch` sequences, on all ranks together, within the limits of a
/// layer.
std::int64_t most_keys(const Limits& limits, std::int64_t batch);

/// Bounds the keys that a rank has of a sequence of up to `keys` keys.
std::int64_t most_keys_of_a_rank(const Sharding& rule, std::int64_t keys, int ranks);
/// The same in doubles, for RunCost, of all sequences together.
double most_keys_of_a_rank(const Sharding& rule, double keys, int ranks);
/// Bounds the keys that a rank has in a run of `batch` sequences, within the limits of a layer.
std::int64_t most_keys_of_a_rank(const Sharding& rule, const Limits& limits, std::int64_t batch,
                                 int ranks);

}  // namespace longspan

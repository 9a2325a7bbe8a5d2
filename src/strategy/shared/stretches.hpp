// Rows, or keys, of a rank that are neighbours in their sequence, and so travel together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "longspan/shard.hpp"
#include "src/arguments/run_arrays.hpp"

namespace longspan {

struct Stretch {
  std::int64_t first;  // among those of the rank
  std::int64_t count;
  std::int64_t position;  // in the sequence
};

/// A rank with more of them uses another exchange.
inline constexpr std::size_t kMostStretches = 4;

/// The stretches of `shard` in a sequence of `length`; nothing if they are too many.
std::optional<std::vector<Stretch>> stretches_of(const Shard& shard, std::int64_t length);

/// What each rank has of a sequence.
using StretchesOfRanks = std::vector<std::vector<Stretch>>;

/// The stretches of each of `ranks` by the rule of `shard`; nothing if one has too many.
std::optional<StretchesOfRanks> stretches_of_ranks(const Shard& shard, int ranks,
                                                   std::int64_t length);

/// Whether a run is of one sequence whose length the host knows, with rows and keys distributed by
/// a rule. All ranks then know what each of them has.
bool is_one_known_sequence(const RunArrays& arrays);

inline std::int64_t count_rows(const std::vector<Stretch>& stretches) {
  std::int64_t all = 0;
  for (const Stretch& one : stretches) all += one.count;
  return all;
}

/// The number of rows of the rank with the most.
inline std::int64_t most_rows(const StretchesOfRanks& ranks) {
  std::int64_t most = 0;
  for (const std::vector<Stretch>& one : ranks) most = std::max(most, count_rows(one));
  return most;
}

}  // namespace longspan

// Finds which of a rank's keys are consecutive in their sequence, and so can be moved, or read,
// together.
#pragma once

#include <cstdint>

#include "longspan/shard.hpp"

namespace longspan::kernels {

/// The number of keys, starting at local key `first` of the rank's `own` keys of a sequence of
/// `length`, that have consecutive positions: 1 or more.
std::int64_t consecutive_keys(const Shard& shard, std::int64_t first, std::int64_t own,
                              std::int64_t length);

}  // namespace longspan::kernels

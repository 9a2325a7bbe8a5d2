// Finds which of a rank's keys stand side by side in their sequence, and so move, or are read,
// together.
#pragma once

#include <cstdint>

#include "longspan/shard.hpp"

namespace longspan::kernels {

/// The number of keys from local key `first` on, of the `own` that the rank has of a sequence of
/// `length`, which stand at consecutive positions: 1 or more.
std::int64_t consecutive_keys(const Shard& shard, std::int64_t first, std::int64_t own,
                              std::int64_t length);

}  // namespace longspan::kernels

// Counts and indices are signed here; containers and memory take unsigned ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longspan {

/// A count or an index, which is not negative, for a container or for Parts.
constexpr std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace longspan

/// \file
/// A search over ascending starts: of documents in a sequence, sequences in a batch, tiles.
#pragma once

#include <cstdint>

#include "longspan/types.hpp"

namespace longspan {

/// The last i in [0, count) with starts(i) <= x, or 0 if there is none; `starts` ascends.
template <class Index, class Starts>
LONGSPAN_HD inline Index last_start(Index count, std::int64_t x, const Starts& starts) {
  Index low = 0, high = count;
  while (high - low > 1) {
    const Index middle = (low + high) / 2;
    (starts(middle) <= x ? low : high) = middle;
  }
  return low;
}

}  // namespace longspan

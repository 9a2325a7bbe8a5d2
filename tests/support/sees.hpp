// The definition of a mask, key by key.
#pragma once

#include <cstdint>

#include "longspan/mask.hpp"

namespace longspan::tests {

/// Whether the query at position i of a sequence of kv_len keys sees key j.
inline bool sees(const Mask& m, std::int64_t i, std::int64_t j, std::int64_t kv_len) {
  return 0 <= j && j < kv_len && (!m.causal || j <= i) && (m.window == 0 || i - j < m.window) &&
         (m.causal || m.right < 0 || j - i <= m.right);
}

}  // namespace longspan::tests

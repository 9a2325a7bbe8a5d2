// Cuts one allocation into parts.
#pragma once

#include <cstddef>

namespace longspan {

/// Hands out parts of the memory at `base`, each aligned to 256 bytes. With a null base it only
/// counts.
struct Parts {
  std::byte* base = nullptr;
  std::size_t bytes = 0;

  std::byte* take(std::size_t size) {
    std::byte* part = base ? base + bytes : nullptr;
    bytes += (size + 255) / 256 * 256;
    return part;
  }
  template <class T>
  T* take_array(std::size_t count) {
    return reinterpret_cast<T*>(take(count * sizeof(T)));
  }
};

}  // namespace longspan

// Copies of rows between two places with different pitches. Copy engines take one as it is (a 2D
// copy in CUDA), and a kernel takes many at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/types.hpp"

namespace longspan {

struct StridedCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t from_pitch = 0;  // bytes from one row to the next
  std::int64_t to_pitch = 0;
  std::int64_t width = 0;  // bytes of a row
  std::int64_t rows = 0;

  LONGSPAN_HD std::int64_t bytes() const { return rows * width; }
};

/// The widest word, up to 16 bytes, that divides all rows and their start addresses.
LONGSPAN_HD inline int word_of(const StridedCopy& c) {
  const std::uintptr_t all =
      reinterpret_cast<std::uintptr_t>(c.from) | reinterpret_cast<std::uintptr_t>(c.to) |
      static_cast<std::uintptr_t>(c.from_pitch) | static_cast<std::uintptr_t>(c.to_pitch) |
      static_cast<std::uintptr_t>(c.width);
  for (int word = 16; word > 1; word /= 2)
    if (all % static_cast<std::uintptr_t>(word) == 0) return word;
  return 1;
}

}  // namespace longspan

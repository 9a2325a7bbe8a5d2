// Copies of a block of rows by threads, here or to another GPU.
#pragma once

#include <cstdint>

#include "src/base/strided_copy.hpp"

namespace longspan::kernels::cuda {

/// Threads that copy one block: this one's index among them, their number (a power of two), and
/// their part of the rows.
struct CopyingThreads {
  int thread, threads;
  std::int64_t part = 0, parts = 1;
};

inline constexpr int kCopiesAtOnce = 4;  // loads of a thread that are in flight together

/// The threads are rows of as many words as a row of the copy has, or the most.
template <class Word>
__device__ void copy_words(const StridedCopy& c, const CopyingThreads& by) {
  const auto words = c.width / static_cast<std::int64_t>(sizeof(Word));
  int columns = 1;
  while (columns < by.threads && columns < words) columns *= 2;
  const int side_by_side = by.threads / columns;
  const std::int64_t step = by.parts * side_by_side;
  const std::int64_t first = by.part * side_by_side + by.thread / columns;
  for (std::int64_t column = by.thread % columns; column < words; column += columns) {
    const auto from = [&](std::int64_t row) {
      return reinterpret_cast<const Word*>(c.from + row * c.from_pitch) + column;
    };
    const auto to = [&](std::int64_t row) {
      return reinterpret_cast<Word*>(c.to + row * c.to_pitch) + column;
    };
    std::int64_t row = first;
    for (; row + (kCopiesAtOnce - 1) * step < c.rows; row += kCopiesAtOnce * step) {
      Word held[kCopiesAtOnce];
#pragma unroll
      for (int i = 0; i < kCopiesAtOnce; ++i) held[i] = *from(row + i * step);
#pragma unroll
      for (int i = 0; i < kCopiesAtOnce; ++i) *to(row + i * step) = held[i];
    }
    for (; row < c.rows; row += step) *to(row) = *from(row);
  }
}

/// The same in the widest words that the block allows.
__device__ inline void copy_block(const StridedCopy& c, const CopyingThreads& by) {
  switch (word_of(c)) {
    case 16:
      return copy_words<uint4>(c, by);
    case 8:
      return copy_words<uint2>(c, by);
    case 4:
      return copy_words<std::uint32_t>(c, by);
    case 2:
      return copy_words<std::uint16_t>(c, by);
    default:
      return copy_words<std::uint8_t>(c, by);
  }
}

}  // namespace longspan::kernels::cuda

// Copies many blocks of rows at once, to other GPUs of the node too: where nothing else computes,
// it is faster than the copy engines, which take one block after the other and microseconds for
// each.
#include <algorithm>

#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kAtOnce = 4;                        // loads of a thread that are under way together
constexpr std::size_t kMostCopies = 64;           // of a launch: what its parameters hold
constexpr std::int64_t kBlockBytes = 64 << 10;    // that a block copies, at least
constexpr std::int64_t kMostBlocksOfACopy = 128;  // it copies more where there are as many

struct Copies {
  StridedCopy copies[kMostCopies];
};

/// The block's threads are rows of as many words as a row of the copy has, or the most.
template <class Word>
__device__ void copy_rows_of(const StridedCopy& c) {
  const auto words = c.width / static_cast<std::int64_t>(sizeof(Word));
  int columns = 1;
  while (columns < kThreads && columns < words) columns *= 2;
  const int side_by_side = kThreads / columns, thread = static_cast<int>(threadIdx.x);
  const std::int64_t step = std::int64_t{gridDim.x} * side_by_side;
  const std::int64_t first = std::int64_t{blockIdx.x} * side_by_side + thread / columns;
  for (std::int64_t column = thread % columns; column < words; column += columns) {
    const auto from = [&](std::int64_t row) {
      return reinterpret_cast<const Word*>(c.from + row * c.from_pitch) + column;
    };
    const auto to = [&](std::int64_t row) {
      return reinterpret_cast<Word*>(c.to + row * c.to_pitch) + column;
    };
    std::int64_t row = first;
    for (; row + (kAtOnce - 1) * step < c.rows; row += kAtOnce * step) {
      Word held[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) held[i] = *from(row + i * step);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) *to(row + i * step) = held[i];
    }
    for (; row < c.rows; row += step) *to(row) = *from(row);
  }
}

/// blockIdx.y is a copy, which the blocks of blockIdx.x share.
__global__ __launch_bounds__(kThreads) void copy_rows_kernel(const __grid_constant__ Copies p) {
  const StridedCopy& c = p.copies[blockIdx.y];
  switch (word_of(c)) {
    case 16:
      return copy_rows_of<uint4>(c);
    case 8:
      return copy_rows_of<uint2>(c);
    case 4:
      return copy_rows_of<std::uint32_t>(c);
    case 2:
      return copy_rows_of<std::uint16_t>(c);
    default:
      return copy_rows_of<std::uint8_t>(c);
  }
}

}  // namespace

void copy_rows(std::span<const StridedCopy> copies, cudaStream_t stream) {
  while (!copies.empty()) {
    Copies some{};
    const std::size_t count = std::min(copies.size(), kMostCopies);
    std::int64_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      some.copies[i] = copies[i];
      most = std::max(most, copies[i].bytes());
    }
    const std::int64_t blocks = std::clamp<std::int64_t>(most / kBlockBytes, 1, kMostBlocksOfACopy);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
    if (most > 0) launch_kernel(copy_rows_kernel, {grid, kThreads, stream}, some);
    copies = copies.subspan(count);
  }
}

}  // namespace longspan::kernels::cuda

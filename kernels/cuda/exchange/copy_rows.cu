// Copies many blocks of rows at once, also to other GPUs of the node. If nothing else computes, it
// is faster than the copy engines, which copy one block after another and take microseconds for
// each.
#include <algorithm>

#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/exchange/copy_words.cuh"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr std::size_t kMostCopies = 64;           // of a launch: as many as its parameters hold
constexpr std::int64_t kBlockBytes = 64 << 10;    // that a block copies, at least
constexpr std::int64_t kMostBlocksOfACopy = 128;  // if there are as many, a block copies more

struct Copies {
  StridedCopy copies[kMostCopies];
};

/// blockIdx.y is a copy, which the blocks of blockIdx.x share.
__global__ __launch_bounds__(kThreads) void copy_rows_kernel(const __grid_constant__ Copies p) {
  copy_block(p.copies[blockIdx.y],
             {static_cast<int>(threadIdx.x), kThreads, blockIdx.x, gridDim.x});
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

// Grows lengths, and fills caches, on the GPU (see growing.hpp).
#include "launcher/problem/growing.hpp"

#include <algorithm>

#include "kernels/cuda/common/launch.hpp"

namespace longspan::launcher::cuda {
namespace {

using kernels::cuda::launch_kernel;

constexpr int kThreads = 128;
constexpr std::int64_t kBlocks = 1 << 16;  // which are many for every GPU

/// Grows the lengths; a thread takes a sequence.
__global__ void grow_kernel(const __grid_constant__ Lengths lengths) {
  const int b = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (b < lengths.batch) lengths.grow(b);
}

/// Fills a cache; a block takes a row of it at a time, and a thread a word of the row.
template <class Word>
__global__ void fill_kernel(const __grid_constant__ Filling f) {
  const std::int64_t words = f.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const Word* const block = reinterpret_cast<const Word*>(f.block);
  Word* const cache = reinterpret_cast<Word*>(f.cache);
  for (std::int64_t slot = blockIdx.x; slot < f.batch * f.capacity; slot += gridDim.x) {
    const std::int64_t to = f.target(slot) * words, from = f.source(slot);
    for (std::int64_t w = threadIdx.x; w < words; w += kThreads)
      cache[to + w] = from < 0 ? static_cast<Word>(~Word{0}) : block[from * words + w];
  }
}

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

void grow(const Lengths& lengths, Stream stream) {
  const auto blocks = static_cast<unsigned>((lengths.batch + kThreads - 1) / kThreads);
  launch_kernel(grow_kernel, {blocks, kThreads, handle(stream)}, lengths);
}

void fill(const Filling& f, Stream stream) {
  const std::int64_t slots = f.batch * f.capacity;
  if (slots == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(slots, kBlocks));
  const bool in_eights = f.row_bytes % 8 == 0;
  launch_kernel(in_eights ? fill_kernel<unsigned long long> : fill_kernel<unsigned char>,
                {blocks, kThreads, handle(stream)}, f);
}

}  // namespace longspan::launcher::cuda

// Makes the lists of a sparse attention (key_indices.hpp): a warp takes a list, 32 indices at a
// time in their order, and each lane writes its entry behind those of the lanes before it.
#include <algorithm>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ __launch_bounds__(kThreads) void compact_keys_kernel(
    const __grid_constant__ CompactParams p) {
  arch::let_next_kernel_start();  // attention, which waits for the lists
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t lists = p.lists(), rows = p.rows() * p.indices.heads;
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (std::int64_t i = first; i < lists; i += std::int64_t{gridDim.x} * kWarps) {
    const CompactList list(p, i);
    int kept = 0;
    for (int j = 0; j < list.count; j += 32) {
      const std::int32_t entry = j + lane < list.count ? list.entry(p, list.from[j + lane]) : -1;
      const unsigned votes = __ballot_sync(~0u, entry >= 0);
      if (entry >= 0) list.to[kept + __popc(votes & ((1u << lane) - 1))] = entry;
      kept += __popc(votes);
    }
    if (lane != 0) continue;
    p.counts[i] = kept;
    p.starts[i] = static_cast<std::int32_t>(i < rows ? i : rows);
    if (i == 0) p.starts[lists] = static_cast<std::int32_t>(rows);
  }
}

}  // namespace

void compact_keys(const CompactParams& p, cudaStream_t stream) {
  const std::int64_t blocks = (p.lists() + kWarps - 1) / kWarps;
  if (blocks == 0) return;
  launch_kernel(compact_keys_kernel,
                {static_cast<unsigned>(std::min<std::int64_t>(blocks, 65536)), kThreads, stream},
                p);
}

}  // namespace longspan::kernels::cuda

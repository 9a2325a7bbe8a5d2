#include "kernels/cuda/combine/resume.hpp"

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kVector = 4;     // elements of a thread: 16 bytes
constexpr int kThreads = 256;  // of a block

/// threadIdx.x = four columns of a row, (blockIdx.x, threadIdx.y) = rows, blockIdx.y = slots.
__global__ __launch_bounds__(kThreads) void fold_onto_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ StateSlots aside,
    Lengths lengths) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int from_slot = static_cast<int>(blockIdx.y), to_slot = p.slot + from_slot;
  bool exists = row < aside.rows;
  if (exists) {
    const int b = sequence_of_row(p.batch, row / p.heads);
    exists = b >= 0 && serves(lengths, p.batch.query_len(b, p.tokens));
  }
  Fold f{};
  if (exists) f = fold(p.state.stats(to_slot)[row], aside.stats(from_slot)[row]);
  __syncthreads();  // every thread of a row has read its stats
  if (!exists || f.take == Fold::first) return;
  if (threadIdx.x == 0) p.state.stats(to_slot)[row] = f.stats;
  float4* to = reinterpret_cast<float4*>(p.state.o(to_slot, row)) + threadIdx.x;
  const float4 own = reinterpret_cast<const float4*>(aside.o(from_slot, row))[threadIdx.x];
  const float4 before = f.take == Fold::second ? float4{} : *to;
  *to = make_float4(f(before.x, own.x), f(before.y, own.y), f(before.z, own.z), f(before.w, own.w));
}

}  // namespace

void fold_onto(const AttendParams& p, Lengths lengths, const StateSlots& aside,
               cudaStream_t stream) {
  const int vectors = aside.columns() / kVector;
  const dim3 block(vectors, kThreads / vectors);
  const dim3 grid(static_cast<unsigned>((aside.rows + block.y - 1) / block.y), aside.slots);
  launch_kernel(fold_onto_kernel, {grid, block, stream}, p, aside, lengths);
}

}  // namespace longspan::kernels::cuda

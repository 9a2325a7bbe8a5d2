// Checks the arrays of a request on the GPU: a block for each sequence, a thread for each given
// slot. The first fault is kept, across launches too, until the host takes it.
#include <algorithm>

#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/faults.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 128;

/// Reports a fault. One thread wins the report and fills it; it is read after the stream has passed
/// the kernel.
struct Reporter {
  FaultReport* report;

  __device__ void operator()(Fault fault, std::int64_t where, std::int64_t column,
                             std::int64_t value) const {
    static_assert(sizeof(Fault) == sizeof(int) && static_cast<int>(Fault::none) == 0);
    if (atomicCAS(reinterpret_cast<int*>(&report->fault), 0, static_cast<int>(fault)) != 0) return;
    report->where = static_cast<std::int32_t>(where);
    report->column = column;
    report->value = value;
  }
};

/// Claims a slot, and returns whether it was taken before.
struct Claim {
  std::uint32_t* claimed;

  __device__ bool operator()(std::int64_t slot) const {
    const std::uint32_t bit = 1u << slot % 32;
    return (atomicOr(claimed + slot / 32, bit) & bit) != 0;
  }
};

__global__ __launch_bounds__(kThreads) void check_sequences_kernel(
    const __grid_constant__ CheckParams p) {
  for (int b = static_cast<int>(blockIdx.x); b < p.geometry.batch.size;
       b += static_cast<int>(gridDim.x))
    check_sequence(p, b, {threadIdx.x, kThreads}, Reporter{p.report}, Claim{p.claimed});
  if (blockIdx.x == 0 && threadIdx.x == 0) check_all_sequences(p, Reporter{p.report});
}

__global__ __launch_bounds__(kThreads) void check_slots_kernel(
    const __grid_constant__ CheckParams p) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token < p.geometry.tokens)
    check_slot(p, token, p.slots[token], Reporter{p.report}, Claim{p.claimed});
}

}  // namespace

void check_arrays(const CheckParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(p.geometry.batch.size, 65536));
  if (blocks > 0) launch_kernel(check_sequences_kernel, {blocks, kThreads, stream}, p);
  if (p.is_append && p.slots != nullptr && p.geometry.tokens > 0) {
    const std::int64_t slot_blocks = (p.geometry.tokens + kThreads - 1) / kThreads;
    launch_kernel(check_slots_kernel, {static_cast<unsigned>(slot_blocks), kThreads, stream}, p);
  }
}

}  // namespace longspan::kernels::cuda

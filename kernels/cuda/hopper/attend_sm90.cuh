// Attention forward on Hopper, with three engines that run at once: TMA loads tiles of keys and
// values, the tensor cores multiply, the arithmetic units do the softmax.
//
//     S = Q K^T     P = exp2(c S - m)     O = O ratio + P V          (c = scale log2 e)
//
// Softcap and ALiBi change S before it becomes P (attend_sm90_scores.cuh), in separate instances.
// So do products of e4m3 (attend_sm90_fp8.cuh): two more warps transpose the values, and consumers
// use other steps. So does the fixed order (attend_sm90_fixed_order.cuh), whose tiles of keys are
// its segments, each with its own state, in the order of the tree.
//
// A block is a scheduler warp, a producer warp (three if keys are in pages: attend_sm90_pages.cuh),
// and two or three consumer warpgroups of 64 query rows each. Q, K and V are in shared memory, K
// and V in a pipeline of stages; S, P and O stay in registers. A consumer issues the scores of the
// next tile together with the product of this one's weights and values (attend_sm90_16bit.cuh), so
// that its softmax runs beside its own products and beside those of the other consumers. Blocks are
// persistent and take one work tile after another.
//
// Key tiles are walked from the last visible key leftwards, each ending where the one before began:
// no tile reaches past the keys, and under a causal mask only the first tile is cut by the mask.
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/hopper/attend_sm90_16bit.cuh"
#include "kernels/cuda/hopper/attend_sm90_fixed_order.cuh"
#include "kernels/cuda/hopper/attend_sm90_fp8.cuh"
#include "kernels/cuda/hopper/attend_sm90_pages.cuh"
#include "kernels/cuda/hopper/attend_sm90_producer.cuh"
#include "kernels/cuda/hopper/attend_sm90_scheduler.cuh"
#include "kernels/cuda/hopper/attend_sm90_segments.cuh"

namespace longspan::kernels::sm90 {

/// The first warpgroup: the second warp is the scheduler, the others are producers.
template <class T>
__device__ __forceinline__ void produce(const KernelParams& call, Shared<T>& shared) {
  const unsigned warp = threadIdx.x / 32;
  if constexpr (T::kFixedOrder) {
    if (warp == 1)
      Scheduler<T>(call, shared).run();
    else if (warp == 0)
      SegmentProducer<T>(call, shared).run();
    return;
  }
  if (warp == 1)
    Scheduler<T>(call, shared).run();
  else if (threadIdx.x == 0 && !has_pages<T>(call))
    Producer<T>(call, shared).run();
  if constexpr (T::kPages)
    if (warp != 1 && has_pages<T>(call)) PageProducer<T>(call, shared).run();
  if constexpr (T::kEightBits)
    if (threadIdx.x >= 128 - T::kTransposers) transpose<T>(shared);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    attend_kernel(const __grid_constant__ KernelParams call) {
  // Builds for other GPUs have an empty kernel that is never launched.
  if constexpr (kHasWgmma) {
    std::byte* const memory = shared_by_1024;
    Shared<T>& shared = *reinterpret_cast<Shared<T>*>(memory);

    if (threadIdx.x == 0) {
      if (!T::kFixedOrder) prefetch_map(&call.q);
      if (!T::kFixedOrder && !has_pages<T>(call)) {
        prefetch_map(&call.k);
        prefetch_map(&call.v);
      }
      init_barriers(call, shared);
    }
    __syncthreads();

    // Known to be uniform, it frees registers of products, except with e4m3 at dim 64.
    const unsigned group = threadIdx.x / 128;
    const int warpgroup = T::kEightBits ? group : __shfl_sync(0xffffffff, group, 0);
    if (warpgroup == 0) {
      give_registers<T::kProducerRegisters>();
      produce(call, shared);
    } else {
      take_registers<T::kConsumerRegisters>();
      if constexpr (T::kFixedOrder)
        consume_in_order(call, shared, warpgroup - 1);
      else if constexpr (T::kEightBits)
        consume<ConsumerE4m3>(call, shared, warpgroup - 1);
      else
        consume<Consumer16Bit>(call, shared, warpgroup - 1);
    }
  }
}

}  // namespace longspan::kernels::sm90

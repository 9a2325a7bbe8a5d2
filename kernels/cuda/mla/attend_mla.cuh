// Attention of short queries over latent keys (MLA) on Hopper: one kv head, or few, of up to 576
// columns, whose first 512 are the values. Each byte of a key serves both products, so a block
// loads it once. Few heads are bound by reading keys (mla_in_order.cuh), many by the products
// (mla_one_pass.cuh). Which of the two serves depends on the heads of a kv head alone.
//
// Work tiles, splits, pages and masks are those of decode, whose scheduler warp both kernels share
// (decode_scheduler.cuh).
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/decode/decode_scheduler.cuh"
#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/mla/mla_in_order.cuh"
#include "kernels/cuda/mla/mla_one_pass.cuh"
#include "kernels/cuda/mla/mla_producer.cuh"

namespace longspan::kernels::cuda {

/// The warps behind the consumers: those that load, then the scheduler.
template <class Traits>
__device__ __forceinline__ void bring_latent_keys(const AttendParams& p, const WorkPlan& plan,
                                                  const KvTensorMaps& maps,
                                                  typename Traits::Shared& shared) {
  constexpr unsigned kScheduler = Traits::kThreads + Traits::kLoaders;
  if (threadIdx.x >= kScheduler)
    DecodeScheduler<Traits>(p, plan, maps, shared).run();
  else
    MlaProducer<Traits>(p, maps, shared).run();
}

template <class Traits>
__global__ __launch_bounds__(Traits::kBlockThreads,
                             1) void attend_mla_kernel(const __grid_constant__ AttendParams p,
                                                       const __grid_constant__ WorkPlan plan,
                                                       const __grid_constant__ KvTensorMaps maps) {
  // Builds for other GPUs have an empty kernel that is never launched.
  if constexpr (arch::kHasWgmma) {
    std::byte* const memory = arch::shared_by_1024;
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    shared.init();
    // A block begins with 168 registers a thread, and warpgroups take only what others give.
    static_assert(2 * Traits::kConsumerRegisters + Traits::kProducerRegisters <= 3 * 168);
    __syncthreads();
    if (threadIdx.x >= Traits::kThreads) {
      sm90::give_registers<Traits::kProducerRegisters>();
      bring_latent_keys<Traits>(p, plan, maps, shared);
    } else {
      sm90::take_registers<Traits::kConsumerRegisters>();
      arch::wait_for_kernels_before();
      if constexpr (Traits::kInOrder) {
        constexpr int kStack = sizeof(typename Traits::Shared);  // after it, more memory
        const int near_levels =
            (arch::dynamic_shared_bytes() - kStack) / static_cast<int>(Traits::Stack::kStateBytes);
        typename Traits::Stack stack(memory + kStack, near_levels, plan.stack, plan.depth);
        MlaInOrder<Traits>(p, plan, shared, stack).run();
      } else if (threadIdx.x < 128) {
        MlaOnePass<Traits, 0>(p, plan, shared).run();
      } else {
        MlaOnePass<Traits, 1>(p, plan, shared).run();
      }
    }
  }
}

template <class Traits>
KernelShape mla_shape() {
  constexpr Family kFamily = Traits::kInOrder ? Family::mla_in_order : Family::mla;
  constexpr int kBytes = sizeof(typename Traits::Shared);
  static_assert(kBytes == bytes_of(kFamily, Loader::any16, kLatentDim, Traits::kRows));
  KernelShape shape{.decode = attend_mla_kernel<Traits>,
                    .threads = Traits::kBlockThreads,
                    .shared_bytes = kBytes,
                    .tile_rows = Traits::kRows,
                    .maps = mla_tensor_maps};
  if constexpr (Traits::kInOrder) {
    shape.state_bytes = Traits::Stack::kStateBytes;
    shape.near_levels = Traits::kNearLevels;
  }
  return shape;
}

template <class Element>
KernelShape mla_for(Family family) {
  return family == Family::mla_in_order ? mla_shape<MlaInOrderTraits<Element>>()
                                        : mla_shape<MlaOnePassTraits<Element>>();
}

}  // namespace longspan::kernels::cuda

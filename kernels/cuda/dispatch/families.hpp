// The families of CUDA kernels, in the order in which they are asked, and what that order says of a
// call: who serves it, and how much scratch it takes.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cuda/dispatch/launch.hpp"
#include "kernels/kernel_family.hpp"

namespace longspan::kernels::cuda {

/// What the GPU's families are asked (KernelFamily).
struct OnGpu {
  using Id = Family;
  using Asked = Kind;
  using Room = cuda::Room;
  /// Queues the attention of the sequences of one kind. With a result the rows end there, without a
  /// state; it returns false where they cannot, and then nothing is queued.
  using Attend = bool (*)(const AttendParams&, const Kind&, const MergeParams* result, Stream);
};
using CudaFamily = KernelFamily<OnGpu>;

std::span<const CudaFamily> families();

/// Gives the family that serves sequences of this kind. Which one it is depends on the layer, the
/// GPU and where rows lie, never on lengths. Throws Unsupported, which names what is missing, where
/// none fits the GPU's shared memory.
const CudaFamily& serving(const AttendParams& p, const Kind& kind);

/// Throws Unsupported for params that no family of this GPU serves, wherever rows lie.
void check(const AttendParams& p, const Gpu& gpu);

/// The bytes of scratch that `attend` takes for these params, and the most for any within limits.
std::size_t scratch_bytes(const AttendParams& p, const Gpu& gpu);
std::size_t scratch_bound(const AttendParams& limits, const Gpu& gpu);

/// Whether the kernel can write such a result: in the type of the products, without a scale.
bool ends_plainly(const AttendParams& p, const MergeParams& m);

/// Queue a kind of sequences: by Hopper's kernels, and by those that share a plan.
bool attend_hopper(const AttendParams& p, const Kind& kind, const MergeParams* result,
                   Stream stream);
bool attend_planned(Family family, const AttendParams& p, const Kind& kind,
                    const MergeParams* result, Stream stream);

}  // namespace longspan::kernels::cuda

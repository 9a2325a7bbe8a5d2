// The families of CUDA kernels, in the order in which they are tried, and what follows from that
// order for a call: which family serves it, and how much scratch it takes.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cuda/dispatch/launch.hpp"
#include "kernels/kernel_family.hpp"

namespace longspan::kernels::cuda {

/// The GPU's arguments of KernelFamily.
struct OnGpu {
  using Id = Family;
  using Asked = Kind;
  using Room = cuda::Room;
  /// Queues the attention of the sequences of one kind. With a result the rows end there, without a
  /// state; if they cannot, it returns false and nothing is queued.
  using Attend = bool (*)(const AttendParams&, const Kind&, const MergeParams* result, Stream);
};
using CudaFamily = KernelFamily<OnGpu>;

std::span<const CudaFamily> families();

/// Returns the family that serves sequences of this kind. It depends on the layer, the GPU and the
/// layout of rows, never on lengths. Throws Unsupported, which names what is missing, if none fits
/// the GPU's shared memory.
const CudaFamily& serving(const AttendParams& p, const Kind& kind);

/// Throws Unsupported for params that no family of this GPU serves, whatever the layout of rows.
void check(const AttendParams& p, const Gpu& gpu);

/// The bytes of scratch that `attend` takes for these params, and the most for any within limits.
std::size_t scratch_bytes(const AttendParams& p, const Gpu& gpu);
std::size_t scratch_bound(const AttendParams& limits, const Gpu& gpu);

/// Whether the kernel can write such a result: in the type of the products, without a scale.
bool ends_plainly(const AttendParams& p, const MergeParams& m);

/// Queue a kind of sequences: with Hopper's kernels, and with those that share a plan.
bool attend_hopper(const AttendParams& p, const Kind& kind, const MergeParams* result,
                   Stream stream);
bool attend_planned(Family family, const AttendParams& p, const Kind& kind,
                    const MergeParams* result, Stream stream);

}  // namespace longspan::kernels::cuda

// Tells the host what it may ask of a kernel, by what the kernel's code was compiled for.
//
// Device code decides by __CUDA_ARCH__, and the host has to decide with it. The GPU says less: one
// of compute capability 9.0 also runs code that was compiled for 8.0, from PTX, and such code
// neither waits for the kernels before it (arch/overlap.cuh) nor asks TMA
// (decode_producer.cuh). Were it given boxes to copy, it would wait for bytes that nobody asked
// for.
#pragma once

namespace longspan::kernels::cuda {

/// The architecture for which the code that runs here was compiled to PTX, as 10 x major + minor,
/// from `ptxVersion` of cudaFuncAttributes. It is __CUDA_ARCH__ / 10, whatever the code was made
/// into later.
constexpr bool is_code_of_sm90(int ptx_version) { return ptx_version >= 90; }

/// Whether the kernel for Hopper is there. Instructions of sm_90a exist on that architecture alone,
/// and in code for others the kernel is empty. `built` says that the build has code for it; `major`
/// and `minor` are the GPU's.
constexpr bool is_hoppers_code(bool built, int major, int minor, int ptx_version) {
  return built && major == 9 && minor == 0 && is_code_of_sm90(ptx_version);
}

}  // namespace longspan::kernels::cuda

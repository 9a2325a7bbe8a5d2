// Tells the host what it may ask of a kernel, from the target that the kernel's code was compiled
// for.
//
// Device code decides by __CUDA_ARCH__, and the host must decide alike. The GPU alone does not
// tell: one of compute capability 9.0 also runs code that was compiled for 8.0, from PTX. Such code
// neither waits for the kernels before it (arch/overlap.cuh) nor uses TMA (decode_producer.cuh).
// Given boxes to copy, it would wait for bytes that nobody requested.
#pragma once

namespace longspan::kernels::cuda {

/// The architecture for which the code that runs here was compiled to PTX, as 10 x major + minor,
/// from `ptxVersion` of cudaFuncAttributes. It is __CUDA_ARCH__ / 10, whatever machine code it was
/// compiled to later.
constexpr bool is_code_of_sm90(int ptx_version) { return ptx_version >= 90; }

/// Whether the kernel for Hopper exists. Instructions of sm_90a exist only on that architecture,
/// and in code for others the kernel is empty. `built`: the build has code for it; `major` and
/// `minor` are the GPU's.
constexpr bool is_hoppers_code(bool built, int major, int minor, int ptx_version) {
  return built && major == 9 && minor == 0 && is_code_of_sm90(ptx_version);
}

}  // namespace longspan::kernels::cuda

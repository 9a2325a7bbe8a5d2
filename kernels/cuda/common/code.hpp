// Which ways host code may take with a kernel, by what its code was compiled for.
//
// Device code decides by __CUDA_ARCH__, and the host has to decide with it. The GPU says less: one
// of compute capability 9.0 also runs code that was compiled for 8.0, from PTX, and such code
// neither waits for the kernels before it (arch/overlap.cuh) nor asks TMA
// (decode_producer.cuh). Were it given boxes to copy, it would wait for bytes that nobody asked
// for.
#pragma once

namespace longspan::kernels::cuda {

/// Of `ptxVersion` in cudaFuncAttributes: 10 x major + minor of the architecture for which the code
/// that runs here was compiled to PTX, which is __CUDA_ARCH__ / 10, whatever it was made into
/// later.
constexpr bool is_code_of_sm90(int ptx_version) { return ptx_version >= 90; }

/// Whether the kernel for Hopper is there: instructions of sm_90a are of that one architecture, and
/// in code for others the kernel is empty. `built`: the build has code for it; `major`, `minor`: of
/// the GPU.
constexpr bool is_hoppers_code(bool built, int major, int minor, int ptx_version) {
  return built && major == 9 && minor == 0 && is_code_of_sm90(ptx_version);
}

}  // namespace longspan::kernels::cuda

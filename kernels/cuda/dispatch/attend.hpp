// The attention kernels of the CUDA backend, for host code. An instance file defines the shapes of
// its kernels; the table of families (families.hpp) chooses between them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/decode/decode_tensor_maps.hpp"
#include "kernels/cuda/dispatch/gpu.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

// Each instance file has one function. `dim` is rounded up to the next instance.
KernelShape portable_bf16(int dim, bool invariant, Loader loader);
KernelShape portable_fp16(int dim, bool invariant, Loader loader);
KernelShape portable_bf16_any16(int dim, bool invariant);
KernelShape portable_bf16_any8(int dim, bool invariant);
KernelShape portable_fp16_any16(int dim, bool invariant);
KernelShape portable_fp16_any8(int dim, bool invariant);
KernelShape decode_bf16(int dim, std::int64_t rows, Loader loader);
KernelShape decode_fp16(int dim, std::int64_t rows, Loader loader);
KernelShape decode_e4m3(int dim, std::int64_t rows);  // of keys and values
KernelShape decode_e5m2(int dim, std::int64_t rows);
KernelShape mla_bf16(Family family);
KernelShape mla_fp16(Family family);
KernelShape attend_fp32(int dim, Loader loader);  // for short and long queries

/// The current GPU, with the kernels of this build.
Gpu current_gpu();

/// Queues the attention of all sequences.
void attend(const AttendParams& p, const Gpu& gpu, cudaStream_t stream);

/// Folds the states of the splits of sequences into their rows of p.state.
void fold_parts(const AttendParams& p, const WorkPlan& plan, cudaStream_t stream);

}  // namespace longspan::kernels::cuda

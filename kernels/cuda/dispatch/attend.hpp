// The attention kernels of the CUDA backend, as their host code sees them: what a kernel needs to
// be launched, and how a call is cut into launches. An instance file gives the shapes of its
// kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/decode/decode_tensor_maps.hpp"
#include "kernels/cuda/dispatch/instances.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

Loader loader_of(const AttendParams& p);

/// A compiled kernel, which is persistent: any grid does all the work. It is one of two kinds.
struct KernelShape {
  /// The kernel for short queries. It waits for the kernels before it by itself (overlap.hpp).
  void (*decode)(AttendParams, Plan, KvTensorMaps) = nullptr;
  void (*tiled)(AttendParams, Plan) = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int tile_rows = 0;            // packed rows that a block takes at a time
  std::size_t state_bytes = 0;  // of a state on a block's stack; 0 where it keeps no fixed order
  int box_dim = 0;              // of the tiles of KvTensorMaps
  int near_levels = 0;          // states on a block's stack that are worth a place in shared
                                // memory, behind shared_bytes; it takes as many as it is given
  int box_keys = 0;             // most keys of a box
  bool resumes = false;         // rows begin from the states at their targets, where asked

  const void* kernel() const {
    return decode ? reinterpret_cast<const void*>(decode) : reinterpret_cast<const void*>(tiled);
  }
};

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
KernelShape attend_fp32(int dim, Loader loader);  // for short and long queries

/// What plans depend on of the GPU.
struct Gpu {
  int multiprocessors = 0;
  int shared_bytes = 0;     // shared memory of a multiprocessor
  int block_bytes = 0;      // of which a block may have so many
  int block_own_bytes = 0;  // which each block takes beside what it asks for
  bool sm90_code = false;   // the code of the decode kernels is_code_of_sm90 (code.hpp)
};

/// Chooses the kernel for the sequences of one kind; the kind is a sequence's own, by its query
/// length. Throws Unsupported, which names what is missing, where none fits the GPU's shared
/// memory.
KernelShape choose_kernel(const AttendParams& p, Lengths lengths, Loader loader, const Gpu& gpu);

/// Throws what choose_kernel would throw for any sequences of these params.
void check_fits(const AttendParams& p, const Gpu& gpu);

/// Whether the batch can hold sequences of this kind. Lengths may be known on the device only.
bool may_hold(const Geometry& p, Lengths lengths);

/// The bytes of scratch that `attend` takes for these params, and the most for any smaller ones.
std::size_t scratch_bytes(const AttendParams& p, const Gpu& gpu);
std::size_t scratch_bound(const AttendParams& bounds, const Gpu& gpu);

/// Queues the attention of all sequences.
void attend(const AttendParams& p, const Gpu& gpu, cudaStream_t stream);

/// Folds the states of the splits of sequences into their rows of p.state.
void fold_parts(const AttendParams& p, const Plan& plan, cudaStream_t stream);

}  // namespace longspan::kernels::cuda

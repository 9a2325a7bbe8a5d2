// The facts about a compiled kernel and a GPU that the choice of kernels and the planning of
// launches use: numbers, and two queries of the build and its driver. Both can therefore be
// evaluated without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/dispatch/instances.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

struct KvTensorMaps;  // decode_tensor_maps.hpp

/// A compiled kernel, which is persistent: any grid does all the work. It is one of two kinds.
struct KernelShape {
  /// The kernel for short queries. It waits for the kernels before it itself (overlap.hpp).
  void (*decode)(AttendParams, WorkPlan, KvTensorMaps) = nullptr;
  void (*tiled)(AttendParams, WorkPlan) = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int tile_rows = 0;            // packed rows that a block takes at a time
  std::size_t state_bytes = 0;  // of a state on a block's stack; 0 if it keeps no fixed order
  int box_dim = 0;              // of the tiles of KvTensorMaps
  int near_levels = 0;          // states on a block's stack that are worth shared memory, after
                                // shared_bytes; it uses as many as it gets
  int box_keys = 0;             // most keys of a box
  bool resumes = false;         // rows start from the states at their targets, if asked
  KvTensorMaps (*maps)(const AttendParams&) = nullptr;  // makes the maps; null: kv_tensor_maps

  const void* kernel() const {
    return decode ? reinterpret_cast<const void*>(decode) : reinterpret_cast<const void*>(tiled);
  }
};

/// Properties of the GPU, and of the kernels that the build has for it, on which plans depend.
struct Gpu {
  int multiprocessors = 0;
  int shared_bytes = 0;      // shared memory of a multiprocessor
  int block_bytes = 0;       // the most that a block may have of it
  int block_own_bytes = 0;   // which each block takes besides what it asks for
  bool sm90_code = false;    // the code of the decode kernels is_code_of_sm90 (code.hpp)
  bool hopper_code = false;  // Hopper's kernels run here (sm90::runs_here)

  /// The kernel of an instance, for the sequences of one kind of the call.
  KernelShape (*shape)(const Instance& instance, const AttendParams& p, Lengths lengths) = nullptr;
  /// The blocks of a kernel that fit a multiprocessor; each may have `allowed` bytes.
  int (*blocks)(const KernelShape& shape, int allowed) = nullptr;
};

}  // namespace longspan::kernels::cuda

// A tensor as Hopper's TMA is told of it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "longspan/types.hpp"

namespace longspan::kernels::cuda {

/// A dimension of a tensor and of the boxes that are copied. Innermost first; the innermost is
/// dense, and its stride is not read.
struct MapDimension {
  std::int64_t extent;  // beyond it a box is zeros, and no memory is read
  std::int64_t stride;  // in elements; a multiple of 16 bytes
  int box;
};

/// Elements of 16 bits, or fp8. Rows of a box are permuted in its own width, 128 or 64 bytes: chunk
/// of 16 bytes XOR row modulo 8, or row / 2 modulo 4. `promotion`: how much of L2's lines a read
/// brings. Throws BackendError where the driver refuses.
CUtensorMap tensor_map(const void* data, DType dtype, std::span<const MapDimension> dimensions,
                       CUtensorMapL2promotion promotion);

}  // namespace longspan::kernels::cuda

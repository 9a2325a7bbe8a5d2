// Tensor maps, which describe a tensor to Hopper's TMA.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "longspan/types.hpp"

namespace longspan::kernels::cuda {

/// A dimension of a tensor and of the boxes that are copied. The innermost one comes first; it is
/// dense, and its stride is not read.
struct MapDimension {
  std::int64_t extent;  // past it a box is zeros, and no memory is read
  std::int64_t stride;  // in elements; a multiple of 16 bytes
  int box;
};

/// Makes a tensor map of elements of 16 bits, or fp8. Rows of a box are permuted within their
/// width, 128 or 64 bytes: chunk of 16 bytes XOR row modulo 8, or row / 2 modulo 4. `promotion` is
/// the granularity of L2 fetches. Throws BackendError if the driver refuses.
CUtensorMap tensor_map(const void* data, DType dtype, std::span<const MapDimension> dimensions,
                       CUtensorMapL2promotion promotion);

}  // namespace longspan::kernels::cuda

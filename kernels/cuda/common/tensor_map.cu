#include "kernels/cuda/common/tensor_map.hpp"

#include <cuda_runtime.h>

#include <string>

#include "longspan/error.hpp"
#include "longspan/storage.hpp"
#include "src/base/driver_function.hpp"

namespace longspan::kernels::cuda {

CUtensorMap tensor_map(const void* data, DType dtype, std::span<const MapDimension> dimensions,
                       CUtensorMapL2promotion promotion) {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  constexpr std::size_t kMost = 5;
  const std::size_t rank = dimensions.size();
  const StorageFormat format = storage_of(dtype);
  cuuint64_t extents[kMost] = {}, strides[kMost] = {};
  cuuint32_t box[kMost] = {}, steps[kMost] = {};
  for (std::size_t i = 0; i < rank; ++i) {
    extents[i] = static_cast<cuuint64_t>(dimensions[i].extent);
    box[i] = static_cast<cuuint32_t>(dimensions[i].box);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(format.bytes(dimensions[i].stride));
  }
  const CUtensorMapDataType type = dtype == DType::fp16   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  // The driver requires an alignment of 64 bytes. GCC 12 does not give every return slot that
  // alignment, so the map is built in a variable that is never a return slot.
  struct {
    CUtensorMap map;
  } made;
  const CUresult result =
      encode(&made.map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), extents,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             format.bytes(box[0]) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw BackendError("CUDA: cuTensorMapEncodeTiled returned " + std::to_string(result));
  return made.map;
}

}  // namespace longspan::kernels::cuda

// Chooses the tile for a call, describes the tensors to the copy engine, and launches.
#include "kernels/cuda/attend_sm90.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "src/check.hpp"

namespace longspan::kernels::sm90 {
namespace {

/// The driver's function, without linking the driver's library.
auto tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  LONGSPAN_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                 cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw BackendError("CUDA: this driver has no cuTensorMapEncodeTiled; it needs version 525 or newer");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

/// [count rows, heads, dim] in boxes of [box_rows, 1, 64 elements], 128-byte swizzle.
CUtensorMap describe(const Rows& rows, DType dtype, int dim, std::int64_t count, int heads,
                     int box_rows) {
  static const auto encode = tensor_map_encoder();
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(count),
                                static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(rows.row_stride) * 2,
                                static_cast<cuuint64_t>(rows.head_stride) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map,
      dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      rows.data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw BackendError("CUDA: cuTensorMapEncodeTiled returned " + std::to_string(result));
  return map;
}

bool fits(const Rows& rows, int heads) {
  const auto aligned = [](std::int64_t stride) { return stride > 0 && stride % 8 == 0; };
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && aligned(rows.row_stride) &&
         (heads == 1 || aligned(rows.head_stride));
}

}  // namespace

template <class T>
void launch(const AttendParams& params, const Finished& finished, bool persistent,
            cudaStream_t stream) {
  // Tiles of keys end at the last visible key, so no copy reaches past the keys and their number
  // need not be known here.
  constexpr std::int64_t kAnyKeys = std::int64_t{1} << 31;
  Call call{};
  call.q = describe(params.q, params.dtype, params.dim, params.tokens, params.heads, 64);
  call.k = describe(params.k, params.dtype, params.dim, kAnyKeys, params.kv_heads, T::kKeys);
  call.v = describe(params.v, params.dtype, params.dim, kAnyKeys, params.kv_heads, T::kKeys);
  call.params = params;
  call.finished = finished;
  call.slots = static_cast<unsigned>(params.batch.query_start
                                         ? params.tokens / T::kRows + params.batch.size
                                         : (params.tokens + T::kRows - 1) / T::kRows);

  // Heads whose keys and values fit half of L2 walk together.
  int device = 0, processors = 0, l2_bytes = 0;
  LONGSPAN_CUDA(cudaGetDevice(&device));
  LONGSPAN_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  LONGSPAN_CUDA(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
  const int group = params.heads / params.kv_heads;
  const std::int64_t head_bytes =
      std::max<std::int64_t>(1, params.shard.length) * params.dim * 2 * 2;
  const std::int64_t resident = std::max<std::int64_t>(1, l2_bytes / 2 / head_bytes);
  call.section = static_cast<unsigned>(std::min<std::int64_t>(params.kv_heads, resident) * group);
  call.items = call.slots * params.heads;
  if (call.items == 0) return;
  if (persistent) {
    call.next = reinterpret_cast<unsigned*>(params.scratch);
    LONGSPAN_CUDA(cudaMemsetAsync(call.next, 0, sizeof *call.next, stream));
  }
  const unsigned blocks =
      persistent ? std::min(call.items, static_cast<unsigned>(processors)) : call.items;
  LONGSPAN_CUDA(cudaFuncSetAttribute(
      attend_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<T>)));
  attend_kernel<T><<<blocks, T::kThreads, sizeof(Shared<T>), stream>>>(call);
  LONGSPAN_CUDA(cudaGetLastError());
}

}  // namespace longspan::kernels::sm90

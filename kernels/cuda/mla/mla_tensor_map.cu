#include "kernels/cuda/mla/mla_tensor_map.hpp"

#include "kernels/cuda/common/tensor_map.hpp"

namespace longspan::kernels::cuda {

KvTensorMaps mla_tensor_maps(const AttendParams& p) {
  constexpr std::int64_t kAny = std::int64_t{1} << 31;  // an extent that no cache exceeds
  constexpr int kTile = 64;
  KvTensorMaps maps{};
  if ((p.pages && p.pages.size % kBoxKeys != 0) || p.k.row_stride <= 0 ||
      (p.kv_heads > 1 && p.k.head_stride <= 0) || (p.pages && p.k.page_stride <= 0))
    return maps;
  for (maps.keys = kTile; p.pages && p.pages.size % maps.keys != 0;) maps.keys /= 2;
  const std::int64_t row = p.k.row_stride;
  const MapDimension dimensions[] = {{p.head_dim, 1, kTile},
                                     {p.pages ? p.pages.size : kAny, row, maps.keys},
                                     {p.kv_heads, p.kv_heads > 1 ? p.k.head_stride : row, 1},
                                     {p.pages ? kAny : 1, p.pages ? p.k.page_stride : row, 1},
                                     {1, row, 1}};
  maps.k = tensor_map(p.k.data, p.kv_dtype, dimensions, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  maps.k_valid = true;
  return maps;
}

}  // namespace longspan::kernels::cuda

#include "kernels/cuda/decode/decode_tensor_maps.hpp"

#include "kernels/cuda/common/tensor_map.hpp"

namespace longspan::kernels::cuda {
namespace {

/// An extent that no cache exceeds. Coordinates are 32-bit, and contiguous rows of at least 128
/// bytes are fewer than 2^31 on any GPU.
constexpr std::int64_t kAny = std::int64_t{1} << 31;

/// Elements of a panel: 128 bytes, or 64 if the row is not a multiple of 128.
int panel_of(int dim, const StorageFormat& format) {
  return format.elements(format.row_bytes(dim) % 128 == 0 ? 128 : 64);
}

bool has_tensor_map(const AttendParams& p, const KvRows& rows, int dim) {
  const StorageFormat format = storage_of(p.kv_dtype);
  const auto aligned = [&](std::int64_t stride) {
    return format.bytes(stride) % 16 == 0 && stride > 0;
  };
  if ((p.kv_dtype != p.dtype && format.bits != 8) || p.head_dim % panel_of(dim, format) != 0 ||
      !rows.dense() || !aligned(rows.row_stride) ||
      reinterpret_cast<std::uintptr_t>(rows.data) % 16 != 0 ||
      (p.kv_heads > 1 && !aligned(rows.head_stride)))
    return false;
  return p.pages ? p.pages.size % kBoxKeys == 0 && aligned(rows.page_stride)
                 : format.bytes(rows.row_stride) >= 128;
}

CUtensorMap map_of(const AttendParams& p, const KvRows& rows, int dim, int keys) {
  const int panel = panel_of(dim, storage_of(p.kv_dtype));
  const MapDimension dimensions[] = {
      {panel, 1, panel},
      {p.pages ? p.pages.size : kAny, rows.row_stride, keys},
      {p.head_dim / panel, panel, dim / panel},
      {p.kv_heads, p.kv_heads > 1 ? rows.head_stride : rows.row_stride, 1},
      {p.pages ? kAny : 1, p.pages ? rows.page_stride : rows.row_stride, 1}};
  // Keys are read once, so wider reads of L2 do not help: a promotion to 256 bytes took 6 % longer.
  return tensor_map(rows.data, p.kv_dtype, dimensions, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace

KvTensorMaps kv_tensor_maps(const AttendParams& p, int dim, int most) {
  KvTensorMaps maps{};
  const bool one_panel = dim <= panel_of(dim, storage_of(p.kv_dtype));
  if (one_panel)
    for (maps.keys = most; p.pages && p.pages.size % maps.keys != 0;) maps.keys /= 2;
  maps.k_valid = has_tensor_map(p, p.k, dim);
  maps.v_valid = has_tensor_map(p, p.v, dim);
  if (maps.k_valid) maps.k = map_of(p, p.k, dim, maps.keys);
  if (maps.v_valid) maps.v = map_of(p, p.v, dim, maps.keys);
  return maps;
}

}  // namespace longspan::kernels::cuda

#include "kernels/cuda/decode/decode_boxes.hpp"

#include "kernels/cuda/common/tensor_map.hpp"

namespace longspan::kernels::cuda {
namespace {

/// Coordinates are 32-bit. Contiguous rows of at least 128 bytes are fewer than 2^31 on any GPU.
constexpr std::int64_t kAny = std::int64_t{1} << 31;

/// Elements of `bytes` each: 128 bytes, or 64 where the dim is no multiple of them.
int panel_of(int dim, std::int64_t bytes) {
  return static_cast<int>((dim * bytes % 128 == 0 ? 128 : 64) / bytes);
}

bool has_boxes(const AttendParams& p, const KvRows& rows, int dim) {
  const std::int64_t bytes = static_cast<std::int64_t>(size_of(p.kv_dtype));
  const auto aligned = [&](std::int64_t stride) { return stride * bytes % 16 == 0 && stride > 0; };
  if ((p.kv_dtype != p.dtype && bytes != 1) || p.head_dim % panel_of(dim, bytes) != 0 ||
      !rows.dense() || !aligned(rows.row_stride) ||
      reinterpret_cast<std::uintptr_t>(rows.data) % 16 != 0 ||
      (p.kv_heads > 1 && !aligned(rows.head_stride)))
    return false;
  return p.pages ? p.pages.size % kBoxKeys == 0 && aligned(rows.page_stride)
                 : rows.row_stride * bytes >= 128;
}

CUtensorMap map_of(const AttendParams& p, const KvRows& rows, int dim, int keys) {
  const int panel = panel_of(dim, static_cast<std::int64_t>(size_of(p.kv_dtype)));
  const MapDimension dimensions[] = {
      {panel, 1, panel},
      {p.pages ? p.pages.size : kAny, rows.row_stride, keys},
      {p.head_dim / panel, panel, dim / panel},
      {p.kv_heads, p.kv_heads > 1 ? rows.head_stride : rows.row_stride, 1},
      {p.pages ? kAny : 1, p.pages ? rows.page_stride : rows.row_stride, 1}};
  // What is read once need not be widened: a promotion to 256 bytes took 6 % more time.
  return tensor_map(rows.data, p.kv_dtype, dimensions, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace

KeyBoxes key_boxes(const AttendParams& p, int dim, int most) {
  KeyBoxes boxes{};
  const bool one_panel = dim <= panel_of(dim, static_cast<std::int64_t>(size_of(p.kv_dtype)));
  if (one_panel)
    for (boxes.keys = most; p.pages && p.pages.size % boxes.keys != 0;) boxes.keys /= 2;
  boxes.k_valid = has_boxes(p, p.k, dim);
  boxes.v_valid = has_boxes(p, p.v, dim);
  if (boxes.k_valid) boxes.k = map_of(p, p.k, dim, boxes.keys);
  if (boxes.v_valid) boxes.v = map_of(p, p.v, dim, boxes.keys);
  return boxes;
}

}  // namespace longspan::kernels::cuda

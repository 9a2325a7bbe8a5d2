#include "src/tensor_checks.hpp"

#include <fmt/ranges.h>

#include <limits>
#include <span>

namespace longspan {

std::string shape_text(const Tensor& t) {
  return fmt::format("[{}]", fmt::join(std::span(t.shape.data(), t.dims), ", "));
}

void check_tensor(const Tensor& t, const char* name, DType dtype, Device device) {
  for (int d = 0; d < t.dims; ++d)
    require(t.shape[d] >= 0, "{} {} has a negative extent", name, shape_text(t));
  require(t.data != nullptr || (t.dims > 0 && t.size() == 0), "{} {} has no data", name,
          shape_text(t));
  require(t.dtype == dtype, "{} is {}; {} is wanted", name, longspan::name(t.dtype),
          longspan::name(dtype));
  require(t.device == device, "{} is on the {}; the work is done on the {}", name,
          longspan::name(t.device), longspan::name(device));
}

void check_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                std::int64_t dim, DType dtype, Device device) {
  check_tensor(t, name, dtype, device);
  require(
      t.dims == 3 && (rows < 0 || t.shape[0] == rows) && t.shape[1] == heads && t.shape[2] == dim,
      "{} is {}; [{}, {}, {}] is wanted", name, shape_text(t),
      rows < 0 ? std::string("tokens") : fmt::to_string(rows), heads, dim);
  require(t.stride[2] == 1 || t.size() == 0, "{} has stride {} in its last dimension; it must be 1",
          name, t.stride[2]);
}

void check_lse(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
               Device device) {
  check_tensor(t, name, DType::fp32, device);
  require(t.dims == 2 && t.shape[0] == rows && t.shape[1] == heads,
          "{} is {} (tokens, heads); [{}, {}] is wanted", name, shape_text(t), rows, heads);
}

void check_product_dtype(DType dtype, const char* name) {
  require(!is_fp8(dtype), "{} is {}; fp32, fp16 or bf16 is wanted", name, longspan::name(dtype));
}

void check_quantised(DType found, const char* name, DType dtype, bool has_scale,
                     const char* scale_name) {
  require(found == dtype || is_fp8(found), "{} is {}; {}, or fp8 with a scale, is wanted", name,
          longspan::name(found), longspan::name(dtype));
  require(!is_fp8(found) || has_scale, "{} is {} and there is no {}; give it (1 where none is due)",
          name, longspan::name(found), scale_name);
}

void check_qq_bias(const QqBias& qq, std::int64_t longest_query) {
  if (!qq) return;
  require(qq.width >= 1, "qq_bias has width {}; it is a matrix [width, width] of at least 1",
          qq.width);
  require(qq.row_stride >= qq.width,
          "qq_bias has rows of {} entries and a row stride of {}; the stride is at least the width",
          qq.width, qq.row_stride);
  require(qq.width >= longest_query,
          "qq_bias is [{}, {}]; a query of {} tokens needs [{}, {}] at least", qq.width, qq.width,
          longest_query, longest_query, longest_query);
}

kernels::Rows rows_of(const Tensor& t) {
  return {t.data, t.stride[t.dims - 3], t.stride[t.dims - 2]};
}

kernels::LseView lse_of(const Tensor& t) {
  if (!t) return {};
  return {static_cast<float*>(t.data), t.stride[t.dims - 2], t.stride[t.dims - 1]};
}

namespace {

/// Rows of pages [pages, page, kv_heads, dim]; the last dimension may have any stride.
kernels::KvRows page_rows(const Tensor& t) {
  kernels::KvRows rows(t.data, t.stride[1], t.stride[2]);
  rows.page_stride = t.stride[0];
  rows.chunk_stride = rows.chunk * t.stride[3];
  rows.dim_stride = t.stride[3];
  return rows;
}

/// K in pages [pages, kv_heads, dim / x, page, x].
kernels::KvRows packed_keys(const Tensor& t) {
  kernels::KvRows rows(t.data, t.stride[3], t.stride[1]);
  rows.page_stride = t.stride[0];
  rows.chunk = static_cast<int>(t.shape[4]);
  rows.chunk_stride = t.stride[2];
  rows.dim_stride = t.stride[4];
  return rows;
}

/// V in pages [pages, kv_heads, dim, page].
kernels::KvRows packed_values(const Tensor& t) {
  kernels::KvRows rows(t.data, t.stride[3], t.stride[1]);
  rows.page_stride = t.stride[0];
  rows.chunk_stride = rows.chunk * t.stride[2];
  rows.dim_stride = t.stride[2];
  return rows;
}

kernels::Pages view_table(const BlockTable& table) {
  if (!table) return {};
  require(table.columns >= 0, "block_table has {} columns", table.columns);
  return {table.data, table.row_stride != 0 ? table.row_stride : table.columns, table.column_stride,
          table.columns};
}

}  // namespace

CacheView view_contiguous(const Tensor& k, const Tensor& v, const CacheShape& shape,
                          Device device) {
  for (const auto& [t, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check_tensor(*t, name, shape.dtype, device);
    const bool packed = t->dims == 3;
    const int d = packed ? 1 : 2;
    require((packed || (t->dims == 4 && t->shape[0] >= shape.batch)) &&
                t->shape[d] == shape.kv_heads && t->shape[d + 1] == shape.dim,
            "{} is {}; [keys, {}, {}] is wanted, or [{}, capacity, {}, {}], or pages with a "
            "block_table",
            name, shape_text(*t), shape.kv_heads, shape.dim, shape.batch, shape.kv_heads,
            shape.dim);
    require(t->stride[d + 1] == 1 || t->size() == 0,
            "{} has stride {} in its last dimension; it must be 1", name, t->stride[d + 1]);
    require(packed || t->size() == 0 || (t->stride[1] != 0 && t->stride[0] % t->stride[1] == 0),
            "{} has stride {} between sequences, which is not a multiple of the stride {} between "
            "keys; make the cache dense",
            name, t->stride[0], t->stride[1]);
  }
  require(k.dims == v.dims && k.shape == v.shape, "k is {} and v is {}; they must have one shape",
          shape_text(k), shape_text(v));
  CacheView view;
  static_cast<kernels::Rows&>(view.k) = rows_of(k);
  static_cast<kernels::Rows&>(view.v) = rows_of(v);
  view.keys = k.shape[0];
  if (k.dims == 4 && k.size() > 0) {
    view.capacity = k.shape[1];
    view.pitch = k.stride[0] / k.stride[1];
    view.keys = (k.shape[0] - 1) * view.pitch + k.shape[1];
    require(v.stride[0] / v.stride[1] == view.pitch,
            "k has {} keys from one sequence to the next and v {}; they must be alike", view.pitch,
            v.stride[0] / v.stride[1]);
  } else if (k.dims == 4) {
    view.keys = 0;
  }
  return view;
}

CacheView view_pages(const Tensor& k, const Tensor& v, const BlockTable& table,
                     const CacheShape& shape, Device device, const char* k_name,
                     const char* v_name) {
  check_tensor(k, k_name, shape.dtype, device);
  check_tensor(v, v_name, shape.dtype, device);
  CacheView view;
  view.pages = view_table(table);
  std::int64_t page = 0;
  if (k.dims == 5) {
    const std::int64_t x = k.shape[4];
    page = k.shape[3];
    require(x >= 1 && k.shape[1] == shape.kv_heads && k.shape[2] * x == shape.dim,
            "{} is {}; in x-packed pages [pages, {}, {} / x, page, x] is wanted", k_name,
            shape_text(k), shape.kv_heads, shape.dim);
    require(v.dims == 4 && v.shape[0] == k.shape[0] && v.shape[1] == shape.kv_heads &&
                v.shape[2] == shape.dim && v.shape[3] == page,
            "{} is {}; beside x-packed keys {} the values are [{}, {}, {}, {}]", v_name,
            shape_text(v), shape_text(k), k.shape[0], shape.kv_heads, shape.dim, page);
    view.k = packed_keys(k);
    view.v = packed_values(v);
  } else {
    require(k.dims == 4 && k.shape[2] == shape.kv_heads && k.shape[3] == shape.dim,
            "{} is {}; pages are [pages, page, {}, {}], or x-packed [pages, {}, {} / x, page, x]",
            k_name, shape_text(k), shape.kv_heads, shape.dim, shape.kv_heads, shape.dim);
    require(v.dims == 4 && v.shape == k.shape, "{} is {} and {} is {}; they must have one shape",
            k_name, shape_text(k), v_name, shape_text(v));
    page = k.shape[1];
    view.k = page_rows(k);
    view.v = page_rows(v);
  }
  require(page >= 1 && page <= std::numeric_limits<int>::max(),
          "{} {} has pages of {} keys; a page has at least 1", k_name, shape_text(k), page);
  view.pages.count = k.shape[0];
  view.pages.size = static_cast<int>(page);
  view.keys = k.shape[0] * page;
  return view;
}

}  // namespace longspan

// The place of a batch's keys in a test, by the shapes of their tensors, which a kernel's strides
// must match.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "kernels/tensors.hpp"
#include "longspan/tensor.hpp"

namespace longspan::tests {

/// The layout of keys and values in a place.
enum class Form {
  rows,      // [rows, kv_heads, dim], sequence after sequence
  batch,     // [batch, capacity, kv_heads, dim]
  together,  // [rows, kv_heads * (dim + value_dim)]: keys and values side by side, as they travel
  pages,     // [pages, page, kv_heads, dim]
  x_packed,  // K [pages, kv_heads, dim / x, page, x], V [pages, kv_heads, dim, page]
};
inline constexpr Form kForms[] = {Form::rows, Form::batch, Form::together, Form::pages,
                                  Form::x_packed};

struct KeyShape {
  DType dtype = DType::bf16;
  int kv_heads = 2, dim = 24, value_dim = 8;
  int gap = 0;     // elements between rows, where the form has room for it
  int offset = 0;  // elements ahead of the first
  int x = 8;
};

/// A place for a batch of keys.
struct KeyPlace {
  Form form = Form::rows;
  KeyShape shape;
  int page = 1;
  std::vector<std::int64_t> start;  // [batch], of rows and together
  std::int64_t capacity = 0;        // of batch
  std::int64_t columns = 0;
  std::vector<std::int32_t> table;  // [batch, columns]
  std::int64_t pages = 0;

  bool in_pages() const { return form == Form::pages || form == Form::x_packed; }
  int width(bool is_key) const { return is_key ? shape.dim : shape.value_dim; }
  std::int64_t row_size(bool is_key) const {
    if (form == Form::together) return shape.kv_heads * (width(true) + width(false));
    return std::int64_t{shape.kv_heads} * width(is_key) + shape.gap;
  }
  std::int64_t page_size(bool is_key) const { return page * row_size(is_key) + shape.gap; }

  /// Elements of the memory of keys or values. Together they have that of keys.
  std::int64_t size(bool is_key, std::int64_t rows) const {
    return shape.offset + (in_pages() ? pages * page_size(is_key) : rows * row_size(is_key));
  }

  /// The place of element d of a key's head; -1 where the table has no page.
  std::int64_t at(bool is_key, int b, std::int64_t key, int head, int d) const {
    const std::int64_t n = width(is_key), row = key % page;
    if (!in_pages()) {
      const std::int64_t ahead = form == Form::batch ? b * capacity : start[b];
      const std::int64_t aside =
          form == Form::together && !is_key ? shape.kv_heads * width(true) : 0;
      return shape.offset + (ahead + key) * row_size(is_key) + aside + head * n + d;
    }
    const std::int64_t entry = table[b * columns + key / page];
    if (entry < 0 || entry >= pages) return -1;
    const std::int64_t first = shape.offset + entry * page_size(is_key);
    if (form == Form::pages) return first + row * row_size(is_key) + head * n + d;
    if (!is_key) return first + (head * n + d) * page + row;
    return first + ((head * n / shape.x + d / shape.x) * page + row) * shape.x + d % shape.x;
  }

  /// In the caller's form.
  Tensor tensor(bool is_key, void* memory, std::int64_t rows, Device device) const {
    const std::int64_t heads = shape.kv_heads, n = width(is_key), row = row_size(is_key);
    void* const data = static_cast<std::byte*>(memory) + shape.offset * size_of(shape.dtype);
    const auto view = [&](std::initializer_list<std::int64_t> extents,
                          std::initializer_list<std::int64_t> strides) {
      Tensor t(data, shape.dtype, extents, device);
      std::copy(strides.begin(), strides.end(), t.stride.begin());
      return t;
    };
    switch (form) {
      case Form::batch:
        return view({rows / capacity, capacity, heads, n}, {capacity * row, row, n, 1});
      case Form::pages:
        return view({pages, page, heads, n}, {page_size(is_key), row, n, 1});
      case Form::x_packed:
        if (!is_key) return view({pages, heads, n, page}, {page_size(false), n * page, page, 1});
        return view({pages, heads, n / shape.x, page, shape.x},
                    {page_size(true), n * page, std::int64_t{page} * shape.x, shape.x, 1});
      default:
        return view({rows, heads, n}, {row, n, 1});
    }
  }

  /// In the kernels' form, without its start.
  kernels::KvRows layout(bool is_key) const {
    const std::int64_t n = width(is_key);
    kernels::KvRows r{nullptr, row_size(is_key), n};
    if (!in_pages()) return r;
    r.page_stride = page_size(is_key);
    if (form == Form::pages) return r;
    r.head_stride = n * page;
    r.row_stride = is_key ? shape.x : 1;
    r.dim_stride = is_key ? 1 : page;
    r.chunk = is_key ? shape.x : 8;
    r.chunk_stride = std::int64_t{r.chunk} * page;
    return r;
  }
};

}  // namespace longspan::tests

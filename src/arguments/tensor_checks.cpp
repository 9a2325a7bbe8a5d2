#include "src/arguments/tensor_checks.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>

#include "longspan/attention.hpp"

namespace longspan {

std::string to_string(const ShapeText& shape) {
  const Tensor& t = shape.tensor;
  if (t.dims < 0 || t.dims > Tensor::kMaxDims) return fmt::format("of {} dimensions", t.dims);
  return fmt::format("[{}]", fmt::join(std::span(t.shape.data(), t.dims), ", "));
}

std::string to_string(const CountText& count) {
  return count.count < 0 ? count.any : fmt::to_string(count.count);
}

namespace {

/// The dimensions of a tensor with more than one index, in ascending order of their strides.
struct Steps {
  std::array<int, Tensor::kMaxDims> dims{};
  int count = 0;

  explicit Steps(const Tensor& t) {
    for (int d = 0; d < t.dims; ++d) {
      if (t.shape[d] <= 1) continue;
      int at = count++;
      for (; at > 0 && t.stride[dims[at - 1]] > t.stride[d]; --at) dims[at] = dims[at - 1];
      dims[at] = d;
    }
  }
  const int* begin() const { return dims.data(); }
  const int* end() const { return dims.data() + count; }
};

/// The memory from the first element of a tensor to one past its last.
struct Span {
  const std::byte* begin;
  const std::byte* end;

  /// Whether the first or the last byte of the other lies in this span.
  bool has_an_end_of(const Span& other) const {
    return (other.begin >= begin && other.begin < end) || (other.end > begin && other.end <= end);
  }
};

Span span_of(const Tensor& t) {
  std::int64_t last = 0;
  for (int d = 0; d < t.dims; ++d) last += (t.shape[d] - 1) * t.stride[d];
  const auto* begin = static_cast<const std::byte*>(t.data);
  return {begin, begin + (last + 1) * static_cast<std::int64_t>(size_of(t.dtype))};
}

/// Whether the span of a tensor has places without an element.
bool has_gaps(const Tensor& t) {
  std::int64_t reach = 0;  // from the first to the last element of the smaller strides
  for (const int d : Steps(t)) {
    if (t.stride[d] > reach + 1) return true;
    reach += (t.shape[d] - 1) * t.stride[d];
  }
  return false;
}

/// Checks that 63 bits hold the bytes of the elements and the bytes from the first to the last.
void check_extent(const Tensor& t, const char* name) {
  std::int64_t count = static_cast<std::int64_t>(size_of(t.dtype)), reach = count;
  bool fits = true, any = true;
  for (int d = 0; d < t.dims; ++d) any = any && t.shape[d] > 0;
  for (int d = 0; any && d < t.dims; ++d) {
    std::int64_t step = 0;
    fits = fits && !__builtin_mul_overflow(count, t.shape[d], &count) &&
           !__builtin_mul_overflow(t.shape[d] - 1, t.stride[d], &step) &&
           !__builtin_mul_overflow(step, static_cast<std::int64_t>(size_of(t.dtype)), &step) &&
           !__builtin_add_overflow(reach, step, &reach);
  }
  require(fits, "{} {} with strides [{}] spans more than 2^63 bytes", name, shape_text(t),
          fmt::join(std::span(t.stride.data(), t.dims), ", "));
}

}  // namespace

void check_tensor(const Tensor& t, const char* name, DType dtype, Device device) {
  require(t.dims >= 0 && t.dims <= Tensor::kMaxDims, "{} has {} dimensions; it has at most {}",
          name, t.dims, Tensor::kMaxDims);
  for (int d = 0; d < t.dims; ++d)
    require(t.shape[d] >= 0, "{} {} has a negative extent", name, shape_text(t));
  constexpr std::int64_t kMostStride = std::int64_t{1} << 56;  // also where no element is reached
  for (int d = 0; d < t.dims; ++d) {
    require(t.stride[d] >= 0, "{} {} has stride {} in dimension {}; strides are not negative", name,
            shape_text(t), t.stride[d], d);
    require(t.stride[d] <= kMostStride,
            "{} {} has stride {} in dimension {}; at most 2^56 is taken", name, shape_text(t),
            t.stride[d], d);
  }
  require(t.dtype <= DType::latent352, "{} has a type of number {}, which does not exist", name,
          static_cast<int>(t.dtype));
  check_extent(t, name);
  require(t.data != nullptr || (t.dims > 0 && t.size() == 0), "{} {} has no data", name,
          shape_text(t));
  require(reinterpret_cast<std::uintptr_t>(t.data) % size_of(t.dtype) == 0,
          "{} {} lies at {}, which is not aligned to its elements of {} bytes", name, shape_text(t),
          t.data, size_of(t.dtype));
  require(t.dtype == dtype, "{} is {}; {} is wanted", name, longspan::name(t.dtype),
          longspan::name(dtype));
  require(t.device == device, "{} is on the {}; the work is done on the {}", name,
          longspan::name(t.device), longspan::name(device));
}

void check_written(const Tensor& t, const char* name) {
  if (t.size() == 0) return;
  std::int64_t reach = 0;  // from the first to the last element of the smaller strides
  for (const int d : Steps(t)) {
    require(t.stride[d] > reach,
            "{} {} with strides [{}] is written, and its elements overlap: stride {} of dimension "
            "{} steps over {} elements that the smaller strides reach",
            name, shape_text(t), fmt::join(std::span(t.stride.data(), t.dims), ", "), t.stride[d],
            d, reach + 1);
    reach += (t.shape[d] - 1) * t.stride[d];
  }
}

void check_overlap(const Tensor& out, const char* out_name, const Tensor& in, const char* in_name,
                   bool in_place) {
  if (out.size() == 0 || in.size() == 0) return;
  const auto same_strides = [&] {
    for (int d = 0; d < out.dims; ++d)
      if (out.shape[d] > 1 && out.stride[d] != in.stride[d]) return false;
    return out.dims == in.dims;
  };
  if (in_place && out.data == in.data && out.dtype == in.dtype && same_strides()) return;
  const Span a = span_of(out), b = span_of(in);
  if (a.end <= b.begin || b.end <= a.begin) return;  // true for nearly all pairs of a run
  require(a.begin != b.begin && (has_gaps(out) || !a.has_an_end_of(b)) &&
              (has_gaps(in) || !b.has_an_end_of(a)),
          "{} overlaps {}: {}", out_name, in_name,
          in_place ? "it may be the same tensor, with the same type and strides, or lie apart"
                   : "it must lie apart");
}

std::string scale_index(const ScaleView& scales, int sequence, int kv_head) {
  if (scales.sequence_stride == 0) return fmt::to_string(kv_head);
  return fmt::format("{}, {}", sequence, kv_head);
}

void check_scales(const ScaleView& scales, const char* name, int batch, int kv_heads,
                  bool divides) {
  if (!scales) return;
  for (int b = 0; b < scales.sequences(batch); ++b)
    for (int h = 0; h < scales.count(kv_heads); ++h) {
      const float scale = scales.of(b, h);
      require(std::isfinite(scale) && !(divides && scale == 0.0f),
              "{}[{}] is {}; a scale is a finite number{}", name, scale_index(scales, b, h), scale,
              divides ? ", and not 0 where it divides" : "");
    }
}

namespace {

/// Joins dimensions 0 (batch) and 1 (tokens) into one if rows then have equal steps.
Tensor join(const Tensor& t, const char* name) {
  const std::int64_t batch = t.shape[0], count = t.shape[1];
  require(batch <= kMostCount && count <= kMostCount && batch * count <= kMostCount,
          "{} is {}: {} sequences of {} tokens; 0 to 2^31 - 1 of each are possible, and as many "
          "rows in all",
          name, shape_text(t), batch, count);
  const bool any = t.size() > 0;  // otherwise memory does not bound the strides
  const std::int64_t step = count == 1 ? t.stride[0] : t.stride[1];
  if (any && batch > 1 && t.stride[0] != count * step) return t;
  Tensor flat = t;
  flat.dims = t.dims - 1;
  flat.shape[0] = batch * count;
  flat.stride[0] = any ? step : t.stride[1];
  for (int d = 1; d < flat.dims; ++d) {
    flat.shape[d] = t.shape[d + 1];
    flat.stride[d] = t.stride[d + 1];
  }
  return flat;
}

/// The gap between sequences of [batch, tokens, ...].
kernels::SequenceGap gap_of(const Tensor& t) {
  return {t.stride[0] - t.shape[1] * t.stride[1], static_cast<std::uint32_t>(t.shape[1])};
}

}  // namespace

Tensor batch_rows(const Tensor& t, const char* name) {
  if (t.dims != 4) return t;
  check_tensor(t, name, t.dtype, t.device);
  Tensor rows = t;
  std::swap(rows.shape[1], rows.shape[2]);
  std::swap(rows.stride[1], rows.stride[2]);
  return join(rows, name);
}

Lse batch_rows(const Lse& lse, const char* name) {
  if (lse.tensor.dims != 3) return lse;
  check_tensor(lse.tensor, name, lse.tensor.dtype, lse.tensor.device);
  return {join(lse.tensor, name)};
}

std::int64_t count_rows(const Tensor& t, int dims) {
  if (t.dims <= dims) return t.shape[0];
  if (t.shape[0] < 0 || t.shape[1] < 0) return -1;
  std::int64_t rows = 0;
  return __builtin_mul_overflow(t.shape[0], t.shape[1], &rows)
             ? std::numeric_limits<std::int64_t>::max()
             : rows;
}

void check_apart(std::initializer_list<const Tensor*> rows,
                 std::initializer_list<const Lse*> lses) {
  const Tensor* first = nullptr;
  const auto check = [&first](const Tensor& t, int dims) {
    if (t.dims != dims) return;
    if (first == nullptr) first = &t;
    require(t.shape[0] == first->shape[0] && t.shape[1] == first->shape[1],
            "queries and results are views of sequences that lie apart, {} of {} tokens and {} of "
            "{}; they have the same",
            first->shape[0], first->shape[1], t.shape[0], t.shape[1]);
  };
  for (const Tensor* t : rows) check(*t, 4);
  for (const Lse* lse : lses) check(lse->tensor, 3);
}

void check_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                std::int64_t dim, DType dtype, Device device) {
  check_tensor(t, name, dtype, device);
  require(
      t.dims == 3 && (rows < 0 || t.shape[0] == rows) && t.shape[1] == heads && t.shape[2] == dim,
      "{} is {}; [{}, {}, {}] is wanted", name, shape_text(t), CountText{rows, "tokens"}, heads,
      dim);
  require(t.stride[2] == 1 || t.size() == 0, "{} has stride {} in its last dimension; it must be 1",
          name, t.stride[2]);
}

void check_batch_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                      std::int64_t dim, DType dtype, Device device) {
  if (t.dims != 4) return check_rows(t, name, rows, heads, dim, dtype, device);
  check_tensor(t, name, dtype, device);
  require((rows < 0 || count_rows(t) == rows) && t.shape[2] == heads && t.shape[3] == dim,
          "{} has {} sequences of {} tokens, with [{}, {}] each; {} rows of [{}, {}] are wanted",
          name, t.shape[0], t.shape[1], t.shape[2], t.shape[3], CountText{rows, "any number of"},
          heads, dim);
  require(t.stride[3] == 1 || t.size() == 0, "{} has stride {} in its last dimension; it must be 1",
          name, t.stride[3]);
}

void check_lse(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
               Device device, DType dtype) {
  check_tensor(t, name, dtype, device);
  require(t.dims == 2 && t.shape[0] == rows && t.shape[1] == heads,
          "{} is {} (tokens, heads); [{}, {}] is wanted", name, shape_text(t), rows, heads);
}

void check_batch_lse(const Lse& lse, const char* name, std::int64_t rows, std::int64_t heads,
                     Device device, DType dtype) {
  const Tensor& t = lse.tensor;
  if (t.dims != 3) return check_lse(t, name, rows, heads, device, dtype);
  check_tensor(t, name, dtype, device);
  require(count_rows(t, 2) == rows && t.shape[2] == heads,
          "{} is {} (batch, tokens, heads); {} rows of {} heads are wanted", name, shape_text(t),
          rows, heads);
}

void check_product_dtype(DType dtype, const char* name) {
  require(is_float(dtype) && !is_fp8(dtype), "{} is {}; fp32, fp16 or bf16 is wanted", name,
          longspan::name(dtype));
}

void check_latent_rows(const Tensor& t, const char* name, DType dtype) {
  const RowFormat format = row_format_of(dtype);
  if (format.bytes == 0) return;
  const char* const type = longspan::name(dtype);
  require(
      t.dtype == DType::uint8 && t.dims >= 1 && t.shape[t.dims - 1] == format.bytes,
      "{} is {} of {}; a cache of {} is uint8 with rows of {} bytes: [keys, 1, {}] is wanted, or "
      "[batch, capacity, 1, {}], or pages [pages, page, 1, {}]",
      name, shape_text(t), longspan::name(t.dtype), type, format.bytes, format.bytes, format.bytes,
      format.bytes);
  if (t.size() == 0) return;
  require(t.stride[t.dims - 1] == 1, "{} has stride {} in its last dimension; rows of {} are dense",
          name, t.stride[t.dims - 1], type);
  constexpr int kAlign = 8;
  auto all = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.data));
  for (int d = 0; d + 2 < t.dims; ++d) all |= t.shape[d] > 1 ? t.stride[d] : 0;
  require(all % kAlign == 0,
          "{} is at {} with {} bytes from row to row; rows of {} begin at multiples of {} bytes",
          name, t.data, t.dims >= 3 ? t.stride[t.dims - 3] : 0, type, kAlign);
  require(
      format.apart == 0 || t.dims != 4 || t.shape[1] <= 1 || t.stride[1] == format.bytes,
      "{} has {} bytes from row to row; {} is one block in a page, the data of all rows and then "
      "their scales: make pages dense",
      name, t.stride[1], type);
}

void check_rows_are_written(DType dtype) {
  if (!is_latent_row(dtype) || row_format_of(dtype).rule != ScaleRule::none) return;
  throw Unsupported(fmt::format(
      "append to a cache of {} is not supported: such rows are read only; {}, {} and {} are "
      "written",
      name(dtype), name(DType::latent656), name(DType::latent656_pow2), name(DType::latent584)));
}

void check_quantised(DType found, const char* name, DType dtype, bool has_scale,
                     const char* scale_name) {
  if (is_latent_row(found))
    return require(!has_scale, "{} is given, and rows of {} carry their scales: leave it out",
                   scale_name, longspan::name(found));
  require(found == dtype || is_fp8(found), "{} is {}; {}, or fp8 with a scale, is wanted", name,
          longspan::name(found), longspan::name(dtype));
  require(!storage_of(found).needs_scale || has_scale,
          "{} is {} and there is no {}; give it (1 where none is due)", name, longspan::name(found),
          scale_name);
}

kernels::Rows rows_of(const Tensor& t) {
  return {t.data, t.stride[t.dims - 3], t.stride[t.dims - 2]};
}

kernels::TokenRows token_rows_of(const Tensor& t) {
  kernels::TokenRows rows(rows_of(t));
  if (t.dims == 4) rows.gap = gap_of(t);
  return rows;
}

kernels::LseView lse_of(const Tensor& t) {
  if (!t) return {};
  return {static_cast<float*>(t.data), t.stride[t.dims - 2], t.stride[t.dims - 1]};
}

kernels::TokenLse token_lse_of(const Lse& lse) {
  kernels::TokenLse view = lse_of(lse.tensor);
  if (lse.tensor.dims == 3) view.gap = gap_of(lse.tensor);
  return view;
}

namespace {

/// The rows of pages [pages, page, kv_heads, dim]; the last dimension may have any stride.
kernels::KvRows page_rows(const Tensor& t) {
  kernels::KvRows rows(t.data, t.stride[1], t.stride[2]);
  rows.page_stride = t.stride[0];
  rows.chunk_stride = rows.chunk * t.stride[3];
  rows.dim_stride = t.stride[3];
  return rows;
}

/// The rows of K in pages [pages, kv_heads, dim / x, page, x].
kernels::KvRows packed_keys(const Tensor& t) {
  kernels::KvRows rows(t.data, t.stride[3], t.stride[1]);
  rows.page_stride = t.stride[0];
  rows.chunk = static_cast<int>(t.shape[4]);
  rows.chunk_stride = t.stride[2];
  rows.dim_stride = t.stride[4];
  return rows;
}

/// The rows of V in pages [pages, kv_heads, dim, page].
kernels::KvRows packed_values(const Tensor& t) {
  kernels::KvRows rows(t.data, t.stride[3], t.stride[1]);
  rows.page_stride = t.stride[0];
  rows.chunk_stride = rows.chunk * t.stride[2];
  rows.dim_stride = t.stride[2];
  return rows;
}

bool same_shape_but_columns(const Tensor& a, const Tensor& b) {
  return a.dims == b.dims &&
         std::equal(a.shape.begin(), a.shape.begin() + a.dims - 1, b.shape.begin());
}

kernels::Pages view_table(const Tensor& table, int batch, Device device) {
  if (!table) return {};
  check_tensor(table, "block_table", DType::int32, device);
  require(table.dims == 2 && table.shape[0] >= batch, "block_table is {}; [{}, columns] is wanted",
          shape_text(table), batch);
  require(table.shape[1] <= kMostCount, "block_table has {} columns; 0 to 2^31 - 1 are possible",
          table.shape[1]);
  require(table.stride[0] <= kMostCount << 10 && table.stride[1] <= kMostCount << 10,
          "block_table has strides {} and {}; they are 0 to 2^41", table.stride[0],
          table.stride[1]);
  return {static_cast<const std::int32_t*>(table.data), table.stride[0], table.stride[1],
          table.shape[1]};
}

}  // namespace

CacheView view_contiguous(const Tensor& k, const Tensor& v, const CacheShape& shape,
                          Device device) {
  for (const auto& [t, name, dim] :
       {std::tuple{&k, "k", shape.head_dim}, std::tuple{&v, "v", shape.value_dim}}) {
    check_tensor(*t, name, shape.dtype, device);
    const bool packed = t->dims == 3;
    const int d = packed ? 1 : 2;
    require((packed || (t->dims == 4 && t->shape[0] >= shape.batch)) &&
                t->shape[d] == shape.kv_heads && t->shape[d + 1] == dim,
            "{} is {}; [keys, {}, {}] is wanted, or [{}, capacity, {}, {}], or pages with a "
            "block_table",
            name, shape_text(*t), shape.kv_heads, dim, shape.batch, shape.kv_heads, dim);
    require(t->stride[d + 1] == 1 || t->size() == 0,
            "{} has stride {} in its last dimension; it must be 1", name, t->stride[d + 1]);
    require(packed || t->size() == 0 || (t->stride[1] != 0 && t->stride[0] % t->stride[1] == 0),
            "{} has stride {} between sequences, which is not a multiple of the stride {} between "
            "keys; make the cache dense",
            name, t->stride[0], t->stride[1]);
  }
  require(same_shape_but_columns(k, v),
          "k is {} and v is {}; they must have one shape but for the last dimension", shape_text(k),
          shape_text(v));
  CacheView view;
  static_cast<kernels::Rows&>(view.k) = rows_of(k);
  static_cast<kernels::Rows&>(view.v) = rows_of(v);
  view.packed = k.dims == 3;
  view.keys = view.packed ? k.shape[0] : 0;
  if (!view.packed && k.size() > 0) {
    view.capacity = k.shape[1];
    view.pitch = k.stride[0] / k.stride[1];
    view.keys = (k.shape[0] - 1) * view.pitch + k.shape[1];
    require(v.stride[0] / v.stride[1] == view.pitch,
            "k has {} keys from one sequence to the next and v {}; they must be alike", view.pitch,
            v.stride[0] / v.stride[1]);
  }
  return view;
}

bool values_in_keys(const Tensor& k, const Tensor& v) {
  return k && v.data == k.data && v.dtype == k.dtype && same_shape_but_columns(k, v) &&
         v.shape[v.dims - 1] <= k.shape[k.dims - 1] &&
         std::equal(k.stride.begin(), k.stride.begin() + k.dims, v.stride.begin());
}

namespace {

/// Whether rows of v lie in rows of k: they begin at the same place, or have the same strides and
/// some columns in common.
bool lies_in(const Tensor& v, const Tensor& k) {
  if (k.size() == 0 || v.size() == 0) return false;
  if (v.data == k.data) return true;
  if (v.dtype != k.dtype || !same_shape_but_columns(k, v) ||
      !std::equal(k.stride.begin(), k.stride.begin() + k.dims, v.stride.begin()))
    return false;
  const auto bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(v.data) -
                                               reinterpret_cast<std::uintptr_t>(k.data));
  const int last = k.dims - 1;
  const std::int64_t step = storage_of(k.dtype).bytes(k.stride[last]);
  return bytes > -v.shape[last] * step && bytes < k.shape[last] * step;
}

}  // namespace

ScaleView scales_of_values(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name,
                           const ScaleView& k_scale, const ScaleView& v_scale, int batch,
                           int kv_heads, Device device) {
  if (!v_scale && k.size() == 0 && v.size() == 0) return k_scale;
  if (!lies_in(v, k)) return v_scale;
  if (!v_scale) return k_scale;
  require(bool{k_scale},
          "v_scale is given and k_scale is not; {} lies in the memory of {}, which has one scale: "
          "give k_scale alone",
          v_name, k_name);
  if (v_scale == k_scale) return k_scale;
  require(device == Device::host,
          "k_scale and v_scale are two tensors; {} lies in the memory of {}, which has one scale, "
          "and what they hold cannot be compared on a GPU without waiting for it: give the same "
          "tensor as both, or leave v_scale out",
          v_name, k_name);
  const int sequences = std::max(k_scale.sequences(batch), v_scale.sequences(batch));
  for (int b = 0; b < sequences; ++b)
    for (int h = 0; h < kv_heads; ++h)
      require(
          v_scale.of(b, h) == k_scale.of(b, h),
          "k_scale is {} and v_scale is {} of kv head {}{}; {} lies in the memory of {}, which has "
          "one scale: give the same, or leave v_scale out",
          k_scale.of(b, h), v_scale.of(b, h), h,
          sequences > 1 ? fmt::format(" of sequence {}", b) : "", v_name, k_name);
  return k_scale;
}

bool needs_new_values(const Tensor& new_v, const char* new_name, const Tensor& k,
                      const char* k_name, const Tensor& v, const char* v_name) {
  const bool needed = !values_in_keys(k, v);
  require(needed || !new_v, "{} is given, but {} is the first columns of {}: leave it out",
          new_name, v_name, k_name);
  return needed;
}

void check_written_cache(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name) {
  check_written(k, k_name);
  if (values_in_keys(k, v)) return;
  check_written(v, v_name);
  check_overlap(v, v_name, k, k_name);
}

CacheView view_pages(const Tensor& k, const Tensor& v, const Tensor& table, const CacheShape& shape,
                     Device device, const char* k_name, const char* v_name) {
  check_tensor(k, k_name, shape.dtype, device);
  check_tensor(v, v_name, shape.dtype, device);
  CacheView view;
  view.pages = view_table(table, shape.batch, device);
  std::int64_t page = 0;
  if (k.dims == 5) {
    const std::int64_t x = k.shape[4];
    page = k.shape[3];
    require(x >= 1 && k.shape[1] == shape.kv_heads && shape.head_dim % x == 0 &&
                k.shape[2] == shape.head_dim / x,
            "{} is {}; in x-packed pages [pages, {}, {} / x, page, x] is wanted", k_name,
            shape_text(k), shape.kv_heads, shape.head_dim);
    require(v.dims == 4 && v.shape[0] == k.shape[0] && v.shape[1] == shape.kv_heads &&
                v.shape[2] == shape.value_dim && v.shape[3] == page,
            "{} is {}; beside x-packed keys {} the values are [{}, {}, value_dim, {}]", v_name,
            shape_text(v), shape_text(k), k.shape[0], shape.kv_heads, page);
    view.k = packed_keys(k);
    view.v = packed_values(v);
  } else {
    require(k.dims == 4 && k.shape[2] == shape.kv_heads && k.shape[3] == shape.head_dim,
            "{} is {}; pages are [pages, page, {}, {}], or x-packed [pages, {}, {} / x, page, x]",
            k_name, shape_text(k), shape.kv_heads, shape.head_dim, shape.kv_heads, shape.head_dim);
    require(same_shape_but_columns(k, v) && v.shape[3] == shape.value_dim,
            "{} is {} and {} is {}; they must have one shape, and {} values in a row of the latter",
            k_name, shape_text(k), v_name, shape_text(v), shape.value_dim);
    page = k.shape[1];
    view.k = page_rows(k);
    view.v = page_rows(v);
  }
  require(page >= 1 && page <= std::numeric_limits<int>::max(),
          "{} {} has pages of {} keys; a page has 1 to 2^31 - 1", k_name, shape_text(k), page);
  require(k.shape[0] <= kMostCount, "{} {} has {} pages; 0 to 2^31 - 1 are possible", k_name,
          shape_text(k), k.shape[0]);
  view.pages.count = k.shape[0];
  view.pages.size = static_cast<int>(page);
  view.keys = k.shape[0] * page;
  return view;
}

CacheView view_slots(const Tensor& k, const Tensor& v, const CacheShape& shape, Device device) {
  CacheView view = k.dims >= 4 ? view_pages(k, v, {}, shape, device, "k", "v")
                               : view_contiguous(k, v, shape, device);
  view.packed = false;
  view.capacity = kMostCount;
  return view;
}

}  // namespace longspan

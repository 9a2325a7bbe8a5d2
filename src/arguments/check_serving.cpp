#include "src/arguments/check_serving.hpp"

#include <fmt/format.h>

#include <initializer_list>
#include <optional>
#include <type_traits>

#include "kernels/features.hpp"
#include "longspan/limits.hpp"
#include "src/arguments/array_checks.hpp"

namespace longspan {
namespace {

/// Checks out, which has the products' type, or fp8 with its scale.
void check_result(const Tensor& out, const Lse& lse, std::int64_t tokens, std::int64_t heads,
                  std::int64_t dim, DType dtype, bool has_scale, const char* scale_name,
                  Device device) {
  check_rows(out, "out", tokens, heads, dim, out.dtype, device);
  check_quantised(out.dtype, "out", dtype, has_scale, scale_name);
  if (lse) check_lse(lse.tensor, "lse", tokens, heads, device);
}

/// Checks extents that a kernel counts in 32 bits, of which there is at least one.
void check_counts(const Tensor& t, const char* name, int first) {
  for (int d = first; d < t.dims; ++d)
    require(t.shape[d] >= 1 && t.shape[d] <= kMostCount,
            "{} is {}: dimension {} has {} elements; 1 to 2^31 - 1 are possible", name,
            shape_text(t), d, t.shape[d]);
}

/// Checks the type of a part of a merge: any type, fp8 with its scale.
void check_part_type(const Tensor& t, const char* name, const Tensor& scale,
                     const char* scale_name) {
  require(is_float(t.dtype), "{} has a type of number {}, which is no float type", name,
          static_cast<int>(t.dtype));
  require(!is_fp8(t.dtype) || scale, "{} is {} and there is no {}; give it (1 where none is due)",
          name, longspan::name(t.dtype), scale_name);
}

void refuse_input(const std::string& what) { throw InputError(what); }

/// Checks factors [count]. On the host it looks at what they hold.
void check_factors(const Tensor& factors, const char* name, std::int64_t count, bool divides,
                   Device device) {
  const float* values = array_of<float>(factors, name, count, device);
  if (device == Device::host) check_scales({values, true}, name, static_cast<int>(count), divides);
}

/// Checks that a type which stands in the options of a call is that of its tensor.
void check_type(std::optional<DType> asked, DType found, const char* name) {
  require(!asked || *asked == found, "dtypes says that {} is {}; it is {}", name,
          longspan::name(asked.value_or(found)), longspan::name(found));
}

/// Checks what all attention on one rank has beside tensors, and what the factors of its tensors
/// hold.
template <class Args>
void check_call(const Args& args, const PagedShape& shape, const RunArrays& arrays, Device device) {
  require(args.max_query_len >= 0 && args.max_query_len <= kMostCount,
          "max_query_len {} is not in 0 to 2^31 - 1; 0 means unknown", args.max_query_len);
  require(args.max_kv_len >= 0 && args.max_kv_len <= kMostCount,
          "max_kv_len {} is not in 0 to 2^31 - 1; 0 means {}", args.max_kv_len,
          std::is_same_v<Args, PagedAttention> ? "what the table can hold" : "unknown");
  check_mask(args.mask, refuse_input);
  check_score(args.score, shape.head_dim, refuse_input);
  require(!args.dtypes.tf32 || shape.dtype == DType::fp32,
          "tf32 is a way to make fp32 products; dtypes.compute is {}", name(shape.dtype));
  require(!args.dtypes.bf16_products || shape.dtype == DType::bf16,
          "bf16_products is a way to make bf16 products; dtypes.compute is {}", name(shape.dtype));
  if (args.dtypes.fp8_products)
    throw Unsupported(
        std::string("fp8_products is not supported by ") +
        (std::is_same_v<Args, AttendState> ? "attend_state" : "calls over a paged cache") +
        "; leave it off");
  if (device != Device::host) return;
  check_scales(arrays.q_scale, "q_scale", shape.kv_heads, false);
  check_scales(arrays.k_scale, "k_scale", shape.kv_heads, false);
  check_scales(arrays.v_scale, "v_scale", shape.kv_heads, false);
  check_score_factors(args.score, shape.head_dim, arrays, shape.heads, shape.kv_heads);
}

/// The sizes of q, rows of a batch, over keys and values of these forms.
PagedShape shape_of(const Tensor& q, const Tensor& k, const char* k_name, const Tensor& v,
                    const DTypes& dtypes) {
  const std::int64_t heads = q.shape[q.dims - 2], kv_heads = k.shape[k.dims == 5 ? 1 : k.dims - 2];
  const std::int64_t tokens = count_rows(q);
  require(tokens >= 0 && tokens <= kMostCount && heads >= 1 && heads <= kMostCount &&
              kv_heads >= 1 && heads % kv_heads == 0,
          "q is {} and {} is {}: heads {} must be a multiple of kv_heads {}", shape_text(q), k_name,
          shape_text(k), heads, kv_heads);
  const std::int64_t head_dim = q.shape[q.dims - 1],
                     value_dim = v.shape[k.dims == 5 ? 2 : v.dims - 1];
  require(head_dim >= 0 && head_dim <= kMostCount && value_dim >= 0 && value_dim <= kMostCount,
          "q is {} and the values are {}: heads have {} and {} columns; 0 to 2^31 - 1 are possible",
          shape_text(q), shape_text(v), head_dim, value_dim);
  const DType dtype = is_fp8(q.dtype) ? dtypes.compute : q.dtype;
  check_product_dtype(dtype, "dtypes.compute");
  return {dtype,
          tokens,
          static_cast<int>(heads),
          static_cast<int>(kv_heads),
          static_cast<int>(head_dim),
          static_cast<int>(value_dim)};
}

/// The caller's memory for states, as a tensor of bytes.
Tensor bytes_of(const AttentionState& state, Device device) {
  return {state.data, DType::uint8, {static_cast<std::int64_t>(state.bytes)}, device};
}

void check_state(const AttentionState& state, std::int64_t tokens, std::int64_t heads,
                 std::int64_t value_dim) {
  const std::size_t needed = check_state_size(tokens, heads, value_dim);
  require(state.bytes >= needed && (state.data != nullptr || needed == 0),
          "state has {} bytes; the states of [{}, {}] rows with a value_dim of {} take {} "
          "(state_bytes)",
          state.data == nullptr ? 0 : state.bytes, tokens, heads, value_dim, needed);
  require(state.bytes < std::size_t{1} << 62, "state has {} bytes, more than there are",
          state.bytes);
  require(reinterpret_cast<std::uintptr_t>(state.data) % 256 == 0,
          "state lies at {}; it must be aligned to 256 bytes", state.data);
}

/// The batch of rows by query_start, or of all.
kernels::Batch batch_of_rows(const Tensor& query_start, std::int64_t tokens, Device device) {
  kernels::Batch batch;
  if (!query_start) return batch;
  batch.query_start = array_of<std::int32_t>(query_start, "query_start", -1, device);
  require(query_start.shape[0] >= 2 && query_start.shape[0] - 1 <= kMostCount,
          "query_start is {}; [batch + 1] of 1 to 2^31 - 1 sequences is wanted",
          shape_text(query_start));
  batch.size = static_cast<int>(query_start.shape[0] - 1);
  if (device == Device::host) check_starts(batch, tokens);
  return batch;
}

/// Checks that out and lse may be written, and are nothing that the call reads.
void check_results(const Tensor& out, const Lse& lse,
                   std::initializer_list<std::pair<const Tensor*, const char*>> inputs) {
  if (out.dims == 0) return;
  check_written(out, "out");
  if (lse) check_written(lse.tensor, "lse");
  if (lse) check_overlap(lse.tensor, "lse", out, "out");
  for (const auto& [in, name] : inputs) {
    check_overlap(out, "out", *in, name);
    if (lse) check_overlap(lse.tensor, "lse", *in, name);
  }
}

}  // namespace

PagedShape shape_of(const PagedAttention& args) {
  const Tensor &q = args.q, &k = args.k_cache;
  require(q.dims == 3, "q is {}; [tokens, heads, head_dim] is wanted", shape_text(q));
  require(
      k.dims == 4 || k.dims == 5,
      "k_cache is {}; pages are [pages, page, kv_heads, head_dim], or x-packed [pages, kv_heads, "
      "head_dim / x, page, x]",
      shape_text(k));
  const Tensor& v = args.v_cache;
  require(v.dims == 4,
          "v_cache is {}; pages are [pages, page, kv_heads, value_dim], or beside "
          "x-packed keys [pages, kv_heads, value_dim, page]",
          shape_text(v));
  return shape_of(q, k, "k_cache", v, args.dtypes);
}

PagedShape shape_of(const AttendState& args) {
  const Tensor &q = args.q, &k = args.k, &v = args.v;
  require(q.dims == 3 || q.dims == 4,
          "q is {}; [tokens, heads, head_dim] is wanted, or [batch, heads, tokens, head_dim]",
          shape_text(q));
  require(k.dims >= 3 && k.dims <= (args.block_table ? 5 : 4) && (k.dims > 3 || !args.block_table),
          "k is {}; [keys, kv_heads, head_dim] is wanted, or [batch, capacity, kv_heads, "
          "head_dim], or pages with a block_table",
          shape_text(k));
  require(v.dims == (k.dims == 5 ? 4 : k.dims),
          "v is {} and k is {}; they have the same form (attention.hpp)", shape_text(v),
          shape_text(k));
  return shape_of(q, k, "k", v, args.dtypes);
}

Checked check_paged(const PagedAttention& args, const PagedShape& shape, bool needs_out,
                    Device device) {
  RunArrays arrays = arrays_of(args, shape.heads, shape.kv_heads, device);
  check_rows(args.q, "q", -1, shape.heads, shape.head_dim, args.q.dtype, device);
  check_quantised(args.q.dtype, "q", shape.dtype, bool{args.q_scale}, "q_scale");
  check_quantised(args.k_cache.dtype, "k_cache", shape.dtype, bool{args.k_scale}, "k_scale");
  check_type(args.dtypes.query, args.q.dtype, "q");
  check_type(args.dtypes.kv, args.k_cache.dtype, "k_cache");
  check_type(args.dtypes.out, args.out.dtype, "out");
  require(bool{args.block_table}, "block_table is missing");
  const CacheView cache = view_pages(
      args.k_cache, args.v_cache, args.block_table,
      {shape.kv_heads, shape.head_dim, shape.value_dim, args.k_cache.dtype, arrays.batch}, device,
      "k_cache", "v_cache");
  arrays.v_scale = scales_of_values(args.k_cache, "k_cache", args.v_cache, "v_cache",
                                    arrays.k_scale, arrays.v_scale, shape.kv_heads, device);
  kernels::check_head_dims(shape.head_dim, shape.value_dim);
  check_quantised(args.v_cache.dtype, "v_cache", shape.dtype, bool{arrays.v_scale}, "v_scale");
  check_call(args, shape, arrays, device);
  if (device == Device::host) check_scales({arrays.out_scale}, "out_scale", 1, true);
  require(!needs_out || args.out.dims > 0, "out is missing");
  require(args.out.dims > 0 || (!args.lse && !args.out_scale),
          "lse and out_scale go with out, which is missing");
  return {cache, arrays};
}

void check_new_keys(const ContextAttention& args, const PagedShape& shape, Device device) {
  const PagedAttention& paged = args.attention;
  check_rows(args.k, "k", shape.tokens, shape.kv_heads, shape.head_dim, shape.dtype, device);
  check_rows(args.v, "v", shape.tokens, shape.kv_heads, shape.value_dim, shape.dtype, device);
  require(!paged.out_scale || !args.out_scale_inv,
          "out_scale divides and out_scale_inv multiplies; give one of them");
  check_result(paged.out, paged.lse, shape.tokens, shape.heads, shape.value_dim, shape.dtype,
               paged.out_scale || args.out_scale_inv, "out_scale or out_scale_inv", device);
  check_factors(args.out_scale_inv, "out_scale_inv", 1, false, device);
  check_results(paged.out, paged.lse,
                {{&paged.q, "q"},
                 {&args.k, "k"},
                 {&args.v, "v"},
                 {&paged.k_cache, "k_cache"},
                 {&paged.v_cache, "v_cache"}});
}

void check_output(const PagedAttention& args, const PagedShape& shape, Device device) {
  if (args.out.dims == 0) return;
  check_result(args.out, args.lse, shape.tokens, shape.heads, shape.value_dim, shape.dtype,
               bool{args.out_scale}, "out_scale", device);
  check_results(args.out, args.lse,
                {{&args.q, "q"}, {&args.k_cache, "k_cache"}, {&args.v_cache, "v_cache"}});
}

void check_handed_out(const SegmentedAttention& args, const PagedShape& shape, Device device) {
  require(!args.skip_decode,
          "skip_decode is given with segments, of which it would leave some unwritten; hand out "
          "those of all sequences");
  check_segments(args.segments, shape.tokens, shape.heads, shape.value_dim, device);
}

void check_segments(const Segments& s, std::int64_t tokens, std::int64_t heads,
                    std::int64_t least_dim, Device device) {
  check_tensor(s.output, "segments.output", DType::fp32, device);
  require(s.output.dims == 4 && s.output.shape[0] == tokens && s.output.shape[1] == heads &&
              s.output.shape[2] >= 1 && s.output.shape[2] <= kMostCount &&
              s.output.shape[3] >= least_dim,
          "segments.output is {}; [{}, {}, segments, at least {}] is wanted", shape_text(s.output),
          tokens, heads, least_dim);
  const std::int64_t count = s.output.shape[2], padded = s.output.stride[2];
  require(s.output.size() == 0 || (s.output.stride[3] == 1 && padded >= s.output.shape[3] &&
                                   padded <= kMostCount && s.output.stride[1] == count * padded &&
                                   s.output.stride[0] == heads * count * padded),
          "segments.output {} has strides {}, {}, {}, {}: its rows lie one behind the other",
          shape_text(s.output), s.output.stride[0], s.output.stride[1], s.output.stride[2],
          s.output.stride[3]);
  for (const auto& [t, name] :
       {std::pair{&s.max, "segments.max"}, std::pair{&s.expsum, "segments.expsum"}}) {
    check_tensor(*t, name, DType::fp32, device);
    require(t->dims == 3 && t->shape[0] == tokens && t->shape[1] == heads && t->shape[2] == count,
            "{} is {}; [{}, {}, {}] is wanted", name, shape_text(*t), tokens, heads, count);
    require(t->size() == 0 ||
                (t->stride[2] == 1 && t->stride[1] == count && t->stride[0] == heads * count),
            "{} {} has strides {}, {}, {}; it must be dense", name, shape_text(*t), t->stride[0],
            t->stride[1], t->stride[2]);
  }
  require(s.keys >= 0, "segments have {} keys; 0 means as many tiles as fill them", s.keys);
  require(s.keys <= kMostCount, "segments have {} keys; at most 2^31 - 1 are possible", s.keys);
  check_overlap(s.max, "segments.max", s.output, "segments.output");
  check_overlap(s.expsum, "segments.expsum", s.output, "segments.output");
  check_overlap(s.expsum, "segments.expsum", s.max, "segments.max");
  require(s.tile >= 1, "a tile has {} keys; it has at least 1", s.tile);
}

kernels::Batch check_reduce(const ReduceSegments& args, Device device) {
  require(bool{args.kv_len}, "kv_len is missing: the length of each sequence, new tokens included");
  kernels::Batch batch;
  batch.size = batch_of(args.kv_len);
  require(batch.size == 1 || args.query_start, "a batch of {} sequences needs query_start",
          batch.size);
  batch.query_start =
      array_of<std::int32_t>(args.query_start, "query_start", std::int64_t{batch.size} + 1, device);
  batch.kv_len = array_of<std::int32_t>(args.kv_len, "kv_len", batch.size, device);
  require(args.out.dims == 3, "out is {}; [tokens, heads, value_dim] is wanted",
          shape_text(args.out));
  const std::int64_t tokens = args.out.shape[0], heads = args.out.shape[1], dim = args.out.shape[2];
  check_part_type(args.out, "out", args.out_scale, "out_scale");
  check_counts(args.out, "out", 1);
  check_rows(args.out, "out", -1, heads, dim, args.out.dtype, device);
  check_factors(args.out_scale, "out_scale", 1, true, device);
  if (args.lse) check_lse(args.lse.tensor, "lse", tokens, heads, device);
  check_segments(args.segments, tokens, heads, dim, device);
  check_results(args.out, args.lse,
                {{&args.segments.output, "segments.output"},
                 {&args.segments.max, "segments.max"},
                 {&args.segments.expsum, "segments.expsum"}});
  return batch;
}

void check_merge(const MergeAttnStates& args, Device device) {
  const Tensor &prefix = args.prefix_out, &suffix = args.suffix_out, &out = args.out;
  require(prefix.dims == 3, "prefix_out is {}; [tokens, heads, value_dim] is wanted",
          shape_text(prefix));
  const std::int64_t tokens = prefix.shape[0], heads = prefix.shape[1], dim = prefix.shape[2];
  check_part_type(prefix, "prefix_out", args.prefix_scale, "prefix_scale");
  check_part_type(suffix, "suffix_out", args.suffix_scale, "suffix_scale");
  check_part_type(out, "out", args.out_scale, "out_scale");
  check_counts(prefix, "prefix_out", 1);
  check_rows(prefix, "prefix_out", -1, heads, dim, prefix.dtype, device);
  check_rows(suffix, "suffix_out", tokens, heads, dim, suffix.dtype, device);
  check_rows(out, "out", tokens, heads, dim, out.dtype, device);
  check_lse(args.prefix_lse.tensor, "prefix_lse", tokens, heads, device);
  check_lse(args.suffix_lse.tensor, "suffix_lse", tokens, heads, device);
  if (args.out_lse) check_lse(args.out_lse.tensor, "out_lse", tokens, heads, device);
  require(args.prefill_tokens_with_context.value_or(0) >= 0,
          "prefill_tokens_with_context is {}; it is a number of tokens",
          args.prefill_tokens_with_context.value_or(0));
  check_factors(args.prefix_scale, "prefix_scale", 1, false, device);
  check_factors(args.suffix_scale, "suffix_scale", 1, false, device);
  check_factors(args.out_scale, "out_scale", 1, true, device);
  check_written(out, "out");
  check_overlap(out, "out", prefix, "prefix_out", true);
  check_overlap(out, "out", suffix, "suffix_out", true);
  check_overlap(out, "out", args.prefix_lse.tensor, "prefix_lse");
  check_overlap(out, "out", args.suffix_lse.tensor, "suffix_lse");
  if (args.out_lse) {
    const Tensor& lse = args.out_lse.tensor;
    check_written(lse, "out_lse");
    check_overlap(lse, "out_lse", args.prefix_lse.tensor, "prefix_lse", true);
    check_overlap(lse, "out_lse", args.suffix_lse.tensor, "suffix_lse", true);
    check_overlap(lse, "out_lse", out, "out");
    check_overlap(lse, "out_lse", prefix, "prefix_out");
    check_overlap(lse, "out_lse", suffix, "suffix_out");
  }
}

void check_merge(const MergeStates& args, Device device) {
  const Tensor &in = args.parts, &lses = args.lses.tensor, &out = args.out;
  check_part_type(in, "parts", args.part_scales, "part_scales");
  check_part_type(out, "out", args.out_scale, "out_scale");
  check_tensor(in, "parts", in.dtype, device);
  require(in.dims == 4 && in.shape[0] >= 1 && in.shape[0] <= kMostCount,
          "parts is {}; [parts, tokens, heads, dim] of at least one part is wanted",
          shape_text(in));
  check_counts(in, "parts", 2);
  require(in.stride[3] == 1 || in.size() == 0,
          "parts has stride {} in its last dimension; it must be 1", in.stride[3]);
  check_rows(out, "out", in.shape[1], in.shape[2], in.shape[3], out.dtype, device);
  check_tensor(lses, "lses", DType::fp32, device);
  require(lses.dims == 3 && lses.shape[0] == in.shape[0] && lses.shape[1] == in.shape[1] &&
              lses.shape[2] == in.shape[2],
          "lses is {} (parts, tokens, heads); [{}, {}, {}] is wanted", shape_text(lses),
          in.shape[0], in.shape[1], in.shape[2]);
  if (args.out_lse) check_lse(args.out_lse.tensor, "out_lse", in.shape[1], in.shape[2], device);
  check_factors(args.part_scales, "part_scales", in.shape[0], false, device);
  check_factors(args.out_scale, "out_scale", 1, true, device);
  check_written(out, "out");
  check_overlap(out, "out", in, "parts");
  check_overlap(out, "out", lses, "lses");
  if (args.out_lse) {
    check_written(args.out_lse.tensor, "out_lse");
    check_overlap(args.out_lse.tensor, "out_lse", lses, "lses");
    check_overlap(args.out_lse.tensor, "out_lse", in, "parts");
    check_overlap(args.out_lse.tensor, "out_lse", out, "out");
  }
}

void check_merge(const MergeArgs& args, const MergeOptions& options, int ranks, Device device) {
  const Tensor &part = args.part, &out = args.out;
  const bool whole = !options.scatter_heads;
  const std::int64_t heads = whole ? options.heads : options.heads / ranks;
  check_batch_rows(part, "part", -1, options.heads, options.value_dim, options.dtype, device);
  const std::int64_t tokens = count_rows(part);
  require(tokens <= options.max_tokens,
          "part has {} tokens; the merge was made for at most {} (max_tokens)", tokens,
          options.max_tokens);
  check_apart({&part, &out}, {&args.part_lse, &args.lse});
  check_part_type(part, "part", args.part_scale, "part_scale");
  require(is_fp8(part.dtype) || !args.part_scale,
          "part_scale is given and part is {}; parts of fp8 have one", name(part.dtype));
  check_batch_lse(args.part_lse, "part_lse", tokens, options.heads, device);
  check_batch_rows(out, "out", tokens, heads, options.value_dim, options.of_out(), device);
  check_part_type(out, "out", args.out_scale, "out_scale");
  check_factors(args.part_scale, "part_scale", 1, false, device);
  check_factors(args.out_scale, "out_scale", 1, true, device);
  check_written(out, "out");
  check_overlap(out, "out", part, "part", whole);
  check_overlap(out, "out", args.part_lse.tensor, "part_lse");
  if (!args.lse) return;
  const Tensor& lse = args.lse.tensor;
  check_batch_lse(args.lse, "lse", tokens, heads, device);
  check_written(lse, "lse");
  check_overlap(lse, "lse", args.part_lse.tensor, "part_lse", whole);
  check_overlap(lse, "lse", part, "part");
  check_overlap(lse, "lse", out, "out");
}

Checked check_append(const AppendKv& args, Device device) {
  require(args.k.dims == 3, "k is {}; [tokens, kv_heads, head_dim] is wanted", shape_text(args.k));
  check_product_dtype(args.k.dtype, "k");
  const std::int64_t tokens = args.k.shape[0], kv_heads = args.k.shape[1];
  const std::int64_t head_dim = args.k.shape[2];
  check_counts(args.k, "k", 1);
  check_rows(args.k, "k", -1, kv_heads, head_dim, args.k.dtype, device);
  const Tensor& v_cache = args.v_cache;
  require(v_cache.dims == 4,
          "v_cache is {}; pages are [pages, page, kv_heads, value_dim], or "
          "beside x-packed keys [pages, kv_heads, value_dim, page]",
          shape_text(v_cache));
  const std::int64_t value_dim = v_cache.shape[args.k_cache.dims == 5 ? 2 : 3];
  if (needs_new_values(args.v, "v", args.k_cache, "k_cache", args.v_cache, "v_cache"))
    check_rows(args.v, "v", tokens, kv_heads, value_dim, args.k.dtype, device);
  check_quantised(args.k_cache.dtype, "k_cache", args.k.dtype, bool{args.k_scale}, "k_scale");
  require(args.slots || tokens == 0, "slots is missing");
  array_of<std::int64_t>(args.slots, "slots", tokens, device);
  RunArrays arrays;
  arrays.k_scale = scales_of(args.k_scale, "k_scale", static_cast<int>(kv_heads), device);
  arrays.v_scale = scales_of(args.v_scale, "v_scale", static_cast<int>(kv_heads), device);
  require(tokens <= kMostCount, "k is {}: {} tokens; 0 to 2^31 - 1 are possible",
          shape_text(args.k), tokens);
  const CacheView cache = view_pages(args.k_cache, args.v_cache, {},
                                     {kv_heads, head_dim, value_dim, args.k_cache.dtype, 1}, device,
                                     "k_cache", "v_cache");
  arrays.v_scale =
      scales_of_values(args.k_cache, "k_cache", args.v_cache, "v_cache", arrays.k_scale,
                       arrays.v_scale, static_cast<int>(kv_heads), device);
  check_quantised(args.v_cache.dtype, "v_cache", args.k.dtype, bool{arrays.v_scale}, "v_scale");
  check_written_cache(args.k_cache, "k_cache", args.v_cache, "v_cache");
  for (const auto& [to, name] :
       {std::pair{&args.k_cache, "k_cache"}, std::pair{&args.v_cache, "v_cache"}}) {
    check_overlap(*to, name, args.k, "k");
    if (args.v) check_overlap(*to, name, args.v, "v");
  }
  if (device == Device::host) {
    check_scales(arrays.k_scale, "k_scale", static_cast<int>(kv_heads), true);
    check_scales(arrays.v_scale, "v_scale", static_cast<int>(kv_heads), true);
  }
  return {cache, arrays};
}

void check_sizes(const Tensor& q, const PagedShape& shape, std::int64_t slots) {
  kernels::check_head_dims(shape.head_dim, shape.value_dim);
  const double bytes =
      static_cast<double>(shape.tokens) * shape.heads * (4.0 * shape.value_dim + 8) * slots;
  require(bytes < 0x1p48,
          "q is {} and there are {} segments: their states take {:.3g} bytes; give less in one "
          "call",
          shape_text(q), slots, bytes);
}

Checked check_attend(const AttendState& args, const PagedShape& shape, Device device) {
  RunArrays arrays = arrays_of(args, shape.heads, shape.kv_heads, device);
  check_batch_rows(args.q, "q", -1, shape.heads, shape.head_dim, args.q.dtype, device);
  check_quantised(args.q.dtype, "q", shape.dtype, bool{args.q_scale}, "q_scale");
  check_quantised(args.k.dtype, "k", shape.dtype, bool{args.k_scale}, "k_scale");
  check_type(args.dtypes.query, args.q.dtype, "q");
  check_type(args.dtypes.kv, args.k.dtype, "k");
  require(!args.dtypes.out,
          "dtypes.out is {}, and a state is fp32: FinishState::out has the type of the result",
          name(args.dtypes.out.value_or(DType::fp32)));
  const CacheShape wanted{shape.kv_heads, shape.head_dim, shape.value_dim, args.k.dtype,
                          arrays.batch};
  const CacheView cache =
      args.block_table ? view_pages(args.k, args.v, args.block_table, wanted, device, "k", "v")
                       : view_contiguous(args.k, args.v, wanted, device);
  arrays.v_scale = scales_of_values(args.k, "k", args.v, "v", arrays.k_scale, arrays.v_scale,
                                    shape.kv_heads, device);
  kernels::check_head_dims(shape.head_dim, shape.value_dim);
  check_quantised(args.v.dtype, "v", shape.dtype, bool{arrays.v_scale}, "v_scale");
  check_call(args, shape, arrays, device);
  check_state(args.state, shape.tokens, shape.heads, shape.value_dim);
  const Tensor state = bytes_of(args.state, device);
  check_overlap(state, "state", args.q, "q");
  check_overlap(state, "state", args.k, "k");
  check_overlap(state, "state", args.v, "v");
  const Tensor workspace{
      args.workspace.data, DType::uint8, {static_cast<std::int64_t>(args.workspace.bytes)}, device};
  check_overlap(state, "state", workspace, "workspace");
  if (device != Device::host && arrays.kv_len == nullptr && arrays.keys.layout != Layout::ranges)
    check_room(arrays.keys, cache);
  return {cache, arrays};
}

kernels::Batch check_finish(const FinishState& args, Device device) {
  const Tensor& out = args.out;
  require(out.dims == 3 || out.dims == 4,
          "out is {}; [tokens, heads, value_dim] is wanted, or [batch, heads, tokens, value_dim]",
          shape_text(out));
  const std::int64_t tokens = count_rows(out), heads = out.shape[out.dims - 2];
  const std::int64_t dim = out.shape[out.dims - 1];
  check_part_type(out, "out", args.out_scale, "out_scale");
  check_counts(out, "out", out.dims - 2);
  check_batch_rows(out, "out", -1, heads, dim, out.dtype, device);
  check_state(args.state, tokens, heads, dim);
  if (args.lse) check_batch_lse(args.lse, "lse", tokens, heads, device);
  check_apart({&out}, {&args.lse});
  check_factors(args.out_scale, "out_scale", 1, true, device);
  const Tensor state = bytes_of(args.state, device);
  check_results(out, args.lse, {{&state, "state"}});
  return batch_of_rows(args.query_start, tokens, device);
}

kernels::Batch check_export(const ExportState& args, std::int64_t value_dim, Device device) {
  const Tensor& output = args.output;
  require(output.dims == 4 && output.shape[2] == 1,
          "output is {}; [tokens, heads, 1, at least value_dim] is wanted", shape_text(output));
  check_counts(output, "output", 1);
  check_state(args.state, output.shape[0], output.shape[1], value_dim);
  check_segments({output, args.max, args.expsum}, output.shape[0], output.shape[1], value_dim,
                 device);
  const Tensor state = bytes_of(args.state, device);
  for (const auto& [to, name] : {std::pair{&args.output, "output"}, std::pair{&args.max, "max"},
                                 std::pair{&args.expsum, "expsum"}})
    check_overlap(*to, name, state, "state");
  return batch_of_rows(args.query_start, output.shape[0], device);
}

std::size_t check_state_size(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim) {
  require(tokens >= 0 && tokens <= kMostCount && heads >= 1 && heads <= kMostCount,
          "states of [{}, {}] rows were asked for; there are 0 to 2^31 - 1 tokens and 1 to "
          "2^31 - 1 heads",
          tokens, heads);
  kernels::check_head_dims(kHeadDimStep, value_dim);
  const double bytes = static_cast<double>(tokens) * static_cast<double>(heads) *
                       (4.0 * static_cast<double>(value_dim) + 8);
  require(bytes < 0x1p48, "states of [{}, {}] rows take {:.3g} bytes; give less in one call",
          tokens, heads, bytes);
  return static_cast<std::size_t>(
      kernels::StateSlots::bytes(tokens * heads, static_cast<int>(value_dim)));
}

void check_workspace(const Workspace& workspace, std::size_t needed) {
  require(workspace.bytes >= needed && (workspace.data != nullptr || needed == 0),
          "workspace has {} bytes; this call needs {} (workspace_bytes)",
          workspace.data == nullptr ? 0 : workspace.bytes, needed);
  require(reinterpret_cast<std::uintptr_t>(workspace.data) % 256 == 0,
          "workspace lies at {}; it must be aligned to 256 bytes", workspace.data);
}

void check_new_lengths(const kernels::Batch& batch, std::int64_t tokens) {
  for (int b = 0; b < batch.size; ++b)
    require(batch.query_len(b, tokens) <= batch.kv_len[b],
            "sequence {} has {} new tokens and kv_len {}, which must count them", b,
            batch.query_len(b, tokens), batch.kv_len[b]);
}

}  // namespace longspan

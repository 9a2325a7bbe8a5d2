#include "src/arguments/check_serving.hpp"

#include <fmt/format.h>

#include <optional>
#include <type_traits>

#include "kernels/features.hpp"
#include "longspan/limits.hpp"
#include "src/arguments/array_checks.hpp"
#include "src/arguments/check_results.hpp"
#include "src/arguments/check_state.hpp"

namespace longspan {
namespace {

void refuse_input(const std::string& what) { throw InputError(what); }

/// Checks that a type in the options of a call is the type of its tensor.
void check_type(std::optional<DType> asked, DType found, const char* name) {
  require(!asked || *asked == found, "dtypes says that {} is {}; it is {}", name,
          longspan::name(asked.value_or(found)), longspan::name(found));
}

/// Checks what all attention on one rank has besides tensors, and the values of its tensors'
/// scales.
template <class Args>
void check_call(const Args& args, const PagedShape& shape, const RunArrays& arrays, Device device) {
  require(args.max_query_len >= 0 && args.max_query_len <= kMostCount,
          "max_query_len {} is not in 0 to 2^31 - 1; 0 means unknown", args.max_query_len);
  require(args.max_kv_len >= 0 && args.max_kv_len <= kMostCount,
          "max_kv_len {} is not in 0 to 2^31 - 1; 0 means {}", args.max_kv_len,
          std::is_same_v<Args, PagedAttention> ? "what the table can hold" : "unknown");
  check_mask(args.mask, refuse_input);
  if (args.mask.prefix > 0)
    throw Unsupported("a prefix in a call is not supported; an Attention has it");
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
  check_scales(arrays.q_scale, "q_scale", arrays.batch, shape.kv_heads, false);
  check_scales(arrays.k_scale, "k_scale", arrays.batch, shape.kv_heads, false);
  check_scales(arrays.v_scale, "v_scale", arrays.batch, shape.kv_heads, false);
  check_score_factors(args.score, shape.head_dim, arrays, shape.heads, shape.kv_heads);
}

/// The sizes of q, rows of a batch, with keys and values of these forms.
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

/// The keys and values of a call, with their names in it.
struct NamedKeys {
  const Tensor &k, &v;
  const char *k_name, *v_name;
};
NamedKeys keys_of(const PagedAttention& args) {
  return {args.k_cache, args.v_cache, "k_cache", "v_cache"};
}
NamedKeys keys_of(const AttendState& args) { return {args.k, args.v, "k", "v"}; }

/// Whether rows name rows of the cache.
bool by_slots(const PagedAttention&) { return false; }
bool by_slots(const AttendState& args) { return args.index.slots && !args.block_table; }

/// Checks the inputs of all attention on one rank.
template <class Args>
Checked check_inputs(const Args& args, const PagedShape& shape, Device device) {
  const auto [k, v, k_name, v_name] = keys_of(args);
  RunArrays arrays = arrays_of(args, shape.heads, shape.kv_heads, device);
  check_batch_rows(args.q, "q", -1, shape.heads, shape.head_dim, args.q.dtype, device);
  check_quantised(args.q.dtype, "q", shape.dtype, bool{args.q_scale}, "q_scale");
  check_quantised(k.dtype, k_name, shape.dtype, bool{args.k_scale}, "k_scale");
  check_type(args.dtypes.query, args.q.dtype, "q");
  check_type(args.dtypes.kv, k.dtype, k_name);
  const CacheShape wanted{shape.kv_heads, shape.head_dim, shape.value_dim, k.dtype, arrays.batch};
  const CacheView cache = by_slots(args) ? view_slots(k, v, wanted, device)
                          : args.block_table
                              ? view_pages(k, v, args.block_table, wanted, device, k_name, v_name)
                              : view_contiguous(k, v, wanted, device);
  arrays.v_scale = scales_of_values(k, k_name, v, v_name, arrays.k_scale, arrays.v_scale,
                                    arrays.batch, shape.kv_heads, device);
  kernels::check_head_dims(shape.head_dim, shape.value_dim);
  check_quantised(v.dtype, v_name, shape.dtype, bool{arrays.v_scale}, "v_scale");
  check_call(args, shape, arrays, device);
  return {cache, arrays};
}

/// Checks out, which has the type of the products, or fp8 with its scale, and lse.
void check_result(const PagedAttention& args, const PagedShape& shape, bool has_scale,
                  const char* scale_name, Device device) {
  check_rows(args.out, "out", shape.tokens, shape.heads, shape.value_dim, args.out.dtype, device);
  check_quantised(args.out.dtype, "out", shape.dtype, has_scale, scale_name);
  if (args.lse) check_lse(args.lse.tensor, "lse", shape.tokens, shape.heads, device);
}

/// Checks a factor of the result that may stand in place of out_scale.
void check_inverse(const PagedAttention& args, const Tensor& out_scale_inv, Device device) {
  require(!args.out_scale || !out_scale_inv,
          "out_scale divides and out_scale_inv multiplies; give one of them");
  check_factors(out_scale_inv, "out_scale_inv", 1, false, device);
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
  check_index_options(args.index, refuse_input);
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
  check_type(args.dtypes.out, args.out.dtype, "out");
  require(bool{args.block_table}, "block_table is missing");
  Checked checked = check_inputs(args, shape, device);
  if (device == Device::host)
    check_scales(ScaleView::dense(checked.arrays.out_scale, 1), "out_scale", 1, 1, true);
  require(!needs_out || args.out.dims > 0, "out is missing");
  require(args.out.dims > 0 || (!args.lse && !args.out_scale),
          "lse and out_scale go with out, which is missing");
  return checked;
}

void check_new_keys(const ContextAttention& args, const PagedShape& shape, Device device) {
  const PagedAttention& paged = args.attention;
  require(paged.mask.alignment == Alignment::lower_right,
          "mask.alignment is {}: the keys k are the last of their sequence, and these rows have "
          "their positions; leave it lower_right",
          name(paged.mask.alignment));
  check_rows(args.k, "k", shape.tokens, shape.kv_heads, shape.head_dim, shape.dtype, device);
  check_rows(args.v, "v", shape.tokens, shape.kv_heads, shape.value_dim, shape.dtype, device);
  check_result(paged, shape, paged.out_scale || args.out_scale_inv, "out_scale or out_scale_inv",
               device);
  check_inverse(paged, args.out_scale_inv, device);
  check_memory({{paged.out, "out"}, {paged.lse.tensor, "lse"}}, {{paged.q, "q"},
                                                                 {args.k, "k"},
                                                                 {args.v, "v"},
                                                                 {paged.k_cache, "k_cache"},
                                                                 {paged.v_cache, "v_cache"}});
}

void check_output(const PagedAttention& args, const Tensor& out_scale_inv, const PagedShape& shape,
                  Device device) {
  if (args.out.dims == 0) return;
  check_inverse(args, out_scale_inv, device);
  check_result(args, shape, args.out_scale || out_scale_inv, "out_scale", device);
  check_memory({{args.out, "out"}, {args.lse.tensor, "lse"}},
               {{args.q, "q"}, {args.k_cache, "k_cache"}, {args.v_cache, "v_cache"}});
}

namespace {

/// Checks new rows of latent keys, and the cache in which they carry their scales.
Checked check_latent_append(const AppendKv& args, Device device) {
  const DType kv = args.of_kv();
  const RowFormat format = row_format_of(kv);
  check_rows_are_written(kv);
  require(args.k.dtype == DType::bf16 || args.k.dtype == DType::fp32,
          "k is {}; bf16 or fp32 is wanted for rows of {}, which hold bf16", name(args.k.dtype),
          name(kv));
  check_rows(args.k, "k", -1, 1, format.dim, args.k.dtype, device);
  for (const auto& [t, what] :
       {std::pair{&args.v, "v"}, std::pair{&args.v_cache, "v_cache"},
        std::pair{&args.k_scale, "k_scale"}, std::pair{&args.v_scale, "v_scale"}})
    require(!*t, "{} is given, and rows of {} hold the values and carry their scales: leave it out",
            what, name(kv));
  const std::int64_t tokens = args.k.shape[0];
  require(tokens <= kMostCount, "k is {}: {} tokens; 0 to 2^31 - 1 are possible",
          shape_text(args.k), tokens);
  require(args.slots || tokens == 0, "slots is missing");
  array_of<std::int64_t>(args.slots, "slots", tokens, device);
  check_latent_rows(args.k_cache, "k_cache", kv);
  CacheView cache = view_pages(args.k_cache, args.k_cache, {},
                               CacheShape{1, format.dim, format.value_dim, kv, 1}.stored(), device,
                               "k_cache", "v_cache");
  cache.carry_scales(kv);
  check_written(args.k_cache, "k_cache");
  check_overlap(args.k_cache, "k_cache", args.k, "k");
  return {cache, RunArrays{}};
}

}  // namespace

Checked check_append(const AppendKv& args, Device device) {
  if (is_latent_row(args.of_kv())) return check_latent_append(args, device);
  require(!args.kv || *args.kv == args.k_cache.dtype,
          "kv is {}, and k_cache is {}; it is for rows that carry their scales", name(args.of_kv()),
          name(args.k_cache.dtype));
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
  for (const auto& [scale, name] :
       {std::pair{&args.k_scale, "k_scale"}, std::pair{&args.v_scale, "v_scale"}})
    require(scale->dims < 2,
            "{} is {}; [1] or [kv_heads] is wanted: slots do not say which sequence a token is of",
            name, shape_text(*scale));
  arrays.k_scale = scales_of(args.k_scale, "k_scale", 1, static_cast<int>(kv_heads), device);
  arrays.v_scale = scales_of(args.v_scale, "v_scale", 1, static_cast<int>(kv_heads), device);
  require(tokens <= kMostCount, "k is {}: {} tokens; 0 to 2^31 - 1 are possible",
          shape_text(args.k), tokens);
  const CacheView cache = view_pages(args.k_cache, args.v_cache, {},
                                     {kv_heads, head_dim, value_dim, args.k_cache.dtype, 1}, device,
                                     "k_cache", "v_cache");
  arrays.v_scale =
      scales_of_values(args.k_cache, "k_cache", args.v_cache, "v_cache", arrays.k_scale,
                       arrays.v_scale, 1, static_cast<int>(kv_heads), device);
  check_quantised(args.v_cache.dtype, "v_cache", args.k.dtype, bool{arrays.v_scale}, "v_scale");
  check_written_cache(args.k_cache, "k_cache", args.v_cache, "v_cache");
  for (const auto& [to, name] :
       {std::pair{&args.k_cache, "k_cache"}, std::pair{&args.v_cache, "v_cache"}}) {
    check_overlap(*to, name, args.k, "k");
    if (args.v) check_overlap(*to, name, args.v, "v");
  }
  if (device == Device::host) {
    check_scales(arrays.k_scale, "k_scale", 1, static_cast<int>(kv_heads), true);
    check_scales(arrays.v_scale, "v_scale", 1, static_cast<int>(kv_heads), true);
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
  require(!args.dtypes.out,
          "dtypes.out is {}, and a state is fp32: FinishState::out has the type of the result",
          name(args.dtypes.out.value_or(DType::fp32)));
  Checked checked = check_inputs(args, shape, device);
  check_state(args.state, shape.tokens, shape.heads, shape.value_dim);
  const Tensor workspace{
      args.workspace.data, DType::uint8, {static_cast<std::int64_t>(args.workspace.bytes)}, device};
  check_memory({{bytes_of(args.state, device), "state"}}, {{args.q, "q"},
                                                           {args.k, "k"},
                                                           {args.v, "v"},
                                                           {args.indices, "indices"},
                                                           {workspace, "workspace"}});
  const RunArrays& arrays = checked.arrays;
  if (device != Device::host && arrays.kv_len == nullptr && arrays.keys.layout != Layout::ranges)
    check_room(arrays.keys, checked.cache);
  return checked;
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

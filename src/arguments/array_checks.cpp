#include "src/arguments/array_checks.hpp"

#include "src/arguments/tensor_checks.hpp"

namespace longspan {
namespace {

/// Whether a tensor was meant to be given: one with extents was, even if its memory is null.
bool is_given(const Tensor& t) { return t.data != nullptr || t.dims != 0; }

/// Checks a vector without gaps.
void check_vector(const Tensor& t, const char* name, std::int64_t extent, DType dtype,
                  Device device) {
  check_tensor(t, name, dtype, device);
  require(t.dims == 1 && (extent < 0 || t.shape[0] == extent), "{} is {}; [{}] is wanted", name,
          shape_text(t), CountText{extent, "any number"});
  require(t.shape[0] <= 1 || t.stride[0] == 1, "{} has stride {}; it must be dense", name,
          t.stride[0]);
}

void check_float(const Tensor& t, const char* name) {
  require(is_float(t.dtype), "{} is {}; fp32, fp16, bf16 or fp8 is wanted", name,
          longspan::name(t.dtype));
}

/// A share of the positions of each sequence, by a rule and its table.
struct Share {
  const Sharding& rule;
  const char* name;  // the name of the option
  const Tensor& table;
  const char* table_name;
  std::int64_t length;   // of the one sequence, if it is known
  std::int64_t listed;   // positions on this rank, if the table is `listed`
  std::int64_t entries;  // entries of such a table
  bool ranges_of_batch;  // ranges have a row for each sequence
};

Shard resolve(const Share& share, int batch, int rank, int ranks, Device device) {
  const Layout layout = share.rule.layout;
  const bool listed = layout == Layout::listed, ranges = layout == Layout::ranges;
  require(batch == 1 || !(listed || (ranges && !share.ranges_of_batch)),
          "{} are {}, which describes one sequence; the batch has {}", share.name, name(layout),
          batch);
  const Tensor& table = share.table;
  require(listed || ranges || !table, "{} is given, and {} are {}, which takes no table",
          share.table_name, share.name, name(layout));
  require(!ranges || table,
          "{} are ranges, and there is no {}: the bounds of each rank's positions", share.name,
          share.table_name);
  // A rank without keys may leave out its table of keys; tables of queries travel.
  require(!listed || table || (share.entries < 0 && share.listed <= 0),
          "{} are listed, and there is no {}: the position of each", share.name, share.table_name);
  const std::int64_t* positions = nullptr;
  if (ranges && table.dims == 2) {
    const std::int64_t ends = std::int64_t{ranks} + 1;
    check_tensor(table, share.table_name, DType::int64, device);
    require(share.ranges_of_batch && table.shape[0] == batch && table.shape[1] == ends &&
                (ends == 1 || table.stride[1] == 1) && (batch == 1 || table.stride[0] == ends),
            "{} is {}; a dense [{}, {}] is wanted", share.table_name, shape_text(table), batch,
            ends);
    positions = static_cast<const std::int64_t*>(table.data);
  } else if (ranges) {
    require(batch == 1, "{} is {}; a batch of {} sequences needs [{}, {}]", share.table_name,
            shape_text(table), batch, batch, ranks + 1);
    positions = array_of<std::int64_t>(table, share.table_name, std::int64_t{ranks} + 1, device);
  } else if (listed && table) {
    positions = array_of<std::int64_t>(table, share.table_name, share.entries, device);
  }
  return {
      layout, rank, ranks, share.length, share.rule.block, positions, listed ? share.listed : 0};
}

/// Checks the fields that a run and an append share.
template <class Args>
RunArrays common_arrays(const Args& args, const Options& options, int rank, int ranks,
                        Device device) {
  RunArrays a;
  a.batch = batch_of(args.kv_len);
  require(a.batch <= options.limits.max_batch,
          "kv_len is {}: {} sequences; the layer was made for 1 to {} (max_batch)",
          shape_text(args.kv_len), a.batch, options.limits.max_batch);
  require(a.batch == 1 || args.query_start, "a batch of {} sequences needs query_start", a.batch);
  require(!args.kv_len || args.total_keys == 0,
          "total_keys is {} and kv_len is given; lengths stand in one of them", args.total_keys);
  require(args.total_keys >= 0 && args.total_keys <= kMostCount,
          "total_keys is {}; 0 to 2^31 - 1 are supported", args.total_keys);
  a.query_start =
      array_of<std::int32_t>(args.query_start, "query_start", std::int64_t{a.batch} + 1, device);
  a.kv_len = array_of<std::int32_t>(args.kv_len, "kv_len", a.batch, device);
  const std::int64_t listed = args.key_table ? args.key_table.shape[0] : 0;
  a.keys = resolve(
      {options.keys, "keys", args.key_table, "key_table", args.total_keys, listed, -1, true},
      a.batch, rank, ranks, device);
  a.k_scale = scales_of(args.k_scale, "k_scale", a.batch, options.kv_heads, device);
  a.v_scale = scales_of(args.v_scale, "v_scale", a.batch, options.kv_heads, device);
  a.rope = rope_of(options.rope, args.rope_cos, args.rope_sin, device);
  return a;
}

/// Checks a table of cosines or sines, [positions, columns].
RopeTable rope_table(const Tensor& t, const char* name, std::int64_t columns, Device device) {
  require(is_float(t.dtype) && !is_fp8(t.dtype), "{} is {}; fp32, fp16 or bf16 is wanted", name,
          longspan::name(t.dtype));
  check_tensor(t, name, t.dtype, device);
  require(t.dims == 2 && t.shape[0] >= 1 && t.shape[1] == columns,
          "{} is {}; [positions, {}] is wanted: a column for each pair of the {} elements that are "
          "rotated (rope.dim)",
          name, shape_text(t), columns, 2 * columns);
  require(t.stride[1] == 1 || columns == 1, "{} has stride {} in its last dimension; it must be 1",
          name, t.stride[1]);
  return {Floats(t.data, t.dtype), t.stride[0]};
}

}  // namespace

Rope rope_of(const RopeOptions& options, const Tensor& cos, const Tensor& sin, Device device) {
  Rope rope;
  rope.dim = options.dim;
  rope.interleaved = options.interleaved;
  const bool has_cos = is_given(cos), has_sin = is_given(sin);
  if (!has_cos && !has_sin) return rope;
  require(has_cos && has_sin, "{} is given without {}; a rotation needs both tables",
          has_cos ? "rope_cos" : "rope_sin", has_cos ? "rope_sin" : "rope_cos");
  require(options.dim > 0,
          "rope_cos and rope_sin are given, and the layer has no RoPE: make it "
          "with rope.dim, the elements that are rotated");
  rope.cos = rope_table(cos, "rope_cos", options.dim / 2, device);
  rope.sin = rope_table(sin, "rope_sin", options.dim / 2, device);
  require(cos.shape[0] == sin.shape[0],
          "rope_cos has {} positions and rope_sin has {}; they must have the same", cos.shape[0],
          sin.shape[0]);
  rope.positions = cos.shape[0];
  return rope;
}

template <Element T>
const T* array_of(const Tensor& t, const char* name, std::int64_t extent, Device device) {
  if (!is_given(t)) return nullptr;
  check_vector(t, name, extent, dtype_of<T>(), device);
  return static_cast<const T*>(t.data);
}
template const float* array_of(const Tensor&, const char*, std::int64_t, Device);
template const std::int32_t* array_of(const Tensor&, const char*, std::int64_t, Device);
template const std::int64_t* array_of(const Tensor&, const char*, std::int64_t, Device);
template const std::uint8_t* array_of(const Tensor&, const char*, std::int64_t, Device);

int batch_of(const Tensor& kv_len) {
  if (kv_len.dims == 0) return 1;
  require(kv_len.dims == 1 && kv_len.shape[0] >= 1 && kv_len.shape[0] <= kMostCount,
          "kv_len is {}; [batch] of 1 to 2^31 - 1 sequences is wanted", shape_text(kv_len));
  return static_cast<int>(kv_len.shape[0]);
}

Floats floats_of(const Tensor& t, const char* name, std::int64_t extent, Device device) {
  if (!is_given(t)) return {};
  check_float(t, name);
  check_vector(t, name, extent, t.dtype, device);
  return {t.data, t.dtype};
}

Slopes slopes_of(const Tensor& t, int batch, int heads, Device device) {
  if (t.dims != 2) return floats_of(t, "slopes", heads, device);
  check_float(t, "slopes");
  check_tensor(t, "slopes", t.dtype, device);
  require(t.shape[0] == batch && t.shape[1] == heads, "slopes is {}; [{}] or [{}, {}] is wanted",
          shape_text(t), heads, batch, heads);
  require((t.stride[1] == 1 || heads == 1) && (t.stride[0] == heads || batch == 1),
          "slopes has strides {} and {}; it must be dense", t.stride[0], t.stride[1]);
  return {Floats(t.data, t.dtype), heads};
}

ScaleView scales_of(const Tensor& t, const char* name, int batch, int kv_heads, Device device) {
  if (!is_given(t)) return {};
  if (t.dims == 2) {
    check_tensor(t, name, DType::fp32, device);
    require(t.shape[0] == batch && t.shape[1] == kv_heads,
            "{} is {}; [1], [{}] or [{}, {}] is wanted: one scale, one of each kv head, or one of "
            "each sequence and kv head",
            name, shape_text(t), kv_heads, batch, kv_heads);
    require(t.stride[0] >= 0 && (t.stride[1] == 0 || t.stride[1] == 1 || kv_heads == 1),
            "{} has strides {} and {}; the first is not negative, and the last is 1, or 0 for one "
            "scale of all kv heads",
            name, t.stride[0], t.stride[1]);
    return {static_cast<const float*>(t.data), 0, 0, kv_heads == 1 ? 0 : t.stride[1],
            batch == 1 ? 0 : t.stride[0]};
  }
  check_vector(t, name, t.dims == 1 && t.shape[0] == 1 ? 1 : kv_heads, DType::fp32, device);
  return ScaleView::dense(static_cast<const float*>(t.data), t.shape[0]);
}

QqBias qq_bias_of(const Tensor& t, std::int64_t longest_query, Device device) {
  if (!is_given(t)) return {};
  check_float(t, "qq_bias");
  check_tensor(t, "qq_bias", t.dtype, device);
  require(t.dims == 2 && t.shape[0] >= 1 && t.shape[0] == t.shape[1],
          "qq_bias is {}; a matrix [width, width] of at least 1 is wanted", shape_text(t));
  constexpr std::int64_t kMostWidth = std::int64_t{1} << 40;
  const std::int64_t width = t.shape[0], row_stride = width > 1 ? t.stride[0] : width;
  require(width <= kMostWidth && row_stride <= kMostWidth,
          "qq_bias has width {} and a row stride of {}; at most 2^40 are supported", width,
          row_stride);
  require(t.stride[1] == 1 || width == 1,
          "qq_bias has stride {} in its last dimension; it must be 1", t.stride[1]);
  require(row_stride >= width,
          "qq_bias has rows of {} entries and a row stride of {}; the stride is at least the width",
          width, row_stride);
  require(width >= longest_query,
          "qq_bias is [{}, {}]; a query of {} tokens needs [{}, {}] at least", width, width,
          longest_query, longest_query, longest_query);
  return {Floats(t.data, t.dtype), width, row_stride};
}

kernels::KeyIndices indices_of(const Tensor& t, const Tensor& length, const IndexOptions& wanted,
                               std::int64_t tokens, int kv_heads, Device device) {
  if (wanted.top_k == 0) {
    require(!is_given(t) && !is_given(length),
            "{} is given, and a row sees what the mask says: give Options::indices with top_k",
            is_given(t) ? "indices" : "index_len");
    return {};
  }
  require(is_given(t), "indices is missing: top_k is {}, so every row names the keys that it sees",
          wanted.top_k);
  check_tensor(t, "indices", DType::int32, device);
  const bool of_heads = t.dims == 3;
  require(
      (t.dims == 2 || (of_heads && t.shape[1] == kv_heads)) && t.shape[0] == tokens,
      "indices is {}; [{}, columns] is wanted, or [{}, {}, columns] with a list for each kv head",
      shape_text(t), tokens, tokens, kv_heads);
  const std::int64_t columns = t.shape[t.dims - 1];
  require(columns >= 1 && columns <= wanted.top_k,
          "indices is {}: {} columns; 1 to {} (top_k) are possible", shape_text(t), columns,
          wanted.top_k);
  require(
      t.size() == 0 || ((t.stride[t.dims - 1] == 1 || columns == 1) && t.stride[0] >= 0 &&
                        (!of_heads || kv_heads == 1 || t.stride[1] == columns)),
      "indices {} have strides of their own within a row: the indices of a row lie one behind the "
      "other",
      shape_text(t));
  kernels::KeyIndices indices;
  indices.data = static_cast<const std::int32_t*>(t.data);
  indices.row_stride = t.stride[0];
  indices.head_stride = of_heads ? columns : 0;
  indices.heads = of_heads ? kv_heads : 1;
  indices.top_k = static_cast<int>(columns);
  indices.lengths = array_of<std::int32_t>(length, "index_len", tokens, device);
  indices.are_slots = wanted.slots;
  return indices;
}

Documents documents_of(const Tensor& t, int batch, Device device) {
  if (!is_given(t)) return {};
  check_tensor(t, "documents", DType::int64, device);
  require(t.dims == 1 || t.dims == 2,
          "documents is {}; [count + 1] is wanted, or [batch, count + 1]", shape_text(t));
  const bool rows = t.dims == 2;
  require(rows ? t.shape[0] == batch : batch == 1,
          "documents is {}; the batch has {} sequences: [{}, count + 1] is wanted, where sequences "
          "with fewer documents repeat their end",
          shape_text(t), batch, batch);
  const std::int64_t count = t.shape[t.dims - 1], stride = rows ? t.stride[0] : 0;
  require(count >= 1, "documents is {}; it has the start of each, and the end of the last",
          shape_text(t));
  require(t.stride[t.dims - 1] == 1 || count == 1,
          "documents has stride {} in its last dimension; it must be 1", t.stride[t.dims - 1]);
  return {static_cast<const std::int64_t*>(t.data), count - 1, stride};
}

Ranges ranges_of(const Tensor& t, int batch, Device device) {
  if (!is_given(t)) return {};
  check_tensor(t, "bidirectional", DType::int64, device);
  const bool rows = t.dims == 3;
  require(
      (rows || t.dims == 2) && t.shape[t.dims - 1] == 2,
      "bidirectional is {}; [count, 2] is wanted, or [batch, count, 2]: the begin of each range, "
      "and the position past its last",
      shape_text(t));
  require(rows ? t.shape[0] == batch : batch == 1,
          "bidirectional is {}; the batch has {} sequences: [{}, count, 2] is wanted, where "
          "sequences with fewer ranges end with empty ones",
          shape_text(t), batch, batch);
  const std::int64_t count = t.shape[t.dims - 2];
  require(count == 0 || (t.stride[t.dims - 1] == 1 && (count == 1 || t.stride[t.dims - 2] == 2)),
          "bidirectional {} has gaps: the ranges of a sequence lie one after another",
          shape_text(t));
  return {static_cast<const std::int64_t*>(t.data), count, rows ? t.stride[0] : 0};
}

RunArrays arrays_of(const AttentionArgs& args, const Options& options, int rank, int ranks,
                    Device device) {
  RunArrays a = common_arrays(args, options, rank, ranks, device);
  if (options.queries)
    a.queries = resolve({*options.queries, "queries", args.query_table, "query_table",
                         args.total_tokens, count_rows(args.q), options.limits.max_tokens, false},
                        a.batch, rank, ranks, device);
  else if (options.results.part == ResultPart::rows)
    a.queries =
        resolve({options.results.rows, "results", args.query_table, "query_table",
                 count_rows(args.q), count_rows(args.out), options.limits.max_tokens, false},
                a.batch, rank, ranks, device);
  require(options.queries || args.total_tokens == 0,
          "total_tokens is given, and the layer's queries are not sharded (Options::queries)");
  require(
      options.queries || options.results.part == ResultPart::rows || !args.query_table,
      "query_table is given, and neither the layer's queries nor its results are sharded by rows "
      "(Options::queries, Options::results)");
  a.causal = array_of<std::uint8_t>(args.causal, "causal", a.batch, device);
  a.documents = documents_of(args.documents, a.batch, device);
  a.ranges = ranges_of(args.bidirectional, a.batch, device);
  a.prefix = array_of<std::int32_t>(args.prefix_len, "prefix_len", a.batch, device);
  require(
      a.prefix == nullptr || options.mask.prefix > 0,
      "prefix_len is given, and the layer's mask has no prefix: make the layer with the longest "
      "prefix of any sequence");
  a.left_padding = array_of<std::int32_t>(args.left_padding, "left_padding", a.batch, device);
  a.used_rows = array_of<std::int32_t>(args.query_len, "query_len", a.batch, device);
  a.sinks = floats_of(args.sinks, "sinks", options.heads, device);
  a.slopes = slopes_of(args.slopes, a.batch, options.heads, device);
  a.qq_bias = qq_bias_of(args.qq_bias, options.queries || args.query_start ? 0 : count_rows(args.q),
                         device);
  a.q_scale = scales_of(args.q_scale, "q_scale", a.batch, options.kv_heads, device);
  a.out_scale = array_of<float>(args.out_scale, "out_scale", 1, device);
  a.indices = indices_of(args.indices, args.index_len, options.indices, count_rows(args.q),
                         options.kv_heads, device);
  a.dropout_seed = array_of<std::int64_t>(args.dropout_seed, "dropout_seed", -1, device);
  if (a.dropout_seed != nullptr) {
    require(args.dropout_seed.shape[0] == 1 || args.dropout_seed.shape[0] == 2,
            "dropout_seed is {}; [1] or [2] is wanted: the seed, and the offset",
            shape_text(args.dropout_seed));
    a.dropout_seeds = static_cast<int>(args.dropout_seed.shape[0]);
  }
  a.dropout_sequences =
      array_of<std::int32_t>(args.dropout_sequences, "dropout_sequences", a.batch, device);
  return a;
}

RunArrays arrays_of(const Append& append, const Options& options, int rank, int ranks,
                    Device device) {
  return common_arrays(append, options, rank, ranks, device);
}

namespace {

/// Checks the fields that all attention on one rank has, except for the sinks.
template <class Args>
RunArrays call_arrays(const Args& args, std::int64_t tokens, int heads, int kv_heads,
                      Device device) {
  RunArrays a;
  a.batch = batch_of(args.kv_len);
  require(a.batch == 1 || args.query_start, "a batch of {} sequences needs query_start", a.batch);
  a.query_start =
      array_of<std::int32_t>(args.query_start, "query_start", std::int64_t{a.batch} + 1, device);
  a.kv_len = array_of<std::int32_t>(args.kv_len, "kv_len", a.batch, device);
  a.causal = array_of<std::uint8_t>(args.causal, "causal", a.batch, device);
  a.slopes = slopes_of(args.slopes, a.batch, heads, device);
  a.qq_bias = qq_bias_of(args.qq_bias, args.query_start ? 0 : tokens, device);
  a.q_scale = scales_of(args.q_scale, "q_scale", a.batch, kv_heads, device);
  a.k_scale = scales_of(args.k_scale, "k_scale", a.batch, kv_heads, device);
  a.v_scale = scales_of(args.v_scale, "v_scale", a.batch, kv_heads, device);
  return a;
}

}  // namespace

RunArrays arrays_of(const PagedAttention& args, int heads, int kv_heads, Device device) {
  require(bool{args.kv_len}, "kv_len is missing: the length of each sequence, new tokens included");
  RunArrays a = call_arrays(args, count_rows(args.q), heads, kv_heads, device);
  a.sinks = floats_of(args.sinks, "sinks", heads, device);
  a.out_scale = array_of<float>(args.out_scale, "out_scale", 1, device);
  return a;
}

RunArrays arrays_of(const AttendState& args, int heads, int kv_heads, Device device) {
  RunArrays a = call_arrays(args, count_rows(args.q), heads, kv_heads, device);
  require(!args.kv_len || args.total_keys == 0,
          "total_keys is {} and kv_len is given; lengths stand in one of them", args.total_keys);
  require(args.total_keys >= 0 && args.total_keys <= kMostCount,
          "total_keys is {}; 0 to 2^31 - 1 are supported", args.total_keys);
  // Resolved without a table first, so that the rank is known to be valid before its table is
  // measured.
  args.keys.resolve(args.total_keys, args.rank, args.ranks);
  a.indices =
      indices_of(args.indices, args.index_len, args.index, count_rows(args.q), kv_heads, device);
  const std::int64_t listed = args.key_table ? args.key_table.shape[0] : 0;
  a.keys =
      resolve({args.keys, "keys", args.key_table, "key_table", args.total_keys, listed, -1, true},
              a.batch, args.rank, args.ranks, device);
  return a;
}

}  // namespace longspan

// Checks one run, and one append.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kernels/faults.hpp"
#include "src/arguments/faults.hpp"
#include "src/arguments/validate.hpp"

namespace longspan {
namespace {

constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max();

/// Checks the table of sequence b, on the host only.
void check_table(const Shard& shard, int b, std::int64_t kv_len) {
  if (shard.layout == Layout::ranges) {
    require(shard.table[0] == 0 && shard.table[shard.ranks] == kv_len,
            "the table of ranges of sequence {} runs from {} to {}; the sequence has keys 0 to {}",
            b, shard.table[0], shard.table[shard.ranks], kv_len);
    for (int r = 0; r < shard.ranks; ++r)
      require(shard.table[r] <= shard.table[r + 1],
              "the table of ranges of sequence {} descends at rank {}", b, r);
  }
  if (shard.layout == Layout::listed)
    for (std::int64_t i = 0; i < shard.listed; ++i)
      require(shard.table[i] >= 0 && shard.table[i] < kv_len,
              "listed key {} stands at position {}; the sequence has {} keys", i, shard.table[i],
              kv_len);
}

/// Checks the documents of each sequence, on the host only.
void check_documents(const Documents& documents, int batch) {
  for (int b = 0; b < batch; ++b) {
    const Documents own = documents.for_sequence(b);
    const std::string where = batch > 1 ? fmt::format(" of sequence {}", b) : "";
    for (std::int64_t d = 0; d < own.count; ++d)
      require(own.start[d] <= own.start[d + 1], "documents descend at document {}{}: {} to {}", d,
              where, own.start[d], own.start[d + 1]);
  }
}

/// Checks the bidirectional ranges of each sequence, on the host only.
void check_ranges(const Ranges& ranges, const kernels::Batch& batch, const Shard& shard) {
  for (int b = 0; b < batch.size; ++b) {
    const std::int64_t* const bound = ranges.for_sequence(b).bound;
    const std::string where = batch.size > 1 ? fmt::format(" of sequence {}", b) : "";
    const std::int64_t keys = batch.keys(b, shard);
    for (std::int64_t r = 0; r < ranges.count; ++r) {
      const std::int64_t begin = bound[2 * r], end = bound[2 * r + 1];
      require(begin <= end, "bidirectional range {}{} is [{}, {}), which ends before it begins", r,
              where, begin, end);
      require(begin >= 0 && end <= keys,
              "bidirectional range {}{} is [{}, {}); the sequence has the positions [0, {})", r,
              where, begin, end, keys);
      require(r == 0 || bound[2 * r - 1] <= begin,
              "bidirectional range {}{} is [{}, {}), and the one before it ends at {}: ranges "
              "ascend and do not overlap",
              r, where, begin, end, r == 0 ? 0 : bound[2 * r - 1]);
    }
  }
}

/// Checks the prefix of each sequence, on the host only.
void check_prefix(const std::int32_t* prefix, int batch, std::int64_t most) {
  for (int b = 0; prefix != nullptr && b < batch; ++b)
    require(prefix[b] >= 0 && prefix[b] <= most,
            "prefix_len[{}] is {}; the layer has prefixes of 0 to {} keys", b, prefix[b], most);
}

/// Checks the padding and the used rows of each sequence, on the host only. The batch has `rows`.
void check_used(const kernels::Batch& batch, std::int64_t rows, const Shard& shard) {
  for (int b = 0; b < batch.size; ++b)
    kernels::check_used(batch, b, batch.query_len(b, rows), batch.keys(b, shard),
                        [](kernels::Fault fault, int where, std::int64_t most, std::int64_t found) {
                          throw_fault({fault, where, most, found});
                        });
}

CacheView check_cache(const Tensor& k, const Tensor& v, const Tensor& table, int batch,
                      const Options& options, Device device) {
  const DType dtype = options.dtypes.of_kv();
  const CacheShape shape =
      CacheShape{options.kv_heads, options.head_dim, options.of_values(), dtype, batch}.stored();
  check_latent_rows(k, "k", dtype);
  CacheView cache = table                   ? view_pages(k, v, table, shape, device, "k", "v")
                    : options.indices.slots ? view_slots(k, v, shape, device)
                                            : view_contiguous(k, v, shape, device);
  cache.carry_scales(dtype);
  if (options.dtypes.compute == DType::fp64 && !(cache.k.dense() && cache.v.dense()))
    throw Unsupported(
        "pages of fp64 whose rows are in chunks (x-packed) are not supported: give pages [pages, "
        "page, kv_heads, dim]");
  return cache;
}

/// Checks new keys and values, and where they can go.
void check_new_rows(const Append& a, const Options& options, Device device) {
  check_rows(a.new_k, "new_k", -1, options.kv_heads, options.head_dim, options.dtypes.compute,
             device);
  if (needs_new_values(a.new_v, "new_v", a.k, "k", a.v, "v"))
    check_rows(a.new_v, "new_v", a.new_k.shape[0], options.kv_heads, options.of_values(),
               options.dtypes.compute, device);
  check_rows_are_written(options.dtypes.of_kv());
  if (options.keys.layout == Layout::listed)
    throw Unsupported(
        "append to listed keys is not supported: their table says where the keys that are there "
        "stand, not where new ones go; write them with ServingOps::append_kv");
  if (options.indices.slots && !a.block_table)
    throw Unsupported(
        "append to a cache whose rows indices name (slots) needs a block_table, which says where "
        "new "
        "keys go; or write them with ServingOps::append_kv");
  if (options.rope.dim > 0 && !a.new_v)
    throw Unsupported(
        "RoPE of new keys whose first columns are the values is not supported: the values would be "
        "rotated too; rotate the rows before, and make the layer without rope.dim");
}

/// Checks that the tables of RoPE have the positions of all rows, `rows` in all. They lie in their
/// sequences as `mask` says.
void check_rope_positions(const kernels::Batch& batch, std::int64_t rows, const Shard& shard,
                          const Rope& rope, const Mask& mask) {
  if (rope.positions == 0) return;
  for (int b = 0; b < batch.size; ++b) {
    const std::int64_t own =
        batch.used_rows != nullptr ? batch.used_rows[b] : batch.query_len(b, rows);
    const std::int64_t needed =
        farthest_position(mask.first_row(own, batch.keys(b, shard)), own) + 1;
    if (needed > rope.positions) throw_fault({kernels::Fault::rope, b, rope.positions, needed});
  }
}

/// Checks that the lengths include the new keys, `rows` in all.
void check_growth(const kernels::Batch& batch, std::int64_t rows, const Shard& shard) {
  for (int b = 0; b < batch.size; ++b) {
    const std::int64_t added = batch.query_len(b, rows), keys = batch.keys(b, shard);
    require(added <= keys, "sequence {} gets {} new keys and has kv_len {}, which must count them",
            b, added, keys);
  }
}

/// Checks that the results of a run do not overlap its inputs.
void check_results(const AttentionArgs& r, bool grows) {
  check_written(r.out, "out");
  if (r.lse) check_written(r.lse.tensor, "lse");
  if (r.lse) check_overlap(r.lse.tensor, "lse", r.out, "out");
  for (const auto& [in, name] : {std::pair{&r.q, "q"}, std::pair{&r.k, "k"}, std::pair{&r.v, "v"},
                                 std::pair{&r.new_k, "new_k"}, std::pair{&r.new_v, "new_v"},
                                 std::pair{&r.indices, "indices"}}) {
    if (!*in) continue;
    check_overlap(r.out, "out", *in, name);
    if (r.lse) check_overlap(r.lse.tensor, "lse", *in, name);
  }
  if (!grows) return;
  check_overlap(r.k, "k", r.q, "q");
  check_overlap(r.v, "v", r.q, "q");
}

/// Checks a cache that grows, whose keys and values are written.
void check_grown(const Tensor& k, const Tensor& v, const Tensor& new_k, const Tensor& new_v) {
  check_written_cache(k, "k", v, "v");
  for (const auto& [to, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check_overlap(*to, name, new_k, "new_k");
    if (new_v) check_overlap(*to, name, new_v, "new_v");
  }
}

/// Checks, on the host only, the values of the scales of a call.
void check_factors(const RunArrays& a, const Options& options, bool grows) {
  check_scales(a.q_scale, "q_scale", a.batch, options.kv_heads, false);
  check_scales(a.k_scale, "k_scale", a.batch, options.kv_heads, grows);
  check_scales(a.v_scale, "v_scale", a.batch, options.kv_heads, grows);
  check_scales(ScaleView::dense(a.out_scale, 1), "out_scale", 1, 1, true);
  check_score_factors(options.score, options.head_dim, a, options.heads, options.kv_heads);
}

/// Checks the features of a run other than its tensors.
void check_features(const AttentionArgs& args, const Options& options) {
  if (args.query_len && (args.new_k || args.new_v))
    throw Unsupported(
        "query_len with new_k is not supported: the keys of rows that are not used would have no "
        "place; append the keys first");
  if (options.indices.slots && options.rope.dim > 0 && !args.kv_len && args.total_keys == 0)
    throw InputError(
        "kv_len (or total_keys) is missing: indices are slots, and RoPE rotates the rows of q by "
        "their "
        "positions at the end of their sequence");
  if (args.skip_decode && (options.queries || options.results.part == ResultPart::rows))
    throw Unsupported(
        fmt::format("skip_decode with {} is not supported: a rank cannot leave out rows whose "
                    "place only the others know; give the sequences of several queries only",
                    options.queries ? "sharded queries" : "results by rows"));
}

/// Checks what runs with dropout may have: they are for training.
void check_dropout(const AttentionArgs& args, const RunArrays& arrays, const Options& options,
                   Device device) {
  if (options.dropout.p > 0) {
    const auto refuse = [](const char* what) {
      throw Unsupported(fmt::format(
          "dropout of {} is not supported: it is for training; make a layer without dropout.p to "
          "serve",
          what));
    };
    if (args.block_table) refuse("keys in pages (block_table)");
    if (args.new_k || args.new_v) refuse("a run that appends to its cache (new_k, new_v)");
    if (args.skip_decode) refuse("a run that leaves out sequences (skip_decode)");
  }
  if (device != Device::host) return;
  for (int b = 0; arrays.dropout_sequences != nullptr && b < arrays.batch; ++b)
    require(arrays.dropout_sequences[b] >= 0,
            "dropout_sequences[{}] is {}; numbers of sequences are not negative", b,
            arrays.dropout_sequences[b]);
}

/// Checks the contents of the table of `own` rows, on the host only. All ranks together have
/// `rows`, which `whole` names.
void check_row_table(const Shard& own, std::int64_t rows, std::int64_t entries, const char* whole) {
  if (own.layout == Layout::ranges) {
    require(own.table[0] == 0 && own.table[own.ranks] == rows,
            "query_table runs from {} to {}; there are rows 0 to {} ({})", own.table[0],
            own.table[own.ranks], rows, whole);
    for (int r = 0; r < own.ranks; ++r)
      require(own.table[r] <= own.table[r + 1], "query_table descends at rank {}", r);
  }
  if (own.layout != Layout::listed) return;
  const std::int64_t held = own.listed;
  for (std::int64_t i = 0; i < std::min(held, entries); ++i)
    require(own.table[i] >= 0 && own.table[i] < rows,
            "query_table[{}] is {}; of {} rows ({}) there are 0 to {}", i, own.table[i], rows,
            whole, rows - 1);
  for (std::int64_t i = held; i < entries; ++i)
    require(own.table[i] == -1,
            "query_table[{}] is {}; of {} rows ({}) this rank has {}, and past them stands -1", i,
            own.table[i], rows, whole, held);
}

/// Checks sharded queries; returns the rows of the whole q, of which this rank has a share.
std::int64_t check_query_shard(const AttentionArgs& args, const RunArrays& arrays,
                               const Options& options, const Communicator& world) {
  const std::int64_t rows = args.total_tokens;
  require(rows >= 0 && rows <= options.limits.max_tokens * world.size(),
          "total_tokens is {}; the layer was made for at most {} on each of {} ranks", rows,
          options.limits.max_tokens, world.size());
  require(args.q.dims == 3, "q of sharded queries must be dense; its sequences lie apart");
  require(args.q.stride[1] == options.head_dim &&
              args.q.stride[0] == std::int64_t{options.heads} * options.head_dim,
          "q of sharded queries must be dense; its strides are {} and {}", args.q.stride[0],
          args.q.stride[1]);
  const Shard& own = arrays.queries;
  if (world.device() == Device::host)
    check_row_table(own, rows, options.limits.max_tokens, "total_tokens");
  if (arrays.batch == 1 && (world.device() == Device::host || own.layout != Layout::ranges))
    require(own.local_len(rows) == args.q.shape[0],
            "the {} layout of queries gives rank {} {} of {} rows (total_tokens); q has {}",
            name(own.layout), world.rank(), own.local_len(rows), rows, args.q.shape[0]);
  return rows;
}

/// Throws for factors of fp32 in products of fp64.
void refuse_scales(const RunArrays& a) {
  if (a.q_scale || a.k_scale || a.v_scale || a.out_scale != nullptr)
    throw Unsupported(
        "scales (q_scale, k_scale, v_scale, out_scale) of fp64 tensors are not supported: they are "
        "for tensors of fp8; multiply before the call");
}

/// Checks that out and lse have the heads and rows of the result that the rank gets.
void check_result_tensors(const AttentionArgs& args, const Options& options,
                          const Communicator& world) {
  const ResultPart part = options.results.part;
  const bool by_rows = part == ResultPart::rows;
  const int heads = part == ResultPart::heads
                        ? result_heads(options.heads, world.rank(), world.size()).size()
                        : options.heads;
  check_batch_rows(args.out, "out", by_rows ? -1 : count_rows(args.q), heads, options.of_values(),
                   options.dtypes.of_out(), world.device());
  const std::int64_t rows = count_rows(args.out);
  require(rows <= options.limits.max_tokens,
          "{} has {} rows; the layer was made for at most {} (max_tokens)", by_rows ? "out" : "q",
          rows, options.limits.max_tokens);
  if (args.lse)
    check_batch_lse(args.lse, "lse", rows, heads, world.device(), options.dtypes.of_lse());
  if (!by_rows) return check_apart({&args.q, &args.out}, {&args.lse});
  require(rows <= count_rows(args.q), "out has {} rows of results by rows; q has {}", rows,
          count_rows(args.q));
  require(args.out.dims == 3 && (!args.lse || args.lse.tensor.dims == 2),
          "out and lse of results by rows have rows at equal steps; their sequences lie apart");
}

/// Checks that results by rows have the rows that the rank gets.
void check_result_rows(const AttentionArgs& args, const RunArrays& arrays, const Options& options,
                       Device device) {
  const Shard& own = arrays.queries;
  const std::int64_t rows = count_rows(args.q), found = count_rows(args.out);
  const bool host = device == Device::host;
  if (host) check_row_table(own, rows, options.limits.max_tokens, "of q");
  if (!host && (arrays.batch > 1 || own.layout == Layout::ranges)) return;
  std::int64_t held = own.local_len(rows);
  if (arrays.query_start != nullptr && host) {
    check_starts({arrays.batch, arrays.query_start, arrays.kv_len}, rows);
    held = 0;
    for (int b = 0; b < arrays.batch; ++b)
      held += own.local_len(arrays.query_start[b + 1] - arrays.query_start[b]);
  }
  require(arrays.query_start == nullptr ? held == found : held <= found,
          "the {} layout of results gives rank {} {} of {} rows of q; out has {}", name(own.layout),
          own.rank, held, rows, found);
}

/// Checks, on the host only, that this rank has its share of the rows of each sequence.
void check_own_rows(const RunArrays& arrays, std::int64_t rows, const Shard& own) {
  if (arrays.query_start == nullptr || own.layout == Layout::listed) return;
  std::int64_t share = 0;
  for (int b = 0; b < arrays.batch; ++b)
    share += own.local_len(arrays.query_start[b + 1] - arrays.query_start[b]);
  require(
      share <= rows,
      "the {} layout of queries gives rank {} {} rows of the sequences of query_start; q has {}",
      name(own.layout), own.rank, share, rows);
}

}  // namespace

void check_starts(const kernels::Batch& batch, std::int64_t rows) {
  if (batch.query_start == nullptr) return;
  const std::int32_t* start = batch.query_start;
  require(start[0] == 0, "query_start[0] is {}; it must be 0", start[0]);
  for (int b = 0; b < batch.size; ++b)
    require(start[b] <= start[b + 1], "query_start descends at sequence {}: {} to {}", b, start[b],
            start[b + 1]);
  require(start[batch.size] <= rows, "query_start ends at row {}; there are {} rows",
          start[batch.size], rows);
}

void check_lengths(const kernels::Batch& batch, std::int64_t rows, const Shard& shard,
                   const CacheView& cache, std::int64_t max_kv_len) {
  check_starts(batch, rows);
  std::int64_t packed_keys = 0;
  for (int b = 0; b < batch.size; ++b) {
    const std::int64_t kv_len = batch.keys(b, shard);
    require(kv_len >= 0, "kv_len[{}] is {}; lengths are not negative", b, kv_len);
    require(max_kv_len == 0 || kv_len <= max_kv_len,
            "sequence {} has {} keys; at most {} were promised (max_kv_len)", b, kv_len,
            max_kv_len);
    const Shard own = shard.for_sequence(b);
    check_table(own, b, kv_len);
    const std::int64_t local = own.local_len(kv_len);
    packed_keys += local;
    require((cache.packed ? packed_keys : local) <= cache.room(),
            "sequence {} has {} keys, of which rank {} holds {} ({} layout); there is room for {} "
            "in {}",
            b, kv_len, own.rank, local, name(own.layout), cache.room(),
            cache.pages ? "its row of block_table" : "k and v");
  }
}

/// Throws an InputError if the sequences together have more keys than the layer's limit.
void check_total_keys(const kernels::Batch& batch, const Shard& keys, std::int64_t most) {
  std::int64_t total = 0;
  for (int b = 0; b < batch.size; ++b) total += batch.keys(b, keys);
  if (most > 0 && total > most)
    throw_fault({.fault = kernels::Fault::too_many, .column = most, .value = total});
}

void check_room(const Shard& shard, const CacheView& cache) {
  const std::int64_t own = shard.local_len(shard.length);
  require(own <= cache.room(), "rank {} holds {} of {} keys ({} layout); there is room for {}",
          shard.rank, own, shard.length, name(shard.layout), cache.room());
}

void check_one_call(const AttentionArgs& args, DType kv) {
  const Tensor &q = args.q, &k = args.k;
  require(q.dims == 3 || q.dims == 4,
          "q is {}; [tokens, heads, head_dim] is wanted, or [batch, heads, tokens, head_dim]",
          shape_text(q));
  require(
      k.dims >= 3 && k.dims <= 5,
      "k is {}; [keys, kv_heads, head_dim] is wanted, or [batch, capacity, kv_heads, head_dim], or "
      "pages "
      "with a block_table",
      shape_text(k));
  const std::int64_t kv_heads = k.shape[k.dims == 5 ? 1 : k.dims - 2];
  const auto is_count = [](std::int64_t n) {
    return n >= 1 && n <= std::numeric_limits<std::int32_t>::max();
  };
  const std::int64_t heads = q.shape[q.dims - 2], rows = count_rows(q);
  require(is_count(heads), "q is {}: {} heads; there is at least 1", shape_text(q), heads);
  require(is_count(q.shape[q.dims - 1]), "q is {}: a head dim of {}; it is at least 1",
          shape_text(q), q.shape[q.dims - 1]);
  const Tensor& out = args.out;
  require((out.dims == 3 || out.dims == 4) && is_count(out.shape[out.dims - 1]),
          "out is {}; [tokens, heads, value_dim] is wanted, or [batch, heads, tokens, value_dim]",
          shape_text(out));
  require(is_count(kv_heads), "k is {}: {} kv_heads; there is at least 1", shape_text(k), kv_heads);
  require(heads % kv_heads == 0, "q is {} and k is {}: heads {} must be a multiple of kv_heads {}",
          shape_text(q), shape_text(k), heads, kv_heads);
  for (const auto& [t, name] : {std::pair{&q, "q"}, std::pair{&k, "k"}, std::pair{&args.v, "v"},
                                std::pair{&args.out, "out"}})
    require(is_float(t->dtype) || t->dtype == DType::fp64 ||
                (is_latent_row(kv) && t->dtype == tensor_type_of(kv)),
            "{} has a type of number {}, which is not a float type", name,
            static_cast<int>(t->dtype));
  require(rows >= 0 && rows <= kMostKeys, "q is {}: {} rows; there are 0 to 2^31 - 1",
          shape_text(q), rows);
}

Tensor values_of(const Tensor& k, const Tensor& v, const Options& options) {
  if (!options.values_in_keys) return v;
  const StorageFormat format = storage_of(options.dtypes.of_kv());
  const int columns = format.row_elements(options.of_values()), last = k.dims - 1;
  require(k.dims == 3 || k.dims == 4,
          "k is {}, and its first {} columns are the values (values_in_keys): [keys, kv_heads, "
          "head_dim] is wanted, or [batch, capacity, kv_heads, head_dim], or pages of that form",
          shape_text(k), columns);
  check_latent_rows(k, "k", options.dtypes.of_kv());
  require(k.shape[last] == format.row_elements(options.head_dim),
          "k is {}; rows of {} (head_dim) are wanted", shape_text(k), options.head_dim);
  const bool is_left_out = v.dims == 0, is_empty = k.size() == 0 && v.size() == 0;
  require(is_left_out || (v.shape[v.dims - 1] == columns && (is_empty || values_in_keys(k, v))),
          "v is {} in memory of its own or with strides of its own, and the layer was made for "
          "values that are the first {} columns of k (values_in_keys): leave v out, or give that "
          "view of k",
          shape_text(v), columns);
  Tensor view = k;
  view.shape[last] = columns;
  return view;
}

AttentionArgs with_batch_rows(const AttentionArgs& args) {
  AttentionArgs flat = args;
  flat.q = batch_rows(args.q, "q");
  flat.out = batch_rows(args.out, "out");
  flat.lse = batch_rows(args.lse, "lse");
  return flat;
}

Append append_of(const AttentionArgs& args) {
  return {.new_k = args.new_k,
          .new_v = args.new_v,
          .k = args.k,
          .v = args.v,
          .total_keys = args.total_keys,
          .query_start = args.query_start,
          .kv_len = args.kv_len,
          .block_table = args.block_table,
          .key_table = args.key_table,
          .k_scale = args.k_scale,
          .v_scale = args.v_scale,
          .rope_cos = args.rope_cos,
          .rope_sin = args.rope_sin};
}

Checked check_attention(const AttentionArgs& args, const Options& options,
                        const Communicator& world) {
  const Device device = world.device();
  const DTypes& dtypes = options.dtypes;
  check_batch_rows(args.q, "q", -1, options.heads, options.head_dim, dtypes.of_query(), device);
  const std::int64_t own_rows = count_rows(args.q);
  check_result_tensors(args, options, world);
  require(own_rows <= options.limits.max_tokens,
          "q has {} rows; the layer was made for at most {} (max_tokens)", own_rows,
          options.limits.max_tokens);
  RunArrays arrays = arrays_of(args, options, world.rank(), world.size(), device);
  const CacheView cache =
      check_cache(args.k, args.v, args.block_table, arrays.batch, options, device);
  arrays.v_scale = scales_of_values(args.k, "k", args.v, "v", arrays.k_scale, arrays.v_scale,
                                    arrays.batch, options.kv_heads, device);
  check_quantised(dtypes.of_query(), "q", dtypes.compute, bool{args.q_scale}, "q_scale");
  check_quantised(dtypes.of_kv(), "k", dtypes.compute, bool{args.k_scale}, "k_scale");
  check_quantised(dtypes.of_kv(), "v", dtypes.compute, bool{arrays.v_scale}, "v_scale");
  check_quantised(dtypes.of_out(), "out", dtypes.compute, bool{args.out_scale}, "out_scale");
  if (dtypes.compute == DType::fp64) refuse_scales(arrays);
  check_features(args, options);
  check_dropout(args, arrays, options, device);
  const std::int64_t rows =
      options.queries ? check_query_shard(args, arrays, options, world) : own_rows;
  if (options.results.part == ResultPart::rows) check_result_rows(args, arrays, options, device);

  const bool grows = args.new_k || args.new_v;
  if (grows) {
    require(options.mask.alignment == Alignment::lower_right,
            "new_k is given and mask.alignment is {}: new keys are the last of their sequence and "
            "these rows the first; append the keys ahead (Attention::append)",
            name(options.mask.alignment));
    check_new_rows(append_of(args), options, device);
    require(args.new_k.shape[0] == rows,
            "new_k has {} rows; there are {} of q, and it has their keys: append others ahead",
            args.new_k.shape[0], rows);
    check_grown(args.k, args.v, args.new_k, args.new_v);
  }
  check_results(args, grows);

  if (options.mask.prefix > 0 && arrays.documents)
    throw Unsupported(
        "a prefix with documents is not supported: it is that of a sequence; give documents as "
        "sequences of their own");
  kernels::Batch batch{arrays.batch, arrays.query_start, arrays.kv_len};
  batch.left_padding = arrays.left_padding;
  batch.used_rows = arrays.used_rows;
  if (device == Device::host || arrays.kv_len == nullptr)
    check_total_keys(batch, arrays.keys, options.limits.max_total_keys);
  if (device == Device::host) {
    check_lengths(batch, rows, arrays.keys, cache, options.limits.max_kv_len);
    if (grows) check_growth(batch, rows, arrays.keys);
    check_rope_positions(batch, rows, arrays.keys, arrays.rope, options.mask);
    if (options.queries) check_own_rows(arrays, own_rows, arrays.queries);
    check_documents(arrays.documents, arrays.batch);
    check_ranges(arrays.ranges, batch, arrays.keys);
    check_prefix(arrays.prefix, arrays.batch, options.mask.prefix);
    check_used(batch, rows, arrays.keys);
    check_factors(arrays, options, grows);
  } else if (arrays.kv_len == nullptr) {
    if (arrays.query_start == nullptr)
      check_rope_positions({}, rows, arrays.keys, arrays.rope, options.mask);
    if (arrays.keys.layout != Layout::ranges) check_room(arrays.keys, cache);
  }
  return {cache, arrays};
}

Checked check_append(const Append& tokens, const Options& options, const Communicator& world) {
  const Device device = world.device();
  RunArrays arrays = arrays_of(tokens, options, world.rank(), world.size(), device);
  check_new_rows(tokens, options, device);
  const CacheView cache =
      check_cache(tokens.k, tokens.v, tokens.block_table, arrays.batch, options, device);
  arrays.v_scale = scales_of_values(tokens.k, "k", tokens.v, "v", arrays.k_scale, arrays.v_scale,
                                    arrays.batch, options.kv_heads, device);
  const DTypes& dtypes = options.dtypes;
  check_quantised(dtypes.of_kv(), "k", dtypes.compute, bool{tokens.k_scale}, "k_scale");
  check_quantised(dtypes.of_kv(), "v", dtypes.compute, bool{arrays.v_scale}, "v_scale");
  check_grown(tokens.k, tokens.v, tokens.new_k, tokens.new_v);
  if (device == Device::host) {
    const kernels::Batch batch{arrays.batch, arrays.query_start, arrays.kv_len};
    check_lengths(batch, tokens.new_k.shape[0], arrays.keys, cache, options.limits.max_kv_len);
    check_growth(batch, tokens.new_k.shape[0], arrays.keys);
    check_rope_positions(batch, tokens.new_k.shape[0], arrays.keys, arrays.rope, {});
    check_scales(arrays.k_scale, "k_scale", arrays.batch, options.kv_heads, true);
    check_scales(arrays.v_scale, "v_scale", arrays.batch, options.kv_heads, true);
  } else if (arrays.kv_len == nullptr) {
    if (arrays.query_start == nullptr)
      check_rope_positions({}, tokens.new_k.shape[0], arrays.keys, arrays.rope, {});
    if (arrays.keys.layout != Layout::ranges) check_room(arrays.keys, cache);
  }
  return {cache, arrays};
}

}  // namespace longspan

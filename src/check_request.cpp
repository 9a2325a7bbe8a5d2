// The checks of one run, and of one append.
#include <fmt/format.h>

#include <limits>

#include "src/validate.hpp"

namespace longspan {
namespace {

constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max();

void check_shard(const Shard& shard, const char* name, int batch, bool ranges_of_batch,
                 const Communicator& world) {
  require(shard.rank == world.rank() && shard.ranks == world.size(),
          "{} describes rank {} of {}; this is rank {} of {}", name, shard.rank, shard.ranks,
          world.rank(), world.size());
  require(shard.layout <= Layout::listed, "{} has a layout of number {}, which is none", name,
          static_cast<int>(shard.layout));
  require(shard.length >= 0, "{} has length {}", name, shard.length);
  require(shard.block > 0 && shard.block <= kMostKeys,
          "{} has blocks of {} keys; a block has 1 to 2^31 - 1", name, shard.block);
  require(shard.listed >= 0, "{} lists {} keys; a count is not negative", name, shard.listed);
  const bool listed = shard.layout == Layout::listed, ranges = shard.layout == Layout::ranges;
  require((!listed && !ranges) || shard.table != nullptr || (listed && shard.listed == 0),
          "{} is {} without a table", name, longspan::name(shard.layout));
  require(batch == 1 || !(listed || (ranges && !ranges_of_batch)),
          "{} is {}, which describes one sequence; the batch has {}", name,
          longspan::name(shard.layout), batch);
}

/// Host only: the table of sequence b.
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

/// Host only.
void check_documents(const Documents& documents) {
  for (std::int64_t d = 0; d < documents.count; ++d)
    require(documents.start[d] <= documents.start[d + 1],
            "documents descend at document {}: {} to {}", d, documents.start[d],
            documents.start[d + 1]);
}

void check_batch(int batch, const std::int32_t* query_start, const std::int32_t* kv_len,
                 const Options& options) {
  require(batch >= 1 && batch <= options.max_batch,
          "the batch has {} sequences; the layer was made for 1 to {}", batch, options.max_batch);
  require(batch == 1 || (query_start != nullptr && kv_len != nullptr),
          "a batch of {} sequences needs query_start and kv_len", batch);
}

CacheView check_cache(const Tensor& k, const Tensor& v, const BlockTable& table, int batch,
                      const Options& options, Device device) {
  const CacheShape shape{options.kv_heads, options.head_dim,
                         options.value_dim.value_or(options.head_dim),
                         options.kv_dtype.value_or(options.dtype), batch};
  return table ? view_pages(k, v, table, shape, device, "k", "v")
               : view_contiguous(k, v, shape, device);
}

/// What a rule alone tells of the one sequence, when its length is in the shard.
void check_room(const Shard& shard, const CacheView& cache) {
  const std::int64_t own = shard.local_len(shard.length);
  require(own <= cache.room(), "rank {} holds {} of {} keys ({} layout); there is room for {}",
          shard.rank, own, shard.length, name(shard.layout), cache.room());
}

/// New keys and values, and where they can go.
void check_new_rows(const Append& a, const Options& options, Device device) {
  check_rows(a.new_k, "new_k", -1, options.kv_heads, options.head_dim, options.dtype, device);
  if (needs_new_values(a.new_v, "new_v", a.k, "k", a.v, "v"))
    check_rows(a.new_v, "new_v", a.new_k.shape[0], options.kv_heads,
               options.value_dim.value_or(options.head_dim), options.dtype, device);
  if (a.shard.layout == Layout::listed)
    throw Unsupported(
        "append to a listed shard is not supported: its table says where the keys that are there "
        "stand, not where new ones go; write them with Kernels::append_kv");
}

/// Lengths count the new keys; `rows` of them in all.
void check_growth(const kernels::Batch& batch, std::int64_t rows, const Shard& shard) {
  for (int b = 0; b < batch.size; ++b) {
    const std::int64_t added = batch.query_len(b, rows), keys = batch.keys(b, shard);
    require(added <= keys, "sequence {} gets {} new keys and has kv_len {}, which must count them",
            b, added, keys);
  }
}

/// What a run writes, and that it is nothing that the run reads.
void check_results(const Request& r, bool grows) {
  check_written(r.out, "out");
  if (r.lse) check_written(r.lse, "lse");
  if (r.lse) check_overlap(r.lse, "lse", r.out, "out");
  for (const auto& [in, name] : {std::pair{&r.q, "q"}, std::pair{&r.k, "k"}, std::pair{&r.v, "v"},
                                 std::pair{&r.new_k, "new_k"}, std::pair{&r.new_v, "new_v"}}) {
    if (!*in) continue;
    check_overlap(r.out, "out", *in, name);
    if (r.lse) check_overlap(r.lse, "lse", *in, name);
  }
  if (!grows) return;
  check_overlap(r.k, "k", r.q, "q");
  check_overlap(r.v, "v", r.q, "q");
}

/// A cache that grows: its keys and values are written.
void check_grown(const Tensor& k, const Tensor& v, const Tensor& new_k, const Tensor& new_v) {
  check_written_cache(k, "k", v, "v");
  for (const auto& [to, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check_overlap(*to, name, new_k, "new_k");
    if (new_v) check_overlap(*to, name, new_v, "new_v");
  }
}

/// Host only: what the factors of a call hold.
void check_factors(const Request& r, int kv_heads) {
  check_scales(r.q_scale, "q_scale", kv_heads, false);
  check_scales(r.k_scale, "k_scale", kv_heads, bool{r.new_k});
  check_scales(r.v_scale, "v_scale", kv_heads, bool{r.new_k});
  check_scales({r.out_scale}, "out_scale", 1, true);
}

/// The features of a request that stand beside its tensors.
void check_features(const Request& request, const Options& options) {
  check_qq_bias(request.qq_bias,
                options.shard_queries || request.query_start != nullptr ? 0 : request.q.shape[0]);
  require(!request.documents || request.batch == 1,
          "documents are packed in one sequence; the batch has {}", request.batch);
  require(!request.documents || request.documents.count >= 0, "there are {} documents",
          request.documents.count);
  if (request.skip_decode && options.shard_queries)
    throw Unsupported(
        "skip_decode with shard_queries is not supported: a rank cannot leave out rows whose place "
        "only the others know; give the sequences of several queries only");
}

std::int64_t check_query_shard(const Request& request, const Options& options,
                               const Communicator& world) {
  check_shard(request.query_shard, "query_shard", request.batch, false, world);
  const std::int64_t rows = request.query_shard.length;
  require(rows <= options.max_tokens * world.size(),
          "query_shard has {} rows in all; the layer was made for at most {} on each of {} ranks",
          rows, options.max_tokens, world.size());
  require(request.q.stride[1] == options.head_dim &&
              request.q.stride[0] == std::int64_t{options.heads} * options.head_dim,
          "with shard_queries q must be dense; its strides are {} and {}", request.q.stride[0],
          request.q.stride[1]);
  if (request.batch == 1 &&
      (world.device() == Device::host || request.query_shard.layout != Layout::ranges))
    require(request.query_shard.local_len(rows) == request.q.shape[0],
            "query_shard gives rank {} {} of {} rows; q has {}", world.rank(),
            request.query_shard.local_len(rows), rows, request.q.shape[0]);
  return rows;
}

}  // namespace

void check_lengths(const kernels::Batch& batch, std::int64_t rows, const Shard& shard,
                   const CacheView& cache, std::int64_t max_kv_len) {
  if (batch.query_start != nullptr) {
    const std::int32_t* start = batch.query_start;
    require(start[0] == 0, "query_start[0] is {}; it must be 0", start[0]);
    for (int b = 0; b < batch.size; ++b)
      require(start[b] <= start[b + 1], "query_start descends at sequence {}: {} to {}", b,
              start[b], start[b + 1]);
    require(start[batch.size] <= rows, "query_start ends at row {}; there are {} rows",
            start[batch.size], rows);
  }
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

void check_one_call(const Request& request) {
  const Tensor &q = request.q, &k = request.k;
  require(q.dims == 3, "q is {}; [tokens, heads, head_dim] is wanted", shape_text(q));
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
  require(is_count(q.shape[1]), "q is {}: {} heads; there is at least 1", shape_text(q),
          q.shape[1]);
  require(is_count(q.shape[2]), "q is {}: a head dim of {}; it is at least 1", shape_text(q),
          q.shape[2]);
  require(request.out.dims == 3 && is_count(request.out.shape[2]),
          "out is {}; [tokens, heads, value_dim] is wanted", shape_text(request.out));
  require(is_count(kv_heads), "k is {}: {} kv_heads; there is at least 1", shape_text(k), kv_heads);
  require(q.shape[1] % kv_heads == 0,
          "q is {} and k is {}: heads {} must be a multiple of kv_heads {}", shape_text(q),
          shape_text(k), q.shape[1], kv_heads);
  require(request.batch >= 1, "the batch has {} sequences; it has at least 1", request.batch);
  for (const auto& [t, name] : {std::pair{&q, "q"}, std::pair{&k, "k"}, std::pair{&request.v, "v"},
                                std::pair{&request.out, "out"}})
    require(t->dtype <= DType::e5m2, "{} has a type of number {}, which is none", name,
            static_cast<int>(t->dtype));
  require(q.shape[0] >= 0 && q.shape[0] <= kMostKeys, "q is {}: {} rows; there are 0 to 2^31 - 1",
          shape_text(q), q.shape[0]);
}

Append append_of(const Request& request) {
  return {.new_k = request.new_k,
          .new_v = request.new_v,
          .k = request.k,
          .v = request.v,
          .block_table = request.block_table,
          .shard = request.shard,
          .batch = request.batch,
          .query_start = request.query_start,
          .kv_len = request.kv_len,
          .k_scale = request.k_scale,
          .v_scale = request.v_scale};
}

CacheView check_request(const Request& request, const Options& options, const Communicator& world) {
  const Device device = world.device();
  check_batch(request.batch, request.query_start, request.kv_len, options);

  const DType q_dtype = options.query_dtype.value_or(options.dtype);
  const DType kv_dtype = options.kv_dtype.value_or(options.dtype);
  const DType out_dtype = options.out_dtype.value_or(options.dtype);
  check_rows(request.q, "q", -1, options.heads, options.head_dim, q_dtype, device);
  const std::int64_t own_rows = request.q.shape[0];
  check_rows(request.out, "out", own_rows, options.heads,
             options.value_dim.value_or(options.head_dim), out_dtype, device);
  require(own_rows <= options.max_tokens,
          "q has {} rows; the layer was made for at most {} (max_tokens)", own_rows,
          options.max_tokens);
  if (request.lse) check_lse(request.lse, "lse", own_rows, options.heads, device);
  const CacheView cache =
      check_cache(request.k, request.v, request.block_table, request.batch, options, device);
  check_quantised(q_dtype, "q", options.dtype, bool{request.q_scale}, "q_scale");
  check_quantised(kv_dtype, "k", options.dtype, bool{request.k_scale}, "k_scale");
  check_quantised(kv_dtype, "v", options.dtype, bool{request.v_scale}, "v_scale");
  check_quantised(out_dtype, "out", options.dtype, request.out_scale != nullptr, "out_scale");
  check_shard(request.shard, "shard", request.batch, true, world);
  require(request.shard.length <= kMostKeys,
          "the sequence has {} keys; at most 2^31 - 1 are supported", request.shard.length);
  check_features(request, options);
  const std::int64_t rows =
      options.shard_queries ? check_query_shard(request, options, world) : own_rows;

  const bool grows = request.new_k || request.new_v;
  if (grows) {
    check_new_rows(append_of(request), options, device);
    require(request.new_k.shape[0] == rows, "new_k has {} rows; there are {} of q",
            request.new_k.shape[0], rows);
    check_grown(request.k, request.v, request.new_k, request.new_v);
  }
  check_results(request, grows);

  if (device == Device::host) {
    const kernels::Batch batch{request.batch, request.query_start, request.kv_len};
    check_lengths(batch, rows, request.shard, cache, options.max_kv_len);
    if (grows) check_growth(batch, rows, request.shard);
    check_documents(request.documents);
    check_factors(request, options.kv_heads);
  } else if (request.kv_len == nullptr && request.shard.layout != Layout::ranges) {
    check_room(request.shard, cache);
  }
  return cache;
}

CacheView check_append(const Append& tokens, const Options& options, const Communicator& world) {
  const Device device = world.device();
  check_batch(tokens.batch, tokens.query_start, tokens.kv_len, options);
  check_new_rows(tokens, options, device);
  const CacheView cache =
      check_cache(tokens.k, tokens.v, tokens.block_table, tokens.batch, options, device);
  const DType kv_dtype = options.kv_dtype.value_or(options.dtype);
  check_quantised(kv_dtype, "k", options.dtype, bool{tokens.k_scale}, "k_scale");
  check_quantised(kv_dtype, "v", options.dtype, bool{tokens.v_scale}, "v_scale");
  check_grown(tokens.k, tokens.v, tokens.new_k, tokens.new_v);
  check_shard(tokens.shard, "shard", tokens.batch, true, world);
  require(tokens.shard.length <= kMostKeys,
          "the sequence has {} keys; at most 2^31 - 1 are supported", tokens.shard.length);
  if (device == Device::host) {
    const kernels::Batch batch{tokens.batch, tokens.query_start, tokens.kv_len};
    check_lengths(batch, tokens.new_k.shape[0], tokens.shard, cache, options.max_kv_len);
    check_growth(batch, tokens.new_k.shape[0], tokens.shard);
    check_scales(tokens.k_scale, "k_scale", options.kv_heads, true);
    check_scales(tokens.v_scale, "v_scale", options.kv_heads, true);
  } else if (tokens.kv_len == nullptr && tokens.shard.layout != Layout::ranges) {
    check_room(tokens.shard, cache);
  }
  return cache;
}

}  // namespace longspan

// A serving problem on a device: through the layer on any number of ranks, through one rank's
// kernels by their names in serving engines, and with many ranks simulated on one device. Outputs,
// states and workspaces are NaN beforehand.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.hpp"
#include "longspan/longspan.hpp"
#include "tests/support/reduced.hpp"
#include "tests/support/serving_judge.hpp"

namespace longspan::tests {

/// The work of one call, for is_left_out().
inline double work_of(const Serving& s, int ranks = 1) {
  return work_of_attention(s.q_lens, s.kv_lens, s.heads, s.kv_heads, s.dim, ranks);
}

/// A vector in the memory of a device; never empty, so that it has an address.
template <class T>
Buffer on_device(Device device, const std::vector<T>& values) {
  Buffer buffer(device, std::max<std::size_t>(16, values.size() * sizeof(T)));
  if (values.size() * sizeof(T) == buffer.bytes()) {
    buffer.upload(values.data());
  } else {
    std::vector<std::byte> padded(buffer.bytes(), std::byte{0xff});
    if (!values.empty()) std::memcpy(padded.data(), values.data(), values.size() * sizeof(T));
    buffer.upload(padded.data());
  }
  return buffer;
}

/// All bits set: a NaN in every dtype.
inline Buffer poisoned(Device device, std::size_t bytes) {
  return on_device(device, std::vector<std::byte>(bytes, std::byte{0xff}));
}

template <class T = std::byte>
std::vector<T> on_host(const Buffer& buffer, std::size_t count) {
  std::vector<std::byte> bytes(buffer.bytes());
  buffer.download(bytes.data());
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), bytes.data(), count * sizeof(T));
  return values;
}

struct ServingResult {
  std::vector<std::byte> out;
  std::vector<float> lse;
};

/// The arrays of a problem on a device, with one rank's share of the keys.
struct ServingArrays {
  Device device;
  const ServingProblem& problem;
  std::vector<std::int64_t> rows;  // tokens that this rank has
  Cache cache;                     // its host copy; k and v are dropped once they are on the device
  Shard shard;                     // in the device's form
  Buffer q, k, v, table, key_table, query_start, kv_len, causal, sinks, slopes, qq, documents,
      bidirectional, prefix, left_padding, used_rows, q_scale, k_scale, v_scale, out_scale, out,
      lse;

  ServingArrays(Device where, const ServingProblem& p, const Shard& host_shard,
                const std::vector<std::int64_t>& shard_table = {},
                std::optional<Shard> query_shard = std::nullopt,
                const std::vector<std::int64_t>* until = nullptr)
      : device(where), problem(p), cache(p.cache(host_shard, until)), shard(host_shard) {
    const Serving& s = p.shape;
    for (int b = 0; b < s.batch(); ++b) {
      const std::int64_t own = query_shard ? query_shard->local_len(s.q_lens[b]) : s.q_lens[b];
      for (std::int64_t i = 0; i < own; ++i)
        rows.push_back(p.query_start[b] +
                       (query_shard ? query_shard->position(i, s.q_lens[b]) : i));
    }
    const std::size_t row = size_of(s.of_q()) * s.heads * s.dim;
    std::vector<std::byte> own_q(rows.size() * row);
    for (std::size_t i = 0; i < rows.size(); ++i)
      std::memcpy(own_q.data() + i * row, p.q.data() + rows[i] * row, row);
    q = on_device(device, own_q);
    k = on_device(device, cache.k);
    v = on_device(device, cache.v);
    cache.k = cache.v = {};
    table = on_device(device, cache.table);
    key_table = on_device(device, shard_table);
    if (shard.layout == Layout::ranges || shard.layout == Layout::listed)
      shard.table = static_cast<const std::int64_t*>(key_table.data());
    query_start = on_device(device, p.query_start);
    kv_len = on_device(device, s.kv_lens);
    causal = on_device(device, s.causal);
    sinks = on_device(device, p.sinks);
    slopes = on_device(device, p.slopes);
    qq = on_device(device, p.qq);
    documents = on_device(device, s.documents);
    bidirectional = on_device(device, s.bidirectional);
    prefix = on_device(device, s.prefix);
    left_padding = on_device(device, s.left_padding);
    used_rows = on_device(device, s.used_rows);
    q_scale = on_device(device, p.q_scale);
    k_scale = on_device(device, p.k_scale);
    v_scale = on_device(device, p.v_scale);
    out_scale = on_device(device, std::vector<float>{s.out_scale});
    out = poisoned(device, out_bytes());
    lse = poisoned(device, rows.size() * s.heads * sizeof(float));
  }

  std::size_t out_bytes() const {
    const Serving& s = problem.shape;
    return rows.size() * s.heads * s.of_value() * size_of(s.of_out());
  }
  std::int64_t own() const { return static_cast<std::int64_t>(rows.size()); }
  Tensor q_tensor() const {
    const Serving& s = problem.shape;
    return Tensor(q.data(), s.of_q(), {own(), s.heads, s.dim}, device);
  }
  Tensor out_tensor() const {
    const Serving& s = problem.shape;
    return Tensor(out.data(), s.of_out(), {own(), s.heads, s.of_value()}, device);
  }
  Tensor lse_tensor() const {
    return Tensor(lse.data(), DType::fp32, {own(), problem.shape.heads}, device);
  }
  Tensor k_tensor() const { return problem.view(cache, k.data(), false, device); }
  Tensor v_tensor() const {
    return problem.view(cache, (problem.shape.values_in_keys ? k : v).data(), true, device);
  }
  template <class T>
  static const T* pointer(const Buffer& buffer) {
    return static_cast<const T*>(buffer.data());
  }
  Tensor block_table() const {
    if (problem.shape.page == 0) return {};
    Tensor view(pointer<std::int32_t>(table), {problem.shape.batch(), cache.columns}, device);
    if (cache.row_stride != 0) view.stride[0] = cache.row_stride;
    return view;
  }
  /// The first `extent` elements of a buffer.
  template <class T>
  Tensor array(const Buffer& buffer, std::int64_t extent) const {
    return {pointer<T>(buffer), {extent}, device};
  }
  Tensor scales(const std::vector<float>& host, const Buffer& buffer) const {
    if (host.empty()) return {};
    return array<float>(buffer, problem.shape.per_head_scales ? problem.shape.kv_heads : 1);
  }
  Tensor small(bool given, const Buffer& buffer) const {
    if (!given) return {};
    return Tensor(buffer.data(), problem.shape.small_dtype, {problem.shape.heads}, device);
  }
  Tensor slope_tensor() const {
    const Serving& s = problem.shape;
    if (!s.alibi) return {};
    if (!s.slopes_of_sequences) return small(true, slopes);
    return Tensor(slopes.data(), s.small_dtype, {s.batch(), s.heads}, device);
  }
  Tensor qq_bias() const {
    if (!problem.shape.qq_bias) return {};
    Tensor view(qq.data(), problem.shape.small_dtype, {problem.qq_width, problem.qq_width}, device);
    view.stride[0] = problem.qq_stride;
    return view;
  }
  Tensor query_starts() const {
    return array<std::int32_t>(query_start, problem.shape.batch() + 1);
  }
  Tensor kv_lens() const { return array<std::int32_t>(kv_len, problem.shape.batch()); }
  Tensor out_scales() const {
    return problem.shape.out_scale != 0 ? array<float>(out_scale, 1) : Tensor();
  }

  /// The same in the kernels' form, for tests that call them directly.
  kernels::Pages pages() const {
    if (problem.shape.page == 0) return {};
    return {pointer<std::int32_t>(table),
            cache.row_stride,
            1,
            cache.columns,
            cache.pages,
            problem.shape.page};
  }
  static Floats floats(const Tensor& t) { return t ? Floats(t.data, t.dtype) : Floats(); }
  void give_scales(kernels::AttendParams& p) const {
    const auto factors = [](const Tensor& t) {
      return t ? ScaleView::dense(static_cast<const float*>(t.data), t.shape[0]) : ScaleView();
    };
    p.q_scale = factors(scales(problem.q_scale, q_scale));
    p.k_scale = factors(scales(problem.k_scale, k_scale));
    p.v_scale = factors(scales(problem.v_scale, v_scale));
  }

  /// Fields common to the arguments of a layer and of one rank's calls.
  template <class Arguments>
  void fill(Arguments& a) const {
    const Serving& s = problem.shape;
    a.q = q_tensor();
    a.out = out_tensor();
    a.block_table = block_table();
    a.query_start = query_starts();
    a.kv_len = kv_lens();
    a.q_scale = scales(problem.q_scale, q_scale);
    a.k_scale = scales(problem.k_scale, k_scale);
    a.v_scale = s.values_in_keys ? a.k_scale : scales(problem.v_scale, v_scale);
    a.sinks = small(s.sinks, sinks);
    a.slopes = slope_tensor();
    a.qq_bias = qq_bias();
    if (!s.causal.empty()) a.causal = array<std::uint8_t>(causal, s.batch());
  }

  AttentionArgs args() const {
    const Serving& s = problem.shape;
    AttentionArgs r;
    fill(r);
    r.k = k_tensor();
    r.v = v_tensor();
    if (shard.layout == Layout::ranges)
      r.key_table = {shard.table, {s.batch(), shard.ranks + 1}, device};
    if (shard.layout == Layout::listed) r.key_table = {shard.table, {shard.listed}, device};
    r.lse = Lse::tokens_heads(lse_tensor());
    if (s.batch() == 1) {  // one sequence needs no arrays
      r.query_start = r.kv_len = {};
      r.total_keys = s.kv_lens[0];
    }
    r.out_scale = out_scales();
    if (!s.documents.empty())
      r.documents = {static_cast<const std::int64_t*>(documents.data()),
                     {s.batch(), s.starts_of_one()},
                     device};
    if (!s.bidirectional.empty())
      r.bidirectional = {static_cast<const std::int64_t*>(bidirectional.data()),
                         {s.batch(), std::ssize(s.bidirectional) / s.batch() / 2, 2},
                         device};
    if (!s.prefix.empty()) r.prefix_len = array<std::int32_t>(prefix, s.batch());
    if (!s.left_padding.empty()) r.left_padding = array<std::int32_t>(left_padding, s.batch());
    if (!s.used_rows.empty()) r.query_len = array<std::int32_t>(used_rows, s.batch());
    r.skip_decode = s.skip_decode;
    return r;
  }

  /// For segmented_attention and context_attention.
  void paged(PagedAttention& a) const {
    const Serving& s = problem.shape;
    fill(a);
    a.k_cache = k_tensor();
    a.v_cache = v_tensor();
    a.max_kv_len = problem.max_kv_len();
    a.max_query_len = problem.max_q_len();
    a.lse = Lse::tokens_heads(lse_tensor());
    a.dtypes.compute = s.dtype;
    if (s.scale != 0) a.score.scale = s.scale;
    a.mask = s.mask;
    a.score.softcap = s.softcap;
    if (s.alibi) a.score.alibi = *s.alibi;
  }

  ServingResult result() const {
    return {on_host(out, out_bytes()), on_host<float>(lse, rows.size() * problem.shape.heads)};
  }
};

inline Sharding rule_of(const Shard& shard) { return {shard.layout, shard.block}; }

inline Options options_for(const ServingProblem& problem) {
  const Serving& s = problem.shape;
  Options o;
  o.heads = s.heads;
  o.kv_heads = s.kv_heads;
  o.head_dim = s.dim;
  if (s.value_dim > 0) o.value_dim = s.value_dim;
  o.dtypes = {.compute = s.dtype, .query = s.q_dtype, .kv = s.kv_dtype, .out = s.out_dtype};
  o.mask = s.mask;
  if (s.scale != 0) o.score.scale = s.scale;
  o.score.softcap = s.softcap;
  if (s.alibi) o.score.alibi = *s.alibi;
  o.limits = {.max_tokens = std::max<std::int64_t>(1, problem.tokens),
              .max_batch = s.batch(),
              .max_kv_len = problem.max_kv_len(),
              .max_query_len = problem.max_q_len()};
  o.debug.check_arrays = true;
  return o;
}

/// One run of a fresh layer. Tables of the shards are on the host; `rows` gets the tokens of this
/// rank's rows.
inline ServingResult run_layer(const Communicator& world, const ServingProblem& problem,
                               const Shard& shard,
                               const std::vector<std::int64_t>& shard_table = {},
                               std::optional<Shard> query_shard = std::nullopt,
                               std::vector<std::int64_t>* rows = nullptr, bool invariant = true) {
  const ServingArrays arrays(world.device(), problem, shard, shard_table, query_shard);
  Options options = options_for(problem);
  options.invariant = invariant && world.device() == Device::cuda;
  options.keys = rule_of(shard);
  if (query_shard) {
    options.queries = rule_of(*query_shard);
    options.limits.max_tokens = 1;
    for (const std::string& n : world.gather(std::to_string(arrays.own()), "rows"))
      options.limits.max_tokens = std::max<std::int64_t>(options.limits.max_tokens, std::stoll(n));
  }
  Attention layer(world, options);
  AttentionArgs args = arrays.args();
  if (query_shard) args.total_tokens = problem.tokens;
  layer.run(args);
  layer.wait();
  if (rows != nullptr) *rows = arrays.rows;
  return arrays.result();
}

/// Waits for the work queued on a device's default stream.
inline void settle(const Buffer& any) { on_host(any, 1); }

/// Exported states of segments: [tokens, heads, segments, dim] and [tokens, heads, segments].
struct HandedOut {
  std::vector<float> output, max, expsum;
};

/// How run_segmented runs. `segments` > 0: it exports their states (to `to`, if given), `keys` in
/// each (0: the cut of serving engines), and reduce_segments makes the result.
struct Segmented {
  int segments = 0;
  std::int64_t keys = 0;
  int tile = 16;
  bool tf32 = false;
  HandedOut* to = nullptr;
};

/// Paged decode and short queries on one rank.
inline ServingResult run_segmented(const ServingOps& kernels, Device device,
                                   const ServingProblem& problem, const Segmented& how = {}) {
  const Serving& s = problem.shape;
  const ServingArrays arrays(device, problem, Shard::contiguous(0, 0, 1));
  SegmentedAttention a;
  PagedAttention& paged = a.attention;
  arrays.paged(paged);
  paged.dtypes.tf32 = how.tf32;
  paged.out_scale = arrays.out_scales();
  const int segments = how.segments;
  const std::size_t states = arrays.rows.size() * s.heads * segments;
  int padded = 16;
  while (padded < s.of_value()) padded *= 2;
  Buffer output, max, expsum;
  if (segments > 0) {
    output = poisoned(device, states * padded * sizeof(float));
    max = poisoned(device, states * sizeof(float));
    expsum = poisoned(device, states * sizeof(float));
    a.segments.output =
        Tensor(output.data(), DType::fp32, {arrays.own(), s.heads, segments, padded}, device);
    a.segments.max = Tensor(max.data(), DType::fp32, {arrays.own(), s.heads, segments}, device);
    a.segments.expsum =
        Tensor(expsum.data(), DType::fp32, {arrays.own(), s.heads, segments}, device);
    a.segments.keys = how.keys;
    a.segments.tile = how.tile;
    paged.out = {};
    paged.lse = {};
  }
  const Buffer workspace = poisoned(device, kernels.workspace_bytes(a));
  a.attention.workspace = {workspace.data(), workspace.bytes()};
  kernels.check(a);
  kernels.segmented_attention(a);
  if (segments > 0) {
    ReduceSegments r;
    r.segments = a.segments;
    r.out = arrays.out_tensor();
    r.lse = Lse::tokens_heads(arrays.lse_tensor());
    r.out_scale = arrays.out_scales();
    r.query_start = paged.query_start;
    r.kv_len = paged.kv_len;
    kernels.reduce_segments(r);
  }
  settle(arrays.out);
  if (how.to != nullptr)
    *how.to = {on_host<float>(output, states * padded), on_host<float>(max, states),
               on_host<float>(expsum, states)};
  return arrays.result();
}

/// Chunked prefill on one rank; the problem has separate_new.
inline ServingResult run_context(const ServingOps& kernels, Device device,
                                 const ServingProblem& problem) {
  const Serving& s = problem.shape;
  const ServingArrays arrays(device, problem, Shard::contiguous(0, 0, 1));
  const Buffer new_k = on_device(device, problem.new_rows(false)),
               new_v = on_device(device, problem.new_rows(true)),
               inverse = on_device(device, std::vector<float>{1.0f / s.out_scale});
  ContextAttention a;
  arrays.paged(a.attention);
  a.k = Tensor(new_k.data(), s.dtype, {problem.tokens, s.kv_heads, s.dim}, device);
  a.v = Tensor(new_v.data(), s.dtype, {problem.tokens, s.kv_heads, s.of_value()}, device);
  a.skip_decode = s.skip_decode;
  if (s.out_scale != 0) a.out_scale_inv = arrays.array<float>(inverse, 1);
  const Buffer workspace = poisoned(device, kernels.workspace_bytes(a));
  a.attention.workspace = {workspace.data(), workspace.bytes()};
  kernels.check(a);
  kernels.context_attention(a);
  settle(arrays.out);
  return arrays.result();
}

/// `ranks` ranks simulated on one device: attend on each share into its slot, then one merge.
inline ServingResult run_ranks(const kernels::Backend& backend, const ServingProblem& problem,
                               const std::vector<Shard>& shards) {
  using namespace kernels;
  const Serving& s = problem.shape;
  const Device device = backend.device();
  const auto ranks = static_cast<int>(shards.size());
  StateSlots states{nullptr, problem.tokens * s.heads, s.of_value(), ranks};
  const Buffer memory = poisoned(device, states.slot_bytes() * ranks);
  states.data = static_cast<std::byte*>(memory.data());
  std::vector<std::unique_ptr<ServingArrays>> kept;  // until the stream has passed them
  std::vector<Buffer> scratches;
  for (int rank = 0; rank < ranks; ++rank) {
    kept.push_back(std::make_unique<ServingArrays>(device, problem, shards[rank]));
    const ServingArrays& a = *kept.back();
    const Tensor k = a.k_tensor(), v = a.v_tensor();
    AttendParams p;
    p.dtype = s.dtype;
    p.q_dtype = s.of_q();
    p.kv_dtype = s.of_kv();
    p.tokens = problem.tokens;
    p.heads = s.heads;
    p.kv_heads = s.kv_heads;
    p.head_dim = s.dim;
    p.value_dim = s.of_value();
    p.q = {a.q.data(), std::int64_t{s.heads} * s.dim, s.dim};
    p.k = KvRows(k.data, k.stride[1], k.stride[2]);  // pages of rows
    p.v = KvRows(v.data, v.stride[1], v.stride[2]);
    p.k.page_stride = k.stride[0];
    p.v.page_stride = v.stride[0];
    p.pages = a.pages();
    a.give_scales(p);
    p.batch.size = s.batch();
    p.batch.query_start = ServingArrays::pointer<std::int32_t>(a.query_start);
    p.batch.kv_len = ServingArrays::pointer<std::int32_t>(a.kv_len);
    p.shard = a.shard;
    p.mask = s.mask;
    p.score = {static_cast<float>(s.scale_used()), s.softcap};
    p.invariant = true;
    p.max_kv_len = problem.max_kv_len();
    p.state = states;
    p.slot = rank;
    scratches.push_back(poisoned(device, backend.attend_scratch(p) + 256));
    p.scratch = static_cast<std::byte*>(scratches.back().data());
    p.scratch_bytes = scratches.back().bytes();
    backend.check(p);
    backend.attend(p, {});
  }
  const ServingArrays& a = *kept.front();
  MergeParams m;
  m.states = states;
  m.interleaved = shards[0].layout == Layout::interleaved;
  m.heads = s.heads;
  m.sinks = a.floats(a.small(s.sinks, a.sinks));
  m.tokens = problem.tokens;
  m.dtype = s.of_out();
  m.out = {a.out.data(), std::int64_t{s.heads} * s.of_value(), s.of_value()};
  m.lse = {static_cast<float*>(a.lse.data()), s.heads, 1};
  backend.merge(m, {});
  settle(a.out);
  return a.result();
}

}  // namespace longspan::tests

#include "launcher/problem/decode_inputs.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

namespace longspan::launcher {
namespace {

constexpr std::int64_t kBlockRows = 4093;  // a prime, so that no period of a layout divides it
enum TensorId : std::uint32_t { kQueries, kKeyBlock, kValueBlock, kNewKeys, kNewValues };

CacheInputs make_cache(const DecodeShape& s, TensorId block, TensorId fresh, float scale,
                       std::int64_t twist) {
  const Options& o = s.options;
  CacheInputs inputs;
  inputs.twist = twist;
  inputs.fresh =
      generated(s.seed, fresh, o.dtypes.compute, s.caches * s.rows(), o.kv_heads, o.head_dim);
  inputs.stored = inputs.fresh;
  Source rows = generated(s.seed, block, o.dtypes.compute, kBlockRows, o.kv_heads, o.head_dim);
  if (storage_of(s.kv_dtype()).needs_scale) {
    inputs.scale = {scale};
    inputs.stored = quantised(inputs.stored, s.kv_dtype(), inputs.scale);
    rows = quantised(rows, s.kv_dtype(), inputs.scale);
  }
  inputs.block.resize(rows.row_bytes() * kBlockRows);
  parallel_for(kBlockRows, o.threads, [&](std::int64_t i) {
    rows.read(i, 0, rows.row_size(), inputs.block.data() + i * rows.row_bytes());
  });
  return inputs;
}

/// The keys or values of the samples, one sequence after the other.
Source sampled_cache(const DecodeShape& shape, const CacheInputs& inputs,
                     const std::vector<DecodeSample>& samples, std::int64_t kv_len) {
  const int dim = shape.options.head_dim;
  const StorageFormat format = storage_of(shape.kv_dtype());
  const std::size_t row_bytes = shape.row_bytes();
  Source source{
      shape.kv_dtype(), static_cast<std::int64_t>(samples.size()) * kv_len, 1, dim, "samples", {}};
  source.read = [=, &shape, &inputs](std::int64_t row, std::int64_t first, std::int64_t count,
                                     void* to) {
    const DecodeSample& sample = samples[row / kv_len];
    const std::int64_t position = row % kv_len, column = std::int64_t{sample.kv_head} * dim + first;
    const int cache = sample.layer % shape.caches;
    if (position >= shape.kv_len) {
      const std::int64_t token = (position - shape.kv_len) % shape.tokens;
      inputs.stored.read(
          cache * shape.rows() + std::int64_t{sample.sequence} * shape.tokens + token, column,
          count, to);
    } else {
      const std::int64_t from = inputs.pattern(cache).row(sample.sequence, position);
      std::memcpy(to, inputs.block.data() + from * row_bytes + format.bytes(column),
                  static_cast<std::size_t>(format.bytes(count)));
    }
  };
  return source;
}

}  // namespace

std::int64_t DecodeShape::capacity(int ranks) const {
  const std::int64_t keys = shard(0, ranks).max_local_len(length_after(steps));
  return page == 0 ? keys : (keys + page - 1) / page * page;
}

Options DecodeShape::fitted() const {
  Options fitted = options;
  fitted.keys = {layout, block};
  fitted.mask.causal = tokens > 1;  // since one new token sees all keys anyway
  fitted.limits.max_tokens = rows();
  fitted.limits.max_batch = batch;
  fitted.limits.max_query_len = tokens;
  fitted.limits.max_kv_len = length_after(steps);
  return fitted;
}

Pattern CacheInputs::pattern(int cache) const {
  constexpr std::int64_t kApart = 977;
  return {kBlockRows, cache * kApart, twist};
}

DecodeInputs::DecodeInputs(const DecodeShape& s)
    : k(make_cache(s, kKeyBlock, kNewKeys, 0.75f, 1)),
      v(make_cache(s, kValueBlock, kNewValues, 1.25f, 132)),
      q(generated(s.seed, kQueries, s.options.dtypes.compute, s.layers * s.rows(), s.options.heads,
                  s.options.head_dim)) {}

std::vector<DecodeSample> draw_samples(const DecodeShape& shape, int count, std::uint64_t draw) {
  std::mt19937_64 random(shape.seed + (draw << 32));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<DecodeSample> samples;
  for (int i = 0; i < count; ++i) {
    if (i == 0)
      samples.push_back({});
    else if (i == 1)
      samples.push_back({shape.layers - 1, shape.batch - 1, shape.options.kv_heads - 1});
    else
      samples.push_back({below(shape.layers), below(shape.batch), below(shape.options.kv_heads)});
  }
  return samples;
}

Problem sampled(const DecodeShape& shape, const DecodeInputs& inputs,
                const std::vector<DecodeSample>& samples, std::int64_t done) {
  const Options& o = shape.options;
  const int group = o.heads / o.kv_heads, tokens = shape.tokens;
  const std::int64_t kv_len = shape.length_after(done);
  Problem problem;
  problem.options = shape.fitted();
  problem.options.heads = group;
  problem.options.kv_heads = 1;
  problem.q_lens.assign(samples.size(), tokens);
  problem.kv_lens.assign(samples.size(), static_cast<std::int32_t>(kv_len));
  problem.k = sampled_cache(shape, inputs.k, samples, kv_len);
  problem.v = sampled_cache(shape, inputs.v, samples, kv_len);
  problem.k_scale = inputs.k.scale;
  problem.v_scale = inputs.v.scale;
  problem.q = {o.dtypes.compute, problem.tokens(), group, o.head_dim, "samples", {}};
  problem.q.read = [=, &shape, &inputs](std::int64_t row, std::int64_t first, std::int64_t count,
                                        void* to) {
    const DecodeSample& sample = samples[row / tokens];
    inputs.q.read(
        sample.layer * shape.rows() + std::int64_t{sample.sequence} * tokens + row % tokens,
        std::int64_t{sample.kv_head} * group * o.head_dim + first, count, to);
  };
  return problem;
}

Answer sampled(const DecodeShape& shape, const std::vector<DecodeSample>& samples,
               const Answer& outputs) {
  const Options& o = shape.options;
  const int group = o.heads / o.kv_heads;
  const auto bytes =
      static_cast<std::size_t>(group * storage_of(o.dtypes.compute).row_bytes(o.head_dim));
  Answer answer;
  answer.rows.resize(samples.size() * shape.tokens);
  std::iota(answer.rows.begin(), answer.rows.end(), std::int64_t{0});
  for (const DecodeSample& sample : samples) {
    for (int t = 0; t < shape.tokens; ++t) {
      const std::int64_t row =
          sample.layer * shape.rows() + std::int64_t{sample.sequence} * shape.tokens + t;
      const std::int64_t at = row * o.kv_heads + sample.kv_head;  // counted in groups of heads
      const std::byte* out = outputs.out.data() + at * bytes;
      const float* lse = outputs.lse.data() + at * group;
      answer.out.insert(answer.out.end(), out, out + bytes);
      answer.lse.insert(answer.lse.end(), lse, lse + group);
    }
  }
  return answer;
}

}  // namespace longspan::launcher

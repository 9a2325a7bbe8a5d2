// One run of a fresh layer by every rank of a test, and its judgement by float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/support/problem.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::tests {

/// A vector in the memory of the world's device.
template <class T>
Buffer to_device(const Communicator& world, const std::vector<T>& values) {
  Buffer buffer(world.device(), std::max<std::size_t>(16, values.size() * sizeof(T)));
  std::vector<std::byte> padded(buffer.bytes());
  if (!values.empty()) std::memcpy(padded.data(), values.data(), values.size() * sizeof(T));
  buffer.upload(padded.data());
  return buffer;
}

inline std::vector<std::byte> to_host(const Buffer& buffer, std::size_t bytes) {
  std::vector<std::byte> values(buffer.bytes());
  buffer.download(values.data());
  values.resize(bytes);
  return values;
}

struct Result {
  std::vector<std::byte> out;
  std::vector<float> lse;
};

inline Options options_for(const Problem& problem, const Communicator& world) {
  const Shape& s = problem.shape;
  return {.heads = s.heads,
          .kv_heads = s.kv_heads,
          .head_dim = s.dim,
          .value_dim = s.of_value(),
          .dtypes = {.compute = s.dtype},
          .mask = s.mask,
          .score = {.softcap = s.softcap},
          .limits = {.max_tokens = problem.tokens, .max_batch = problem.batch()},
          .invariant = world.device() == Device::cuda};
}

/// One run of a fresh layer; outputs are first poisoned with NaN bytes. `rows` of the queries are
/// this rank's own when they are sharded; or only of the result, by `result_shard`.
inline Result run(const Communicator& world, const Problem& problem, const Shard& shard,
                  Options options, std::optional<Shard> query_shard = std::nullopt,
                  std::optional<Shard> result_shard = std::nullopt) {
  const Shape& s = problem.shape;
  const Device device = world.device();
  const std::vector<std::byte> own_q = query_shard ? problem.share_rows(*query_shard) : problem.q;
  const std::int64_t rows = static_cast<std::int64_t>(own_q.size()) /
                            static_cast<std::int64_t>(size_of(s.dtype) * s.heads * s.dim);
  const std::vector<std::byte> own_k = problem.share_keys(shard);
  const std::int64_t keys = static_cast<std::int64_t>(own_k.size()) /
                            static_cast<std::int64_t>(size_of(s.dtype) * s.kv_heads * s.dim);
  int heads = s.heads;  // of the result
  if (options.results.part == ResultPart::heads)
    heads = result_heads(s.heads, world.rank(), world.size()).size();
  std::int64_t results = rows;
  if (result_shard) {
    options.results = {ResultPart::rows, {result_shard->layout, result_shard->block}};
    results = 0;
    for (std::int32_t len : s.q_lens) results += result_shard->local_len(len);
  }
  const std::size_t out_bytes = size_of(s.dtype) * results * heads * s.of_value();
  options.keys = {shard.layout, shard.block};
  const std::int64_t all = std::accumulate(s.kv_lens.begin(), s.kv_lens.end(), std::int64_t{0});
  if (problem.batch() > 1 && all % 2 == 1) options.limits.max_total_keys = all;  // in some cases
  if (query_shard) {
    options.queries = {query_shard->layout, query_shard->block};
    std::int64_t most = 0;
    for (const std::string& n : world.gather(std::to_string(rows), "rows"))
      most = std::max<std::int64_t>(most, std::stoll(n));
    options.limits.max_tokens = most;
  }

  const Buffer q = to_device(world, own_q), k = to_device(world, own_k),
               v = to_device(world, problem.share_values(shard)),
               start = to_device(world, problem.query_start), lens = to_device(world, s.kv_lens),
               sinks = to_device(world, problem.sinks),
               out = to_device(world, std::vector<std::byte>(out_bytes, std::byte{0xff})),
               lse = to_device(world, std::vector<float>(results * heads, NAN));

  Attention layer(world, options);
  AttentionArgs args{
      .q = Tensor(q.data(), s.dtype, {rows, s.heads, s.dim}, device),
      .k = Tensor(k.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
      .v = Tensor(v.data(), s.dtype, {keys, s.kv_heads, s.of_value()}, device),
      .out = Tensor(out.data(), s.dtype, {results, heads, s.of_value()}, device),
      .lse = Lse::tokens_heads(Tensor(lse.data(), DType::fp32, {results, heads}, device))};
  if (problem.batch() > 1) {
    args.query_start = {
        static_cast<const std::int32_t*>(start.data()), {problem.batch() + 1}, device};
    args.kv_len = {static_cast<const std::int32_t*>(lens.data()), {problem.batch()}, device};
  } else {
    args.total_keys = s.kv_lens[0];
  }
  if (shard.layout == Layout::ranges)
    args.key_table = {shard.table, {problem.batch(), shard.ranks + 1}, device};
  if (shard.layout == Layout::listed) args.key_table = {shard.table, {shard.listed}, device};
  if (s.sinks) args.sinks = {static_cast<const float*>(sinks.data()), {s.heads}, device};
  if (query_shard) args.total_tokens = problem.tokens;
  if (const std::optional<Shard>& dealt = query_shard ? query_shard : result_shard) {
    if (dealt->layout == Layout::ranges)
      args.query_table = {dealt->table, {dealt->ranks + 1}, device};
    if (dealt->layout == Layout::listed)
      args.query_table = {dealt->table, {options.limits.max_tokens}, device};
  }
  layer.run(args);
  layer.wait();

  Result result{to_host(out, out_bytes), std::vector<float>(results * heads)};
  const std::vector<std::byte> lse_bytes = to_host(lse, result.lse.size() * sizeof(float));
  std::copy(lse_bytes.begin(), lse_bytes.end(),
            reinterpret_cast<std::byte*>(result.lse.data()));  // of no rows, too
  return result;
}

inline std::vector<std::int64_t> all_rows(const Problem& problem) {
  std::vector<std::int64_t> rows(problem.tokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

/// The token of each of this rank's rows, sequence after sequence.
inline std::vector<std::int64_t> own_rows(const Problem& problem, const Shard& shard) {
  std::vector<std::int64_t> rows;
  for (int b = 0; b < problem.batch(); ++b)
    for (std::int64_t i = 0; i < shard.local_len(problem.shape.q_lens[b]); ++i)
      rows.push_back(problem.query_start[b] + shard.position(i, problem.shape.q_lens[b]));
  return rows;
}

/// The part of a whole result, of all rows and heads, that has these rows and heads.
inline Result part_of(const Problem& problem, const Result& whole,
                      const std::vector<std::int64_t>& rows, HeadRange heads) {
  const std::size_t row = size_of(problem.shape.dtype) * problem.shape.of_value();
  Result part;
  for (const std::int64_t token : rows)
    for (int h = heads.begin; h < heads.end; ++h) {
      const std::size_t at = token * problem.shape.heads + h;
      part.out.insert(part.out.end(), whole.out.begin() + at * row,
                      whole.out.begin() + (at + 1) * row);
      part.lse.push_back(whole.lse[at]);
    }
  return part;
}

inline void expect_exact(const Problem& problem, const Result& result,
                         const std::vector<std::int64_t>& rows) {
  EXPECT_LE(problem.max_error(result.out, rows), problem.tolerance());
  Problem::Oracle exact(problem);
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (int h = 0; h < problem.shape.heads; ++h) {
      const double expected = exact(rows[i], h).lse;
      const float found = result.lse[i * problem.shape.heads + h];
      if (std::isinf(expected)) {
        EXPECT_EQ(found, expected);
      } else {
        EXPECT_NEAR(found, expected, problem.shape.dtype == DType::fp32 ? 1e-5 : 2e-2);
      }
    }
}

inline std::vector<Shape> shapes() {
  return {
      {.mask = {.causal = true}},
      {.heads = 6, .kv_heads = 1, .dim = 80, .q_lens = {3}, .kv_lens = {1000}},
      {.dtype = DType::bf16, .q_lens = {130}, .kv_lens = {700}, .mask = {.causal = true}},
      {.dtype = DType::fp16, .q_lens = {9}, .kv_lens = {513}, .mask = {.window = 100, .right = 7}},
      {.q_lens = {7}, .kv_lens = {2}, .mask = {.causal = true}},  // more queries than keys
      {.q_lens = {4}, .kv_lens = {0}},                            // no keys at all
      {.q_lens = {2}, .kv_lens = {1}, .sinks = true},
      {.dim = 128,
       .q_lens = {20},
       .kv_lens = {900},
       .mask = {.causal = true, .window = 200},
       .softcap = 20.0f,
       .sinks = true},
      {.q_lens = {1, 0, 17, 40}, .kv_lens = {333, 50, 0, 40}, .mask = {.causal = true}},
      {.heads = 5,
       .kv_heads = 5,
       .dim = 24,
       .dtype = DType::bf16,
       .q_lens = {1, 1, 1},
       .kv_lens = {1, 600, 129},
       .sinks = true},
      // Values of another width than keys.
      {.dim = 192, .value_dim = 128, .q_lens = {33}, .kv_lens = {500}, .mask = {.causal = true}},
      {.heads = 5,
       .kv_heads = 1,
       .dim = 576,
       .value_dim = 512,
       .dtype = DType::bf16,
       .q_lens = {2, 1},
       .kv_lens = {300, 129}},
      {.dim = 40, .value_dim = 72, .dtype = DType::fp16, .q_lens = {9}, .kv_lens = {200}},
      {.dim = 8, .q_lens = {70}, .kv_lens = {260}, .mask = {.causal = true}},
      {.dim = 512, .dtype = DType::fp16, .q_lens = {3}, .kv_lens = {140}},
  };
}

/// Those for which there is time, also where CPUs simulate GPUs.
inline std::vector<Shape> in_time(std::vector<Shape> shapes) {
  if (kSimulated)
    std::erase_if(shapes, [](const Shape& s) {
      const auto sum = [](const std::vector<std::int32_t>& lens) {
        return std::accumulate(lens.begin(), lens.end(), std::int64_t{0});
      };
      return sum(s.kv_lens) * sum(s.q_lens) > 4000 || s.dim > 80;
    });
  return shapes;
}

}  // namespace longspan::tests

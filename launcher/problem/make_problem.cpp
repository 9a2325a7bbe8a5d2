#include "launcher/problem/make_problem.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "launcher/io/npy.hpp"
#include "launcher/problem/demand.hpp"
#include "launcher/problem/elements.hpp"
#include "longspan/option_table.hpp"

namespace longspan::launcher {
namespace {

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

void take_files(Problem& problem, const RunOptions& o) {
  problem.q = from_file(NpyFile(o.q, o.dtype), "--q");
  problem.k = from_file(NpyFile(o.k, o.dtype), "--k");
  problem.v = from_file(NpyFile(o.v, o.dtype), "--v");
  const Source &q = problem.q, &k = problem.k, &v = problem.v;
  for (const Source* other : {&k, &v})
    require(other->dtype == q.dtype, "{} is {}, but {} is {}; the types must be equal", q.label,
            name(q.dtype), other->label, name(other->dtype));
  require(k.rows == v.rows && k.heads == v.heads,
          "{} and {}: keys and values must have the same shape; only the last number may differ",
          k.label, v.label);
  require(q.dim == k.dim,
          "{} and {}: queries and keys must have the same head_dim, the last number", q.label,
          k.label);
  require(q.heads % k.heads == 0,
          "{} and {}: the {} heads of the queries are not a multiple of the {} kv heads", q.label,
          k.label, q.heads, k.heads);
  require(std::max(q.rows, k.rows) <= 2147483647, "{} and {}: at most 2^31 - 1 rows are supported",
          q.label, k.label);
  problem.q_lens = {static_cast<std::int32_t>(q.rows)};
  problem.kv_lens = {static_cast<std::int32_t>(k.rows)};
}

void make_inputs(Problem& problem, const RunOptions& o, std::uint64_t seed) {
  const DType dtype = o.dtype.empty() ? fp32 : dtype_named(o.dtype);
  const int kv_heads = o.kv_heads > 0 ? o.kv_heads : o.heads;
  require(o.lengths.size() > 0 || o.tokens <= 2147483647 / o.batch,
          "{} sequences of {} query rows; at most 2^31 - 1 rows are supported", o.batch, o.tokens);
  require_memory_for_batch(o.batch);
  if (o.lengths.empty()) {
    problem.q_lens.assign(o.batch, static_cast<std::int32_t>(o.tokens));
    problem.kv_lens.assign(o.batch, static_cast<std::int32_t>(o.kv));
  } else {
    problem.q_lens.assign(o.lengths.begin(), o.lengths.end());
    problem.kv_lens = problem.q_lens;
  }
  const std::int64_t tokens = problem.tokens(), keys = problem.key_start().back();
  require(tokens <= 2147483647, "{} query rows in the batch; at most 2^31 - 1 are supported",
          tokens);
  problem.q = generated(seed, 0, dtype, tokens, o.heads, o.dim);
  problem.k = generated(seed, 1, dtype, keys, kv_heads, o.dim);
  const int value_dim = o.value_dim > 0 ? o.value_dim : o.dim;
  require(!o.values_in_keys || value_dim <= o.dim,
          "--values-in-keys with --dim {} and --value-dim {}: values that are the first columns of "
          "their keys are no wider than these",
          o.dim, value_dim);
  problem.v = o.values_in_keys ? first_columns(problem.k, value_dim)
                               : generated(seed, 2, dtype, keys, kv_heads, value_dim);
}

/// The published slopes for a power of two of heads (Press et al., arXiv 2108.12409).
std::vector<float> published_slopes(int heads) {
  std::vector<float> slopes;
  slopes.reserve(static_cast<std::size_t>(heads));
  for (int h = 0; h < heads; ++h)
    slopes.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(heads)));
  return slopes;
}

void take_sinks(Problem& problem, const RunOptions& o) {
  const NpyFile file(o.sinks, "fp32");
  require(file.shape() == std::vector<std::int64_t>{problem.q.heads},
          "{} (--sinks) has shape {}; [{}] was expected, one sink for each head of the queries",
          o.sinks, file.shape_text(), problem.q.heads);
  problem.sinks.resize(problem.q.heads);
  file.read(0, problem.sinks.size() * sizeof(float), problem.sinks.data());
}

/// The gradients of the results.
void take_gradients(Problem& problem, const RunOptions& o, std::uint64_t seed) {
  problem.options.gradients = true;
  problem.fp32_gradients = o.fp32_gradients;
  const Source& q = problem.q;
  if (o.dout.empty()) {
    problem.dout = generated(seed, kOfDout, q.dtype, q.rows, q.heads, problem.v.dim);
    return;
  }
  problem.dout = from_file(NpyFile(o.dout, o.dtype), "--dout");
  const Source& dout = problem.dout;
  require(dout.rows == q.rows && dout.heads == q.heads && dout.dim == problem.v.dim,
          "{}: the gradient of the result has its shape, [{}, {}, {}]", dout.label, q.rows, q.heads,
          problem.v.dim);
  require(dout.dtype == q.dtype, "{} is {}, but {} is {}; the types must be equal", q.label,
          name(q.dtype), dout.label, name(dout.dtype));
  if (o.dlse.empty()) return;
  const NpyFile file(o.dlse, "fp32");
  require(file.shape() == std::vector<std::int64_t>{q.rows, q.heads},
          "{} (--dlse) has shape {}; [{}, {}] was expected, a number for each row and head", o.dlse,
          file.shape_text(), q.rows, q.heads);
  problem.dlse = in_file(file, q.rows, q.heads, 1);
}

/// Bidirectional ranges of every sequence.
void take_ranges(Problem& problem, const RunOptions& o) {
  const std::vector<std::int64_t>& bounds = o.bidirectional;
  require(bounds.size() % 2 == 0 && std::is_sorted(bounds.begin(), bounds.end()),
          "--bidirectional {}: the begin and the end of each range, ascending",
          fmt::join(bounds, " "));
  for (const std::int32_t keys : problem.kv_lens) {
    require(bounds.empty() || bounds.back() <= keys, "--bidirectional {}: a sequence has {} keys",
            fmt::join(bounds, " "), keys);
    problem.bidirectional.insert(problem.bidirectional.end(), bounds.begin(), bounds.end());
  }
}

/// Documents, ranges and padding of every sequence.
void take_hidden(Problem& problem, const RunOptions& o) {
  const std::size_t batch = problem.kv_lens.size();
  require(std::is_sorted(o.documents.begin(), o.documents.end()),
          "--documents {}: the starts of documents ascend", fmt::join(o.documents, " "));
  for (std::size_t b = 0; b < batch; ++b)
    problem.documents.insert(problem.documents.end(), o.documents.begin(), o.documents.end());
  take_ranges(problem, o);
  if (o.left_padding.empty()) return;
  require(o.left_padding.size() == 1 || o.left_padding.size() == batch,
          "--left-padding has {} numbers; 1 is wanted, or {}, one for each sequence",
          o.left_padding.size(), batch);
  for (std::size_t b = 0; b < batch; ++b) {
    const std::int64_t keys = o.left_padding[o.left_padding.size() == 1 ? 0 : b];
    require(keys <= problem.kv_lens[b], "--left-padding {}: sequence {} has {} keys", keys, b,
            problem.kv_lens[b]);
    problem.left_padding.push_back(static_cast<std::int32_t>(keys));
  }
}

/// Every row names keys of its sequence at random.
void draw_indices(Problem& problem, int top_k, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  problem.options.indices.top_k = top_k;
  for (std::size_t b = 0; b < problem.kv_lens.size(); ++b)
    for (std::int64_t i = 0; i < std::int64_t{problem.q_lens[b]} * top_k; ++i)
      problem.indices.push_back(
          problem.kv_lens[b] == 0 ? -1
                                  : static_cast<std::int32_t>(
                                        random() % static_cast<std::uint64_t>(problem.kv_lens[b])));
}

/// Rounds the inputs to fp8, also for the oracle.
void store_as(Problem& problem, DType dtype) {
  for (Source* source : {&problem.q, &problem.k, &problem.v})
    *source = quantised(*source, dtype, {1.0f});
  problem.q_scale = problem.k_scale = problem.v_scale = {1.0f};
  problem.options.dtypes.query = problem.options.dtypes.kv = dtype;
}

}  // namespace

Problem make_problem(const RunOptions& o, const WorldOptions& world) {
  Problem problem;
  o.q.empty() ? make_inputs(problem, o, world.seed) : take_files(problem, o);
  if (!o.sinks.empty()) take_sinks(problem, o);
  take_hidden(problem, o);
  if (!o.alibi.empty()) problem.slopes = published_slopes(problem.q.heads);
  problem.keys = {.layout = o.layout, .block = o.block};
  if (o.shard_queries) problem.queries = problem.keys;
  problem.options = {.heads = problem.q.heads,
                     .kv_heads = problem.k.heads,
                     .head_dim = problem.q.dim,
                     .value_dim = problem.v.dim,
                     .values_in_keys = o.values_in_keys,
                     .dtypes = {.compute = problem.q.dtype,
                                .fp8_products = o.fp8_products,
                                .bf16_products = o.bf16_products},
                     .mask = o.mask,
                     .score = o.score,
                     .rope = o.rope,
                     .dropout = o.dropout,
                     .invariant = o.invariant,
                     .strategy = o.strategy,
                     .ranks_per_node = o.ranks_per_node,
                     .exchange = world.exchange,
                     .threads = world.threads,
                     .debug = {.profile = true}};
  if (o.top_k > 0) draw_indices(problem, o.top_k, world.seed);
  if (const auto alibi = choice_named<Alibi>(o.alibi)) problem.options.score.alibi = *alibi;
  problem.dropout_seed[0] = o.dropout_seed.value_or(static_cast<std::int64_t>(world.seed));
  if (!o.qkv_dtype.empty()) store_as(problem, dtype_named(o.qkv_dtype));
  if (o.backward) take_gradients(problem, o, world.seed);
  return problem;
}

}  // namespace longspan::launcher

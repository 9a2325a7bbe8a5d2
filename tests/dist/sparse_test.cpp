// Sparse attention by indices against float64, over ranks, layouts of keys, pages and storage:
// indices that are nobody, are given twice, or are all on one rank; rows of no key; states and
// shapes of peers' grids; refusals on every rank. What no index names is NaN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

struct Sparse {
  int heads = 8, kv_heads = 1, dim = 48, value_dim = 32;
  bool in_keys = true;  // latent keys
  DType dtype = fp32, kv_dtype = fp32;
  std::vector<std::int32_t> q_lens{6}, kv_lens{700};
  Sharding rule{Layout::contiguous, kSegment};
  int page = 0;  // keys; 0: none
  int top_k = 40, columns = 40;
  bool of_heads = false;  // a list for each kv head
  bool lengths = false, slots = false, sinks = false, padding = false, used = false;
  double softcap = 0;
  const char* strategy = "auto";
  ResultPart part = ResultPart::all;
};

class SparseAttention : public testing::Test {
 protected:
  SparseAttention() : world(test_world()) {}

  std::int64_t tokens() const { return std::accumulate(s.q_lens.begin(), s.q_lens.end(), 0L); }
  int batch() const { return static_cast<int>(s.q_lens.size()); }
  int lists() const { return s.of_heads ? s.kv_heads : 1; }

  std::int32_t below(std::int64_t n) {
    return static_cast<std::int32_t>(random() %
                                     static_cast<std::uint64_t>(std::max<std::int64_t>(n, 1)));
  }

  /// Draws everything that ranks share.
  void make(const Sparse& given) {
    s = given;
    const std::uint64_t seed = shared_seed(world);
    random.seed(seed);
    q = random_elements(s.dtype, tokens() * s.heads * s.dim, seed, 0);
    start.assign(1, 0);
    k.clear();
    v.clear();
    indices.clear();
    lens.clear();
    padding.clear();
    used.clear();
    for (int b = 0; b < batch(); ++b) {
      const auto each = static_cast<std::uint32_t>(3 * b);
      start.push_back(start.back() + s.q_lens[b]);
      k.push_back(random_elements(s.kv_dtype, std::int64_t{s.kv_lens[b]} * s.kv_heads * s.dim, seed,
                                  each + 1));
      v.push_back(random_elements(s.kv_dtype, std::int64_t{s.kv_lens[b]} * s.kv_heads * s.value_dim,
                                  seed, each + 2));
      padding.push_back(s.padding ? s.kv_lens[b] / 5 : 0);
      used.push_back(s.used ? s.q_lens[b] - below(2) : s.q_lens[b]);
    }
    if (s.sinks) sinks = random_floats(s.heads, seed, 99);
    for (std::int64_t t = 0; t < tokens(); ++t) {
      lens.push_back(s.lengths ? below(s.columns + 3) - 1 : s.columns);
      const std::int64_t keys = s.kv_lens[sequence(t)];
      for (int h = 0; h < lists(); ++h) {
        const int kind = static_cast<int>((t + h) % 6);
        for (int i = 0; i < s.columns; ++i) {
          std::int32_t index = below(keys);
          if (kind == 1) index = -1;                                      // a row of nobody
          if (kind == 2) index = below(std::min<std::int64_t>(keys, 9));  // of one rank, and often
          if (kind == 3 && below(2)) index = -1 - below(3);
          if (kind == 4 && below(2)) index = static_cast<std::int32_t>(keys) + below(5);
          if (kind == 4 && below(9) == 0) index = std::numeric_limits<std::int32_t>::max();
          indices.push_back(keys == 0 && kind != 1 ? 0 : index);
        }
      }
    }
    // Of rows and heads the number of times that each key is named.
    named.assign(static_cast<std::size_t>(tokens() * lists()), {});
    for (std::int64_t t = 0; t < tokens(); ++t)
      for (int h = 0; h < lists(); ++h) {
        const int b = sequence(t);
        std::vector<double>& times = named[static_cast<std::size_t>(t * lists() + h)];
        times.assign(static_cast<std::size_t>(s.kv_lens[b]), 0.0);
        if (t - start[b] >= used[b]) continue;
        for (int i = 0; i < std::min(s.columns, lens[t]); ++i) {
          const std::int32_t index =
              indices[static_cast<std::size_t>((t * lists() + h) * s.columns + i)];
          if (index >= padding[b] && index < s.kv_lens[b]) ++times[static_cast<std::size_t>(index)];
        }
      }
    // NaN in all that nobody names.
    for (int b = 0; b < batch(); ++b)
      for (std::int64_t j = 0; j < s.kv_lens[b]; ++j)
        for (int g = 0; g < s.kv_heads; ++g) {
          bool some = false;
          for (std::int64_t t = start[b]; t < start[b + 1]; ++t)
            some = some || named[static_cast<std::size_t>(t * lists() + (s.of_heads ? g : 0))]
                                [static_cast<std::size_t>(j)] > 0;
          if (some) continue;
          poison(k[b], j * s.kv_heads + g, s.dim);
          poison(v[b], j * s.kv_heads + g, s.value_dim);
        }
  }

  void poison(std::vector<std::byte>& to, std::int64_t row, int dim) const {
    for (int d = 0; d < dim; ++d) launcher::store(to.data(), s.kv_dtype, row * dim + d, NAN);
  }

  int sequence(std::int64_t t) const {
    int b = 0;
    while (t >= start[b + 1]) ++b;
    return b;
  }

  Options options() const {
    Options o{.heads = s.heads,
              .kv_heads = s.kv_heads,
              .head_dim = s.dim,
              .value_dim = s.value_dim,
              .values_in_keys = s.in_keys,
              .dtypes = {.compute = s.dtype},
              .score = {.softcap = s.softcap},
              .indices = {.top_k = s.top_k, .slots = s.slots},
              .keys = s.rule,
              .strategy = s.strategy,
              .threads = 1};
    if (s.kv_dtype != s.dtype) o.dtypes.kv = s.kv_dtype;
    o.limits.max_tokens = tokens();
    o.limits.max_batch = batch();
    o.results.part = s.part;
    if (s.part == ResultPart::rows) o.results.rows = {Layout::striped};
    return o;
  }

  /// A rank's cache: its keys of all sequences, in pages in a mixed order if there are any, each
  /// followed by NaN.
  struct Cache {
    std::vector<std::byte> k, v;
    std::vector<std::int32_t> table;                // [batch, columns]
    std::vector<std::vector<std::int32_t>> places;  // of sequences: the slot of a position, or -1
    std::int64_t rows = 0, columns = 0;
  };
  Cache cache() {
    Cache c;
    std::vector<std::int64_t> own;
    std::int64_t pages = 0;
    for (int b = 0; b < batch(); ++b) {
      own.push_back(
          s.rule.resolve(s.kv_lens[b], world.rank(), world.size()).local_len(s.kv_lens[b]));
      if (s.page > 0) c.columns = std::max(c.columns, (own.back() + s.page - 1) / s.page);
    }
    pages = c.columns * batch() + 1;
    c.rows = s.page > 0 ? pages * s.page : std::accumulate(own.begin(), own.end(), std::int64_t{0});
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 mixed(static_cast<unsigned>(world.rank()) + 5);
    std::shuffle(order.begin(), order.end(), mixed);
    order.resize(static_cast<std::size_t>(c.columns * batch()));
    c.table = order;
    const std::size_t unit = size_of(s.kv_dtype),
                      row_k = unit * static_cast<std::size_t>(s.kv_heads * s.dim),
                      row_v = unit * static_cast<std::size_t>(s.kv_heads * s.value_dim);
    c.k.resize(static_cast<std::size_t>(c.rows) * row_k);
    c.v.resize(static_cast<std::size_t>(c.rows) * row_v);
    for (std::int64_t i = 0; i < c.rows * s.kv_heads; ++i) {
      poison(c.k, i, s.dim);
      poison(c.v, i, s.value_dim);
    }
    std::int64_t before = 0;
    for (int b = 0; b < batch(); ++b) {
      const Shard shard = s.rule.resolve(s.kv_lens[b], world.rank(), world.size());
      c.places.emplace_back(static_cast<std::size_t>(s.kv_lens[b]), -1);
      for (std::int64_t i = 0; i < own[b]; ++i) {
        const std::int64_t to =
            s.page > 0 ? c.table[b * c.columns + i / s.page] * std::int64_t{s.page} + i % s.page
                       : before + i;
        const auto from = static_cast<std::size_t>(shard.position(i, s.kv_lens[b]));
        c.places[b][from] = static_cast<std::int32_t>(to);
        std::copy_n(k[b].begin() + static_cast<std::ptrdiff_t>(from * row_k), row_k,
                    c.k.begin() + to * static_cast<std::ptrdiff_t>(row_k));
        std::copy_n(v[b].begin() + static_cast<std::ptrdiff_t>(from * row_v), row_v,
                    c.v.begin() + to * static_cast<std::ptrdiff_t>(row_v));
      }
      before += own[b];
    }
    return c;
  }

  /// The indices that this rank gives.
  std::vector<std::int32_t> own_indices(const Cache& c) const {
    if (!s.slots) return indices;
    std::vector<std::int32_t> own = indices;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const int b = sequence(static_cast<std::int64_t>(i) / (s.columns * lists()));
      if (own[i] < 0) continue;  // nobody stays nobody
      own[i] = own[i] < s.kv_lens[b] ? c.places[b][static_cast<std::size_t>(own[i])]
                                     : static_cast<std::int32_t>(c.rows);
    }
    return own;
  }

  Result run() {
    Attention layer(world, options());
    return run(layer);
  }
  Result run(Attention& layer) {
    const Device device = world.device();
    const Cache c = cache();
    const Buffer to_q = to_device(world, q), to_k = to_device(world, c.k),
                 to_v = to_device(world, c.v), table = to_device(world, c.table),
                 to_start = to_device(world, start), kv = to_device(world, s.kv_lens),
                 to_indices = to_device(world, own_indices(c)), to_lens = to_device(world, lens),
                 to_sinks = to_device(world, sinks), pad = to_device(world, padding),
                 to_used = to_device(world, used);
    heads = {0, s.heads};
    if (s.part == ResultPart::heads) heads = result_heads(s.heads, world.rank(), world.size());
    rows.clear();
    for (int b = 0; b < batch(); ++b)
      for (std::int64_t t = 0; t < s.q_lens[b]; ++t)
        if (s.part != ResultPart::rows || t % world.size() == world.rank())
          rows.push_back(start[b] + t);
    const auto count = std::ssize(rows);
    const std::size_t bytes =
        size_of(s.dtype) * static_cast<std::size_t>(count * heads.size() * s.value_dim);
    const Buffer out = to_device(world, std::vector<std::byte>(bytes, std::byte{0xff})),
                 lse = to_device(world, std::vector<float>(
                                            static_cast<std::size_t>(count * heads.size()), NAN));
    const auto view = [&](const Buffer& of, int dim) {
      return s.page > 0
                 ? Tensor(of.data(), s.kv_dtype, {c.rows / s.page, s.page, s.kv_heads, dim}, device)
                 : Tensor(of.data(), s.kv_dtype, {c.rows, s.kv_heads, dim}, device);
    };
    AttentionArgs args{
        .q = Tensor(to_q.data(), s.dtype, {tokens(), s.heads, s.dim}, device),
        .k = view(to_k, s.dim),
        .out = Tensor(out.data(), s.dtype, {count, heads.size(), s.value_dim}, device),
        .lse = Lse::tokens_heads(Tensor(lse.data(), fp32, {count, heads.size()}, device))};
    if (!s.in_keys) args.v = view(to_v, s.value_dim);
    if (batch() > 1)
      args.query_start = {static_cast<const std::int32_t*>(to_start.data()), {batch() + 1}, device};
    if (!s.slots) args.kv_len = {static_cast<const std::int32_t*>(kv.data()), {batch()}, device};
    if (s.page > 0 && !s.slots)
      args.block_table = {
          static_cast<const std::int32_t*>(table.data()), {batch(), c.columns}, device};
    const auto* data = static_cast<const std::int32_t*>(to_indices.data());
    args.indices = s.of_heads ? Tensor(data, {tokens(), s.kv_heads, s.columns}, device)
                              : Tensor(data, {tokens(), s.columns}, device);
    if (s.lengths)
      args.index_len = {static_cast<const std::int32_t*>(to_lens.data()), {tokens()}, device};
    if (s.sinks) args.sinks = {static_cast<const float*>(to_sinks.data()), {s.heads}, device};
    if (s.padding)
      args.left_padding = {static_cast<const std::int32_t*>(pad.data()), {batch()}, device};
    if (s.used)
      args.query_len = {static_cast<const std::int32_t*>(to_used.data()), {batch()}, device};
    const Buffer one = to_device(world, std::vector<float>{1.0f});
    if (is_fp8(s.kv_dtype))
      args.k_scale = args.v_scale = {static_cast<const float*>(one.data()), {1}, device};
    layer.run(args);
    layer.wait();
    Result result{to_host(out, bytes),
                  std::vector<float>(static_cast<std::size_t>(count * heads.size()))};
    const std::vector<std::byte> lse_bytes = to_host(lse, result.lse.size() * sizeof(float));
    std::copy(lse_bytes.begin(), lse_bytes.end(), reinterpret_cast<std::byte*>(result.lse.data()));
    return result;
  }

  launcher::RowMajor matrix(const std::vector<std::byte>& of, int b, int kv_head, int dim) const {
    launcher::RowMajor m(s.kv_lens[b], dim);
    for (std::int64_t j = 0; j < s.kv_lens[b]; ++j)
      for (int d = 0; d < dim; ++d)
        m(j, d) = launcher::load(of.data(), s.kv_dtype, (j * s.kv_heads + kv_head) * dim + d);
    return m;
  }

  void expect_exact(const Result& found) const {
    const double bound = s.dtype == fp32 ? 1e-5 : 3e-2;
    for (int h = heads.begin; h < heads.end; ++h) {
      const int kv_head = h / (s.heads / s.kv_heads);
      launcher::RowMajor keys, values;
      int of = -1;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::int64_t t = rows[i];
        const int b = sequence(t);
        if (b != of) {
          keys = matrix(k[b], b, kv_head, s.dim);
          values = s.in_keys ? launcher::RowMajor(keys.leftCols(s.value_dim))
                             : matrix(v[b], b, kv_head, s.value_dim);
          of = b;
        }
        Eigen::VectorXd row(s.dim);
        for (int d = 0; d < s.dim; ++d)
          row[d] = launcher::load(q.data(), s.dtype, (t * s.heads + h) * s.dim + d);
        std::vector<double> bias;
        for (const double times :
             named[static_cast<std::size_t>(t * lists() + (s.of_heads ? kv_head : 0))])
          bias.push_back(std::log(times));
        std::optional<double> sink;
        if (s.sinks) sink = sinks[static_cast<std::size_t>(h)];
        const launcher::Exact exact = launcher::attend_exactly(
            row, keys, values, {0, s.kv_lens[b]}, 1 / std::sqrt(s.dim), s.softcap, sink, bias);
        const std::int64_t at = static_cast<std::int64_t>(i) * heads.size() + h - heads.begin;
        for (int d = 0; d < s.value_dim; ++d)
          ASSERT_NEAR(launcher::load(found.out.data(), s.dtype, at * s.value_dim + d), exact.out[d],
                      bound)
              << "row " << t << " head " << h << " column " << d;
        const float lse = found.lse[static_cast<std::size_t>(at)];
        if (std::isinf(exact.lse))
          ASSERT_EQ(lse, exact.lse) << "row " << t << " head " << h;
        else
          ASSERT_NEAR(lse, exact.lse, bound) << "row " << t << " head " << h;
      }
    }
  }

  Communicator world;
  Sparse s;
  std::mt19937_64 random;
  std::vector<std::byte> q;
  std::vector<std::vector<std::byte>> k, v;  // of sequences
  std::vector<std::int32_t> start, indices, lens, padding, used;
  std::vector<std::vector<double>> named;
  std::vector<float> sinks;
  std::vector<std::int64_t> rows;  // of the result of this rank
  HeadRange heads;
};

TEST_F(SparseAttention, EveryPageAndLayout) {
  for (const Sharding rule :
       {Sharding{Layout::contiguous}, Sharding{Layout::interleaved, 1},
        Sharding{Layout::interleaved, 64}, Sharding{Layout::zigzag}, Sharding{Layout::striped}})
    for (const int page : {0, 2, 61, 64, 69, 576}) {
      SCOPED_TRACE(std::string(name(rule.layout)) + " page " + std::to_string(page));
      make({.q_lens = {2, 0, 3, 1},
            .kv_lens = {300, 5, 64, 0},
            .rule = rule,
            .page = page,
            .lengths = page == 61,
            .sinks = page == 64});
      ASSERT_NO_FATAL_FAILURE(expect_exact(run()));
    }
}

TEST_F(SparseAttention, EveryShapeOfHeads) {
  for (const Sparse& shape : {Sparse{.heads = 1},
                              {.heads = 3, .columns = 17},
                              {.heads = 16, .dim = 576, .value_dim = 512},
                              {.heads = 64, .q_lens = {2}},
                              {.heads = 128, .q_lens = {2}, .kv_lens = {130}},
                              {.heads = 8, .kv_heads = 2, .in_keys = false},
                              {.heads = 8,
                              .kv_heads = 2,
                              .dim = 64,
                              .value_dim = 64,
                              .in_keys = false,
                              .page = 64,
                              .of_heads = true},
                              {.heads = 6,
                              .kv_heads = 3,
                              .dim = 40,
                              .value_dim = 40,
                              .in_keys = false,
                              .of_heads = true,
                              .lengths = true},
                              {.heads = 4,
                              .kv_heads = 4,
                              .dim = 24,
                              .value_dim = 17,
                              .in_keys = false,
                              .page = 5,
                              .of_heads = true,
                              .sinks = true}})
    for (const DType dtype : {fp32, bf16}) {
      Sparse of_type = shape;
      of_type.dtype = of_type.kv_dtype = dtype;
      SCOPED_TRACE(std::to_string(shape.heads) + " heads, " + std::to_string(shape.kv_heads) +
                   " kv heads, " + name(dtype));
      make(of_type);
      ASSERT_NO_FATAL_FAILURE(expect_exact(run()));
    }
}

TEST_F(SparseAttention, WhatGoesWithIndices) {
  for (const Sparse& shape :
       {Sparse{.page = 16, .slots = true},
        {.slots = true},
        {.q_lens = {3, 2}, .kv_lens = {90, 200}, .padding = true},
        {.q_lens = {3, 2}, .kv_lens = {90, 200}, .lengths = true, .used = true},
        {.softcap = 2},
        {.dtype = bf16, .kv_dtype = e4m3, .page = 8},
        {.dtype = fp16, .kv_dtype = fp16},
        {.strategy = "scatter-states"},
        {.strategy = "gather-states", .part = ResultPart::rows},
        {.strategy = "scatter-states", .part = ResultPart::heads}}) {
    SCOPED_TRACE(std::string(shape.strategy) + (shape.slots ? " slots" : "") + " " +
                 name(shape.kv_dtype));
    make(shape);
    ASSERT_NO_FATAL_FAILURE(expect_exact(run()));
  }
}

/// One layer serves fewer rows and indices than its limits, and repeats its bits.
TEST_F(SparseAttention, RunsWithinTheLimits) {
  make({.q_lens = {9}, .top_k = 64, .columns = 64});
  Attention layer(world, options());
  const std::size_t bytes = layer.workspace_bytes();
  for (const int columns : {64, 1, 7}) {
    make({.q_lens = {columns == 7 ? 9 : 2}, .top_k = 64, .columns = columns});
    const Result once = run(layer);
    ASSERT_NO_FATAL_FAILURE(expect_exact(once));
    EXPECT_EQ(run(layer).out, once.out);
    EXPECT_EQ(layer.workspace_bytes(), bytes);
  }
}

/// An owner that does not drop foreign indices adds what is at those rows of its own cache.
TEST_F(SparseAttention, ForeignIndicesAreNobody) {
  make({.heads = 2,
        .q_lens = {1},
        .kv_lens = {256},
        .rule = {Layout::interleaved, 1},
        .top_k = 4,
        .columns = 4});
  indices = {0, 1, 2, 3};
  for (std::vector<double>& times : named) {
    times.assign(256, 0.0);
    for (std::size_t i = 0; i < 4; ++i) times[i] = 1;
  }
  k[0] = random_elements(fp32, 256 * s.dim, 11, 1);
  ASSERT_NO_FATAL_FAILURE(expect_exact(run()));
}

void expect_refused(const std::string& why, const auto& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << why;
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(why));
  }
}

TEST_F(SparseAttention, WhatDoesNotGoIsRefused) {
  make({});
  const auto refuse = [&](const char* why, const auto& change) {
    Options o = options();
    change(o);
    expect_refused(why, [&] { Attention(world, o); });
  };
  refuse("a mask (causal, window, chunks, prefix, ranges) with indices",
         [](Options& o) { o.mask.causal = true; });
  refuse("invariant with indices", [](Options& o) { o.invariant = true; });
  refuse("fp64 with indices", [](Options& o) { o.dtypes = {.compute = DType::fp64}; });
  refuse("dropout with indices", [](Options& o) { o.dropout.p = 0.5; });
  refuse("gradients with indices", [](Options& o) {
    o.gradients = true, o.limits.max_kv_len = 700, o.values_in_keys = false;
  });
  refuse("a share of the query rows", [](Options& o) { o.queries = Sharding{}; });
  refuse("listed keys with indices", [](Options& o) { o.keys = {Layout::listed}; });
  refuse("top_k -1 is not in", [](Options& o) { o.indices.top_k = -1; });
  refuse("top_k is 0", [](Options& o) { o.indices = {0, true}; });
  for (const StrategyInfo& info : strategies())
    if (std::string(info.name) != "gather-states" && std::string(info.name) != "scatter-states")
      refuse("gather-states and scatter-states do so", [&](Options& o) { o.strategy = info.name; });
}

TEST_F(SparseAttention, BadIndicesAreRefused) {
  if (world.device() != Device::host) GTEST_SKIP() << "tensors on CPUs";
  const Communicator alone = self();
  std::vector<float> queries(48), keys(96), out(48);
  std::vector<std::int32_t> list(24);
  std::vector<std::int64_t> wide(24);
  const Options o{.heads = 2,
                  .kv_heads = 2,
                  .head_dim = 8,
                  .dtypes = {.compute = fp32},
                  .indices = {.top_k = 4},
                  .limits = {.max_tokens = 3}};
  Attention layer(alone, o);
  const AttentionArgs good{.q = Tensor(queries.data(), {3, 2, 8}),
                           .k = Tensor(keys.data(), {6, 2, 8}),
                           .v = Tensor(keys.data(), {6, 2, 8}),
                           .out = Tensor(out.data(), {3, 2, 8}),
                           .total_keys = 6,
                           .indices = Tensor(list.data(), {3, 4})};
  EXPECT_NO_THROW(layer.run(good));
  const auto refuse = [&](const char* why, const auto& change) {
    AttentionArgs bad = good;
    change(bad);
    expect_refused(why, [&] { layer.run(bad); });
  };
  refuse("indices is missing", [](AttentionArgs& a) { a.indices = {}; });
  refuse("indices is int64", [&](AttentionArgs& a) { a.indices = Tensor(wide.data(), {3, 4}); });
  refuse("5 columns; 1 to 4 (top_k)", [&](AttentionArgs& a) {
    a.indices = Tensor(list.data(), {3, 5});
  });
  refuse("0 columns", [&](AttentionArgs& a) { a.indices = Tensor(list.data(), {3, 0}); });
  refuse("[3, columns] is wanted", [&](AttentionArgs& a) {
    a.indices = Tensor(list.data(), {2, 4});
  });
  refuse("[3, 2, columns]", [&](AttentionArgs& a) { a.indices = Tensor(list.data(), {3, 1, 4}); });
  refuse("one behind the other", [&](AttentionArgs& a) {
    a.indices = Tensor(list.data(), {3, 4}, {8, 2});
  });
  refuse("index_len is [2]", [&](AttentionArgs& a) { a.index_len = Tensor(list.data(), {2}); });
  Attention dense(alone, {.heads = 2,
                          .kv_heads = 2,
                          .head_dim = 8,
                          .dtypes = {.compute = fp32},
                          .limits = {.max_tokens = 3}});
  expect_refused("give Options::indices with top_k", [&] { dense.run(good); });
  Options slots = o;
  slots.indices.slots = true;
  slots.rope.dim = 8;
  Attention turned(alone, slots);
  AttentionArgs given = good;
  std::vector<float> values(96);
  given.k = Tensor(keys.data(), {2, 3, 2, 8});
  given.v = Tensor(values.data(), {2, 3, 2, 8});
  EXPECT_NO_THROW(turned.run(given));
  given.total_keys = 0;
  expect_refused("RoPE rotates the rows of q", [&] { turned.run(given); });
  given.total_keys = 5;
  given.new_k = given.new_v = Tensor(queries.data(), {3, 2, 8});
  expect_refused("needs a block_table", [&] { turned.run(given); });
  // In one call the most is that of the tensor.
  EXPECT_NO_THROW(attend(alone, good, {.dtypes = {.compute = fp32}}));
}

TEST_F(SparseAttention, RanksThatDifferAreRefused) {
  if (world.size() == 1) GTEST_SKIP() << "one rank";
  make({});
  const bool first = world.rank() == 0;
  Options o = options();
  o.indices.top_k = first ? 41 : 40;
  expect_refused("indices.top_k", [&] { Attention(world, o); });
  const auto differ = [&](const char* what, const auto& change) {
    world = test_world();  // the last one has ended
    make({});
    Attention layer(world, options());
    if (first) change();
    expect_refused(what, [&] { run(layer); });
  };
  differ("indices.columns", [&] {
    s.columns = 20;
    indices.resize(indices.size() / 2);
  });
  if (world.device() == Device::host) differ("indices", [&] { ++indices[0]; });
}

}  // namespace
}  // namespace longspan::tests

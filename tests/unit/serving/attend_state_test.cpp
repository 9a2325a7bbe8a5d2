// States in and out by ServingOps: keys in chunks of any cut, in any order, each call continuing
// the state of those before, against float64 over all keys; what is refused, by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "longspan/serving.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"
#include "tests/support/problem.hpp"

namespace longspan::tests {
namespace {

using ::testing::HasSubstr;

/// Memory of the caller, poisoned, with a tail that must not be written.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes), memory_(Device::host, bytes + kTail) {
    std::memset(memory_.data(), 0xff, memory_.bytes());
  }
  ~Guarded() {
    const auto* tail = static_cast<const unsigned char*>(memory_.data()) + bytes_;
    EXPECT_TRUE(std::all_of(tail, tail + kTail, [](unsigned char byte) { return byte == 0xff; }))
        << "memory past the end was written";
  }
  void* data() const { return memory_.data(); }
  std::size_t bytes() const { return bytes_; }
  std::vector<std::byte> content() const {
    const auto* from = static_cast<const std::byte*>(memory_.data());
    return {from, from + bytes_};
  }
  AttentionState state() const { return {data(), bytes_}; }
  Workspace workspace() const { return {data(), bytes_}; }

 private:
  static constexpr std::size_t kTail = 64;
  std::size_t bytes_;
  Buffer memory_;
};

/// Keys and values of one rank, as tensors.
void give_keys(AttendState& a, const HostProblem& p, Local& l) {
  const HostShape& s = p.shape;
  if (s.page == 0) {
    const std::int64_t keys =
        static_cast<std::int64_t>(l.k.bytes.size() / size_of(l.k.dtype)) / p.kv_stride();
    for (const auto& [to, array] : {std::pair{&a.k, &l.k}, std::pair{&a.v, &l.v}}) {
      *to = Tensor(array->data(), array->dtype, {keys, s.kv_heads, s.dim});
      to->stride[0] = p.kv_stride();
    }
    return;
  }
  const std::int64_t pages = l.pages.count, size = l.pages.size;
  const kernels::KvRows &k = l.k_rows, &v = l.v_rows;
  if (s.store == Store::rows) {
    a.k = Tensor(l.k.data(), l.k.dtype, {pages, size, s.kv_heads, s.dim});
    a.k.stride = {k.page_stride, k.row_stride, k.head_stride, 1};
    a.v = Tensor(l.v.data(), l.v.dtype, {pages, size, s.kv_heads, s.dim});
    a.v.stride = {v.page_stride, v.row_stride, v.head_stride, 1};
  } else {
    a.k = Tensor(l.k.data(), l.k.dtype, {pages, s.kv_heads, s.dim / k.chunk, size, k.chunk});
    a.k.stride = {k.page_stride, k.head_stride, k.chunk_stride, k.row_stride, 1};
    a.v = Tensor(l.v.data(), l.v.dtype, {pages, s.kv_heads, s.dim, size});
    a.v.stride = {v.page_stride, v.head_stride, v.dim_stride, v.row_stride};
  }
  a.block_table = Tensor(l.table.data(), {p.batch(), l.pages.columns});
  a.block_table.stride = {l.pages.row_stride, l.pages.column_stride};
}

class AttendStateTest : public ::testing::Test {
 protected:
  const ServingOps ops{Device::host, 2};
  const unsigned seed = tests::fresh_seed();
  std::mt19937 random{seed};

  void TearDown() override {
    if (HasFailure()) std::cerr << "seed " << seed << "\n";
  }

  /// A call over the keys of `shard`, without keys and memory.
  AttendState args_of(HostProblem& p, const Shard& shard) {
    const HostShape& s = p.shape;
    AttendState a;
    a.q = Tensor(p.q.data(), p.q.dtype, {p.tokens(), s.heads, s.dim});
    a.q.stride[0] = p.q_stride();
    if (p.batch() > 1 || random() % 2 == 0) {
      a.query_start = Tensor(p.query_start.data(), {p.batch() + 1});
      a.kv_len = Tensor(s.kv_len.data(), {p.batch()});
    } else {
      a.total_keys = s.kv_len[0];
    }
    if (random() % 2 == 0) a.max_kv_len = *std::max_element(s.kv_len.begin(), s.kv_len.end()) + 1;
    if (random() % 2 == 0)
      a.max_query_len = *std::max_element(s.query_len.begin(), s.query_len.end());
    a.keys = {shard.layout, shard.block};
    a.rank = shard.rank;
    a.ranks = shard.ranks;
    if (shard.layout == Layout::ranges)
      a.key_table = p.batch() == 1 ? Tensor(shard.table, {shard.ranks + 1})
                                   : Tensor(shard.table, {p.batch(), shard.ranks + 1});
    if (shard.layout == Layout::listed) a.key_table = Tensor(shard.table, {shard.listed});
    a.dtypes = {.compute = s.dtype};
    a.mask = s.mask;
    a.score = {.softcap = s.softcap, .alibi = s.alibi.value_or(Alibi::context)};
    if (!s.causal.empty()) a.causal = Tensor(s.causal.data(), {p.batch()});
    if (s.alibi) a.slopes = Tensor(p.slopes.data(), p.slopes.dtype, {s.heads});
    if (s.qq) {
      a.qq_bias = Tensor(p.qq.data(), p.qq.dtype, {p.qq_width(), p.qq_width()});
      a.qq_bias.stride[0] = p.qq_width() + HostProblem::kGap;
    }
    if (s.scales) {
      const std::int64_t count = s.scales_per_head ? s.kv_heads : 1;
      a.q_scale = Tensor(p.q_scale.data(), {count});
      a.k_scale = Tensor(p.k_scale.data(), {count});
      a.v_scale = Tensor(p.v_scale.data(), {count});
    }
    return a;
  }

  Guarded make_state(const HostProblem& p) const {
    return Guarded(ops.state_bytes(p.tokens(), p.shape.heads, p.shape.dim));
  }

  /// Keys of one shard onto a state, in a workspace of exactly the requested size.
  void attend(HostProblem& p, const Shard& shard, const Guarded& state, bool resume) {
    Local l = p.local(shard);
    AttendState a = args_of(p, shard);
    give_keys(a, p, l);
    a.state = state.state();
    a.resume = resume;
    const Guarded workspace(ops.workspace_bytes(a));
    a.workspace = workspace.workspace();
    ops.check(a);
    ops.attend_state(a);
  }

  /// Over poisoned results.
  Result finish(const HostProblem& p, const Guarded& state,
                const std::vector<float>* sinks = nullptr) const {
    const HostShape& s = p.shape;
    Result r{std::vector<float>(p.tokens() * s.heads * s.dim, kNan),
             std::vector<float>(p.tokens() * s.heads, kNan)};
    FinishState f{.state = state.state(),
                  .out = Tensor(r.out.data(), {p.tokens(), s.heads, s.dim}),
                  .lse = Lse::tokens_heads(Tensor(r.lse.data(), {p.tokens(), s.heads}))};
    if (sinks) f.sinks = Tensor(sinks->data(), {s.heads});
    ops.finish_state(f);
    return r;
  }

  std::vector<float> some_sinks(int heads) {
    std::normal_distribution<float> normal;
    std::vector<float> sinks(heads);
    for (float& sink : sinks) sink = normal(random);
    return sinks;
  }

  Result chain(HostProblem& p, const std::vector<Shard>& shards,
               const std::vector<float>* sinks = nullptr) {
    const Guarded state = make_state(p);
    bool resume = false;
    for (const Shard& shard : shards) {
      attend(p, shard, state, resume);
      resume = true;
    }
    return finish(p, state, sinks);
  }

  /// Cuts of each sequence at random places, some chunks empty: [batch, chunks + 1].
  std::vector<std::int64_t> random_cuts(const HostShape& s, int chunks) {
    std::vector<std::int64_t> table;
    for (const std::int32_t length : s.kv_len) {
      std::vector<std::int64_t> cuts{0, length};
      for (int i = 1; i < chunks; ++i)
        cuts.push_back(random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % (length + 1)));
      std::sort(cuts.begin(), cuts.end());
      table.insert(table.end(), cuts.begin(), cuts.end());
    }
    return table;
  }

  /// All shards of a rule, in any order, with and without sinks.
  void expect_exact(const HostShape& shape, const Shard& rule) {
    SCOPED_TRACE(std::string(name(rule.layout)) + " of " + std::to_string(rule.ranks) + " seed " +
                 std::to_string(seed));
    HostProblem p(shape, static_cast<std::uint32_t>(random()));
    std::vector<Shard> shards = HostProblem::on_all(rule);
    std::shuffle(shards.begin(), shards.end(), random);
    const std::vector<float> sinks = some_sinks(shape.heads);
    const auto* given = random() % 2 == 0 ? &sinks : nullptr;
    EXPECT_TRUE(is_close(p.error(chain(p, shards, given), given)));
  }
  void expect_exact_in_chunks(const HostShape& shape, int chunks) {
    const std::vector<std::int64_t> table = random_cuts(shape, chunks);
    expect_exact(shape, {.layout = Layout::ranges, .ranks = chunks, .table = table.data()});
  }
};

const Mask kMasks[] = {{},
                       {.causal = true},
                       {.causal = true, .window = 1},
                       {.causal = true, .window = 90},
                       {.window = 20, .right = 9}};

TEST_F(AttendStateTest, ChunksOfAnyCut) {
  for (const Mask& mask : kMasks)
    for (const int chunks : {1, 2, 3, 7}) {
      expect_exact_in_chunks({.query_len = {5}, .kv_len = {300}, .mask = mask}, chunks);
      expect_exact_in_chunks(
          {.query_len = {50, 1, 0, 40, 90}, .kv_len = {400, 700, 30, 40, 33}, .mask = mask},
          chunks);
    }
}

TEST_F(AttendStateTest, StepsOfARing) {
  for (const Layout layout :
       {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
    for (const int ranks : {1, 2, 5})
      for (const std::int64_t block : {16, 128})
        expect_exact({.query_len = {60, 1, 9}, .kv_len = {500, 333, 9}, .mask = {.causal = true}},
                     {.layout = layout, .ranks = ranks, .block = block});
}

TEST_F(AttendStateTest, HeadsAndTypes) {
  for (const DType dtype : {fp32, fp16, bf16})
    for (const int dim : {8, 64, 72, 128})
      for (const int kv_heads : {1, 2, 6}) {
        if (tests::kSanitized && dim > 64) continue;
        expect_exact_in_chunks({.heads = 6,
                                .kv_heads = kv_heads,
                                .dim = dim,
                                .dtype = dtype,
                                .query_len = {7},
                                .kv_len = {260}},
                               3);
      }
}

TEST_F(AttendStateTest, BiasesScalesAndPages) {
  for (const std::optional<Alibi> alibi :
       {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}})
    for (const int page : {0, 16})
      for (const bool quantised : {false, true}) {
        HostShape shape{
            .query_len = {9, 1, 33}, .kv_len = {200, 70, 500}, .mask = {.causal = true}};
        shape.page = page;
        shape.alibi = alibi;
        shape.qq = !quantised;
        shape.softcap = quantised ? 4.0f : 0.0f;
        shape.scales = quantised;
        shape.scales_per_head = page == 0;
        if (quantised) {
          shape.dtype = bf16;
          shape.q_dtype = shape.kv_dtype = e4m3;
        }
        shape.causal = {1, 0, 1};
        shape.store = quantised ? Store::x_packed : Store::rows;
        expect_exact_in_chunks(shape, 4);
        expect_exact(shape, {.layout = Layout::striped, .ranks = 3});
      }
}

TEST_F(AttendStateTest, ListedKeys) {
  for (const Mask& mask : kMasks) {
    const HostShape shape{.query_len = {40}, .kv_len = {300}, .mask = mask};
    std::vector<std::int64_t> places(300);
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random);
    HostProblem p(shape, seed);
    std::vector<Shard> shards;  // 100, 0, 150 and 50 of the keys
    for (const auto& [first, count] :
         {std::pair{0, 100}, std::pair{100, 0}, std::pair{100, 150}, std::pair{250, 50}})
      shards.push_back(Shard::at_positions(300, 0, 1, places.data() + first, count));
    EXPECT_TRUE(is_close(p.error(chain(p, shards))));
  }
}

// ---- the contents of a state
// ---------------------------------------------------------------------

/// A chain may begin and end with calls that see no key; all of it may be without keys.
TEST_F(AttendStateTest, CallsWithoutKeys) {
  const HostShape shape{.query_len = {4, 2}, .kv_len = {40, 0}, .mask = {.causal = true}};
  HostProblem p(shape, seed);
  const std::vector<std::int64_t> table{0, 0, 40, 40, 0, 0, 0, 0};
  const std::vector<float> sinks = some_sinks(shape.heads);
  const auto chunk = [&](int rank) {
    return Shard{.layout = Layout::ranges, .rank = rank, .ranks = 3, .table = table.data()};
  };
  for (const std::vector<Shard>& shards :
       {std::vector{chunk(0), chunk(1), chunk(2)}, std::vector{chunk(2), chunk(0), chunk(1)}})
    EXPECT_TRUE(is_close(p.error(chain(p, shards, &sinks), &sinks)));
  const Result none = chain(p, {chunk(0), chunk(2)});
  EXPECT_EQ(none.out, std::vector<float>(none.out.size()));
  EXPECT_EQ(none.lse, std::vector<float>(none.lse.size(), -INFINITY));
  const Result sunk = chain(p, {chunk(2)}, &sinks);
  EXPECT_EQ(sunk.out, std::vector<float>(sunk.out.size()));
  for (std::size_t i = 0; i < sunk.lse.size(); ++i)
    EXPECT_NEAR(sunk.lse[i], sinks[i % shape.heads], 1e-6);
}

/// A row that sees no key of a call keeps its state to the bit; a result changes no state, and a
/// chain continues after it.
TEST_F(AttendStateTest, AStateStaysUntilKeysCome) {
  const HostShape shape{.query_len = {6, 3}, .kv_len = {90, 70}};
  HostProblem p(shape, seed);
  const std::vector<std::int64_t> table{0, 50, 50, 90, 0, 20, 20, 70};
  const auto chunk = [&](int rank) {
    return Shard{.layout = Layout::ranges, .rank = rank, .ranks = 3, .table = table.data()};
  };
  const Guarded state = make_state(p);
  attend(p, chunk(0), state, false);
  const std::vector<std::byte> before = state.content();
  attend(p, chunk(1), state, true);
  EXPECT_EQ(state.content(), before);
  const Result part = finish(p, state);
  EXPECT_TRUE(finish(p, state).same_bits(part));
  EXPECT_EQ(state.content(), before);
  EXPECT_FALSE(is_close(p.error(part)));
  attend(p, chunk(2), state, true);
  EXPECT_TRUE(is_close(p.error(finish(p, state))));
  attend(p, chunk(0), state, false);  // afresh: the old contents are gone
  EXPECT_EQ(state.content(), before);
}

TEST_F(AttendStateTest, RowsPastTheLastSequenceAreUntouched) {
  HostShape shape{.query_len = {3, 2}, .kv_len = {50, 60}};
  HostProblem p(shape, seed);
  constexpr std::int64_t kPadding = 4;
  const std::int64_t tokens = p.tokens() + kPadding, heads = shape.heads, dim = shape.dim;
  std::vector<float> q(tokens * heads * dim, NAN);
  for (std::int64_t t = 0; t < p.tokens(); ++t)
    for (std::int64_t c = 0; c < heads * dim; ++c)
      q[t * heads * dim + c] = static_cast<float>(p.q[t * p.q_stride() + c]);
  const Guarded state(ops.state_bytes(tokens, heads, dim));
  Local l = p.local(Shard{});
  AttendState a = args_of(p, Shard{});
  give_keys(a, p, l);
  a.q = Tensor(q.data(), {tokens, heads, dim});
  a.state = state.state();
  const Guarded workspace(ops.workspace_bytes(a));
  a.workspace = workspace.workspace();
  ops.attend_state(a);
  Result r{std::vector<float>(tokens * heads * dim, kNan),
           std::vector<float>(tokens * heads, kNan)};
  ops.finish_state({.state = state.state(),
                    .out = Tensor(r.out.data(), {tokens, heads, dim}),
                    .lse = Lse::tokens_heads(Tensor(r.lse.data(), {tokens, heads})),
                    .query_start = a.query_start});
  const auto poisoned = [](float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits == std::bit_cast<std::uint32_t>(kNan);
  };
  EXPECT_TRUE(std::all_of(r.out.end() - kPadding * heads * dim, r.out.end(), poisoned));
  EXPECT_TRUE(std::all_of(r.lse.end() - kPadding * heads, r.lse.end(), poisoned));
  r.out.resize(p.tokens() * heads * dim);
  r.lse.resize(p.tokens() * heads);
  EXPECT_TRUE(is_close(p.error(r)));
}

TEST_F(AttendStateTest, NoTokens) {
  HostShape shape{.query_len = {0}, .kv_len = {50}};
  HostProblem p(shape, seed);
  p.q = Array(fp32, 1);
  EXPECT_EQ(ops.state_bytes(0, 4, 64), 0u);
  Local l = p.local(Shard{});
  AttendState a = args_of(p, Shard{.length = 50});
  give_keys(a, p, l);
  const Guarded workspace(ops.workspace_bytes(a));
  a.workspace = workspace.workspace();
  ops.attend_state(a);
  ops.finish_state({.state = a.state, .out = Tensor(p.q.data(), fp32, {0, 4, 64})});
}

// ---- results ------------------------------------------------------------------------------------

TEST_F(AttendStateTest, ResultsOfAnyTypeAndPlace) {
  const HostShape shape{.heads = 4, .query_len = {6}, .kv_len = {77}};
  HostProblem p(shape, seed);
  const Guarded state = make_state(p);
  attend(p, {.length = 77}, state, false);
  const std::vector<float> sinks = some_sinks(4);
  const Result exact = finish(p, state, &sinks);
  const std::int64_t tokens = 6, heads = 4, dim = 64;
  const std::vector<float> scale{0.25f};
  for (const DType dtype : {fp32, fp16, bf16, e4m3, e5m2})
    for (const bool batched : {false, true}) {
      // [tokens, heads, dim] with gaps; or one sequence as [1, heads, tokens, dim], dense.
      const std::int64_t head_stride = batched ? tokens * dim : dim + 3;
      const std::int64_t row_stride = batched ? dim : heads * head_stride + 5;
      Array out(dtype, tokens * (heads * (dim + 3) + 5));
      std::vector<float> lse(tokens * heads, kNan);
      FinishState f{.state = state.state(), .sinks = Tensor(sinks.data(), {heads})};
      f.out = batched ? Tensor(out.data(), dtype, {1, heads, tokens, dim})
                      : Tensor(out.data(), dtype, {tokens, heads, dim});
      if (!batched) f.out.stride = {row_stride, head_stride, 1};
      f.lse = batched ? Lse::tokens_heads(Tensor(lse.data(), {1, tokens, heads}))
                      : Lse::heads_tokens(Tensor(lse.data(), {heads, tokens}));
      if (is_fp8(dtype)) f.out_scale = Tensor(scale.data(), {1});
      ops.finish_state(f);
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t d = 0; d < dim; ++d) {
            const float value = exact.out[(t * heads + h) * dim + d] / (is_fp8(dtype) ? 0.25f : 1);
            Array rounded(dtype, 1);
            rounded.set(0, value);
            ASSERT_EQ(out[t * row_stride + h * head_stride + d], rounded[0]) << name(dtype);
          }
          EXPECT_EQ(lse[batched ? t * heads + h : h * tokens + t], exact.lse[t * heads + h]);
        }
    }
}

/// As one segment: max + ln(expsum) is the lse, output / expsum the result; and its result of
/// reduce_segments.
TEST_F(AttendStateTest, AStateIsHandedOut) {
  const HostShape shape{.query_len = {5, 1}, .kv_len = {90, 0}, .mask = {.causal = true}};
  HostProblem p(shape, seed);
  const Guarded state = make_state(p);
  const std::vector<std::int64_t> table{0, 30, 90, 0, 0, 0};
  for (const int rank : {0, 1})
    attend(p, {.layout = Layout::ranges, .rank = rank, .ranks = 2, .table = table.data()}, state,
           rank == 1);
  const Result exact = finish(p, state);
  const std::int64_t tokens = p.tokens(), heads = shape.heads, dim = shape.dim, padded = dim + 8;
  std::vector<float> output(tokens * heads * padded, kNan), max(tokens * heads, kNan), sum = max;
  ExportState e{.state = state.state(),
                .output = Tensor(output.data(), {tokens, heads, 1, padded}),
                .max = Tensor(max.data(), {tokens, heads, 1}),
                .expsum = Tensor(sum.data(), {tokens, heads, 1}),
                .value_dim = shape.dim};
  ops.export_state(e);
  for (std::int64_t row = 0; row < tokens * heads; ++row) {
    if (std::isinf(exact.lse[row])) {
      EXPECT_EQ(max[row], -INFINITY);
      EXPECT_EQ(sum[row], 0.0f);
    } else {
      EXPECT_NEAR(max[row] + std::log(sum[row]), exact.lse[row], 1e-5);
    }
    for (std::int64_t d = 0; d < dim; ++d)
      EXPECT_NEAR(output[row * padded + d],
                  std::isinf(exact.lse[row]) ? 0.0f : exact.out[row * dim + d] * sum[row],
                  1e-5 * std::max(1.0f, sum[row]));
    for (std::int64_t d = dim; d < padded; ++d) EXPECT_TRUE(std::isnan(output[row * padded + d]));
  }
  Result reduced{std::vector<float>(exact.out.size(), kNan),
                 std::vector<float>(exact.lse.size(), kNan)};
  ops.reduce_segments({.segments = {e.output, e.max, e.expsum},
                       .out = Tensor(reduced.out.data(), {tokens, heads, dim}),
                       .lse = Lse::tokens_heads(Tensor(reduced.lse.data(), {tokens, heads})),
                       .query_start = Tensor(p.query_start.data(), {3}),
                       .kv_len = Tensor(p.shape.kv_len.data(), {2})});
  EXPECT_TRUE(is_close(p.error(reduced)));
  e.query_start = Tensor(p.query_start.data(), {2});  // the first sequence alone
  std::fill(max.begin(), max.end(), kNan);
  ops.export_state(e);
  for (std::int64_t row = 0; row < tokens * heads; ++row)
    EXPECT_EQ(std::isnan(max[row]), row >= 5 * heads);
}

/// Values of another width than keys, in caches [batch, capacity, ...].
TEST_F(AttendStateTest, OtherWidthsAndCapacities) {
  for (const auto& [dim, value_dim] : {std::pair{192, 128}, {40, 72}, {576, 512}}) {
    const tests::Shape shape{.heads = 4,
                             .kv_heads = 1,
                             .dim = dim,
                             .value_dim = value_dim,
                             .q_lens = {9, 2},
                             .kv_lens = {130, 61},
                             .mask = {.causal = true}};
    const tests::Problem p(shape, seed);
    const Guarded state(ops.state_bytes(p.tokens, 4, value_dim));
    for (int rank = 0; rank < 3; ++rank) {
      const Shard shard = Shard::zigzag(0, rank, 3);
      const std::int64_t capacity = shard.local_len(130) + 7;
      // Each sequence from the start of its row; the rest is NaN.
      const auto in_rows = [&](const std::vector<std::byte>& packed, int columns) {
        const std::size_t row = columns * sizeof(float);
        std::vector<std::byte> rows(2 * capacity * row, std::byte{0xff});
        const std::size_t first = shard.local_len(130) * row;
        std::memcpy(rows.data(), packed.data(), first);
        std::memcpy(rows.data() + capacity * row, packed.data() + first, packed.size() - first);
        return rows;
      };
      std::vector<std::byte> k = in_rows(p.share_keys(shard), dim);
      std::vector<std::byte> v = in_rows(p.share_values(shard), value_dim);
      AttendState a{.state = state.state(), .resume = rank > 0};
      a.q = Tensor(const_cast<std::byte*>(p.q.data()), fp32, {p.tokens, 4, dim});
      a.k = Tensor(k.data(), fp32, {2, capacity, 1, dim});
      a.v = Tensor(v.data(), fp32, {2, capacity, 1, value_dim});
      a.query_start = Tensor(p.query_start.data(), {3});
      a.kv_len = Tensor(shape.kv_lens.data(), {2});
      a.keys = {Layout::zigzag};
      a.rank = rank;
      a.ranks = 3;
      const Guarded workspace(ops.workspace_bytes(a));
      a.workspace = workspace.workspace();
      ops.attend_state(a);
    }
    std::vector<std::byte> out(p.tokens * 4 * value_dim * sizeof(float), std::byte{0xff});
    ops.finish_state(
        {.state = state.state(), .out = Tensor(out.data(), fp32, {p.tokens, 4, value_dim})});
    std::vector<std::int64_t> rows(p.tokens);
    std::iota(rows.begin(), rows.end(), 0);
    EXPECT_LE(p.max_error(out, rows), p.tolerance());
  }
}

/// Two sequences of three tokens each as [batch, heads, tokens, dim].
TEST_F(AttendStateTest, QueriesOfABatch) {
  HostShape shape{.query_len = {3, 3}, .kv_len = {50, 60}, .mask = {.causal = true}};
  HostProblem p(shape, seed);
  const Guarded state = make_state(p);
  Local l = p.local(Shard{});
  AttendState a = args_of(p, Shard{});
  give_keys(a, p, l);
  a.q = Tensor(p.q.data(), fp32, {2, shape.heads, 3, shape.dim});
  a.q.stride = {3 * p.q_stride(), shape.dim, p.q_stride(), 1};
  a.state = state.state();
  const Guarded workspace(ops.workspace_bytes(a));
  a.workspace = workspace.workspace();
  ops.attend_state(a);
  EXPECT_TRUE(is_close(p.error(finish(p, state))));
}

TEST_F(AttendStateTest, TheWorkspaceNeedsShapesOnly) {
  HostProblem p({.query_len = {3, 2}, .kv_len = {50, 60}}, seed);
  Local l = p.local(Shard{});
  AttendState a = args_of(p, Shard{});
  give_keys(a, p, l);
  const std::size_t bytes = ops.workspace_bytes(a);
  a.resume = true;
  EXPECT_EQ(ops.workspace_bytes(a), bytes);
  a.q.data = a.k.data = a.v.data = a.query_start.data = nullptr;
  EXPECT_EQ(ops.workspace_bytes(a), bytes);
  p.shape.kv_len = {5000, 60};
  EXPECT_EQ(ops.workspace_bytes(a), bytes);
}

// ---- refusals -----------------------------------------------------------------------------------

/// A valid call, and its memory.
struct Call {
  std::vector<float> q = std::vector<float>(4 * 4 * 32, 0.5f);
  std::vector<float> keys = std::vector<float>(100 * 2 * 32, 0.25f), values = keys;
  std::vector<float> out = std::vector<float>(4 * 4 * 32, kNan), lse = std::vector<float>(16, kNan);
  std::vector<float> max = lse, sum = lse, one{1.0f};
  std::vector<std::int32_t> start{0, 1, 4}, lens{20, 33}, table{0, 1, 2, 3};
  std::vector<std::int64_t> ranges{0, 10, 20, 0, 10, 33};
  Buffer state{Device::host, ServingOps::state_bytes(4, 4, 32)}, workspace;
  AttendState a;
  FinishState f;
  ExportState e;

  explicit Call(const ServingOps& ops) {
    std::memset(state.data(), 0xff, state.bytes());
    a.state = f.state = e.state = {state.data(), state.bytes()};
    a.q = Tensor(q.data(), {4, 4, 32});
    a.k = Tensor(keys.data(), {100, 2, 32});
    a.v = Tensor(values.data(), {100, 2, 32});
    a.query_start = Tensor(start.data(), {3});
    a.kv_len = Tensor(lens.data(), {2});
    workspace = Buffer(Device::host, ops.workspace_bytes(a));
    a.workspace = {workspace.data(), workspace.bytes()};
    f.out = Tensor(out.data(), {4, 4, 32});
    f.lse = Lse::tokens_heads(Tensor(lse.data(), {4, 4}));
    e.output = Tensor(out.data(), {4, 4, 1, 32});
    e.max = Tensor(max.data(), {4, 4, 1});
    e.expsum = Tensor(sum.data(), {4, 4, 1});
  }
  /// All of two ranks by a table.
  void shard() {
    a.keys = {Layout::ranges};
    a.ranks = 2;
    a.key_table = Tensor(ranges.data(), {2, 3});
  }
  bool untouched() const {
    const auto* bytes = static_cast<const unsigned char*>(state.data());
    const auto is_nan = [](float x) { return std::isnan(x); };
    return std::all_of(bytes, bytes + state.bytes(), [](unsigned char b) { return b == 0xff; }) &&
           std::all_of(out.begin(), out.end(), is_nan) &&
           std::all_of(max.begin(), max.end(), is_nan);
  }
};

struct Refusal {
  const char* says;
  std::function<void(Call&)> change;
};

template <class E>
void expect_refused(const ServingOps& ops, const std::vector<Refusal>& refusals,
                    const std::function<void(Call&)>& work) {
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.says);
    Call call(ops);
    refusal.change(call);
    try {
      work(call);
      ADD_FAILURE() << "not refused";
    } catch (const E& error) {
      EXPECT_THAT(error.what(), HasSubstr(refusal.says));
    } catch (const Error& error) {
      ADD_FAILURE() << "another kind of error: " << error.what();
    }
    EXPECT_TRUE(call.untouched());
  }
}

TEST_F(AttendStateTest, AttendRefusesByName) {
  const auto attend_it = [&](Call& c) { ops.attend_state(c.a); };
  Call good(ops);
  attend_it(good);
  EXPECT_FALSE(good.untouched());
  expect_refused<InputError>(
      ops,
      {
          {"state has 0 bytes; the states of [4, 4] rows with a value_dim of 32 take 2176",
           [](Call& c) { c.a.state = {}; }},
          {"state has 2175 bytes", [](Call& c) { c.a.state.bytes = 2175; }},
          {"it must be aligned to 256 bytes",
           [](Call& c) { c.a.state.data = static_cast<std::byte*>(c.a.state.data) + 64; }},
          {"state overlaps q",
           [](Call& c) { c.a.q.data = static_cast<std::byte*>(c.state.data()) + 64; }},
          {"state overlaps k",
           [](Call& c) {
             c.a.k = Tensor(c.state.data(), fp32, {8, 2, 32});
             c.a.v = Tensor(c.values.data(), {8, 2, 32});
           }},
          {"state overlaps workspace", [](Call& c) { c.a.workspace.data = c.state.data(); }},
          {"workspace has 0 bytes", [](Call& c) { c.a.workspace = {}; }},
          {"q is [4, 4]", [](Call& c) { c.a.q.dims = 2; }},
          {"q has stride 2 in its last dimension", [](Call& c) { c.a.q.stride[2] = 2; }},
          {"q is on the cuda", [](Call& c) { c.a.q.device = Device::cuda; }},
          {"heads 3 must be a multiple of kv_heads 2", [](Call& c) { c.a.q.shape[1] = 3; }},
          {"k is [100, 2]", [](Call& c) { c.a.k.dims = 2; }},
          {"k is [100, 2, 32]",
           [](Call& c) {
             c.a.block_table = Tensor(c.table.data(), {2, 2});
           }},
          {"k is [2, 2, 1, 5, 32]",  // x-packed without a table
           [](Call& c) {
             c.a.k = Tensor(c.keys.data(), {2, 2, 1, 5, 32});
           }},
          {"v is [100, 2]", [](Call& c) { c.a.v.dims = 2; }},
          {"they must have one shape but for the last", [](Call& c) { c.a.v.shape[0] = 99; }},
          {"k is bf16; fp32, or fp8", [](Call& c) { c.a.k.dtype = bf16; }},
          {"k is e4m3 and there is no k_scale", [](Call& c) { c.a.k.dtype = e4m3; }},
          {"q is e5m2 and there is no q_scale",
           [](Call& c) {
             c.a.q.dtype = e5m2;
             c.a.dtypes.compute = fp32;
           }},
          {"needs query_start", [](Call& c) { c.a.query_start = {}; }},
          {"total_keys is 7 and kv_len is given", [](Call& c) { c.a.total_keys = 7; }},
          {"kv_len[1] is -1", [](Call& c) { c.lens[1] = -1; }},
          {"there is room for 100", [](Call& c) { c.lens[1] = 90; }},
          {"at most 30 were promised", [](Call& c) { c.a.max_kv_len = 30; }},
          {"at most 2 were promised", [](Call& c) { c.a.max_query_len = 2; }},
          {"query_start descends", [](Call& c) { c.start[1] = 5; }},
          {"block_table[0][0] is 9, which is not a page",
           [](Call& c) {
             c.a.k = Tensor(c.keys.data(), {5, 20, 2, 32});
             c.a.v = Tensor(c.values.data(), {5, 20, 2, 32});
             c.a.block_table = Tensor(c.table.data(), {2, 2});
             c.table[0] = 9;
           }},
          {"a shard has rank 2", [](Call& c) { c.shard(), c.a.rank = 2; }},
          {"a shard has ranks 0", [](Call& c) { c.a.ranks = 0; }},
          {"keys are ranges, and there is no key_table",
           [](Call& c) { c.shard(), c.a.key_table = {}; }},
          {"key_table is given, and keys are contiguous",
           [](Call& c) { c.shard(), c.a.keys = {}; }},
          {"key_table is [2, 3]; a dense [2, 4]", [](Call& c) { c.shard(), c.a.ranks = 3; }},
          {"the table of ranges of sequence 1 descends",
           [](Call& c) { c.shard(), c.ranges[4] = 50; }},
          {"keys are listed, which describes one sequence",
           [](Call& c) {
             c.a.keys = {Layout::listed};
             c.a.key_table = Tensor(c.ranges.data(), {6});
           }},
          {"window -1 is negative", [](Call& c) { c.a.mask.window = -1; }},
          {"softcap is nan", [](Call& c) { c.a.score.softcap = NAN; }},
          {"tf32 is a way",
           [](Call& c) {
             c.a.q.dtype = c.a.k.dtype = c.a.v.dtype = bf16;
             c.a.dtypes.tf32 = true;
           }},
          {"dtypes.out is bf16, and a state is fp32", [](Call& c) { c.a.dtypes.out = bf16; }},
          {"dtypes says that k is fp16; it is fp32", [](Call& c) { c.a.dtypes.kv = fp16; }},
          {"v_scale[0] is inf",
           [](Call& c) {
             c.one[0] = INFINITY;
             c.a.v_scale = Tensor(c.one.data(), {1});
           }},
          {"causal is [1]; [2] is wanted",
           [](Call& c) { c.a.causal = Tensor(c.a.q.data, DType::uint8, {1}); }},
          {"slopes is [1]; [4] is wanted", [](Call& c) { c.a.slopes = Tensor(c.one.data(), {1}); }},
      },
      attend_it);
  expect_refused<Unsupported>(
      ops,
      {{"fp8_products is not supported by attend_state",
        [](Call& c) { c.a.dtypes.fp8_products = true; }},
       {"head_dim 577", [](Call& c) { c.a.q.shape[2] = c.a.k.shape[2] = c.a.v.shape[2] = 577; }}},
      attend_it);
}

/// As attend_state does: a table is checked before it is used.
TEST_F(AttendStateTest, CheckRefusesTablesByName) {
  const auto check_it = [&](Call& c) { ops.check(c.a); };
  Call good(ops);
  good.shard();
  check_it(good);
  expect_refused<InputError>(
      ops,
      {{"the table of ranges of sequence 1 descends", [](Call& c) { c.shard(), c.ranges[4] = 50; }},
       {"the table of ranges of sequence 0",
        [](Call& c) { c.shard(), c.ranges[0] = std::numeric_limits<std::int64_t>::min(); }},
       {"there is room for 100", [](Call& c) { c.lens[1] = 90; }}},
      check_it);
}

TEST_F(AttendStateTest, FinishAndExportRefuseByName) {
  const auto finish_it = [&](Call& c) { ops.finish_state(c.f); };
  const auto export_it = [&](Call& c) { ops.export_state(c.e); };
  expect_refused<InputError>(
      ops,
      {
          {"out is [4, 4]", [](Call& c) { c.f.out.dims = 2; }},
          {"out [4, 4, 32] has no data", [](Call& c) { c.f.out.data = nullptr; }},
          {"out is e4m3 and there is no out_scale", [](Call& c) { c.f.out.dtype = e4m3; }},
          {"out is int64; fp32, fp16, bf16 or fp8 is wanted",
           [](Call& c) { c.f.out.dtype = DType::int64; }},
          {"is written, and its elements overlap", [](Call& c) { c.f.out.stride[0] = 0; }},
          {"state has 2176 bytes; the states of [5, 4] rows",
           [](Call& c) { c.f.out.shape[0] = 5; }},
          {"lse is [4, 3]", [](Call& c) { c.f.lse.tensor.shape[1] = 3; }},
          {"sinks is [1]; [4] is wanted", [](Call& c) { c.f.sinks = Tensor(c.one.data(), {1}); }},
          {"out_scale[0] is 0",
           [](Call& c) {
             c.one[0] = 0;
             c.f.out_scale = Tensor(c.one.data(), {1});
           }},
          {"out overlaps state", [](Call& c) { c.f.out.data = c.state.data(); }},
          {"lse overlaps out", [](Call& c) { c.f.lse.tensor.data = c.out.data(); }},
          {"query_start is [1]; [batch + 1]",
           [](Call& c) { c.f.query_start = Tensor(c.start.data(), {1}); }},
          {"query_start ends at row 7",
           [](Call& c) {
             c.start[2] = 7;
             c.f.query_start = Tensor(c.start.data(), {3});
           }},
      },
      finish_it);
  expect_refused<Unsupported>(ops, {{"value_dim 513", [](Call& c) { c.f.out.shape[2] = 513; }}},
                              finish_it);
  expect_refused<InputError>(
      ops,
      {
          {"output is [4, 4, 1]; [tokens, heads, 1, ", [](Call& c) { c.e.output.dims = 3; }},
          {"output is [4, 4, 2, 16]",
           [](Call& c) {
             c.e.output = Tensor(c.out.data(), {4, 4, 2, 16});
           }},
          {"segments.max is [4, 4, 2]", [](Call& c) { c.e.max.shape[2] = 2; }},
          {"segments.output is [4, 4, 1, 32]; [4, 4, segments, at least 40]",
           [](Call& c) {
             c.e.value_dim = 40;
             c.e.state.bytes = 1 << 20;  // of another, but nothing is read
           }},
          {"state has 0 bytes", [](Call& c) { c.e.state = {}; }},
          {"output overlaps state", [](Call& c) { c.e.output.data = c.state.data(); }},
      },
      export_it);
}

TEST_F(AttendStateTest, SizesThatThereAreNot) {
  EXPECT_EQ(ops.state_bytes(4, 4, 32), 16 * 8 + 16 * 32 * 4u);
  EXPECT_THROW(ops.state_bytes(-1, 4, 32), InputError);
  EXPECT_THROW(ops.state_bytes(4, 0, 32), InputError);
  EXPECT_THROW(ops.state_bytes(std::int64_t{1} << 31, 4, 32), InputError);
  EXPECT_THROW(ops.state_bytes(1 << 30, 1 << 30, 512), InputError);
  EXPECT_EQ(ops.state_bytes(4, 4, 21), 16 * 8 + 16 * 24 * 4u);
  EXPECT_THROW(ops.state_bytes(4, 4, 0), Unsupported);
  EXPECT_THROW(ops.state_bytes(4, 4, 1024), Unsupported);
}

TEST_F(AttendStateTest, NoWorkspaceForSizesThatThereAreNot) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  Call call(ops);
  const AttendState batch = [&] {
    AttendState a = call.a;
    a.q = Tensor(call.q.data(), {2, 4, 2, 32});  // batch, heads, tokens, head_dim
    return a;
  }();
  EXPECT_EQ(ops.workspace_bytes(batch), call.workspace.bytes());
  // The products of two extents overflow 63 bits, in both directions, or hide a sign.
  for (const auto& [dim, extent] : std::initializer_list<std::pair<int, std::int64_t>>{
           {0, kMost}, {0, -kMost}, {0, -2}, {0, kMost / 2}, {2, kMost}, {2, -2}, {1, kMost}}) {
    AttendState a = batch;
    a.q.shape[dim] = extent;
    EXPECT_THROW(ops.workspace_bytes(a), InputError) << dim << ": " << extent;
    a.q.shape[1] = extent;
    EXPECT_THROW(ops.workspace_bytes(a), InputError) << dim << " and 1: " << extent;
  }
}

}  // namespace
}  // namespace longspan::tests

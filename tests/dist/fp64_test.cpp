// Layers of fp64 on every rank count: results and gradients against the oracle, in random cases of
// all options, with the bits of one rank; and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "launcher/judge/gradients.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/gradient_case.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

/// Of elements of order 1: the sums have some hundred terms, each rounded to 2^-53.
constexpr double kBound = 4e-14;

using Numbers = std::vector<double>;

/// Out, lse and the gradients of q, k and v, for all rows and keys or for those of a rank.
struct Answers {
  Numbers out, lse, dq, dk, dv;
};

/// The inputs of all ranks. The shape, its masks and its biases are those of a HostProblem.
struct Problem {
  HostProblem host;
  bool sinks;
  Numbers q, k, v, dout, dlse;
  std::vector<float> sink;

  Problem(const HostShape& shape, std::uint32_t seed, bool with_sinks)
      : host(shape, seed), sinks(with_sinks) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](std::int64_t rows, int heads) {
      Numbers made(static_cast<std::size_t>(rows * heads * shape.dim));
      for (double& x : made) x = normal(random);
      return made;
    };
    q = draw(host.tokens(), shape.heads);
    dout = draw(host.tokens(), shape.heads);
    k = draw(host.key_start.back(), shape.kv_heads);
    v = draw(host.key_start.back(), shape.kv_heads);
    for (std::int64_t i = 0; i < host.tokens() * shape.heads; ++i) dlse.push_back(normal(random));
    for (int h = 0; h < shape.heads; ++h) sink.push_back(static_cast<float>(h) / 2 - 1);
  }

  Answers exact() const {
    const HostShape& s = host.shape;
    const int group = s.heads / s.kv_heads, dim = s.dim;
    Answers all{Numbers(q.size()), Numbers(dlse.size()), Numbers(q.size()), Numbers(k.size()),
                Numbers(v.size())};
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    for (int b = 0; b < host.batch(); ++b)
      for (int h = 0; h < s.heads; ++h) {
        const auto keys = of_head(k, b, h / group), values = of_head(v, b, h / group);
        launcher::GradientsOf<double> sums{launcher::RowMajor::Zero(keys.rows(), dim),
                                           launcher::RowMajor::Zero(keys.rows(), dim)};
        for (std::int64_t t = 0; t < s.query_len[b]; ++t) {
          const std::int64_t row = (host.query_start[b] + t) * s.heads + h;
          const auto vector = [&](const Numbers& of) {
            return Eigen::VectorXd(Eigen::Map<const Eigen::VectorXd>(of.data() + row * dim, dim));
          };
          const auto bias = host.biases(b, h, t);
          const std::optional<double> own =
              sinks ? std::optional<double>(sink[static_cast<std::size_t>(h)]) : std::nullopt;
          const auto one = launcher::attend_exactly(vector(q), keys, values, host.visible(b, t),
                                                    scale, s.softcap, own, bias);
          const auto gradients = launcher::add_gradients<double>(
              vector(q), keys, values, host.visible(b, t), scale, s.softcap, own,
              std::span<const double>(bias), vector(dout), dlse[static_cast<std::size_t>(row)],
              sums);
          std::copy_n(one.out.data(), dim, all.out.begin() + row * dim);
          all.lse[static_cast<std::size_t>(row)] = one.lse;
          std::copy_n(gradients.dq.data(), dim, all.dq.begin() + row * dim);
        }
        for (Eigen::Index i = 0; i < keys.rows(); ++i)
          for (int c = 0; c < dim; ++c) {
            const std::int64_t at = ((host.key_start[b] + i) * s.kv_heads + h / group) * dim + c;
            all.dk[static_cast<std::size_t>(at)] += sums.dk(i, c);
            all.dv[static_cast<std::size_t>(at)] += sums.dv(i, c);
          }
      }
    return all;
  }

 private:
  launcher::RowMajor of_head(const Numbers& rows, int b, int kv_head) const {
    const HostShape& s = host.shape;
    launcher::RowMajor made(s.kv_len[b], s.dim);
    for (std::int64_t i = 0; i < s.kv_len[b]; ++i)
      for (int c = 0; c < s.dim; ++c)
        made(i, c) = rows[static_cast<std::size_t>(
            ((host.key_start[b] + i) * s.kv_heads + kv_head) * s.dim + c)];
    return made;
  }
};

/// Rows of `row` numbers each, those at `at`.
Numbers take(const Numbers& from, const std::vector<std::int64_t>& at, std::int64_t row) {
  Numbers to;
  for (const std::int64_t i : at)
    to.insert(to.end(), from.begin() + i * row, from.begin() + (i + 1) * row);
  return to;
}

/// A rank's part of a problem, and its run.
class Rank {
 public:
  Rank(Problem& problem, const Communicator& world, Layout keys, std::optional<Layout> queries)
      : problem_(problem), world_(world), keys_(keys), queries_(queries) {
    const HostProblem& p = problem.host;
    const Shard of_keys = Sharding{keys, 16}.resolve(0, world.rank(), world.size());
    Shard of_rows;
    if (queries) of_rows = Sharding{*queries, 5}.resolve(0, world.rank(), world.size());
    for (int b = 0; b < p.batch(); ++b) {
      for (std::int64_t t = 0; t < of_rows.local_len(p.shape.query_len[b]); ++t)
        rows_.push_back(p.query_start[b] + of_rows.position(t, p.shape.query_len[b]));
      for (std::int64_t i = 0; i < of_keys.local_len(p.shape.kv_len[b]); ++i)
        own_keys_.push_back(p.key_start[b] + of_keys.position(i, p.shape.kv_len[b]));
    }
    own_ = part_of({problem.q, {}, problem.dout, problem.k, problem.v});
    dlse_ = take(problem.dlse, rows_, p.shape.heads);
    const auto poisoned = [](const Numbers& like) { return Numbers(like.size(), std::nan("")); };
    found_ = {poisoned(own_.out), poisoned(dlse_), poisoned(own_.out), poisoned(own_.dk),
              poisoned(own_.dv)};
  }

  Options options(const std::string& strategy = "auto") const {
    const HostShape& s = problem_.host.shape;
    Options o{.heads = s.heads, .kv_heads = s.kv_heads, .head_dim = s.dim};
    o.dtypes.compute = fp64;
    o.mask = s.mask;
    o.score.softcap = s.softcap;
    if (s.alibi) o.score.alibi = *s.alibi;
    o.limits.max_tokens = problem_.host.tokens() + 1;
    o.limits.max_batch = problem_.host.batch();
    o.limits.max_kv_len = 1 + *std::max_element(s.kv_len.begin(), s.kv_len.end());
    o.keys = {keys_, 16};
    if (queries_) o.queries = Sharding{*queries_, 5};
    o.gradients = goes_back();
    o.strategy = strategy;
    return o;
  }
  /// Rows on all ranks have no gradients by gather-kv.
  bool goes_back() const { return queries_ || world_.size() == 1; }

  AttentionArgs args() {
    HostProblem& p = problem_.host;
    HostShape& s = p.shape;
    const std::int64_t rows = std::ssize(rows_), keys = std::ssize(own_keys_);
    AttentionArgs a;
    a.q = tensor(own_.out, {rows, s.heads, s.dim});
    a.k = tensor(own_.dk, {keys, s.kv_heads, s.dim});
    a.v = tensor(own_.dv, {keys, s.kv_heads, s.dim});
    a.out = tensor(found_.out, {rows, s.heads, s.dim});
    a.lse = Lse::tokens_heads(tensor(found_.lse, {rows, s.heads}));
    if (queries_) a.total_tokens = p.tokens();
    give_terms(a, p);
    if (s.alibi) a.slopes = Tensor(p.slopes.data(), p.slopes.dtype, {s.heads});
    if (problem_.sinks) a.sinks = Tensor(problem_.sink.data(), {s.heads});
    return a;
  }

  GradientArgs gradient_args() {
    const HostShape& s = problem_.host.shape;
    GradientArgs g;
    g.run = args();
    g.dout = tensor(own_.dq, {std::ssize(rows_), s.heads, s.dim});
    g.dlse = Lse::tokens_heads(tensor(dlse_, {std::ssize(rows_), s.heads}));
    g.dq = tensor(found_.dq, {std::ssize(rows_), s.heads, s.dim});
    g.dk = tensor(found_.dk, {std::ssize(own_keys_), s.kv_heads, s.dim});
    g.dv = tensor(found_.dv, {std::ssize(own_keys_), s.kv_heads, s.dim});
    return g;
  }

  const Answers& found() const { return found_; }
  const Answers& run() {
    Attention layer(world_, options());
    layer.run(args());
    if (goes_back()) layer.backward(gradient_args());
    layer.wait();
    return found_;
  }

  /// This rank's part of answers for all rows and keys.
  Answers part_of(const Answers& all) const {
    const HostShape& s = problem_.host.shape;
    const std::int64_t row = std::int64_t{s.heads} * s.dim, key = std::int64_t{s.kv_heads} * s.dim;
    return {take(all.out, rows_, row), all.lse.empty() ? Numbers() : take(all.lse, rows_, s.heads),
            take(all.dq, rows_, row), take(all.dk, own_keys_, key), take(all.dv, own_keys_, key)};
  }

 private:
  static Tensor tensor(Numbers& numbers, std::initializer_list<std::int64_t> extents) {
    static double none;  // empty tensors may have one address
    return {numbers.empty() ? &none : numbers.data(), fp64, extents};
  }

  Problem& problem_;
  Communicator world_;
  Layout keys_;
  std::optional<Layout> queries_;
  std::vector<std::int64_t> rows_, own_keys_;  // of the whole
  Answers own_;  // q, dout, k and v in the places of out, dq, dk and dv
  Numbers dlse_;
  Answers found_;
};

void expect_close(const Numbers& found, const Numbers& exact, const char* name) {
  ASSERT_EQ(found.size(), exact.size()) << name;
  double largest = 1;
  for (const double x : exact)
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] == exact[i]) continue;  // infinities
    ASSERT_LE(std::abs(found[i] - exact[i]), kBound * largest)
        << name << "[" << i << "] is " << found[i] << ", exactly " << exact[i];
  }
}

template <class Error, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

class Fp64 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world_.device() != Device::host) GTEST_SKIP() << "only CPUs compute in fp64";
  }
  const Communicator world_ = test_world();
};

TEST_F(Fp64, AgreesWithTheOracle) {
  const auto seed = static_cast<std::uint32_t>(shared_seed(world_));
  std::mt19937 random(seed);
  constexpr Layout kLayouts[] = {Layout::contiguous, Layout::zigzag, Layout::striped,
                                 Layout::interleaved};
  for (int i = 0; i < 24; ++i) {
    Problem problem(random_shape(random), static_cast<std::uint32_t>(random()), random() % 3 == 0);
    const Layout keys = kLayouts[random() % 4];
    std::optional<Layout> queries = kLayouts[random() % 4];
    if (random() % 3 == 0) queries.reset();
    SCOPED_TRACE("case " + std::to_string(i) + " of seed " + std::to_string(seed) + ", keys " +
                 name(keys) + ", rows " + (queries ? name(*queries) : "on all ranks"));
    Rank rank(problem, world_, keys, queries);
    const Answers& found = rank.run();
    const Answers exact = rank.part_of(problem.exact());
    expect_close(found.out, exact.out, "out");
    expect_close(found.lse, exact.lse, "lse");
    // A rank adds its rows to the forward of one rank alone in the same order.
    Rank alone(problem, self(), keys, std::nullopt);
    const Answers same = rank.part_of(alone.run());
    EXPECT_EQ(found.out, same.out) << "not the bits of one rank";
    if (!rank.goes_back()) continue;
    expect_close(found.dq, exact.dq, "dq");
    expect_close(found.dk, exact.dk, "dk");
    expect_close(found.dv, exact.dv, "dv");
    if (HasFailure()) return;
  }
}

/// NaN and infinity in keys that a row does not see never reach it.
TEST_F(Fp64, WhatNobodySeesMayBeAnything) {
  HostShape shape{.heads = 2, .kv_heads = 1, .dim = 17, .query_len = {40}, .kv_len = {300}};
  shape.mask = {.causal = true, .window = 100};
  Problem problem(shape, static_cast<std::uint32_t>(shared_seed(world_)), false);
  const Answers exact = problem.exact();
  for (std::int64_t i = 0; i < 150 * shape.dim; ++i)
    problem.k[static_cast<std::size_t>(i)] = problem.v[static_cast<std::size_t>(i)] = std::nan("");
  Rank rank(problem, world_, Layout::zigzag, Layout::striped);
  const Answers& found = rank.run();
  const Answers part = rank.part_of(exact);
  expect_close(found.out, part.out, "out");
  expect_close(found.dq, part.dq, "dq");
  expect_close(found.dk, part.dk, "dk");
  // A key with NaN that some rows see reaches those rows alone.
  problem.k[static_cast<std::size_t>(290 * shape.dim)] = std::nan("");
  Rank last(problem, self(), Layout::contiguous, std::nullopt);
  const Answers& seen = last.run();
  for (std::int64_t t = 0; t < 40; ++t)
    EXPECT_EQ(std::isnan(seen.out[static_cast<std::size_t>(t * 2 * shape.dim)]), t >= 30) << t;
}

TEST_F(Fp64, AddsToWhatIsThere) {
  HostShape shape{.heads = 4, .kv_heads = 2, .dim = 8, .query_len = {30}, .kv_len = {30}};
  Problem problem(shape, static_cast<std::uint32_t>(shared_seed(world_)), false);
  Rank rank(problem, world_, Layout::contiguous, Layout::contiguous);
  Attention layer(world_, rank.options());
  layer.run(rank.args());
  GradientArgs g = rank.gradient_args();
  layer.backward(g);
  const Answers once = rank.found();
  g.accumulate = true;
  layer.backward(g);
  for (const auto& [of_once, of_both] : {std::pair{&once.dq, &rank.found().dq},
                                         {&once.dk, &rank.found().dk},
                                         {&once.dv, &rank.found().dv}})
    for (std::size_t i = 0; i < of_once->size(); ++i)
      ASSERT_EQ((*of_both)[i], 2 * (*of_once)[i]) << i;
}

TEST_F(Fp64, RefusesByName) {
  HostShape shape{.heads = 4, .kv_heads = 2, .dim = 8, .query_len = {30}, .kv_len = {30}};
  Problem problem(shape, 1, true);
  Rank rank(problem, world_, Layout::contiguous, Layout::contiguous);
  const auto refused = [&](const Options& options) {
    return message_of<Unsupported>([&] { Attention(world_, options); });
  };
  for (const char* strategy : {"gather-states", "ring-kv", "ring-q", "heads", "scatter-states",
                               "heads+gather-kv", "heads+ring-kv"})
    EXPECT_THAT(
        refused(rank.options(strategy)),
        ::testing::AllOf(::testing::HasSubstr(strategy), ::testing::HasSubstr("gather-kv")));
  Options rope = rank.options();
  rope.rope.dim = 8;
  EXPECT_THAT(refused(rope), ::testing::HasSubstr("RoPE"));
  Attention layer(world_, rank.options());
  AttentionArgs run = rank.args();
  std::vector<float> few(30 * 4);
  run.lse = Lse::tokens_heads(Tensor(few.data(), {run.q.shape[0], 4}));
  EXPECT_THAT(message_of<InputError>([&] { layer.run(run); }),
              ::testing::HasSubstr("lse is fp32; fp64 is wanted"));
  GradientArgs g = rank.gradient_args();
  g.dsinks = Tensor(few.data(), {4});
  EXPECT_THAT(message_of<Unsupported>([&] { layer.backward(g); }), ::testing::HasSubstr("dsinks"));
}

}  // namespace
}  // namespace longspan::tests

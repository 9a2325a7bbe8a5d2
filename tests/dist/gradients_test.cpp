// Gradients of a layer on every rank count: random cases of every option against float64, the bits
// of repeated runs, runs that await their backward in any order, what is refused, and ranks that
// differ.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/device_copies.hpp"
#include "tests/dist/gradient_case.hpp"
#include "tests/dist/node_sizes.hpp"
#include "tests/dist/replay.hpp"
#include "tests/dist/told.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_gradients.hpp"
#include "tests/support/message.hpp"
#include "tests/support/test_cases.hpp"

namespace longspan::tests {
namespace {

/// A share of all rows, for every rank. Its length marks it; a share of one rank of one is not it.
constexpr Shard kReplicated{.length = -1};
bool is_replicated(const Shard& queries) { return queries.length < 0; }

/// One rank's part of a problem: its rows and keys, and the gradients that it is given.
class RankProblem {
 public:
  RankProblem(HostGradients& whole, const Shard& keys, const Shard& queries, DType gradient = fp32)
      : whole_(whole), keys_(keys), queries_(queries) {
    const HostProblem& p = whole.problem;
    const HostShape& s = p.shape;
    for (int b = 0; b < p.batch(); ++b) {
      for (std::int64_t t = 0; t < queries.local_len(s.query_len[b]); ++t)
        rows_.push_back(p.query_start[b] + queries.position(t, s.query_len[b]));
      for (std::int64_t i = 0; i < keys.local_len(s.kv_len[b]); ++i)
        own_keys_.push_back(p.key_start[b] + keys.position(i, s.kv_len[b]));
    }
    const std::int64_t rows = std::ssize(rows_), row = std::int64_t{s.heads} * s.dim;
    q_ = Array(p.q.dtype, std::max<std::int64_t>(1, rows * row));
    out_ = Array(s.dtype, std::max<std::int64_t>(1, rows * row));
    lse_.assign(rows * s.heads, kNan);
    dout_ = Array(whole.dout_dtype, rows * row);
    for (std::int64_t t = 0; t < rows; ++t)
      for (std::int64_t i = 0; i < row; ++i) {
        q_.set(t * row + i, static_cast<float>(p.q[rows_[t] * p.q_stride() + i]));
        dout_.set(t * row + i, whole.dout[rows_[t] * row + i]);
      }
    for (const std::int64_t t : rows_)
      for (int h = 0; h < s.heads && !whole.dlse.empty(); ++h)
        dlse_.push_back(whole.dlse[t * s.heads + h]);
    local_ = p.local(keys);
    dq_ = Array(gradient, rows * row);
    dk_ = Array(gradient, std::ssize(own_keys_) * s.kv_heads * s.dim);
    dv_ = dk_;
    if (!whole.sinks.empty()) dsinks_ = Array(fp32, s.heads);
    if (s.alibi) dslopes_ = Array(fp32, slope_rows() * s.heads);
    if (s.qq) dqq_ = Array(fp32, p.qq_width() * p.qq_width());
  }

  static Options options(const HostGradients& whole, const Shard& keys, const Shard& queries,
                         const std::string& strategy) {
    const HostShape& s = whole.problem.shape;
    Options o{.heads = s.heads, .kv_heads = s.kv_heads, .head_dim = s.dim};
    o.dtypes.compute = s.dtype;
    o.dtypes.bf16_products = s.bf16_products;
    o.mask = s.mask;
    o.score.softcap = s.softcap;
    if (s.alibi) o.score.alibi = *s.alibi;
    o.rope = s.rope;
    o.limits.max_tokens = whole.problem.tokens() + 1;
    o.limits.max_batch = whole.problem.batch();
    o.limits.max_kv_len = 1 + *std::max_element(s.kv_len.begin(), s.kv_len.end());
    o.keys = {keys.layout, keys.block};
    if (!is_replicated(queries)) o.queries = Sharding{queries.layout, queries.block};
    o.gradients = true;
    if (s.qq) o.limits.max_qq_gradient = whole.problem.qq_width();
    o.strategy = strategy;
    return o;
  }

  AttentionArgs run_args() {
    HostProblem& p = whole_.problem;
    const HostShape& s = p.shape;
    const std::int64_t rows = std::ssize(rows_), keys = std::ssize(own_keys_);
    AttentionArgs a;
    a.q = Tensor(q_.data(), q_.dtype, {rows, s.heads, s.dim});
    a.k = strided(local_.k, keys);
    a.v = strided(local_.v, keys);
    a.out = Tensor(out_.data(), out_.dtype, {rows, s.heads, s.dim});
    a.lse = Lse::tokens_heads(Tensor(lse_.data(), {rows, s.heads}));
    if (!is_replicated(queries_)) a.total_tokens = p.tokens();
    give_terms(a, p);
    if (s.alibi) a.slopes = of_slopes(p.slopes);
    if (!whole_.sinks.empty()) a.sinks = Tensor(whole_.sinks.data(), {s.heads});
    if (p.tables) {
      a.rope_cos = p.tables->view(p.tables->cos);
      a.rope_sin = p.tables->view(p.tables->sin);
    }
    return a;
  }

  GradientArgs gradient_args() {
    const HostShape& s = whole_.problem.shape;
    const std::int64_t rows = std::ssize(rows_), keys = std::ssize(own_keys_);
    GradientArgs g;
    g.run = run_args();
    g.dout = Tensor(dout_.data(), dout_.dtype, {rows, s.heads, s.dim});
    if (!whole_.dlse.empty()) g.dlse = Lse::tokens_heads(Tensor(dlse_.data(), {rows, s.heads}));
    g.dk_before_rope = whole_.dk_before_rope;
    g.dq = Tensor(dq_.data(), dq_.dtype, {rows, s.heads, s.dim});
    g.dk = Tensor(dk_.data(), dk_.dtype, {keys, s.kv_heads, s.dim});
    g.dv = Tensor(dv_.data(), dv_.dtype, {keys, s.kv_heads, s.dim});
    if (!whole_.sinks.empty()) g.dsinks = Tensor(dsinks_.data(), dsinks_.dtype, {s.heads});
    if (s.alibi) g.dslopes = of_slopes(dslopes_);
    const std::int64_t width = whole_.problem.qq_width();
    if (s.qq) g.dqq_bias = Tensor(dqq_.data(), dqq_.dtype, {width, width});
    return g;
  }

  /// This rank's part of gradients of the whole.
  template <class Real>
  GradientResult<Real> part_of(const GradientResult<Real>& all) const {
    const HostShape& s = whole_.problem.shape;
    GradientResult<Real> part;
    const auto take = [](const std::vector<Real>& from, const std::vector<std::int64_t>& at,
                         std::int64_t row) {
      std::vector<Real> to;
      for (const std::int64_t i : at)
        to.insert(to.end(), from.begin() + i * row, from.begin() + (i + 1) * row);
      return to;
    };
    part.dq = take(all.dq, rows_, std::int64_t{s.heads} * s.dim);
    part.dk = take(all.dk, own_keys_, std::int64_t{s.kv_heads} * s.dim);
    part.dv = take(all.dv, own_keys_, std::int64_t{s.kv_heads} * s.dim);
    part.dsinks = all.dsinks;
    part.dslopes = all.dslopes;
    part.dqq = all.dqq;
    part.slope_terms = all.slope_terms;
    part.qq_terms = all.qq_terms;
    return part;
  }

  /// out and lse of all rows, from the ranks that have them. Collective.
  Result results_of_all(const Communicator& world) const {
    const HostShape& s = whole_.problem.shape;
    const std::int64_t row = std::int64_t{s.heads} * s.dim;
    std::vector<float> mine;  // of each row: its number, lse [heads], out [heads, dim]
    for (std::size_t t = 0; t < rows_.size(); ++t) {
      mine.push_back(static_cast<float>(rows_[t]));
      for (int h = 0; h < s.heads; ++h) mine.push_back(lse_[t * s.heads + h]);
      for (std::int64_t i = 0; i < row; ++i) mine.push_back(static_cast<float>(out_[t * row + i]));
    }
    const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * 4);
    Result all{std::vector<float>(whole_.problem.tokens() * row),
               std::vector<float>(whole_.problem.tokens() * s.heads)};
    for (const std::string& part : world.gather(bytes, "results")) {
      std::vector<float> theirs(part.size() / 4);
      std::memcpy(theirs.data(), part.data(), part.size());
      for (auto at = theirs.begin(); at != theirs.end(); at += 1 + s.heads + row) {
        const auto token = static_cast<std::int64_t>(*at);
        std::copy_n(at + 1, s.heads, all.lse.begin() + token * s.heads);
        std::copy_n(at + 1 + s.heads, row, all.out.begin() + token * row);
      }
    }
    return all;
  }

  GradientResult<float> found() const {
    const auto floats = [](const Array& a) {
      std::vector<float> values(a.bytes.size() / size_of(a.dtype));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(a[i]);
      return values;
    };
    return {floats(dq_), floats(dk_), floats(dv_), floats(dsinks_), floats(dslopes_), floats(dqq_)};
  }
  void poison() {
    for (Array* a : {&dq_, &dk_, &dv_, &dsinks_, &dslopes_, &dqq_})
      std::fill(a->bytes.begin(), a->bytes.end(), std::byte{0xff});
  }
  Array& dq() { return dq_; }
  void make_values_keys() { local_.v = local_.k; }

 private:
  std::int64_t slope_rows() const {
    return whole_.problem.shape.slopes_of_sequences ? whole_.problem.batch() : 1;
  }
  Tensor of_slopes(Array& a) const {
    const HostShape& s = whole_.problem.shape;
    if (!s.slopes_of_sequences) return Tensor(a.data(), a.dtype, {s.heads});
    return Tensor(a.data(), a.dtype, {slope_rows(), s.heads});
  }
  Tensor strided(Array& rows, std::int64_t count) const {
    const HostShape& s = whole_.problem.shape;
    Tensor t(rows.data(), rows.dtype, {count, s.kv_heads, s.dim});
    t.stride[0] = whole_.problem.kv_stride();
    return t;
  }

  HostGradients& whole_;
  Shard keys_, queries_;
  std::vector<std::int64_t> rows_, own_keys_;  // of the whole
  Array q_, out_, dout_, dq_, dk_, dv_, dsinks_, dslopes_, dqq_;
  std::vector<float> lse_, dlse_;
  Local local_;
};

GradientResult<float> run_and_go_back(const Communicator& world, RankProblem& rank,
                                      const Options& options) {
  if (world.device() == Device::cuda) {
    Attention layer(world, options);
    run_layer(layer, rank.run_args());
    run_backward(layer, rank.gradient_args());
    return rank.found();
  }
  // [backward]
  Attention layer(world, options);  // with options.gradients
  layer.run(rank.run_args());
  layer.backward(rank.gradient_args());
  layer.wait();
  // [/backward]
  return rank.found();
}

/// RoPE of any number of elements, by base and scale or by tables.
void draw_rope(std::mt19937& random, HostShape& s) {
  s.rope = {.dim = 2 * static_cast<int>(1 + random() % static_cast<unsigned>(s.dim / 2)),
            .interleaved = random() % 2 == 0};
  if (random() % 2 == 0) s.rope.base = 500.0f;
  if (random() % 3 == 0) s.rope.scale = 2.5f;
  constexpr DType kTables[] = {DType::fp32, DType::fp16, DType::bf16};
  if (random() % 2 == 0) s.rope_table = kTables[random() % 3];
}

/// A strategy, how the rows are distributed, and for two levels the ranks of a node.
struct Form {
  const char* strategy;
  bool replicated;
  int per_node = 0;

  std::string name() const {
    std::string text = strategy;
    if (replicated) text += ", replicated";
    return per_node > 0 ? text + ", nodes of " + std::to_string(per_node) : text;
  }
};

using Forms = std::vector<Form>;

/// Whether it can have the same bits on every such number of ranks (Options::invariant).
bool keeps_order(const Form& form, int ranks) {
  return form.per_node == 0 && form.strategy != std::string("ring-kv") &&
         kVirtualRanks % ranks == 0;
}

const Forms kForms = {{"ring-kv", false},      {"gather-kv", false},     {"ring-q", false},
                      {"heads", false},        {"gather-states", false}, {"scatter-states", false},
                      {"gather-states", true}, {"scatter-states", true}};

/// The others: by heads with all rows on every rank, and two levels on every size of nodes.
Forms other_forms(int ranks) {
  Forms forms = {{"heads", true}};
  for (const int n : node_sizes(ranks))
    for (const Form& form :
         {Form{"heads+ring-kv", false, n}, Form{"heads+gather-kv", false, n},
          Form{"heads+ring-q", false, n}, Form{"heads+gather-states", false, n},
          Form{"heads+scatter-states", false, n}, Form{"heads+gather-states", true, n},
          Form{"heads+scatter-states", true, n}})
      forms.push_back(form);
  return forms;
}

Forms all_forms(int ranks) {
  Forms forms = kForms;
  for (const Form& form : other_forms(ranks)) forms.push_back(form);
  return forms;
}

Form random_form(std::mt19937& random, const HostShape& shape, const Forms& forms, int ranks) {
  const Form form = forms[random() % forms.size()];
  const bool by_heads = std::string(form.strategy).starts_with("heads");
  if (by_heads && shape.heads < (form.per_node > 0 ? form.per_node : ranks)) return kForms[0];
  return form;
}

/// What float64 allows. GPUs multiply 16 bits with weights rounded to them: each term of a sum may
/// be off by half a unit of it, in either direction, and terms of random signs have a sum as large
/// as the root of their squares.
::testing::AssertionResult is_right(const GradientResult<float>& found,
                                    const GradientResult<double>& exact, GradientBounds bounds,
                                    DType dtype) {
  if (!wants_gpus() || dtype == fp32) return is_close(found, exact, bounds);
  const double unit = dtype == bf16 ? 0x1p-9 : 0x1p-12;
  const auto length = [](const auto& values, const std::vector<double>* from) {
    double squares = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double off = values[i] - (from != nullptr ? (*from)[i] : 0.0);
      squares += off * off;
    }
    return std::sqrt(squares);
  };
  const auto check = [&](const char* name, const std::vector<float>& a,
                         const std::vector<double>& e, double& bound) {
    const double error = length(a, &e);
    const double most = 4 * unit * length(e, nullptr) + bound * std::sqrt(1.0 * e.size());
    bound = std::numeric_limits<double>::infinity();  // of one element
    if (error <= most) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << name << ": error " << error << ", bound " << most;
  };
  if (auto r = check("dq", found.dq, exact.dq, bounds.dq); !r) return r;
  if (auto r = check("dk", found.dk, exact.dk, bounds.dk); !r) return r;
  if (auto r = check("dv", found.dv, exact.dv, bounds.dv); !r) return r;
  const auto largest = [](const std::vector<double>& terms) {
    return terms.empty() ? 0 : *std::max_element(terms.begin(), terms.end());
  };
  bounds.dslopes += unit * largest(exact.slope_terms);
  bounds.dqq += unit * largest(exact.qq_terms);
  return is_close(found, exact, bounds);
}

void agree_with_float64(const Forms& forms, int cases) {
  const Communicator world = test_world();
  const auto seed = static_cast<std::uint32_t>(shared_seed(world));
  std::mt19937 random(seed), more(seed + 1);
  constexpr Layout kLayouts[] = {Layout::contiguous, Layout::zigzag, Layout::striped,
                                 Layout::interleaved};
  for (int i = 0; i < number_of_cases(cases); ++i) {
    HostShape shape = random_shape(random);
    if (more() % 3 == 0 && shape.dim > 1) draw_rope(more, shape);
    shape.slopes_of_sequences = more() % 3 == 0;
    const Shard keys{kLayouts[random() % 4], world.rank(), world.size(), 0, 16};
    const Form form = random_form(random, shape, forms, world.size());
    const Shard queries = form.replicated
                              ? kReplicated
                              : Shard{kLayouts[random() % 4], world.rank(), world.size(), 0, 5};
    HostGradients whole(shape, static_cast<std::uint32_t>(random()), random() % 2 == 0);
    whole.out_dtype = shape.dtype;
    whole.dk_before_rope = shape.rope.dim > 0 && more() % 2 == 0;
    if (random() % 3 == 0)
      for (int h = 0; h < shape.heads; ++h)
        whole.sinks.push_back(static_cast<float>(random() % 100) / 25 - 2);
    SCOPED_TRACE("case " + std::to_string(i) + " of seed " + std::to_string(seed) + ", " +
                 form.name() + ", keys " + name(keys.layout) +
                 (form.replicated ? "" : std::string(", rows ") + name(queries.layout)) + ", " +
                 name(shape.dtype) + ", rope " + std::to_string(shape.rope.dim));
    RankProblem rank(whole, keys, queries);
    Options options = RankProblem::options(whole, keys, queries, form.strategy);
    options.ranks_per_node = form.per_node;
    const GradientResult<float> found = run_and_go_back(world, rank, options);
    const GradientResult<double> exact = rank.part_of(whole.plain<double>());
    EXPECT_TRUE(
        is_right(found, exact, GradientBounds(whole, rank.results_of_all(world)), shape.dtype));
  }
}

TEST(Gradients, AgreeWithFloat64) { agree_with_float64(kForms, 40); }

TEST(Gradients, OnTwoLevelsAgreeWithFloat64) {
  const Forms forms = other_forms(test_world().size());
  agree_with_float64(forms, forms.size() > 1 ? 40 : 10);
}

/// Whether every product takes its time, in the simulator.
#ifdef LONGSPAN_SIMULATED
bool is_slow() { return wants_gpus(); }
#else
bool is_slow() { return false; }
#endif

struct Small {
  Communicator world = test_world();
  HostShape shape{.heads = 4,
                  .kv_heads = 2,
                  .dim = 32,
                  .query_len = {is_slow() ? 60 : 600},
                  .kv_len = {is_slow() ? 128 * world.size() + 2 : 900},
                  .mask = {.causal = true}};
  HostGradients whole{shape, static_cast<std::uint32_t>(shared_seed(world))};
  Shard keys{Layout::contiguous, world.rank(), world.size()};
  Shard queries{Layout::zigzag, world.rank(), world.size()};
  RankProblem rank{whole, keys, queries};
  Options options = RankProblem::options(whole, keys, queries, "auto");
};

/// Sequences at the start of their rows of a cache: the same bits as packed ones, and nothing is
/// written behind them.
TEST(Gradients, KeysWithRoomBehindThem) {
  const Communicator world = test_world();
  HostShape shape{.heads = 4,
                  .kv_heads = 2,
                  .dim = 24,
                  .query_len = {90, 200},
                  .kv_len = {300, 260},
                  .mask = {.causal = true}};
  HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(world)));
  for (const char* strategy : {"ring-kv", "ring-q"}) {
    SCOPED_TRACE(strategy);
    const Shard keys{Layout::zigzag, world.rank(), world.size()};
    RankProblem rank(whole, keys, keys);
    const Options options = RankProblem::options(whole, keys, keys, strategy);
    const GradientResult<float> packed = run_and_go_back(world, rank, options);

    const std::int64_t capacity = 310, row = std::int64_t{shape.kv_heads} * shape.dim;
    const auto spread = [&](const Tensor& from, std::vector<float>& to) {
      to.assign(2 * capacity * row, kNan);
      std::int64_t at = 0;
      for (int b = 0; b < 2; ++b)
        for (std::int64_t i = 0; i < keys.local_len(shape.kv_len[b]); ++i, ++at)
          std::copy_n(static_cast<const float*>(from.data) + at * from.stride[0], row,
                      to.begin() + (b * capacity + i) * row);
      return Tensor(to.data(), {2, capacity, shape.kv_heads, shape.dim});
    };
    std::vector<float> k, v, dk(2 * capacity * row, kNan), dv = dk;
    GradientArgs args = rank.gradient_args();
    args.run.k = spread(args.run.k, k);
    args.run.v = spread(args.run.v, v);
    args.dk = Tensor(dk.data(), {2, capacity, shape.kv_heads, shape.dim});
    args.dv = Tensor(dv.data(), {2, capacity, shape.kv_heads, shape.dim});
    Attention layer(world, options);
    run_layer(layer, args.run);
    run_backward(layer, args);
    layer.wait();
    EXPECT_EQ(rank.found().dq, packed.dq);
    std::int64_t at = 0;
    for (int b = 0; b < 2; ++b)
      for (std::int64_t i = 0; i < capacity; ++i)
        for (std::int64_t c = 0; c < row; ++c) {
          const std::int64_t to = (b * capacity + i) * row + c;
          if (i < keys.local_len(shape.kv_len[b])) {
            ASSERT_EQ(dk[to], packed.dk[at]);
            ASSERT_EQ(dv[to], packed.dv[at++]);
          } else {
            ASSERT_TRUE(std::isnan(dk[to]) && std::isnan(dv[to]));
          }
        }
  }
}

/// Sequences that lie apart, [batch, heads, tokens, dim] as torch has them: the bits of packed
/// ones.
TEST(Gradients, OfSequencesThatLieApart) {
  const Communicator world = test_world();
  constexpr std::int32_t kRows = 70, kRoom = kRows + 3;
  const HostShape shape{.heads = 8,
                        .kv_heads = 4,
                        .dim = 12,
                        .query_len = {kRows, kRows},
                        .kv_len = {300, 260},
                        .mask = {.causal = true}};
  HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(world)));
  const Shard keys{Layout::zigzag, world.rank(), world.size()};
  for (const Form& form : all_forms(world.size())) {
    if (!form.replicated || world.size() > shape.heads) continue;
    SCOPED_TRACE(form.name());
    RankProblem rank(whole, keys, kReplicated);
    Options options = RankProblem::options(whole, keys, kReplicated, form.strategy);
    options.ranks_per_node = form.per_node;
    const GradientResult<float> packed = run_and_go_back(world, rank, options);

    const std::int64_t row = std::int64_t{shape.heads} * shape.dim;
    const auto at = [&](std::int64_t i) {  // of element i of packed rows
      const std::int64_t token = i / row, head = i % row / shape.dim, c = i % shape.dim;
      return ((token / kRows * shape.heads + head) * kRoom + token % kRows) * shape.dim + c;
    };
    const auto apart = [&](std::vector<float>& memory, const Tensor& from) {
      memory.assign(2 * kRoom * row, kNan);
      for (std::int64_t i = 0; i < from.size(); ++i)
        memory[at(i)] = static_cast<const float*>(from.data)[i];
      Tensor view(memory.data(), {2, shape.heads, kRows, shape.dim});
      view.stride = {kRoom * row, kRoom * shape.dim, shape.dim, 1};
      return view;
    };
    GradientArgs args = rank.gradient_args();
    std::vector<float> q, out, dout, dq;
    args.run.q = apart(q, args.run.q);
    args.run.out = apart(out, args.run.out);
    args.dout = apart(dout, args.dout);
    args.dq = apart(dq, args.dq);
    rank.poison();
    Attention layer(world, options);
    run_layer(layer, args.run);
    run_backward(layer, args);
    layer.wait();
    EXPECT_EQ(rank.found().dk, packed.dk);
    EXPECT_EQ(rank.found().dv, packed.dv);
    for (std::size_t i = 0; i < packed.dq.size(); ++i)
      ASSERT_EQ(dq[at(static_cast<std::int64_t>(i))], packed.dq[i]);
  }
}

TEST(Gradients, SeveralRunsAwaitTheirBackwardInAnyOrder) {
  Small a, b;
  const GradientResult<float> first = run_and_go_back(a.world, a.rank, a.options);
  const GradientResult<float> second = run_and_go_back(b.world, b.rank, b.options);
  a.rank.poison(), b.rank.poison();
  Attention layer(a.world, a.options);
  run_layer(layer, a.rank.run_args());
  run_layer(layer, b.rank.run_args());
  run_backward(layer, a.rank.gradient_args());
  run_layer(layer, a.rank.run_args());
  run_backward(layer, b.rank.gradient_args());
  layer.wait();
  EXPECT_TRUE(a.rank.found() == first);
  EXPECT_TRUE(b.rank.found() == second);
}

TEST(Gradients, AreAddedToWhatIsThere) {
  Small s;
  const GradientResult<float> once = run_and_go_back(s.world, s.rank, s.options);
  Attention layer(s.world, s.options);
  run_layer(layer, s.rank.run_args());
  GradientArgs args = s.rank.gradient_args();
  args.accumulate = true;  // to those of the first backward
  run_backward(layer, args);
  layer.wait();
  const GradientResult<float> twice = s.rank.found();
  for (std::size_t i = 0; i < once.dq.size(); ++i) ASSERT_EQ(twice.dq[i], 2 * once.dq[i]);
  for (std::size_t i = 0; i < once.dk.size(); ++i) ASSERT_EQ(twice.dk[i], 2 * once.dk[i]);
}

/// Kernels for heads of 64 may round themselves, if they have all rows and keys.
TEST(Gradients, InTheTypeOfTheTensors) {
  Small s;
  for (const int dim : {32, 64}) {
    HostShape shape = s.shape;
    shape.dtype = bf16;
    shape.dim = dim;
    HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(s.world)), true, bf16);
    const Options options = RankProblem::options(whole, s.keys, s.queries, "auto");
    RankProblem in_fp32(whole, s.keys, s.queries), in_bf16(whole, s.keys, s.queries, bf16);
    const GradientResult<float> wide = run_and_go_back(s.world, in_fp32, options);
    const GradientResult<float> narrow = run_and_go_back(s.world, in_bf16, options);
    for (std::size_t i = 0; i < wide.dq.size(); ++i)  // one rounding, at the end
      ASSERT_EQ(narrow.dq[i], launcher::rounded(bf16, wide.dq[i]));
    for (std::size_t i = 0; i < wide.dk.size(); ++i)
      ASSERT_EQ(narrow.dk[i], launcher::rounded(bf16, wide.dk[i]));
    for (std::size_t i = 0; i < wide.dv.size(); ++i)
      ASSERT_EQ(narrow.dv[i], launcher::rounded(bf16, wide.dv[i]));
  }
}

/// Parts of dout and dlse are added up in the order of the ranks: the bits of their sum.
TEST(Gradients, PartialGradientsOfResults) {
  Small s;
  RankProblem rank(s.whole, s.keys, kReplicated);
  const int ranks = s.world.size();
  const std::int64_t rows = s.whole.problem.tokens(),
                     row = std::int64_t{s.shape.heads} * s.shape.dim;
  for (const char* strategy : {"gather-states", "scatter-states"}) {
    for (const DType dtype : {fp32, bf16}) {
      SCOPED_TRACE(std::string(strategy) + " " + name(dtype));
      std::vector<Array> parts, lse_parts;
      Array dout(fp32, rows * row), dlse(fp32, rows * s.shape.heads);
      for (int p = 0; p < ranks; ++p) {
        const auto fresh = [&](Array& part, Array& sum, std::uint32_t stream) {
          const std::vector<float> values = random_floats(std::ssize(sum.bytes) / 4, 91, stream);
          for (std::size_t i = 0; i < values.size(); ++i) {
            part.set(i, values[i]);
            sum.set(i, p == 0 ? part[i] : static_cast<float>(sum[i]) + static_cast<float>(part[i]));
          }
        };
        const auto number = static_cast<std::uint32_t>(2 * p);
        fresh(parts.emplace_back(dtype, rows * row), dout, number);
        fresh(lse_parts.emplace_back(fp32, rows * s.shape.heads), dlse, number + 1);
      }
      Options options = RankProblem::options(s.whole, s.keys, kReplicated, strategy);
      const auto go_back = [&](Dout form, Array& of_out, Array& of_lse) {
        options.dout = form;
        rank.poison();
        Attention layer(s.world, options);
        run_layer(layer, rank.run_args());
        GradientArgs args = rank.gradient_args();
        args.dout.data = of_out.data();
        args.dout.dtype = of_out.dtype;
        args.dlse = Lse::tokens_heads(Tensor(of_lse.data(), fp32, {rows, s.shape.heads}));
        run_backward(layer, args);
        layer.wait();
        return rank.found();
      };
      const GradientResult<float> whole = go_back(Dout::replicated, dout, dlse);
      const GradientResult<float> summed =
          go_back(Dout::partial, parts[s.world.rank()], lse_parts[s.world.rank()]);
      EXPECT_FALSE(std::isnan(whole.dq[0]));
      EXPECT_TRUE(summed == whole);
    }
  }
}

/// A rank without dlse adds nothing to that of the others.
TEST(Gradients, PartialGradientsOfLseOnSomeRanks) {
  Small s;
  RankProblem rank(s.whole, s.keys, kReplicated);
  Options options = RankProblem::options(s.whole, s.keys, kReplicated, "gather-states");
  const auto go_back = [&](Dout form, bool is_mine) {
    options.dout = form;
    rank.poison();
    Attention layer(s.world, options);
    run_layer(layer, rank.run_args());
    GradientArgs args = rank.gradient_args();
    std::vector<float> zeros(s.whole.dout.size(), 0.0f);
    if (!is_mine) args.dout.data = zeros.data();
    if (!is_mine) args.dlse = {};
    run_backward(layer, args);
    layer.wait();
    return rank.found();
  };
  const GradientResult<float> whole = go_back(Dout::replicated, true);
  EXPECT_TRUE(go_back(Dout::partial, s.world.rank() == s.world.size() - 1) == whole);
}

/// All ranks have the same bits of the gradients of terms, and they are added to what is there.
TEST(Gradients, OfTermsAreTheSameOnAllRanks) {
  Small s;
  HostShape shape = s.shape;
  shape.alibi = Alibi::query;
  shape.qq = true;
  HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(s.world)));
  whole.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  for (const char* strategy : {"ring-kv", "ring-q", "scatter-states"}) {
    SCOPED_TRACE(strategy);
    RankProblem rank(whole, s.keys, s.queries);
    Attention layer(s.world, RankProblem::options(whole, s.keys, s.queries, strategy));
    run_layer(layer, rank.run_args());
    GradientArgs args = rank.gradient_args();
    run_backward(layer, args);
    const GradientResult<float> once = rank.found();
    args.accumulate = true;
    run_backward(layer, args);
    layer.wait();
    const GradientResult<float> twice = rank.found();
    const auto bits = [](const GradientResult<float>& r) {
      std::string all;
      for (const auto* values : {&r.dsinks, &r.dslopes, &r.dqq})
        all.append(reinterpret_cast<const char*>(values->data()), values->size() * 4);
      return all;
    };
    for (const std::string& theirs : s.world.gather(bits(once), "gradients of terms"))
      EXPECT_TRUE(theirs == bits(once));
    for (std::size_t i = 0; i < once.dslopes.size(); ++i)
      ASSERT_EQ(twice.dslopes[i], 2 * once.dslopes[i]);
    for (std::size_t i = 0; i < once.dqq.size(); ++i) ASSERT_EQ(twice.dqq[i], 2 * once.dqq[i]);
  }
}

TEST(Gradients, RefusesByName) {
  Small s;
  Attention layer(s.world, s.options);
  run_layer(layer, s.rank.run_args());
  const auto refusal = [&](auto&& change) {
    GradientArgs args = s.rank.gradient_args();
    change(args);
    return told([&] { run_backward(layer, args); });
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal([](GradientArgs& g) { g.run.lse = {}; }), HasSubstr("needs the lse"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dout = {}; }), HasSubstr("dout"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dq.dtype = fp16; }), HasSubstr("dq is fp16"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dk.shape[0] += 1; }), HasSubstr("dk is"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dv.data = g.run.v.data; }), HasSubstr("dv"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.run.v = g.run.k; }), HasSubstr("leave dv out"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dsinks = g.dout; }), HasSubstr("no sinks"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dk_before_rope = true; }), HasSubstr("no RoPE"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.run.skip_decode = true; }), HasSubstr("skip_decode"));

  EXPECT_THAT(refusal([](GradientArgs& g) { g.dslopes = g.dout; }), HasSubstr("no slopes"));
  EXPECT_THAT(refusal([](GradientArgs& g) { g.dqq_bias = g.dout; }), HasSubstr("no qq_bias"));
  const std::vector<float> slopes(4, 0.1f), matrix(610 * 610, 0.0f);
  std::vector<float> other(610 * 610);
  const Tensor qq(matrix.data(), {610, 610}), dqq(other.data(), {610, 610});
  EXPECT_THAT(refusal([&](GradientArgs& g) {
                g.run.slopes = Tensor(slopes.data(), {4});
                g.dslopes = Tensor(other.data(), {2, 4});
              }),
              HasSubstr("dslopes is [2, 4]; slopes is [4]"));
  EXPECT_THAT(refusal([&](GradientArgs& g) { g.run.qq_bias = qq, g.dqq_bias = dqq; }),
              HasSubstr("widths up to 0 (max_qq_gradient)"));
  EXPECT_THAT(refusal([&](GradientArgs& g) {
                g.run.slopes = Tensor(slopes.data(), {4});
                g.dslopes = g.run.slopes;
              }),
              HasSubstr("dslopes"));

  Options none = s.options;
  none.gradients = false;
  Attention forward(s.world, none);
  EXPECT_THAT(told([&] { run_backward(forward, s.rank.gradient_args()); }),
              HasSubstr("Options::gradients"));
  Options wrong = s.options;
  wrong.queries->layout = Layout::listed;
  EXPECT_THAT(told([&] { Attention(s.world, wrong); }), HasSubstr("listed query rows"));
  wrong = s.options;
  wrong.limits.max_kv_len = 0;
  EXPECT_THAT(told([&] { Attention(s.world, wrong); }), HasSubstr("max_kv_len"));
  wrong = s.options;
  wrong.dout = Dout::partial;
  EXPECT_THAT(told([&] { Attention(s.world, wrong); }), HasSubstr("dout partial with sharded"));
  wrong = none;
  wrong.limits.max_qq_gradient = 5;
  EXPECT_THAT(told([&] { Attention(s.world, wrong); }), HasSubstr("for gradients"));
  wrong = s.options;
  wrong.dtypes.kv = DType::e4m3;
  EXPECT_THAT(told([&] { Attention(s.world, wrong); }), HasSubstr("e4m3"));
}

/// Rows past those that are used have no position in the tables of RoPE, and gradients of 0.
TEST(Gradients, RotationsOfRowsThatAreNotUsed) {
  const Communicator world = test_world();
  HostShape shape{.heads = 4, .kv_heads = 2, .dim = 16, .query_len = {60}, .kv_len = {40}};
  shape.used_rows = {30};
  shape.rope = {.dim = 8};
  HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(world)));
  const Shard keys{Layout::contiguous, world.rank(), world.size()};
  const Shard queries{Layout::striped, world.rank(), world.size()};
  RankProblem rank(whole, keys, queries);
  RopeTables tables(shape.rope, 40, fp32);
  const auto with_tables = [&](AttentionArgs run) {
    run.rope_cos = tables.view(tables.cos);
    run.rope_sin = tables.view(tables.sin);
    return run;
  };
  Attention layer(world, RankProblem::options(whole, keys, queries, "auto"));
  run_layer(layer, with_tables(rank.run_args()));
  GradientArgs args = rank.gradient_args();
  args.run = with_tables(args.run);
  run_backward(layer, args);
  layer.wait();
  EXPECT_TRUE(is_close(rank.found(), rank.part_of(whole.plain<double>()),
                       GradientBounds(whole, rank.results_of_all(world))));
}

using Shardings = std::vector<std::pair<Sharding, Sharding>>;  // of keys and rows

/// Several ranks and one alone give the same bits, whatever else is in the batch.
void expect_bits_of_one_rank(DType dtype, const Shardings& shardings) {
  const Communicator world = test_world(), alone = self(world.device(), world.gpu());
  const int ranks = world.size();
  if (kVirtualRanks % ranks != 0) GTEST_SKIP() << ranks << " ranks do not divide 64";
  HostShape shape{.heads = 8,
                  .kv_heads = 4,
                  .dim = 10,
                  .dtype = dtype,
                  .query_len = {1100},
                  .kv_len = {1300},
                  .mask = {.causal = true, .window = 900}};
  shape.bf16_products = dtype == bf16 && world.device() == Device::host;
  if (is_slow()) shape.heads = shape.kv_heads = 2, shape.query_len = {140}, shape.kv_len = {270};
  const auto seed = static_cast<std::uint32_t>(shared_seed(world));
  HostGradients one(shape, seed, true, dtype);
  shape.query_len.push_back(is_slow() ? 20 : 170);
  shape.kv_len.push_back(is_slow() ? 130 : 220);
  HostGradients two(shape, seed, true, dtype);
  for (HostGradients* problem : {&one, &two})
    for (int h = 0; h < shape.heads; ++h) problem->sinks.push_back(0.25f * static_cast<float>(h));

  const auto begins_as = [](const std::vector<float>& longer, const std::vector<float>& first) {
    return std::memcmp(longer.data(), first.data(), first.size() * sizeof(float)) == 0;
  };
  ASSERT_TRUE(begins_as(two.dout, one.dout));
  const auto shard = [](const Sharding& rule, const Communicator& of) {
    return Shard{rule.layout, of.rank(), of.size(), 0, rule.block};
  };
  const auto go_back = [&](const Communicator& on, RankProblem& rank, const Shard& keys,
                           const Shard& rows, HostGradients& whole, const std::string& strategy,
                           int threads) {
    Options o = RankProblem::options(whole, keys, rows, strategy);
    o.invariant = true;
    o.threads = threads;
    rank.poison();
    return run_and_go_back(on, rank, o);
  };

  for (const auto& [of_keys, of_rows] : shardings) {
    RankProblem all(one, shard(of_keys, alone), shard(of_rows, alone));
    const GradientResult<float> wanted =
        go_back(alone, all, shard(of_keys, alone), shard(of_rows, alone), one, "gather-states", 1);
    for (const Form& form : all_forms(ranks)) {
      const std::string strategy = form.strategy;
      if (!keeps_order(form, ranks)) continue;
      if (strategy == "heads" && shape.kv_heads < ranks) continue;
      if (form.replicated && of_rows.layout != Layout::contiguous) continue;
      const bool keys_travel = strategy == "gather-kv" || strategy == "heads";
      if (keys_travel && of_keys.layout != Layout::contiguous) continue;
      SCOPED_TRACE(form.name() + ", keys " + name(of_keys.layout) + ", rows " +
                   name(of_rows.layout));
      const Shard keys = shard(of_keys, world);
      const Shard rows = form.replicated ? kReplicated : shard(of_rows, world);
      RankProblem own(one, keys, rows), with_another(two, keys, rows);
      const GradientResult<float> part = own.part_of(wanted);
      const GradientResult<float> found = go_back(world, own, keys, rows, one, strategy, 1);
      EXPECT_TRUE(begins_as(found.dq, part.dq) && begins_as(found.dk, part.dk) &&
                  begins_as(found.dv, part.dv) && begins_as(found.dsinks, part.dsinks));
      const GradientResult<float> more = go_back(world, with_another, keys, rows, two, strategy, 2);
      EXPECT_TRUE(begins_as(more.dq, part.dq) && begins_as(more.dk, part.dk) &&
                  begins_as(more.dv, part.dv));
    }
  }
}

TEST(Gradients, InvariantOnesHaveTheBitsOfOneRank) {
  const Sharding contiguous{}, by_one{Layout::interleaved, 128}, by_two{Layout::interleaved, 256};
  expect_bits_of_one_rank(
      fp32,
      {{contiguous, contiguous}, {contiguous, by_two}, {by_one, by_two}, {by_two, contiguous}});
}

/// By the CPU's own products of bf16, where it has them.
TEST(Gradients, InvariantOnesOfBf16HaveTheBitsOfOneRank) {
  expect_bits_of_one_rank(bf16, {{Sharding{}, {Layout::interleaved, 256}}});
}

TEST(Gradients, WithoutAnOrderAreRefusedForInvariant) {
  Small s;  // with zigzag rows
  const int ranks = s.world.size();
  if (ranks == 1) GTEST_SKIP() << "one rank has one order";
  const bool divides = kVirtualRanks % ranks == 0;
  Options o = s.options;
  o.invariant = true;
  const auto refusal = [&] { return told([&] { Attention(s.world, o); }); };
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal(), HasSubstr(divides ? "zigzag queries" : "contiguous keys"));
  o.keys.layout = Layout::striped;
  EXPECT_THAT(refusal(), HasSubstr("striped keys"));
  o.keys = *o.queries = {};
  o.strategy = "ring-kv";
  EXPECT_THAT(refusal(), HasSubstr(divides ? "ring-kv: its gradients" : "divides 64"));
  o.strategy = "heads";
  o.heads = 2 * ranks, o.kv_heads = 1;
  EXPECT_THAT(refusal(), HasSubstr(divides ? "1 kv heads" : "divides 64"));
  o.dtypes.compute = DType::fp64;
  EXPECT_THAT(refusal(), HasSubstr("fp64 with invariant"));
}

/// The memory that gradients add to a layer is that of the table of costs, but for the scratch of
/// the kernels.
TEST(Gradients, TakeTheMemoryThatIsForecast) {
  const Communicator world = test_world();
  constexpr std::int64_t kKeys = 2048;
  const std::int64_t own = kKeys / world.size();
  for (const Form& form : all_forms(world.size())) {
    SCOPED_TRACE(form.name());
    Options o{.heads = 84, .kv_heads = 84, .head_dim = 32};  // the same on each rank, if by heads
    o.dtypes.compute = bf16;
    o.limits.max_tokens = form.replicated ? kKeys : own + 1;
    o.limits.max_kv_len = kKeys;
    if (!form.replicated) o.queries = Sharding{Layout::contiguous};
    o.strategy = form.strategy;
    o.ranks_per_node = form.per_node;
    o.threads = 1;
    const RunSize size{
        .tokens = kKeys, .most_tokens = static_cast<double>(o.limits.max_tokens), .keys = kKeys};
    const auto bytes = [&](bool gradients) {
      o.gradients = gradients;
      const auto taken = static_cast<double>(Attention(world, o).workspace_bytes());
      return std::pair(taken, cost_of(o, world.size(), size, world.device()).workspace_bytes);
    };
    for (const bool invariant : {false, keeps_order(form, world.size())}) {
      o.invariant = invariant;
      const auto [with, with_wanted] = bytes(true);
      const auto [without, without_wanted] = bytes(false);
      // In the fixed order each block of a GPU has a stack.
      const double scratch = invariant && world.device() == Device::cuda ? 64 << 20 : 1 << 20;
      EXPECT_NEAR(with - without, with_wanted - without_wanted,
                  0.01 * (with_wanted - without_wanted) + scratch);
    }
  }
}

/// So are the bytes that a rank receives, on the mean of the ranks.
TEST(Gradients, ReceiveTheBytesThatAreForecast) {
  const Communicator world = test_world();
  const std::int64_t keys = 128 * world.size();
  const int heads = is_slow() ? world.size() : 84;  // the same on each rank, if by heads
  for (const Form& form : all_forms(world.size())) {
    SCOPED_TRACE(form.name());
    const HostShape shape{.heads = heads,
                          .kv_heads = heads,
                          .dim = 8,
                          .query_len = {static_cast<std::int32_t>(keys)},
                          .kv_len = {static_cast<std::int32_t>(keys)}};
    HostGradients whole(shape, 1, false);
    const Shard own{Layout::contiguous, world.rank(), world.size()};
    const Shard rows = form.replicated ? kReplicated : own;
    RankProblem rank(whole, own, rows);
    Options o = RankProblem::options(whole, own, rows, form.strategy);
    o.ranks_per_node = form.per_node;
    o.limits.max_tokens = form.replicated ? keys : keys / world.size();
    Attention layer(world, o);
    run_layer(layer, rank.run_args());
    const comm::Transport& transport = comm::transport_of(world);
    const std::uint64_t before = transport.received_bytes();
    run_backward(layer, rank.gradient_args());
    layer.wait();
    double all = 0;
    for (const std::string& bytes :
         world.gather(std::to_string(transport.received_bytes() - before), "bytes"))
      all += std::stod(bytes);
    const auto most = static_cast<double>(o.limits.max_tokens), count = static_cast<double>(keys);
    const RunSize size{.tokens = count, .most_tokens = most, .keys = count};
    EXPECT_DOUBLE_EQ(all / world.size(),
                     cost_of(o, world.size(), size, world.device()).backward.received_bytes);
  }
}

TEST(Gradients, RanksThatDifferInWhatDoutIs) {
  Small s;
  if (s.world.size() == 1) GTEST_SKIP() << "one rank differs from nobody";
  Options options = RankProblem::options(s.whole, s.keys, kReplicated, "gather-states");
  if (s.world.rank() == 1) options.dout = Dout::partial;
  EXPECT_THAT(told([&] { Attention(s.world, options); }),
              ::testing::HasSubstr("'dout' differs between ranks"));
}

/// Values that are the first columns of their keys: dk and dv, added up in fp32 and rounded once.
TEST(Gradients, OfValuesInKeys) {
  const Communicator world = test_world();
  constexpr int kValues = 20, kDim = 32;
  HostShape shape{.heads = 8, .kv_heads = 8, .dim = kDim, .dtype = bf16};
  shape.query_len = shape.kv_len = {203, 50};
  shape.mask.causal = true;
  HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(world)));
  const Shard keys{Layout::contiguous, world.rank(), world.size()};
  for (const Form& form : all_forms(world.size())) {
    if (std::string(form.strategy).starts_with("heads") && shape.heads < world.size()) continue;
    if (form.per_node > 2) continue;  // one size of nodes is as another here
    SCOPED_TRACE(form.name());
    const Shard rows = form.replicated ? kReplicated : keys;
    Options o = RankProblem::options(whole, keys, rows, form.strategy);
    o.value_dim = kValues;
    o.ranks_per_node = form.per_node;
    o.threads = 1;
    Attention layer(world, o);
    const auto first_columns = [](Tensor t) {
      t.shape[t.dims - 1] = kValues;
      return t;
    };
    const auto go_back = [&](RankProblem& rank, bool in_keys) {
      if (!in_keys) rank.make_values_keys();
      GradientArgs g = rank.gradient_args();
      g.run.v = first_columns(in_keys ? g.run.k : g.run.v);
      g.run.out = first_columns(g.run.out);
      g.dout = first_columns(g.dout);
      g.dv = in_keys ? Tensor() : first_columns(g.dv);
      run_layer(layer, g.run);
      run_backward(layer, g);
      layer.wait();
      return rank.found();
    };
    RankProblem apart(whole, keys, rows), joined(whole, keys, rows, bf16);
    const GradientResult<float> two = go_back(apart, false), one = go_back(joined, true);
    ASSERT_EQ(one.dk.size(), two.dk.size());
    for (std::size_t i = 0; i < one.dk.size(); ++i) {
      const float of_values = i % kDim < kValues ? two.dv[i] : 0.0f;
      ASSERT_EQ(one.dk[i], launcher::rounded(bf16, two.dk[i] + of_values)) << i;
    }
  }
}

/// A device tensor with room for more rows than a run has.
class Roomy {
 public:
  Roomy() = default;
  Roomy(Device device, const Tensor& like, std::int64_t rows) : tensor_(like) {
    tensor_.shape[0] = rows;
    memory_ = Buffer(device, span_bytes(tensor_) + 16);
    tensor_.data = memory_.data();
    tensor_.device = device;
  }
  const Tensor& tensor() const { return tensor_; }
  /// Behind what is given all is NaN.
  void give(const Tensor& host) {
    std::vector<std::byte> bytes(memory_.bytes(), std::byte{0xff});
    if (host.size() > 0) std::memcpy(bytes.data(), host.data, span_bytes(host));
    memory_.upload(bytes.data());
  }
  /// Returns whether nothing was written behind what is taken.
  bool take(const Tensor& host) const {
    std::vector<std::byte> bytes(memory_.bytes());
    memory_.download(bytes.data());
    const std::size_t taken = span_bytes(host);
    if (host.size() > 0) std::memcpy(host.data, bytes.data(), taken);
    return std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(taken), bytes.end(),
                       [](std::byte b) { return b == std::byte{0xff}; });
  }

 private:
  Tensor tensor_;
  Buffer memory_;
};

/// Forward and backward in one graph, whose lengths change: on a GPU only the device knows them.
/// The tensors have room for more rows and keys than there are.
TEST(Gradients, RunAgainWithOtherLengths) {
  const Communicator world = test_world();
  const Device device = world.device();
  const auto seed = static_cast<std::uint32_t>(shared_seed(world));
  const int ranks = world.size();
  constexpr std::int32_t kMost = 150;
  const std::int64_t room = 3 * kMost;  // for the keys of a rank, and its rows
  const std::int32_t r = 2 * ranks;     // so that zigzag rows are even
  for (const Form& form : all_forms(ranks)) {
    if (std::string(form.strategy).starts_with("heads") && ranks > 4) continue;
    SCOPED_TRACE(form.name());
    const bool on_gpu = device != Device::host;
    const Shard keys{Layout::zigzag, world.rank(), ranks};
    const Shard rows = form.replicated ? kReplicated : keys;
    HostShape shape{.heads = 4,
                    .kv_heads = 4,
                    .dim = 12,
                    .query_len = {3 * r, 0, 5 * r},
                    .kv_len = {kMost, 1, 5 * r},
                    .mask = {.causal = true},
                    .rope = {.dim = 8}};
    HostGradients first(shape, seed);
    // Rows past the last sequence are a part of q where lengths are on the device.
    const std::int64_t total = first.problem.tokens() + (on_gpu ? 3 * r : 0);
    const std::int64_t own_rows = form.replicated ? total : total / ranks;
    Options options = RankProblem::options(first, keys, rows, form.strategy);
    options.ranks_per_node = form.per_node;
    options.limits.max_tokens = total;
    options.limits.max_kv_len = kMost;
    Attention layer(world, options);

    RankProblem like(first, keys, rows);
    const GradientArgs host = like.gradient_args();
    GradientArgs args = host;
    std::vector<Roomy> memory;
    memory.reserve(16);
    const auto place = [&](Tensor& t, std::int64_t count) {
      t = memory.emplace_back(device, t, count).tensor();
    };
    const auto members = [](GradientArgs& g) {
      return std::vector<Tensor*>{&g.run.q, &g.run.out,    &g.run.lse.tensor,  &g.dout,
                                  &g.dq,    &g.run.k,      &g.run.v,           &g.dk,
                                  &g.dv,    &g.run.kv_len, &g.run.query_start, &g.dlse.tensor};
    };
    constexpr std::size_t kOfRows = 5, kOfKeys = 9, kWritten[] = {1, 2, 4, 7, 8}, kDlse = 11;
    const std::vector<Tensor*> own = members(args);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::int64_t extent = own[i]->shape[0];
      place(*own[i], i < kOfRows || i == kDlse ? (on_gpu ? own_rows : extent)
                     : i < kOfKeys             ? room
                                               : extent);
    }
    args.dk_before_rope = true;
    if (!form.replicated) args.run.total_tokens = on_gpu ? total : first.problem.tokens();
    Replay replay(device, [&](Stream stream) {
      layer.run(args.run, stream);
      layer.backward(args, stream);
    });
    for (int turn = 0; turn < 3; ++turn) {
      if (turn > 0 && on_gpu) shape.query_len = {turn * r, 4 * r, r};
      shape.kv_len = {turn == 1 ? r : kMost - 20 * turn, 1 + 3 * turn, 4 * r + 7 * turn};
      HostGradients whole(shape, seed + 7 * static_cast<std::uint32_t>(turn));
      whole.dk_before_rope = true;
      RankProblem rank(whole, keys, rows);
      rank.poison();
      GradientArgs now = rank.gradient_args();
      const std::vector<Tensor*> given = members(now);
      for (std::size_t i = 0; i < given.size(); ++i) memory[i].give(*given[i]);
      turn == 0 ? replay.eager() : replay.again();
      layer.wait(replay.stream());
      for (const std::size_t i : kWritten)
        EXPECT_TRUE(memory[i].take(*given[i])) << "tensor " << i << ", turn " << turn;
      EXPECT_TRUE(is_close(rank.found(), rank.part_of(whole.plain<double>()),
                           GradientBounds(whole, rank.results_of_all(world))))
          << "turn " << turn;
    }
  }
}

/// A rank that goes back while the others go on.
TEST(Gradients, RanksThatDiffer) {
  const int ranks = test_world().size();
  if (ranks == 1) GTEST_SKIP() << "one rank differs from nobody";
  Forms forms = {{"auto", false}};
  for (const int n : node_sizes(ranks)) forms.push_back({"heads+ring-kv", false, n});
  for (const Form& form : forms) {
    SCOPED_TRACE(form.name());
    Small s;  // with a communicator of its own, which ends
    s.options.strategy = form.strategy;
    s.options.ranks_per_node = form.per_node;
    Attention layer(s.world, s.options);
    run_layer(layer, s.rank.run_args());
    const std::string found = told([&] {
      if (s.world.rank() == 0)
        run_backward(layer, s.rank.gradient_args());
      else
        run_layer(layer, s.rank.run_args());
      layer.wait();
    });
    EXPECT_THAT(found, ::testing::HasSubstr("backward"));
  }
}

TEST(Gradients, RanksThatDifferInTheTermsThatTheyAskFor) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank differs from nobody";
  HostShape shape{.heads = 2, .kv_heads = 2, .dim = 8, .query_len = {40}, .kv_len = {40}};
  shape.alibi = Alibi::query;
  HostGradients whole(shape, static_cast<std::uint32_t>(shared_seed(world)));
  const Shard own{Layout::contiguous, world.rank(), world.size()};
  RankProblem rank(whole, own, own);
  Attention layer(world, RankProblem::options(whole, own, own, "ring-kv"));
  run_layer(layer, rank.run_args());
  GradientArgs args = rank.gradient_args();
  if (world.rank() == 1) args.dslopes = {};
  EXPECT_THAT(told([&] {
                run_backward(layer, args);
                layer.wait();
              }),
              ::testing::HasSubstr("'dslopes' differs between ranks"));
}

}  // namespace
}  // namespace longspan::tests

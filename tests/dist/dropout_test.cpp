// Dropout of a layer on every rank count: one mask for any ranks, strategies, layouts and batches,
// which values reveal that are rows of the identity; seeds that rank 0 draws; and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/judge/oracle.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/node_sizes.hpp"
#include "tests/dist/told.hpp"
#include "tests/dist/world.hpp"

namespace longspan::tests {
namespace {

constexpr int kHeads = 8, kKvHeads = 4, kDim = 8;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Sequences whose queries are 0, so that all keys that a row sees weigh the same, and whose value
/// of key j is 1 in column j and 0 in the others.
struct Sequences {
  std::vector<std::int32_t> rows, keys;
  int columns() const { return *std::max_element(keys.begin(), keys.end()); }
  std::int64_t all_rows() const { return std::accumulate(rows.begin(), rows.end(), 0); }
};

struct Form {
  std::string strategy;
  Sharding keys;
  std::optional<Sharding> queries;
  int per_node = 0;
  bool gradients = false;
  DType dtype = fp32;

  std::string name() const {
    return strategy + " keys " + longspan::name(keys.layout) + ":" + std::to_string(keys.block) +
           (queries ? " sharded" : " replicated") + " nodes of " + std::to_string(per_node) +
           (gradients ? " with gradients" : "");
  }
};

/// One rank's run: out [own rows, heads, columns], and which rows they are.
struct Found {
  std::vector<std::pair<int, std::int64_t>> rows;  // sequence and row of it
  std::vector<float> out;
  std::array<std::int64_t, 2> seed;
};

Options options_of(const Form& form, const Sequences& all, double p) {
  Options o{.heads = kHeads, .kv_heads = kKvHeads, .head_dim = kDim, .value_dim = all.columns()};
  o.dtypes.compute = form.dtype;
  o.mask.causal = true;
  o.dropout.p = p;
  o.limits.max_tokens = all.all_rows() + 1;
  o.limits.max_batch = static_cast<int>(all.rows.size());
  o.limits.max_kv_len = all.columns();
  o.keys = form.keys;
  o.queries = form.queries;
  o.strategy = form.strategy;
  o.ranks_per_node = form.per_node;
  o.gradients = form.gradients;
  return o;
}

Found run(const Communicator& world, const Options& options, const Sequences& all,
          const std::vector<std::int64_t>& seed, std::vector<std::int32_t> numbers = {}) {
  const int rank = world.rank(), ranks = world.size(), columns = all.columns();
  Found made;
  std::vector<float> v;
  std::vector<std::int32_t> starts{0};
  for (int b = 0; b < static_cast<int>(all.rows.size()); ++b) {
    const auto s = static_cast<std::size_t>(b);
    starts.push_back(starts.back() + all.rows[s]);
    const Shard own = options.keys.resolve(all.keys[s], rank, ranks);
    for (std::int64_t i = 0; i < own.local_len(all.keys[s]); ++i)
      for (int h = 0; h < kKvHeads; ++h)
        for (int c = 0; c < columns; ++c)
          v.push_back(c == own.position(i, all.keys[s]) ? 1.0f : 0.0f);
    const Shard rows = options.queries ? options.queries->resolve(all.rows[s], rank, ranks)
                                       : Shard::contiguous(all.rows[s], 0, 1);
    for (std::int64_t t = 0; t < rows.local_len(all.rows[s]); ++t)
      made.rows.emplace_back(b, rows.position(t, all.rows[s]));
  }
  const std::int64_t rows = std::ssize(made.rows), keys = std::ssize(v) / kKvHeads / columns;
  std::vector<float> q(static_cast<std::size_t>(rows * kHeads * kDim + 1)),
      k(static_cast<std::size_t>(keys * kKvHeads * kDim + 1), 1.0f), lse(q.size());
  v.push_back(0);
  made.out.assign(static_cast<std::size_t>(rows * kHeads * columns + 1), kNan);
  std::vector<std::int32_t> kv_len = all.keys;
  AttentionArgs args;
  args.q = Tensor(q.data(), {rows, kHeads, kDim});
  args.k = Tensor(k.data(), {keys, kKvHeads, kDim});
  args.v = Tensor(v.data(), {keys, kKvHeads, columns});
  args.out = Tensor(made.out.data(), {rows, kHeads, columns});
  args.lse = Lse::tokens_heads(Tensor(lse.data(), {rows, kHeads}));
  args.query_start = Tensor(starts.data(), {std::ssize(starts)});
  args.kv_len = Tensor(kv_len.data(), {std::ssize(kv_len)});
  if (options.queries) args.total_tokens = all.all_rows();
  if (!seed.empty()) args.dropout_seed = Tensor(seed.data(), {std::ssize(seed)});
  if (!numbers.empty()) args.dropout_sequences = Tensor(numbers.data(), {std::ssize(numbers)});
  Attention layer(world, options);
  layer.run(args);
  layer.wait();
  made.seed = layer.dropout_seed();
  made.out.pop_back();
  for (std::int64_t i = 0; i < rows * kHeads; ++i) {  // lse has all weights
    const auto [b, t] = made.rows[static_cast<std::size_t>(i / kHeads)];
    const std::int64_t seen =
        all.keys[static_cast<std::size_t>(b)] - all.rows[static_cast<std::size_t>(b)] + t + 1;
    EXPECT_NEAR(lse[static_cast<std::size_t>(i)], std::log(static_cast<double>(seen)), 1e-5);
  }
  return made;
}

/// Compares every element with the mask of the oracle.
void expect_mask(const Found& found, const Options& options, const Sequences& all,
                 std::array<std::int64_t, 2> seed, const std::vector<std::int32_t>& numbers = {}) {
  const int columns = all.columns();
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < found.rows.size(); ++i)
    for (int h = 0; h < kHeads; ++h) {
      const auto [b, t] = found.rows[i];
      const auto s = static_cast<std::size_t>(b);
      const std::int64_t position = all.keys[s] - all.rows[s] + t;
      const launcher::DropoutOf of{options.dropout.p,
                                   static_cast<std::uint64_t>(seed[0]),
                                   static_cast<std::uint64_t>(seed[1]),
                                   static_cast<std::uint32_t>(numbers.empty() ? b : numbers[s]),
                                   static_cast<std::uint32_t>(options.dropout.first_head + h),
                                   position};
      const std::vector<double> z = launcher::dropout_factors<float>(of, columns);
      for (int c = 0; c < columns; ++c) {
        const double wanted =
            c <= position ? z[static_cast<std::size_t>(c)] / static_cast<double>(position + 1) : 0;
        const float got = found.out[(i * kHeads + static_cast<std::size_t>(h)) *
                                        static_cast<std::size_t>(columns) +
                                    static_cast<std::size_t>(c)];
        wrong += wanted == 0 ? got != 0.0f : !(std::abs(got / wanted - 1) < 1e-5);
      }
    }
  EXPECT_EQ(wrong, 0);
}

std::vector<Form> all_forms(int ranks) {
  std::vector<Form> forms;
  for (const StrategyInfo& info : strategies())
    for (const bool sharded : {true, false})
      for (const Sharding& keys :
           {Sharding{Layout::contiguous, kSegment}, Sharding{Layout::zigzag, kSegment},
            Sharding{Layout::striped, kSegment}, Sharding{Layout::interleaved, 6}}) {
        Form form{.strategy = info.name, .keys = keys};
        if (sharded) form.queries = keys;
        forms.push_back(form);
        for (const int per_node : node_sizes(ranks)) {
          form.per_node = per_node;
          forms.push_back(form);
        }
      }
  return forms;
}

TEST(Dropout, HasOneMask) {
  const Communicator world = test_world();
  const Sequences all{{40, 33}, {300, 150}};
  const std::array<std::int64_t, 2> seed{-123456789012345, 77};
  std::set<std::string> served;
  int number = 0;
  for (Form form : all_forms(world.size())) {
    SCOPED_TRACE(form.name());
    form.gradients = ++number % 2 == 0;
    Options options = options_of(form, all, 0.3);
    options.dropout.first_head = 16;
    try {
      expect_mask(run(world, options, all, {seed[0], seed[1]}), options, all, seed);
      served.insert(form.strategy);
    } catch (const Unsupported&) {
    } catch (const UsageError&) {
    }
  }
  // Those of two levels need several nodes of several ranks.
  EXPECT_GE(served.size(), node_sizes(world.size()).empty() ? 6u : 9u);
}

/// A sequence alone has the mask that it has in a batch, where the caller gives it its number.
TEST(Dropout, AloneAsInABatch) {
  const Communicator world = test_world();
  const Form form{.strategy = "auto", .keys = {Layout::zigzag, kSegment}};
  const Sequences alone{{33}, {150}};
  const Options options = options_of(form, alone, 0.5);
  expect_mask(run(world, options, alone, {5}, {1}), options, alone, {5, 0}, {1});
}

TEST(Dropout, Rank0Draws) {
  const Communicator world = test_world();
  const Form form{.strategy = "auto", .keys = {Layout::zigzag, kSegment}};
  const Sequences all{{20}, {150}};
  const Options options = options_of(form, all, 0.5);
  const Found first = run(world, options, all, {}), second = run(world, options, all, {});
  expect_mask(first, options, all, first.seed);
  const std::string mine = std::to_string(first.seed[0]) + " " + std::to_string(first.seed[1]);
  for (const std::string& theirs : world.gather(mine, "seeds")) EXPECT_EQ(theirs, mine);
  EXPECT_NE(first.seed[0], second.seed[0]);
  EXPECT_EQ(first.seed[1], 0);
}

/// The two results of one layer whose probability is 0, and of one without dropout, have the same
/// bits.
TEST(Dropout, OfProbability0IsNone) {
  const Communicator world = test_world();
  const Form form{.strategy = "auto", .keys = {Layout::zigzag, kSegment}};
  const Sequences all{{20}, {150}};
  const Options options = options_of(form, all, 0);
  EXPECT_EQ(run(world, options, all, {7}).out, run(world, options, all, {}).out);
}

TEST(Dropout, RanksAgreeOnSeeds) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const Form form{.strategy = "auto", .keys = {Layout::zigzag, kSegment}};
  const Sequences all{{20}, {150}};
  const bool last = world.rank() == world.size() - 1;
  EXPECT_THAT(told([&] { run(world, options_of(form, all, 0.5), all, {last ? 8 : 7}); }),
              testing::HasSubstr("dropout_seed"));
}

TEST(Dropout, RanksAgreeOnProbabilities) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const Form form{.strategy = "auto", .keys = {Layout::zigzag, kSegment}};
  const Sequences all{{20}, {150}};
  const bool last = world.rank() == world.size() - 1;
  EXPECT_THAT(told([&] { run(world, options_of(form, all, last ? 0.5 : 0.25), all, {7}); }),
              testing::HasSubstr("dropout.p"));
}

/// The error of a call; empty without one.
template <class Fault, class Work>
std::string error_of(const Work& work) {
  try {
    work();
    return "";
  } catch (const Fault& error) {
    return error.what();
  }
}

TEST(Dropout, RefusesByName) {
  const Communicator world = test_world();
  const auto made = [&](const auto& change) {
    Options o{
        .heads = 4, .kv_heads = 4, .head_dim = 8, .limits = {.max_tokens = 4, .max_kv_len = 64}};
    o.dropout.p = 0.5;
    change(o);
    return Attention(world, o);
  };
  for (const double p : {-0.1, 1.0, 1.5, std::nan(""), HUGE_VAL})
    EXPECT_THAT(error_of<UsageError>([&] { made([&](Options& o) { o.dropout.p = p; }); }),
                testing::HasSubstr("dropout.p is"));
  EXPECT_THAT(error_of<UsageError>([&] { made([](Options& o) { o.dropout.first_head = -1; }); }),
              testing::HasSubstr("dropout.first_head -1"));
  EXPECT_THAT(error_of<Unsupported>([&] { made([](Options& o) { o.dtypes.kv = e4m3; }); }),
              testing::HasSubstr("dropout with e4m3"));

  Attention layer = made([](Options& o) {
    o.dtypes.compute = fp32;
    o.gradients = true;
  });
  std::vector<float> q(4 * 4 * 8), k(64 * 4 * 8), out(q.size()), dk(k.size()), lse(16);
  std::vector<std::int32_t> numbers{-1}, table{0};
  std::vector<std::int64_t> seeds{1, 2, 3};
  const auto own = layer.shard(64).local_len(64);
  const auto arguments = [&] {
    AttentionArgs a;
    a.q = Tensor(q.data(), {4, 4, 8});
    a.k = a.v = Tensor(k.data(), {own, 4, 8});
    a.v.data = dk.data();
    a.out = Tensor(out.data(), {4, 4, 8});
    a.lse = Lse::tokens_heads(Tensor(lse.data(), {4, 4}));
    a.total_keys = 64;
    return a;
  };
  const auto refused = [&](const auto& change, const char* text) {
    AttentionArgs a = arguments();
    change(a);
    std::string error;
    try {
      layer.run(a);
    } catch (const Error& caught) {
      error = caught.what();
    }
    EXPECT_THAT(error, testing::HasSubstr(text));
  };
  if (world.size() > 1) return;  // the first error ends the others' communicator
  refused([&](AttentionArgs& a) { a.dropout_seed = Tensor(seeds.data(), {3}); },
          "dropout_seed is [3]; [1] or [2] is wanted");
  refused([&](AttentionArgs& a) { a.dropout_seed = Tensor(table.data(), {1}); },
          "dropout_seed is int32");
  refused(
      [&](AttentionArgs& a) {
        a.dropout_seed = Tensor(seeds.data(), {1});
        a.dropout_seed.device = Device::cuda;
      },
      "dropout_seed");
  refused([&](AttentionArgs& a) { a.dropout_sequences = Tensor(numbers.data(), {1}); },
          "dropout_sequences[0] is -1");
  refused([&](AttentionArgs& a) { a.dropout_sequences = Tensor(seeds.data(), {1}); },
          "dropout_sequences is int64");
  refused([&](AttentionArgs& a) { a.skip_decode = true; }, "skip_decode");
  refused(
      [&](AttentionArgs& a) {
        a.k = a.v = Tensor(k.data(), {1, 64, 4, 8});
        a.v.data = dk.data();
        a.block_table = Tensor(table.data(), {1, 1});
      },
      "block_table");
  refused([&](AttentionArgs& a) { a.new_k = a.new_v = Tensor(dk.data(), {4, 4, 8}); }, "new_k");
  EXPECT_EQ(layer.dropout_seed()[1], 0);
  layer.run(arguments());
  layer.run(arguments());
  EXPECT_EQ(layer.dropout_seed()[1], 1);

  GradientArgs back;
  back.run = arguments();
  std::vector<float> dout(q.size()), dq(q.size()), dv(k.size());
  back.dout = Tensor(dout.data(), {4, 4, 8});
  back.dq = Tensor(dq.data(), {4, 4, 8});
  back.dk = Tensor(dv.data(), {own, 4, 8});
  back.dv = back.dk;
  EXPECT_THAT(error_of<InputError>([&] { layer.backward(back); }),
              testing::HasSubstr("backward with dropout needs the dropout_seed of its run"));
}

}  // namespace
}  // namespace longspan::tests

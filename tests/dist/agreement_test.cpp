// Ranks that mean different things by one run, or by the layer: every rank gets a UsageError that
// names the field, both values and the ranks, within the deadline, and nothing is written. The
// victim is the last rank. On GPUs what the host can see is compared always, contents of arrays
// with check_arrays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/told.hpp"
#include "tests/dist/world.hpp"

namespace longspan::tests {
namespace {

constexpr int kHeads = 4, kKvHeads = 2, kDim = 32;
constexpr std::int64_t kTokens = 4, kKeys = 600, kRoom = 2048;

/// An array in the memory of the world's device.
template <class T>
class Array {
 public:
  Array(Device device, std::vector<T> values)
      : values_(std::move(values)), memory_(device, values_.size() * sizeof(T)) {
    memory_.upload(values_.data());
  }
  T* data() const { return static_cast<T*>(memory_.data()); }
  /// Of the first `extents` elements; without extents, of all.
  Tensor view(std::initializer_list<std::int64_t> extents = {}) const {
    if (extents.size() > 0) return {data(), extents, memory_.device()};
    return {data(), {static_cast<std::int64_t>(values_.size())}, memory_.device()};
  }
  void set(std::size_t i, T value) {
    values_.at(i) = value;
    memory_.upload(values_.data());
  }
  std::vector<T> read() const {
    std::vector<T> values(values_.size());
    memory_.download(values.data());
    return values;
  }

 private:
  std::vector<T> values_;
  Buffer memory_;
};

/// A run of two sequences with most of what may be given, and the memory behind it.
struct OneRun {
  Device device;
  int rank, ranks;
  Array<float> q, keys, out, sinks, slopes, bias;
  Array<std::int32_t> start, lens, prefix;
  Array<std::uint8_t> causal;
  Array<std::int64_t> documents, images, ranges, row_ranges, listed;
  AttentionArgs args;

  explicit OneRun(const Communicator& world)
      : device(world.device()),
        rank(world.rank()),
        ranks(world.size()),
        q(device, std::vector<float>(2 * kTokens * kHeads * kDim, 0.5f)),
        keys(device, std::vector<float>(kRoom * kKvHeads * kDim, 0.25f)),
        out(device, std::vector<float>(2 * kTokens * kHeads * kDim, NAN)),
        sinks(device, {1, 2, 3, 4}),
        slopes(device, {1, 2, 3, 4}),
        bias(device, std::vector<float>(kTokens * kTokens, 1)),
        start(device, {0, 2, 4}),
        lens(device, {500, 600}),
        prefix(device, {4, 5}),
        causal(device, {1, 0}),
        documents(device, {0, 100, 600}),
        images(device, {0, 100, 200, 300}),
        ranges(device, table(ranks, kKeys)),
        row_ranges(device, row_table(ranks)),
        listed(device, {rank}) {
    args.query_start = start.view();
    args.kv_len = lens.view();
    set_tokens(kTokens);
    args.k = args.v = keys.view({kRoom, kKvHeads, kDim});
  }

  static std::vector<std::int64_t> table(int count, std::int64_t length) {
    std::vector<std::int64_t> ends;
    for (int r = 0; r <= count; ++r) ends.push_back(length * r / count);
    return ends;
  }
  /// kTokens rows on each rank but the last, which has one less.
  static std::vector<std::int64_t> row_table(int count) {
    std::vector<std::int64_t> ends = table(count, kTokens * count);
    --ends.back();
    return ends;
  }
  void set_tokens(std::int64_t tokens) {
    args.q = q.view({tokens, kHeads, kDim});
    args.out = out.view({tokens, kHeads, kDim});
  }
  void one_sequence(std::int64_t length = kKeys) {
    args.query_start = args.kv_len = {};
    args.total_keys = length;
  }
  bool wrote() const {
    for (const float value : out.read())
      if (!std::isnan(value)) return true;
    return false;
  }
};

struct Case {
  const char* name;
  const char* says;                             // what the error must contain
  std::function<void(OneRun&)> all;             // what every rank does to its arguments
  std::function<void(OneRun&)> victim;          // what the victim does then
  bool contents = false;                        // only an array's contents differ
  void (*options)(Options&) = [](Options&) {};  // of the layer, on every rank
};

void nothing(OneRun&) {}

const std::vector<Case> kCases{
    {"length", "'total_keys' differs between ranks", [](OneRun& r) { r.one_sequence(1000); },
     [](OneRun& r) { r.args.total_keys = 2000; }},
    {"ranges", "'key_table' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.args.key_table = r.ranges.view();
     },
     [](OneRun& r) { r.ranges.set(1, 10); }, true, [](Options& o) { o.keys = {Layout::ranges}; }},
    // What ranks list is judged by the length that all of them mean.
    {"length of listed keys", "'total_keys' differs between ranks",
     [](OneRun& r) {
       r.one_sequence(r.ranks);
       r.args.key_table = r.listed.view();
     },
     [](OneRun& r) { r.args.total_keys += 1; }, false,
     [](Options& o) { o.keys = {Layout::listed}; }},
    {"tokens", "'rows of q' differs between ranks", [](OneRun& r) { r.one_sequence(); },
     [](OneRun& r) { r.set_tokens(kTokens - 1); }},
    {"batch", "'batch' differs between ranks", nothing,
     [](OneRun& r) {
       r.args.query_start = r.start.view({2});
       r.args.kv_len = r.lens.view({1});
     }},
    {"lengths left out", "'kv_len' differs between ranks",
     [](OneRun& r) {
       r.one_sequence(0);
       r.args.kv_len = r.lens.view({1});
     },
     [](OneRun& r) { r.one_sequence(500); }},
    {"kv_len", "'kv_len' differs between ranks", nothing, [](OneRun& r) { r.lens.set(1, 599); },
     true},
    {"query_start", "'query_start' differs between ranks", nothing,
     [](OneRun& r) { r.start.set(1, 1); }, true},
    {"causal flags", "'causal' differs between ranks",
     [](OneRun& r) { r.args.causal = r.causal.view(); }, [](OneRun& r) { r.causal.set(1, 1); },
     true},
    {"causal flags on one", "'causal' differs between ranks", nothing,
     [](OneRun& r) { r.args.causal = r.causal.view(); }},
    {"sinks on one", "'sinks' differs between ranks", nothing,
     [](OneRun& r) { r.args.sinks = r.sinks.view(); }},
    {"sinks", "'sinks' differs between ranks", [](OneRun& r) { r.args.sinks = r.sinks.view(); },
     [](OneRun& r) { r.sinks.set(3, 9); }, true},
    {"slopes", "'slopes' differs between ranks", [](OneRun& r) { r.args.slopes = r.slopes.view(); },
     [](OneRun& r) { r.slopes.set(0, 9); }, true},
    {"bias", "'qq_bias' differs between ranks",
     [](OneRun& r) {
       r.args.qq_bias = r.bias.view({kTokens, kTokens});
     },
     [](OneRun& r) { r.bias.set(15, 9); }, true},
    {"documents", "'documents' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.args.documents = r.documents.view();
     },
     [](OneRun& r) { r.documents.set(1, 101); }, true},
    {"bidirectional", "'bidirectional' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.args.bidirectional = r.images.view({2, 2});
     },
     [](OneRun& r) { r.images.set(1, 101); }, true},
    {"prefix_len", "'prefix_len' differs between ranks",
     [](OneRun& r) { r.args.prefix_len = r.prefix.view(); }, [](OneRun& r) { r.prefix.set(1, 3); },
     true, [](Options& o) { o.mask.prefix = 5; }},
    {"skip_decode", "'skip_decode' differs between ranks", nothing,
     [](OneRun& r) { r.args.skip_decode = true; }},
    // A map of rows that came from another rank must not be followed.
    {"query ranges", "'query_table' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.args.total_tokens = kTokens * r.ranks - 1;
       r.args.query_table = r.row_ranges.view();
       if (r.rank == r.ranks - 1) r.set_tokens(kTokens - 1);
     },
     [](OneRun& r) {
       r.row_ranges.set(r.ranks - 1, kTokens * (r.ranks - 1) - 1);
       r.set_tokens(kTokens);
     },
     true, [](Options& o) { o.queries = Sharding{Layout::ranges}; }},
    {"query length", "'total_tokens' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.args.total_tokens = kTokens * r.ranks;
     },
     [](OneRun& r) {
       r.set_tokens(kTokens - 1);
       r.args.total_tokens -= 1;
     },
     false, [](Options& o) { o.queries = Sharding{Layout::striped}; }},
};

Options options_of(bool contents = false) {
  return {.heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .dtypes = {.compute = fp32},
          .limits = {.max_tokens = kTokens, .max_batch = 2, .max_kv_len = kRoom},
          .debug = {.check_arrays = contents}};
}

Options options_of(const Case& one) {
  Options options = options_of(one.contents);
  one.options(options);
  return options;
}

TEST(Agreement, EveryDifferenceOfARunIsAnErrorThatNamesIt) {
  for (const Case& one : kCases) {
    const Communicator world = test_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    const int victim = world.size() - 1;
    SCOPED_TRACE(one.name);
    OneRun run(world);
    one.all(run);
    Attention layer(world, options_of(one));
    OneRun other(world);
    one.all(other);
    if (world.rank() == victim) one.victim(other);
    const std::string text = told([&] {
      // Alike, it runs; then the victim means something else. Who still waits for the end of the
      // first run may hear of it there.
      layer.run(run.args);
      EXPECT_TRUE(world.device() == Device::cuda || run.wrote());
      layer.wait();
      layer.run(other.args);
      layer.wait();
    });
    EXPECT_THAT(text, ::testing::HasSubstr(one.says));
    EXPECT_THAT(text, ::testing::HasSubstr("rank " + std::to_string(victim) + " has "));
    // On GPUs a run has ended, with a result that wait() disowns, when ranks hear of each other.
    EXPECT_FALSE(world.device() == Device::host && other.wrote()) << "a result of different runs";
    // The communicator has ended with that error, on every rank.
    EXPECT_THAT(told([&] { layer.run(run.args); }),
                ::testing::AllOf(::testing::HasSubstr("had ended before this call"),
                                 ::testing::HasSubstr(text)));
  }
}

/// How keys and queries are dealt out to the ranks is fixed when a layer is made.
struct Deal {
  const char* name;
  const char* says;
  std::vector<const char*> values;  // of the others, and of the victim
  void (*all)(Options&);
  void (*victim)(Options&);
};

const std::vector<Deal> kDeals{
    {"layout",
     "'keys' differs between ranks",
     {"has contiguous", "has interleaved:128"},
     [](Options& o) { o.keys = {Layout::contiguous}; },
     [](Options& o) { o.keys = {Layout::interleaved}; }},
    {"block",
     "'keys' differs between ranks",
     {"has interleaved:128", "has interleaved:256"},
     [](Options& o) {
       o.keys = {Layout::interleaved, 128};
     },
     [](Options& o) { o.keys.block = 256; }},
    {"table",
     "'keys' differs between ranks",
     {"has contiguous", "has ranges"},
     [](Options&) {},
     [](Options& o) { o.keys = {Layout::ranges}; }},
    {"query layout",
     "'queries' differs between ranks",
     {"has zigzag", "has listed"},
     [](Options& o) { o.queries = Sharding{Layout::zigzag}; },
     [](Options& o) { o.queries = Sharding{Layout::listed}; }},
    {"query block",
     "'queries' differs between ranks",
     {"has interleaved:16", "has interleaved:2"},
     [](Options& o) {
       o.queries = Sharding{Layout::interleaved, 16};
     },
     [](Options& o) { o.queries->block = 2; }},
    {"queries of one rank",
     "'queries' differs between ranks",
     {"has not sharded", "has contiguous"},
     [](Options&) {},
     [](Options& o) { o.queries = Sharding{}; }},
};

TEST(Agreement, RanksThatDealKeysOrQueriesDifferentlyMakeNoLayer) {
  for (const Deal& deal : kDeals) {
    const Communicator world = test_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    const int victim = world.size() - 1;
    SCOPED_TRACE(deal.name);
    Options options = options_of();
    deal.all(options);
    if (world.rank() == victim) deal.victim(options);
    const std::string text = told([&] { Attention(world, options); });
    EXPECT_THAT(text, ::testing::HasSubstr(deal.says));
    for (const char* value : deal.values) EXPECT_THAT(text, ::testing::HasSubstr(value));
    EXPECT_THAT(text, ::testing::HasSubstr("rank " + std::to_string(victim) + " has "));
  }
}

TEST(Agreement, OneCallComparesToo) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  OneRun run(world);
  run.one_sequence();
  if (world.rank() == world.size() - 1) run.args.sinks = run.sinks.view();
  EXPECT_THAT(told([&] { attend(world, run.args); }),
              ::testing::HasSubstr("'sinks' differs between ranks"));
  EXPECT_FALSE(run.wrote());
}

TEST(Agreement, OneCallComparesHowKeysAreDealt) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  OneRun run(world);
  run.one_sequence();
  const bool last = world.rank() == world.size() - 1;
  const Options options{.keys = {last ? Layout::striped : Layout::zigzag}};
  EXPECT_THAT(told([&] { attend(world, run.args, options); }),
              ::testing::HasSubstr("'keys' differs between ranks"));
  EXPECT_FALSE(run.wrote());
}

TEST(Agreement, OneCallComparesHowQueriesAreDealt) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  OneRun run(world);
  run.one_sequence();
  Options options;
  if (world.rank() == world.size() - 1) options.queries = Sharding{Layout::striped};
  EXPECT_THAT(told([&] { attend(world, run.args, options); }),
              ::testing::HasSubstr("'queries' differs between ranks"));
  EXPECT_FALSE(run.wrote());
}

/// A world where it takes a second to find that a rank does not come, and on GPUs as long as NCCL
/// may need to begin.
Communicator impatient_world() {
  MPI_Barrier(MPI_COMM_WORLD);  // one rank may be late, since a world of before ended there later
  const bool on_gpus = wants_gpus();
  Communicator world =
      from_mpi(MPI_COMM_WORLD, {.device = on_gpus ? Device::cuda : Device::host,
                                .deadline = std::chrono::milliseconds(on_gpus ? 4000 : 1500)});
  world.make_current();
  return world;
}

/// Two layers that ranks run in different orders, with results of the same sizes.
struct Pair {
  const char* name;
  const char* says;
  void (*first)(Options&);
  void (*second)(Options&);
};

const Pair kPairs[] = {
    {"masks", "'causal' differs between ranks", [](Options& o) { o.mask.causal = true; },
     [](Options&) {}},
    {"scales", "'scale' differs between ranks", [](Options& o) { o.score.scale = 2.0f; },
     [](Options&) {}},
    {"equal layers", "'layer' differs between ranks", [](Options&) {}, [](Options&) {}},
};

class TwoLayers : public ::testing::TestWithParam<StrategyInfo> {};

TEST_P(TwoLayers, InDifferentOrdersGiveNoResult) {
  for (const Pair& pair : kPairs) {
    const Communicator world = impatient_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    SCOPED_TRACE(pair.name);
    OneRun run(world);
    run.one_sequence(kTokens * world.size());
    Options options = options_of();
    options.strategy = GetParam().name;
    options.keys = {Layout::striped};
    options.queries = Sharding{Layout::striped};
    run.args.total_tokens = kTokens * world.size();
    Options other = options;
    pair.first(options);
    pair.second(other);
    try {
      choose_strategy(options, world.size(), Machine{});
    } catch (const Error&) {
      GTEST_SKIP() << "it does not serve these ranks";
    }
    Attention first(world, options), second(world, other);
    const std::string text = told_in_different_orders(world, first, second, run.args);
    EXPECT_THAT(text, ::testing::HasSubstr(pair.says));
    EXPECT_FALSE(world.device() == Device::host && run.wrote()) << "a result of different runs";
  }
}

INSTANTIATE_TEST_SUITE_P(, TwoLayers, ::testing::ValuesIn(strategies()),
                         [](const ::testing::TestParamInfo<StrategyInfo>& made) {
                           std::string name = made.param.name;
                           std::ranges::replace_if(
                               name, [](char c) { return !std::isalnum(c); }, '_');
                           return name;
                         });

/// One rank finds its layer of an earlier call, where another one makes a new one.
TEST(Agreement, ALayerThatOneRankMakesWhileOthersRunIsNamedByWhatDiffers) {
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  OneRun run(world);
  Attention layer(world, options_of());
  Options other = options_of();
  other.score.softcap = 3;
  const std::string text = told([&] {
    if (world.rank() == world.size() - 1) Attention(world, other);
    layer.run(run.args);
    layer.wait();
  });
  EXPECT_THAT(text, ::testing::HasSubstr("'softcap' differs between ranks"));
}

/// One rank refuses its call before anything travels; the others wait for it there.
TEST(Agreement, ACallThatOneRankRefusesIsNamedByWhatDiffers) {
  struct Refused {
    const char* says;
    void (*victim)(AttentionArgs&);
  };
  const Refused cases[] = {
      {"'skip_decode' differs between ranks", [](AttentionArgs& a) { a.skip_decode = true; }},
      {"'total_keys' differs between ranks", [](AttentionArgs& a) { a.total_keys = -1; }},
      {"'total_tokens' differs between ranks", [](AttentionArgs& a) { a.total_tokens = 1 << 20; }},
      {"did not come to", [](AttentionArgs& a) { a.k.stride[0] = -1; }},
  };
  for (const Refused& one : cases) {
    SCOPED_TRACE(one.says);
    const Communicator world = impatient_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    const int victim = world.size() - 1;
    const bool refuses = world.rank() == victim;
    OneRun run(world);
    run.one_sequence(kTokens * world.size());
    run.args.total_tokens = kTokens * world.size();
    Options options = options_of();
    options.queries = Sharding{Layout::striped};
    Attention layer(world, options);
    layer.run(run.args);
    layer.wait();
    if (refuses) one.victim(run.args);
    std::string text;
    try {
      layer.run(run.args);
      layer.wait();
    } catch (const Error& error) {
      text = error.what();
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (refuses) {
      EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("differs"))) << "it waits for nobody";
      continue;
    }
    EXPECT_THAT(text, ::testing::HasSubstr(one.says));
    EXPECT_THAT(text,
                ::testing::HasSubstr("Rank " + std::to_string(victim) + " refused this call: "));
  }
}

/// What it refused was its own business, and it calls again.
TEST(Agreement, ARankThatCallsAgainAfterARefusalIsWaitedFor) {
  const Communicator world = test_world();
  OneRun run(world);
  Attention layer(world, options_of());
  for (int turn = 0; turn < 3; ++turn) {
    if (world.rank() == world.size() - 1) {
      AttentionArgs wrong = run.args;
      wrong.k.stride[0] = -1;
      EXPECT_THROW(layer.run(wrong), InputError);
    }
    layer.run(run.args);
    layer.wait();
  }
  EXPECT_TRUE(run.wrote());
}

TEST(Agreement, WhatMayDifferDoes) {
  const Communicator world = test_world();
  const bool last = world.rank() == world.size() - 1;
  OneRun run(world);
  Array<float> lse(world.device(), std::vector<float>(kTokens * kHeads, NAN));
  // Threads, times of phases and a wish for the lse are a rank's own.
  Options options = options_of();
  options.threads = last ? 3 : 1;
  options.debug.profile = last;
  Attention layer(world, options);
  if (last) run.args.lse = Lse::tokens_heads(lse.view({kTokens, kHeads}));
  for (int turn = 0; turn < 3; ++turn) {
    layer.run(run.args);
    layer.wait();
  }
  EXPECT_TRUE(run.wrote());
}

}  // namespace
}  // namespace longspan::tests

// Keys and query rows that are dealt out by listed tables. A position that two entries list, or
// none, is an InputError on every rank, with the position and the ranks that list it. Nothing is
// written, and the layer goes on. Every strategy that supports such tables is tried. On GPUs the
// tables are read only with check_arrays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::tests {
namespace {

constexpr int kHeads = 8, kDim = 16;
constexpr std::int64_t kKeys = kSimulated ? 300 : 5000, kRows = kSimulated ? 90 : 300;

using Tables = std::vector<std::vector<std::int64_t>>;  // [ranks]

/// Every position once, on some rank, in some order.
Tables deal(std::int64_t length, int ranks, std::mt19937_64& random) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(length));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  Tables tables(static_cast<std::size_t>(ranks));
  for (const std::int64_t position : all) tables[random() % tables.size()].push_back(position);
  return tables;
}

/// The error's text for the first position that is not listed exactly once; empty where there is
/// none.
std::string first_wrong(const Tables& tables, std::int64_t length) {
  for (std::int64_t position = 0; position < length; ++position) {
    std::ostringstream text;
    text << "position " << position << " is listed by ";
    std::int64_t all = 0;
    for (std::size_t p = 0; p < tables.size(); ++p) {
      const std::int64_t times = std::count(tables[p].begin(), tables[p].end(), position);
      if (times == 0) continue;
      text << (all > 0 ? " and " : "") << "rank " << p;
      if (times > 1) text << " " << times << " times";
      all += times;
    }
    if (all == 1) continue;
    text << (all == 0 ? "no rank" : "") << ". Each of the " << length << " positions";
    return text.str();
  }
  return "";
}

/// Defects of tables, and what makes them.
struct Defect {
  const char* name;
  std::function<void(Tables&)> make;
  int least_ranks = 1;
};

const std::vector<Defect> kDefects{
    {"nothing", [](Tables&) {}},
    {"another key in the place of one", [](Tables& t) { t.back().back() = t.front().front(); }},
    {"a rank has another one's key besides its own",
     [](Tables& t) { t.back().push_back(t.front().front()); }, 2},
    {"a rank has a key twice", [](Tables& t) { t.back().push_back(t.back().front()); }},
    {"a rank has a key twice and lacks another", [](Tables& t) { t.back()[1] = t.back()[0]; }},
    {"a key is nobody's", [](Tables& t) { t.front().erase(t.front().begin() + 3); }},
    {"two keys are nobody's",
     [](Tables& t) {
       for (auto& table : t)
         std::erase_if(table, [](auto at) { return at == 7 || at == kRows - 1; });
     }},
    {"a rank has the keys of another",
     [](Tables& t) {
       const std::size_t n = std::min(t.front().size(), t.back().size());
       std::copy_n(t.front().begin(), n, t.back().begin());
     },
     2},
    {"keys of three ranks overlap", [](Tables& t) { t[0].back() = t[1].back() = t[2].back(); }, 3},
};

/// A layer and the arguments of a run, except the tables.
struct ListedRun {
  const Communicator& world;
  Options options;
  std::vector<float> q, keys, out;
  std::vector<std::int64_t> rows;
  std::vector<std::int32_t> kv_len{kKeys};
  bool by_kv_len = false;
  bool kernels_run = false;    // in spite of a defect
  std::vector<Buffer> memory;  // on a GPU, of what a run is given

  ListedRun(const Communicator& communicator, const StrategyInfo& info, bool list_keys,
            bool list_rows, bool shard_rows)
      : world(communicator),
        options{.heads = kHeads,
                .kv_heads = kHeads,
                .head_dim = kDim,
                .dtypes = {.compute = fp32},
                .mask = {.causal = true},
                .limits = {.max_tokens = kRows + 2, .max_kv_len = kKeys},
                .strategy = info.name} {
    options.debug.check_arrays = world.device() != Device::host;
    if (list_keys) options.keys = {Layout::listed};
    if (shard_rows) options.queries = Sharding{list_rows ? Layout::listed : Layout::striped};
  }

  /// The values in memory of the device.
  template <class T>
  Tensor given(const std::vector<T>& values, std::initializer_list<std::int64_t> extents) {
    if (world.device() == Device::host) return Tensor(values.data(), extents);
    memory.emplace_back(world.device(), values.size() * sizeof(T));
    memory.back().upload(values.data());
    return Tensor(static_cast<const T*>(memory.back().data()), extents, world.device());
  }

  /// The error of the run; empty where it gives a result. With an error nothing is written.
  std::string run(Attention& layer, const Tables& key_tables, const Tables& row_tables) {
    const auto own = static_cast<std::size_t>(world.rank());
    const Sharding dealt = options.queries.value_or(Sharding{});
    std::int64_t tokens = kRows, held = kKeys;
    AttentionArgs a;
    memory.clear();
    if (dealt.layout == Layout::listed) {
      tokens = std::ssize(row_tables[own]);
      rows = row_tables[own];
      rows.resize(static_cast<std::size_t>(options.limits.max_tokens), -1);
      a.query_table = given(rows, {std::ssize(rows)});
    } else if (options.queries) {
      tokens = dealt.resolve(kRows, world.rank(), world.size()).local_len(kRows);
    }
    if (options.keys.layout == Layout::listed) {
      held = std::ssize(key_tables[own]);
      a.key_table = given(key_tables[own], {held});
    } else {
      held = options.keys.resolve(kKeys, world.rank(), world.size()).local_len(kKeys);
    }
    q.assign(static_cast<std::size_t>(tokens * kHeads * kDim), 0.5f);
    keys.assign(static_cast<std::size_t>(held * kHeads * kDim), 0.25f);
    out.assign(q.size(), NAN);
    a.q = given(q, {tokens, kHeads, kDim});
    a.k = a.v = given(keys, {held, kHeads, kDim});
    a.out = given(out, {tokens, kHeads, kDim});
    const std::size_t result = memory.size() - 1;
    if (by_kv_len)
      a.kv_len = given(kv_len, {1});
    else
      a.total_keys = kKeys;
    if (options.queries) a.total_tokens = kRows;
    std::string wrong;
    try {
      layer.run(a);
      layer.wait();
    } catch (const InputError& error) {
      wrong = error.what();
    }
    if (world.device() != Device::host) memory[result].download(out.data());
    if (!wrong.empty()) {
      EXPECT_TRUE(kernels_run ||
                  std::all_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
      return wrong;
    }
    for (const float x : out) EXPECT_NEAR(x, 0.25f, 1e-5f);
    return "";
  }
};

class ListedPositions : public ::testing::Test {
 protected:
  ListedPositions() : world_(test_world()), random_(shared_seed(world_)) {}

  /// Tries every defect of the tables of keys, or of rows, with every strategy; returns how many
  /// strategies there were.
  int try_all(bool list_keys, bool list_rows, bool shard_rows, bool by_kv_len = false) {
    int taken = 0;
    for (const StrategyInfo& info : strategies()) {
      SCOPED_TRACE(info.name);
      ListedRun run(world_, info, list_keys, list_rows, shard_rows);
      run.by_kv_len = by_kv_len;
      try {
        Attention layer(world_, run.options);
        run.run(layer, deal(kKeys, world_.size(), random_), deal(kRows, world_.size(), random_));
      } catch (const Unsupported&) {
        continue;  // on all ranks alike
      }
      ++taken;
      Attention layer(world_, run.options);
      for (const Defect& defect : kDefects) {
        SCOPED_TRACE(defect.name);
        Tables keys = deal(kKeys, world_.size(), random_),
               rows = deal(kRows, world_.size(), random_);
        if (world_.size() >= defect.least_ranks) defect.make(list_rows ? rows : keys);
        const std::string wrong = list_rows ? first_wrong(rows, kRows) : first_wrong(keys, kKeys);
        const std::string text = run.run(layer, keys, rows);
        EXPECT_EQ(text.empty(), wrong.empty()) << text;
        if (wrong.empty()) continue;
        EXPECT_THAT(text, ::testing::HasSubstr(wrong));
        EXPECT_THAT(text, ::testing::StartsWith(list_rows ? "query_table: " : "key_table: "));
        for (const std::string& other : world_.gather(text, "errors")) EXPECT_EQ(other, text);
      }
    }
    return taken;
  }

  /// On GPUs keys of listed positions do not travel, and fewer strategies take them.
  int least(int on_cpus) const { return world_.device() == Device::host ? on_cpus : 1; }

  Communicator world_;
  std::mt19937_64 random_;
};

TEST_F(ListedPositions, OfKeysAreEachOnes) { EXPECT_GE(try_all(true, false, false), least(3)); }

TEST_F(ListedPositions, OfKeysWithSharedRowsAreEachOnes) {
  EXPECT_GE(try_all(true, false, true), least(4));
}

TEST_F(ListedPositions, OfKeysWhoseNumberIsAnArrayAreEachOnes) {
  EXPECT_GE(try_all(true, false, false, true), least(3));
}

TEST_F(ListedPositions, OfRowsAreEachOnes) { EXPECT_GE(try_all(false, true, true), least(2)); }

TEST_F(ListedPositions, OfRowsBesideListedKeysAreEachOnes) {
  EXPECT_GE(try_all(true, true, true), least(2));
}

/// The check of arrays reports an invalid length in memory of a GPU.
TEST_F(ListedPositions, OfNoLengthAreNotLookedFor) {
  if (world_.device() == Device::host) GTEST_SKIP() << "on CPUs it is seen ahead";
  const StrategyInfo& any = *std::find_if(
      strategies().begin(), strategies().end(),
      [](const StrategyInfo& info) { return std::string_view(info.name) == "gather-states"; });
  for (const std::int32_t length : {-5, 1 << 30}) {
    SCOPED_TRACE(length);
    ListedRun run(world_, any, true, false, false);
    run.by_kv_len = run.kernels_run = true;
    run.kv_len = {length};
    Attention layer(world_, run.options);
    EXPECT_THAT(run.run(layer, deal(kKeys, world_.size(), random_), {}),
                ::testing::HasSubstr("kv_len"));
  }
}

/// A cache that grows and shrinks: the sum of 0 ... length - 1 is kept from run to run.
TEST_F(ListedPositions, OfOtherLengthsInOneLayer) {
  if (world_.device() != Device::host) GTEST_SKIP() << "what is kept is kept by the host";
  Attention layer(world_, {.head_dim = 8, .dtypes = {.compute = fp32}, .keys = {Layout::listed}});
  for (const std::int64_t length : {10, 11, 12, 400, 399, 1, 0, 64, 65, 3}) {
    SCOPED_TRACE(length);
    Tables tables = deal(length, world_.size(), random_);
    const auto& own = tables[static_cast<std::size_t>(world_.rank())];
    std::vector<float> q(8, 1.0f), k(own.size() * 8, 1.0f), out(8, NAN);
    AttentionArgs a{.q = Tensor(q.data(), {1, 1, 8}),
                    .k = Tensor(k.data(), {std::ssize(own), 1, 8}),
                    .v = Tensor(k.data(), {std::ssize(own), 1, 8}),
                    .out = Tensor(out.data(), {1, 1, 8}),
                    .total_keys = length};
    if (!own.empty()) a.key_table = Tensor(own.data(), {std::ssize(own)});
    layer.run(a);
    EXPECT_NEAR(out[0], length > 0 ? 1.0f : 0.0f, 1e-5f);
    if (length == 0) continue;
    a.total_keys = length + 1;
    EXPECT_THAT([&] { layer.run(a); },
                ::testing::ThrowsMessage<InputError>(::testing::HasSubstr(
                    "position " + std::to_string(length) + " is listed by no rank")));
  }
}

}  // namespace
}  // namespace longspan::tests

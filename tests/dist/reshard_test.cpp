// Caches that are resharded, on every rank count: from any layout, ranks and form to any other.
// Every rank can compute every key, so each judges all bytes of its own memory: its keys, and bytes
// that must not change. The bytes that travel are counted. Arguments that differ between ranks are
// an error on all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/replay.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/draw_cache_ranks.hpp"
#include "tests/support/known_cache.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

using ::testing::HasSubstr;

constexpr Form kCacheForms[] = {Form::rows, Form::batch, Form::pages, Form::x_packed};

template <class E>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "not refused";
}

class ReshardTest : public ::testing::Test {
 protected:
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  std::mt19937 shared{static_cast<std::uint32_t>(seed)};  // draws alike on all ranks
  std::mt19937 own{static_cast<std::uint32_t>(seed) + 1 +
                   static_cast<std::uint32_t>(world.rank())};  // draws of this rank alone

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(shared() % static_cast<std::uint64_t>(n));
  }

  CacheRanks draw_ranks(Layout layout, const std::vector<std::int64_t>& lengths) {
    return draw_cache_ranks(layout, world.size(), lengths,
                            [this](std::int64_t n) { return below(n); });
  }

  Form draw_form() { return kCacheForms[own() % std::size(kCacheForms)]; }

  KeyShape shape_of(const ReshardOptions& o) {
    KeyShape shape{
        .dtype = o.dtype, .kv_heads = o.kv_heads, .dim = o.head_dim, .value_dim = o.of_values()};
    shape.gap = static_cast<int>(own() % 3) * 4;
    shape.offset = static_cast<int>(own() % 2) * 8;
    return shape;
  }

  /// The bytes that this rank has to receive, send and keep, key by key.
  ReshardTraffic traffic_of(const ReshardOptions& o) const {
    const std::uint64_t row =
        static_cast<std::uint64_t>(o.kv_heads) * (o.head_dim + o.of_values()) * size_of(o.dtype);
    const auto had = positions_of(o.from, world.rank(), o.lengths);
    const auto gets = positions_of(o.to, world.rank(), o.lengths);
    ReshardTraffic t;
    for (std::size_t b = 0; b < o.lengths.size(); ++b) {
      std::vector<std::int64_t> kept;
      std::set_intersection(had[b].begin(), had[b].end(), gets[b].begin(), gets[b].end(),
                            std::back_inserter(kept));
      t.kept += kept.size() * row;
      t.sent += (had[b].size() - kept.size()) * row;
      t.received += (gets[b].size() - kept.size()) * row;
    }
    return t;
  }

  void expect_resharded(const ReshardOptions& o, Form from_form, Form to_form) {
    SCOPED_TRACE(std::string(name(o.from.rule.layout)) + " on " + std::to_string(o.from.ranks) +
                 " to " + name(o.to.rule.layout) + " on " + std::to_string(o.to.ranks) + " of " +
                 std::to_string(world.size()) + " " + name(o.dtype) + " seed " +
                 std::to_string(seed));
    Reshard reshard(world, o);
    const ReshardTraffic expected = traffic_of(o), found = reshard.traffic();
    EXPECT_EQ(found.sent, expected.sent);
    EXPECT_EQ(found.received, expected.received);
    EXPECT_EQ(found.kept, expected.kept);
    const auto had = positions_of(o.from, world.rank(), o.lengths);
    const auto gets = positions_of(o.to, world.rank(), o.lengths);
    for (int layer = 0; layer < 2; ++layer) {  // one plan for all layers of a model
      const KnownCache from(from_form, shape_of(o), had, true, world.device(), own);
      KnownCache to(to_form, shape_of(o), gets, false, world.device(), own);
      const std::uint64_t before = world.received_bytes();
      reshard.run({from.tensors(), to.tensors()});
      reshard.wait();
      EXPECT_EQ(world.received_bytes() - before, expected.received);
      to.write(gets);
      EXPECT_TRUE(from.is_right()) << "what is read stays as it is";
      EXPECT_TRUE(to.is_right());
    }
  }
};

TEST_F(ReshardTest, FromEveryLayoutToEveryLayout) {
  for (const Layout from : kReshardLayouts)
    for (const Layout to : kReshardLayouts)
      for (int draw = 0; draw < 2; ++draw) {
        ReshardOptions o{.kv_heads = 2,
                         .head_dim = 16,
                         .dtype = bf16,
                         .lengths = {1 + below(500), 0, below(9), below(200)}};
        o.from = draw_ranks(from, o.lengths);
        o.to = draw_ranks(to, o.lengths);
        expect_resharded(o, draw_form(), draw_form());
      }
}

TEST_F(ReshardTest, OfEveryTypeAndForm) {
  for (const DType dtype : {fp32, fp16, bf16, e4m3, e5m2})
    for (const Form from : kCacheForms)
      for (const Form to : kCacheForms) {
        ReshardOptions o{.kv_heads = 3,
                         .head_dim = 24,
                         .value_dim = 8,
                         .dtype = dtype,
                         .lengths = {below(150), below(40)}};
        o.from = draw_ranks(Layout::interleaved, o.lengths);
        o.to = draw_ranks(Layout::zigzag, o.lengths);
        expect_resharded(o, from, to);
      }
}

TEST_F(ReshardTest, OfLatentKeysAlone) {
  ReshardOptions o{
      .kv_heads = 1, .head_dim = 72, .value_dim = 0, .dtype = bf16, .lengths = {300, 77}};
  o.from = draw_ranks(Layout::zigzag, o.lengths);
  o.to = draw_ranks(Layout::striped, o.lengths);
  expect_resharded(o, Form::rows, Form::pages);
  expect_resharded(o, Form::pages, Form::batch);
}

TEST_F(ReshardTest, FromOneHalfOfTheRanksToTheOther) {
  const int half = world.size() / 2;
  if (half == 0) GTEST_SKIP() << "one rank has no halves";
  ReshardOptions o{.kv_heads = 2, .head_dim = 32, .dtype = fp16, .lengths = {1000, 129}};
  o.from = {.rule = {Layout::interleaved, 128}, .ranks = half};
  o.to = {.first_rank = half};  // all that are left
  Reshard reshard(world, o);
  EXPECT_EQ(reshard.options().to.ranks, 0) << "as it was given";
  EXPECT_EQ(reshard.traffic().kept, 0U);
  o.to.ranks = world.size() - half;
  expect_resharded(o, Form::rows, Form::pages);
}

TEST_F(ReshardTest, OfNothing) {
  for (const auto& lengths : {std::vector<std::int64_t>{}, std::vector<std::int64_t>{0, 0}}) {
    ReshardOptions o{.lengths = lengths};
    Reshard reshard(world, o);
    reshard.run({});
    reshard.wait();
    EXPECT_EQ(reshard.traffic().received, 0U);
  }
}

/// A key may go to the place of another one, which was packed before.
TEST_F(ReshardTest, InOnePlace) {
  for (const Form form : kCacheForms) {
    ReshardOptions o{.kv_heads = 2, .head_dim = 8, .dtype = fp32, .lengths = {700}};
    const int all = world.size();
    o.from = {.rule = {Layout::zigzag}, .ranks = all};
    o.to = {.rule = {Layout::interleaved, 16}, .ranks = all};
    const auto had = positions_of(o.from, world.rank(), o.lengths);
    const auto gets = positions_of(o.to, world.rank(), o.lengths);
    KnownCache::Positions room = had;  // for the larger share
    if (gets[0].size() > room[0].size()) room[0].resize(gets[0].size());
    KnownCache cache(form, shape_of(o), room, true, world.device(), own);
    Reshard reshard(world, o);
    reshard.run({cache.tensors(), cache.tensors()});
    reshard.wait();
    cache.write(gets);
    EXPECT_TRUE(cache.is_right()) << "form " << static_cast<int>(form);
  }
}

/// On a GPU a graph moves the contents at the time of the replay.
TEST_F(ReshardTest, AMoveIsCapturedOnceAndRepeated) {
  ReshardOptions o{.kv_heads = 2, .head_dim = 16, .dtype = bf16, .lengths = {500, 61}};
  o.from = {.rule = {Layout::zigzag}, .ranks = world.size()};
  o.to = {.rule = {Layout::striped}, .ranks = world.size()};
  const auto had = positions_of(o.from, world.rank(), o.lengths);
  const auto gets = positions_of(o.to, world.rank(), o.lengths);
  const KnownCache from(Form::rows, shape_of(o), had, true, world.device(), own);
  const KnownCache blank(Form::rows, shape_of(o), had, false, world.device(), own);
  KnownCache to(Form::pages, shape_of(o), gets, false, world.device(), own);
  Reshard reshard(world, o);
  Replay move(world.device(), [&](Stream stream) {
    reshard.run({from.tensors(), to.tensors()}, stream);
  });
  Replay clear(world.device(), [&](Stream stream) {
    reshard.run({blank.tensors(), to.tensors()}, stream);
  });
  to.write(gets);
  for (int round = 0; round < 3; ++round) {
    clear.eager();
    reshard.wait(clear.stream());
    EXPECT_FALSE(to.is_right());
    move.again();
    reshard.wait(move.stream());
    EXPECT_TRUE(to.is_right()) << "round " << round;
  }
}

TEST_F(ReshardTest, WhatRanksGiveDifferentlyIsAnErrorOnAll) {
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const ReshardOptions base{.kv_heads = 2, .head_dim = 16, .lengths = {5, 6, 7, 8, 9, 10, 11}};
  struct Change {
    const char* name;
    std::function<void(ReshardOptions&)> make;
  };
  const Change changes[] = {
      {"kv_heads", [](ReshardOptions& o) { o.kv_heads = 3; }},
      {"head_dim", [](ReshardOptions& o) { o.head_dim = 8, o.value_dim = 16; }},
      {"value_dim", [](ReshardOptions& o) { o.value_dim = 0; }},
      {"dtype", [](ReshardOptions& o) { o.dtype = fp16; }},
      {"lengths", [](ReshardOptions& o) { o.lengths.back() = 12; }},
      {"from.rule", [](ReshardOptions& o) { o.from.rule.layout = Layout::zigzag; }},
      {"from.ranks", [](ReshardOptions& o) { o.from.ranks = 1; }},
      {"from.table", [](ReshardOptions& o) { o.from.table = {0}; }},
      {"to.rule",
       [](ReshardOptions& o) {
         o.to.rule = {Layout::interleaved, 4};
       }},
      {"to.first_rank", [](ReshardOptions& o) { o.to.first_rank = 1, o.to.ranks = 1; }},
      {"to.ranks", [](ReshardOptions& o) { o.to.ranks = 1; }},
  };
  for (const Change& change : changes) {
    ReshardOptions o = base;
    if (world.rank() == world.size() - 1) change.make(o);
    try {
      Reshard reshard(world, o);
      ADD_FAILURE() << change.name << ": no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("'") + change.name + "'"));
    }
  }
  ReshardOptions o = base;  // threads are a rank's own
  o.threads = 1 + world.rank();
  const Reshard made(world, o);
}

TEST_F(ReshardTest, RanksThatRunDifferentReshardsWriteNothing) {
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  ReshardOptions o{.kv_heads = 2, .head_dim = 16, .dtype = bf16, .lengths = {300, 40}};
  o.from = {.rule = {Layout::zigzag}, .ranks = world.size()};
  o.to = {.rule = {Layout::striped}, .ranks = world.size()};
  ReshardOptions other = o;  // as many keys for every rank
  std::swap(other.lengths[0], other.lengths[1]);
  Reshard one(world, o), two(world, other);
  const bool is_other = world.rank() == world.size() - 1;
  const std::vector<std::int64_t>& lengths = is_other ? other.lengths : o.lengths;
  const KnownCache from(Form::rows, shape_of(o), positions_of(o.from, world.rank(), lengths), true,
                        world.device(), own);
  const KnownCache to(Form::pages, shape_of(o), positions_of(o.to, world.rank(), lengths), false,
                      world.device(), own);
  const std::string message = refusal<Error>([&] {
    (is_other ? two : one).run({from.tensors(), to.tensors()});
    (is_other ? two : one).wait();
  });
  EXPECT_THAT(message, HasSubstr("'lengths' differs between ranks"));
  EXPECT_TRUE(to.is_right()) << "nothing was written";
}

TEST_F(ReshardTest, OptionsThatMakeNoSense) {
  const auto refused = [&](const ReshardOptions& o) {
    return refusal<UsageError>([&] { Reshard(world, o); });
  };
  EXPECT_THAT(refused({.kv_heads = 0}), HasSubstr("kv_heads 0"));
  EXPECT_THAT(refused({.head_dim = -8}), HasSubstr("head_dim -8"));
  EXPECT_THAT(refused({.value_dim = -1}), HasSubstr("value_dim -1"));
  EXPECT_THAT(refused({.dtype = DType::int32}), HasSubstr("int32"));
  EXPECT_THAT(refused({.lengths = {4, -1}}), HasSubstr("lengths[1] is -1"));
  EXPECT_THAT(refused({.lengths = {std::int64_t{1} << 41}}), HasSubstr("bytes"));
  EXPECT_THAT(refused({.from = {.ranks = world.size() + 1}}), HasSubstr("from is on"));
  EXPECT_THAT(refused({.to = {.first_rank = world.size()}}), HasSubstr("to is on 0 ranks"));
  EXPECT_THAT(refused({.to = {.first_rank = -1, .ranks = 1}}), HasSubstr("from rank -1"));
  EXPECT_THAT(refused({.to = {.rule = {Layout::interleaved, 0}}}), HasSubstr("blocks of 0"));
  EXPECT_THAT(refused({.lengths = {5}, .from = {.rule = {Layout::ranges}}}),
              HasSubstr("from.table has 0 entries"));
  EXPECT_THAT(
      refused({.lengths = {5}, .to = {.rule = {Layout::ranges}, .ranks = 1, .table = {0, 4}}}),
      HasSubstr("to.table of sequence 0 is [0, 4]"));
  EXPECT_THAT(refused({.threads = -1}), HasSubstr("threads -1"));
  EXPECT_THAT(refusal<Unsupported>([&] { Reshard(world, {.from = {.rule = {Layout::listed}}}); }),
              HasSubstr("listed"));
}

/// Every rank refuses its own call, so none waits for another; then all go on.
TEST_F(ReshardTest, TensorsThatDoNotFitAreRefusedAndNothingIsWritten) {
  ReshardOptions o{.kv_heads = 2,
                   .head_dim = 16,
                   .dtype = bf16,
                   .lengths = {300 * std::int64_t{world.size()}, 40 * std::int64_t{world.size()}}};
  const int all = world.size();
  o.from = {.rule = {Layout::zigzag}, .ranks = all};
  o.to = {.rule = {Layout::striped}, .ranks = all};
  const auto had = positions_of(o.from, world.rank(), o.lengths);
  const auto gets = positions_of(o.to, world.rank(), o.lengths);
  const KnownCache from(Form::rows, shape_of(o), had, true, world.device(), own);
  KnownCache to(Form::pages, shape_of(o), gets, false, world.device(), own);
  Reshard reshard(world, o);
  const ReshardArgs good{from.tensors(), to.tensors()};
  const auto refused = [&](const std::function<void(ReshardArgs&)>& spoil) {
    ReshardArgs args = good;
    spoil(args);
    return refusal<InputError>([&] { reshard.run(args); });
  };
  EXPECT_THAT(refused([](ReshardArgs& a) { a.from.k = {}; }), HasSubstr("from: "));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.to.v = {}; }), HasSubstr("to: "));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.from.v.dtype = fp16; }), HasSubstr("fp16"));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.from.k.shape[2] = 8; }), HasSubstr("k is "));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.from.k.shape[0] = a.from.v.shape[0] = 17; }),
              HasSubstr("k has 17 keys"));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.to.block_table.shape[1] = 0; }),
              HasSubstr("room for 0 keys"));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.to.block_table.shape[0] = 1; }),
              HasSubstr("block_table"));
  EXPECT_THAT(refused([](ReshardArgs& a) { a.to.v = a.to.k; }), HasSubstr("value_dim 0"));
  if (world.device() == Device::host) {
    const auto table = static_cast<std::int32_t*>(good.to.block_table.data);
    const std::int32_t first = table[0];
    for (const std::int32_t entry : {-1, 1 << 20}) {
      table[0] = entry;
      EXPECT_THAT(refused([](ReshardArgs&) {}), HasSubstr("block_table[0][0]"));
    }
    table[0] = table[1];
    EXPECT_THAT(refused([](ReshardArgs&) {}), HasSubstr("as another entry is"));
    table[0] = first;
  }
  EXPECT_TRUE(to.is_right()) << "nothing was written";
  reshard.run(good);
  reshard.wait();
  to.write(gets);
  EXPECT_TRUE(to.is_right());
}

}  // namespace
}  // namespace longspan::tests

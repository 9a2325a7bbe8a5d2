// Ranks that mean different things by one run: every rank gets a UsageError that names the field,
// both values and the ranks, within the deadline, and nothing is written. The victim is the last
// rank. On GPUs what the host can see is compared always, contents of arrays with check_arrays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/world.hpp"

namespace longspan::testing {
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

/// A request of two sequences with most of what may be given, and the memory behind it.
struct OneRun {
  Device device;
  int rank, ranks;
  Array<float> q, keys, out, sinks, slopes, bias;
  Array<std::int32_t> start, lens;
  Array<std::uint8_t> causal;
  Array<std::int64_t> documents, ranges, places;
  Request request;

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
        causal(device, {1, 0}),
        documents(device, {0, 100, 600}),
        ranges(device, table(ranks, kKeys)),
        places(device, {0, 1, 2, 3}) {
    request.batch = 2;
    request.query_start = start.data();
    request.kv_len = lens.data();
    request.shard = Shard::contiguous(0, rank, ranks);
    set_tokens(kTokens);
    request.k = request.v = Tensor(keys.data(), fp32, {kRoom, kKvHeads, kDim}, device);
  }

  static std::vector<std::int64_t> table(int count, std::int64_t length) {
    std::vector<std::int64_t> ends;
    for (int r = 0; r <= count; ++r) ends.push_back(length * r / count);
    return ends;
  }
  void set_tokens(std::int64_t tokens) {
    request.q = Tensor(q.data(), fp32, {tokens, kHeads, kDim}, device);
    request.out = Tensor(out.data(), fp32, {tokens, kHeads, kDim}, device);
  }
  void one_sequence(std::int64_t length = kKeys) {
    request.batch = 1;
    request.query_start = request.kv_len = nullptr;
    request.shard = Shard::contiguous(length, rank, ranks);
  }
  bool wrote() const {
    for (const float value : out.read())
      if (!std::isnan(value)) return true;
    return false;
  }
};

struct Case {
  const char* name;
  const char* says;                     // what the error must contain
  std::function<void(OneRun&)> all;     // what every rank does to its request
  std::function<void(OneRun&)> victim;  // what the victim does then
  bool contents = false;                // only an array's contents differ
  bool shard_queries = false;
};

void nothing(OneRun&) {}

const std::vector<Case> kCases{
    {"length", "'shard.length' differs between ranks", [](OneRun& r) { r.one_sequence(1000); },
     [](OneRun& r) { r.request.shard.length = 2000; }},
    {"layout", "'shard.layout' differs between ranks", nothing,
     [](OneRun& r) { r.request.shard = Shard::interleaved(0, r.rank, r.ranks); }},
    {"block", "'shard.block' differs between ranks",
     [](OneRun& r) { r.request.shard = Shard::interleaved(0, r.rank, r.ranks, 128); },
     [](OneRun& r) { r.request.shard.block = 256; }},
    {"ranges", "'shard.table' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.request.shard = Shard::ranges(kKeys, r.rank, r.ranks, r.ranges.data());
     },
     [](OneRun& r) { r.ranges.set(1, 10); }, true},
    {"tokens", "'rows of q' differs between ranks", [](OneRun& r) { r.one_sequence(); },
     [](OneRun& r) { r.set_tokens(kTokens - 1); }},
    {"batch", "'batch' differs between ranks", nothing, [](OneRun& r) { r.request.batch = 1; }},
    {"lengths left out", "'kv_len' differs between ranks",
     [](OneRun& r) {
       r.one_sequence(500);
       r.request.kv_len = r.lens.data();
     },
     [](OneRun& r) { r.request.kv_len = nullptr; }},
    {"kv_len", "'kv_len' differs between ranks", nothing, [](OneRun& r) { r.lens.set(1, 599); },
     true},
    {"query_start", "'query_start' differs between ranks", nothing,
     [](OneRun& r) { r.start.set(1, 1); }, true},
    {"causal flags", "'causal' differs between ranks",
     [](OneRun& r) { r.request.causal = r.causal.data(); }, [](OneRun& r) { r.causal.set(1, 1); },
     true},
    {"causal flags on one", "'causal' differs between ranks", nothing,
     [](OneRun& r) { r.request.causal = r.causal.data(); }},
    {"sinks on one", "'sinks' differs between ranks", nothing,
     [](OneRun& r) { r.request.sinks = r.sinks.data(); }},
    {"sinks", "'sinks' differs between ranks", [](OneRun& r) { r.request.sinks = r.sinks.data(); },
     [](OneRun& r) { r.sinks.set(3, 9); }, true},
    {"slopes", "'slopes' differs between ranks",
     [](OneRun& r) { r.request.slopes = r.slopes.data(); }, [](OneRun& r) { r.slopes.set(0, 9); },
     true},
    {"bias", "'qq_bias' differs between ranks",
     [](OneRun& r) {
       r.request.qq_bias = {r.bias.data(), kTokens, kTokens};
     },
     [](OneRun& r) { r.bias.set(15, 9); }, true},
    {"documents", "'documents' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.request.documents = {r.documents.data(), 2};
     },
     [](OneRun& r) { r.documents.set(1, 101); }, true},
    {"skip_decode", "'skip_decode' differs between ranks", nothing,
     [](OneRun& r) { r.request.skip_decode = true; }},
    // A map of rows that came from another rank must not be followed.
    {"query layout", "'query_shard.layout' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.set_tokens(kTokens);
       r.request.query_shard = Shard::zigzag(kTokens * r.ranks, r.rank, r.ranks);
     },
     [](OneRun& r) {
       r.request.query_shard =
           Shard::at_positions(kTokens * r.ranks, r.rank, r.ranks, r.places.data(), kTokens);
     },
     false, true},
    {"query length", "'query_shard.length' differs between ranks",
     [](OneRun& r) {
       r.one_sequence();
       r.request.query_shard = Shard::striped(kTokens * r.ranks, r.rank, r.ranks);
     },
     [](OneRun& r) {
       r.set_tokens(kTokens - 1);
       r.request.query_shard.length -= 1;
     },
     false, true},
};

Options options_of(const Case& one) {
  return {.heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .dtype = fp32,
          .max_tokens = kTokens,
          .max_batch = 2,
          .max_kv_len = kRoom,
          .shard_queries = one.shard_queries,
          .check_arrays = one.contents};
}

/// What a rank is told; empty when nobody complained.
std::string told(const std::function<void()>& work) {
  try {
    work();
    return "";
  } catch (const UsageError& error) {
    return error.what();
  } catch (const Error& error) {
    return "not a UsageError: " + std::string(error.what());
  }
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
      layer.run(run.request);
      EXPECT_TRUE(world.device() == Device::cuda || run.wrote());
      layer.wait();
      layer.run(other.request);
      layer.wait();
    });
    EXPECT_THAT(text, ::testing::HasSubstr(one.says));
    EXPECT_THAT(text, ::testing::HasSubstr("rank " + std::to_string(victim) + " has "));
    // On GPUs a run has ended, with a result that wait() disowns, when ranks hear of each other.
    EXPECT_FALSE(world.device() == Device::host && other.wrote()) << "a result of different runs";
    // The communicator has ended with that error, on every rank.
    EXPECT_EQ(told([&] { layer.run(run.request); }), text);
  }
}

TEST(Agreement, OneCallComparesToo) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  OneRun run(world);
  run.one_sequence();
  if (world.rank() == world.size() - 1) run.request.sinks = run.sinks.data();
  EXPECT_THAT(told([&] { attend(world, run.request); }),
              ::testing::HasSubstr("'sinks' differs between ranks"));
  EXPECT_FALSE(run.wrote());
}

TEST(Agreement, WhatMayDifferDoes) {
  const Communicator world = test_world();
  const bool last = world.rank() == world.size() - 1;
  OneRun run(world);
  Array<float> lse(world.device(), std::vector<float>(kTokens * kHeads, NAN));
  // Threads, times of phases and a wish for the lse are a rank's own.
  Attention layer(world, {.heads = kHeads,
                          .kv_heads = kKvHeads,
                          .head_dim = kDim,
                          .dtype = fp32,
                          .max_tokens = kTokens,
                          .max_batch = 2,
                          .max_kv_len = kRoom,
                          .threads = last ? 3 : 1,
                          .profile = last});
  if (last) run.request.lse = Tensor(lse.data(), fp32, {kTokens, kHeads}, world.device());
  for (int turn = 0; turn < 3; ++turn) {
    layer.run(run.request);
    layer.wait();
  }
  EXPECT_TRUE(run.wrote());
}

}  // namespace
}  // namespace longspan::testing

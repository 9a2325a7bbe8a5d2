// The decode step that `longspan bench decode` times, and its checks: they must pass for a step
// that was done, and fail for one that was not.
#include "launcher/bench/decode_step.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "launcher/problem/memory.hpp"
#include "launcher/problem/world.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::launcher {
namespace {

using tests::fresh_seed;

DecodeShape small(std::uint64_t seed) {
  return {.options = {.heads = 6,
                      .kv_heads = 2,
                      .head_dim = 24,
                      .dtypes = {.compute = fp32},
                      .threads = 1},
          .batch = 3,
          .tokens = 2,
          .layers = 3,
          .caches = 2,
          .kv_len = 300,
          .steps = 4,
          .seed = seed};
}

class OnDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam() == Device::cuda && gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
  DecodeStep make(const DecodeShape& shape) {
    return {self(GetParam()), shape, [] {}};
  }
};

INSTANTIATE_TEST_SUITE_P(host, OnDevice, ::testing::Values(Device::host));
#if defined(LONGSPAN_HAVE_CUDA)
INSTANTIATE_TEST_SUITE_P(gpu, OnDevice, ::testing::Values(Device::cuda));
#endif

/// The first step, or part of one.
void once(DecodeStep& step, DecodeStep::Part part = DecodeStep::Part::whole) {
  step.queue(part, step.stream());
  step.wait();
}

TEST_P(OnDevice, EveryStepIsRight) {
  const std::uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::vector<DecodeShape> shapes;
  for (const int page : {0, 1, 16}) {
    for (const DType cache : {fp32, e4m3}) {
      shapes.push_back(small(seed));
      shapes.back().page = page;
      shapes.back().options.dtypes.kv = cache;
    }
  }
  shapes.push_back(small(seed));
  shapes.back().kv_len = 0;
  shapes.push_back(small(seed));
  shapes.back().kv_len = 4093 + 200;  // the pattern's second pass over its rows
  for (const DecodeShape& shape : shapes) {
    DecodeStep step = make(shape);
    const auto right = [&](int done) {
      const Judgement j = step.check(done, 5);
      EXPECT_EQ(j.rows, 5 * shape.tokens);
      EXPECT_TRUE(j.right) << "page " << shape.page << " kv_len " << shape.kv_len << " step "
                           << done << ": " << j.wrong << " wrong, relative error "
                           << j.relative_error;
    };
    once(step);
    right(1);
    const auto replays = step.repeat(DecodeStep::Part::whole);
    replays->queue(1);
    step.wait();
    right(2);
    replays->queue(2);
    step.wait();
    right(4);
    const std::size_t timed = GetParam() == Device::host ? 4 : 0;
    EXPECT_EQ(step.spent().append.size(), timed);
  }
}

TEST_P(OnDevice, AStepThatWasNotDoneIsFound) {
  DecodeStep step = make(small(fresh_seed()));
  EXPECT_THROW(step.check(0, 1), SharedError);  // nothing was written
  once(step);
  EXPECT_THROW(step.check(2, 1), SharedError);  // the lengths are those of one step
  EXPECT_TRUE(step.check(1, 1).right);
  step.restart(2);
  EXPECT_THROW(step.check(2, 1), SharedError);  // lengths without outputs
  step.restart(1);
  once(step, DecodeStep::Part::append);
  EXPECT_THROW(step.check(2, 1), SharedError);  // appended, and not attended
}

TEST_P(OnDevice, AGapInTheCacheIsFound) {
  DecodeStep step = make(small(fresh_seed()));
  step.restart(1);  // the first step's keys are not there: NaN
  once(step);
  EXPECT_THROW(step.check(2, 1), SharedError);
}

TEST(DecodeStep, OtherOutputsAreWrong) {
  const DecodeShape shape = small(fresh_seed());
  const DecodeInputs inputs(shape);
  const std::vector<DecodeSample> samples = draw_samples(shape, 3, 1);
  EXPECT_EQ(samples[1].layer, 2);
  EXPECT_EQ(samples[1].sequence, 2);
  EXPECT_EQ(samples[1].kv_head, 1);

  // The true outputs of all layers, from the oracle's own problem.
  const Problem problem = sampled(shape, inputs, samples, 1);
  Trial trial(self(), problem);
  trial.run();
  Answer answer = trial.answer();
  ASSERT_TRUE(judge(self(), problem, answer, answer.rows).right);
  for (const std::size_t i : {std::size_t{0}, answer.lse.size() - 1}) {
    Answer other = answer;
    other.lse[i] += 0.001f;
    EXPECT_FALSE(judge(self(), problem, other, other.rows).right);
    other = answer;
    reinterpret_cast<float*>(other.out.data())[i * 24] += 0.001f;
    EXPECT_FALSE(judge(self(), problem, other, other.rows).right);
  }
}

/// A row of the cache whose word tells its source.
TEST(Filling, EveryPlaceHasItsRowAndTheRoomIsNaN) {
  const std::vector<std::int32_t> table{5, 0, 3, 1, 4, 2};
  std::vector<std::uint64_t> block(7);
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = i;
  for (const bool paged : {false, true}) {
    for (int rank = 0; rank < 3; ++rank) {
      std::vector<std::uint64_t> cache(2 * 12, 99);
      const Filling filling{.block = reinterpret_cast<const std::byte*>(block.data()),
                            .pattern = {7, 3, 2},
                            .cache = reinterpret_cast<std::byte*>(cache.data()),
                            .batch = 2,
                            .capacity = 12,
                            .table = paged ? table.data() : nullptr,
                            .page = 4,
                            .shard = Shard::interleaved(0, rank, 3, 5),
                            .kv_len = 26};
      fill(Device::host, filling, 1, {});
      for (int b = 0; b < 2; ++b) {
        for (std::int64_t i = 0; i < 12; ++i) {
          const std::int64_t at = paged ? table[b * 3 + i / 4] * 4 + i % 4 : b * 12 + i;
          const std::int64_t own = filling.shard.local_len(26);
          const std::int64_t p = i < own ? filling.shard.position(i, 26) : -1;
          const auto expected = static_cast<std::uint64_t>((3 + 101 * b + p + p / 7 * 2) % 7);
          EXPECT_EQ(cache[at], p < 0 ? ~std::uint64_t{0} : expected) << b << " " << i;
        }
      }
    }
  }
}

TEST(Lengths, GrowOnEveryRankByItsShare) {
  std::vector<std::int32_t> whole{10, 4}, own(2);
  const Lengths lengths{.whole = whole.data(),
                        .own = own.data(),
                        .batch = 2,
                        .tokens = 3,
                        .shard = Shard::interleaved(0, 1, 2, 4)};
  grow(Device::host, lengths, {});
  EXPECT_EQ(whole, (std::vector<std::int32_t>{13, 7}));
  EXPECT_EQ(own, (std::vector<std::int32_t>{5, 3}));  // of [4, 8) and [12, 16)
}

TEST(Repeats, EachIsTimed) {
  int done = 0;
  const Queue queue(Device::host);
  const auto replays = queue.repeat([&](Stream) { ++done; });
  replays->queue(3);
  EXPECT_EQ(done, 3);
  EXPECT_EQ(replays->milliseconds().size(), 3u);
  replays->queue(1);
  EXPECT_EQ(replays->milliseconds().size(), 1u);
}

}  // namespace
}  // namespace longspan::launcher

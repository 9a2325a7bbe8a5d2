// The host's fixed order: the bits of a row do not depend on the ranks, the threads, the rows
// beside it, its place, the batch, or the width of a vector.
#include "kernels/host/targets.hpp"
//
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <string>

#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {
namespace {

HostShape few_rows(std::int32_t kv_len) {
  return {.heads = 2, .kv_heads = 1, .dim = 32, .query_len = {3}, .kv_len = {kv_len}};
}

class HostOrder : public ::testing::Test {
 protected:
  /// judge(result, target): the problem on every instruction set that this CPU has.
  template <class Judge>
  void on_every_instruction_set(HostProblem& problem, const Judge& judge) {
    for (std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      judge(problem.run(*backend_), target);
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }

  /// Exact on each; the same bits on those with a fused multiply-add.
  void expect_exact_on_every_instruction_set(HostProblem& problem) {
    const Result best = problem.run(*backend_);
    on_every_instruction_set(problem, [&](const Result& result, std::int64_t target) {
      EXPECT_LT(problem.error(result).out, 2e-6) << hwy::TargetName(target);
      if (target & (HWY_AVX3_DL | HWY_AVX3 | HWY_AVX2)) {
        EXPECT_TRUE(result.same_bits(best)) << hwy::TargetName(target);
      }
    });
  }

  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);
};

/// Some rows of a kv head lie in lanes, and keys are not transposed: whole vectors of rows and
/// others, masks, and values that a row does not see.
TEST_F(HostOrder, RowsInLanes) {
  for (const int heads : {9, 16, 17, 48, 100})
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      HostShape shape;
      shape.heads = heads;
      shape.kv_heads = 1;
      shape.dim = 72;
      shape.dtype = dtype;
      shape.query_len = {1, 2};
      shape.kv_len = {700, 131};
      shape.mask = {.causal = true, .window = 300};
      HostProblem problem(shape, fresh_seed());
      if (dtype == DType::fp32) expect_exact_on_every_instruction_set(problem);
      const Result one = problem.run(*backend_);
      for (int ranks : {2, 4}) {
        SCOPED_TRACE("heads " + std::to_string(heads) + " ranks " + std::to_string(ranks));
        std::vector<Shard> shards;
        for (int r = 0; r < ranks; ++r) shards.push_back(Shard::contiguous(0, r, ranks));
        EXPECT_TRUE(problem.run(*backend_, shards).same_bits(one));
      }
    }
}

TEST_F(HostOrder, SameBitsOnEveryNumberOfRanks) {
  for (std::int32_t kv_len : {1, 127, 4097, 5000, 131073}) {
    if (tests::kSanitized && kv_len > 100000) continue;
    for (bool causal : {false, true}) {
      HostShape shape = few_rows(kv_len);
      shape.mask.causal = causal;
      HostProblem problem(shape, fresh_seed());
      for (const Shard& rule : {Shard::contiguous(0, 0, 1), Shard::interleaved(0, 0, 1, 128),
                                Shard::interleaved(0, 0, 1, 256)}) {
        const Result one = problem.run(*backend_, {rule});
        EXPECT_LT(problem.error(one).out, 2e-6);
        for (int ranks : {2, 4, 8, 64}) {
          Shard shard = rule;
          shard.ranks = ranks;
          EXPECT_TRUE(problem.run(*backend_, HostProblem::on_all(shard)).same_bits(one))
              << name(rule.layout) << " block " << rule.block << " kv " << kv_len << " ranks "
              << ranks << " causal " << causal;
        }
      }
    }
  }
}

// The test above can fail: another cut of the same keys gives other bits.
TEST_F(HostOrder, OtherCutsAreExactWithOtherBits) {
  HostProblem problem(few_rows(5000), fresh_seed());
  const Result one = problem.run(*backend_);
  for (int ranks : {3, 7}) {
    const Result other =
        problem.run(*backend_, HostProblem::on_all(Shard::contiguous(0, 0, ranks)));
    EXPECT_LT(problem.error(other).out, 2e-6);
    EXPECT_FALSE(other.same_bits(one));
  }
}

TEST_F(HostOrder, SameBitsOnEveryNumberOfThreads) {
  // One token leaves fewer tiles than threads, so that leaves are split; 300 fill many tiles.
  for (std::int32_t tokens : {1, 300}) {
    HostShape shape{.heads = 6, .kv_heads = 2, .dim = 72, .query_len = {tokens}, .kv_len = {9000}};
    shape.mask.causal = true;
    HostProblem problem(shape, fresh_seed());
    for (const Shard& shard :
         {Shard::contiguous(0, 0, 1), Shard::interleaved(0, 0, 1), Shard::striped(0, 0, 1)}) {
      const Result one = problem.run(*kernels::host_backend(1), {shard});
      for (int threads : {2, 3, 4, 16})
        EXPECT_TRUE(problem.run(*kernels::host_backend(threads), {shard}).same_bits(one))
            << name(shard.layout) << " threads " << threads << " tokens " << tokens;
    }
  }
}

/// Rows [first, first + count) of a problem's one sequence, as a problem whose rows keep their
/// positions: fewer keys follow them.
HostProblem some_rows(const HostProblem& whole, std::int32_t first, std::int32_t count) {
  HostShape shape = whole.shape;
  const std::int32_t after = whole.shape.query_len[0] - first - count;
  shape.query_len = {count};
  shape.kv_len = {whole.shape.kv_len[0] - after};
  HostProblem part(shape, 0);
  const std::int64_t size = size_of(shape.dtype);
  std::copy_n(whole.q.bytes.data() + first * part.q_stride() * size, part.q.bytes.size(),
              part.q.bytes.data());
  std::copy_n(whole.k.bytes.data(), part.k.bytes.size(), part.k.bytes.data());
  std::copy_n(whole.v.bytes.data(), part.v.bytes.size(), part.v.bytes.data());
  return part;
}

// Interleaved, since its virtual ranks do not move when a sequence grows.
TEST_F(HostOrder, SameBitsWhateverTheRowsBesideIt) {
  for (DType dtype : {fp32, bf16}) {
    HostShape shape{.heads = 10, .kv_heads = 2, .dim = 40, .dtype = dtype, .query_len = {217}};
    shape.kv_len = {3000};
    shape.mask = {.causal = true, .window = 1700};
    shape.softcap = dtype == bf16 ? 30.0f : 0.0f;
    HostProblem whole(shape, fresh_seed());
    const std::vector<Shard> rule = {Shard::interleaved(0, 0, 1)};
    const Result all = whole.run(*backend_, rule);
    for (const auto& [first, count] :
         std::vector<std::pair<int, int>>{{0, 1}, {5, 7}, {100, 1}, {99, 64}, {216, 1}, {3, 214}}) {
      HostProblem part = some_rows(whole, first, count);
      const Result some = part.run(*backend_, rule);
      const std::int64_t row = 10 * 40;
      EXPECT_TRUE(std::equal(some.out.begin(), some.out.end(), all.out.begin() + first * row))
          << first << " + " << count;
      EXPECT_TRUE(std::equal(some.lse.begin(), some.lse.end(), all.lse.begin() + first * 10));
    }
  }
}

TEST_F(HostOrder, SameBitsWhateverTheBatch) {
  HostShape shape{.query_len = {4, 0, 130, 1}, .kv_len = {700, 90, 2000, 33}};
  shape.mask.causal = true;
  HostProblem batch(shape, fresh_seed());
  const Result all = batch.run(*backend_);
  const std::int64_t row = std::int64_t{shape.heads} * shape.dim;
  for (int b = 0; b < 4; ++b) {
    HostShape alone_shape = shape;
    alone_shape.query_len = {shape.query_len[b]};
    alone_shape.kv_len = {shape.kv_len[b]};
    HostProblem alone(alone_shape, 0);
    std::copy_n(batch.q.bytes.data() + batch.query_start[b] * batch.q_stride() * 4,
                alone.q.bytes.size(), alone.q.bytes.data());
    const std::int64_t from = batch.key_start[b] * batch.kv_stride() * 4;
    std::copy_n(batch.k.bytes.data() + from, alone.k.bytes.size(), alone.k.bytes.data());
    std::copy_n(batch.v.bytes.data() + from, alone.v.bytes.size(), alone.v.bytes.data());
    const Result one = alone.run(*backend_);
    EXPECT_TRUE(
        std::equal(one.out.begin(), one.out.end(), all.out.begin() + batch.query_start[b] * row))
        << b;
  }
}

TEST_F(HostOrder, EveryInstructionSet) {
  HostShape shape{.heads = 6, .kv_heads = 3, .dim = 88, .query_len = {50}, .kv_len = {1000}};
  shape.mask.causal = true;
  for (float softcap : {0.0f, 20.0f}) {
    for (DType dtype : {fp32, fp16, bf16}) {
      shape.softcap = softcap;
      shape.dtype = dtype;
      HostProblem problem(shape, fresh_seed());
      expect_exact_on_every_instruction_set(problem);
    }
  }
}

TEST_F(HostOrder, EveryInstructionSetHasEveryFeature) {
  HostShape shape{.heads = 6, .kv_heads = 3, .dim = 88, .query_len = {50}, .kv_len = {1000}};
  shape.mask.causal = true;
  shape.q_dtype = e5m2;
  shape.scales = shape.qq = true;
  shape.page = 8;
  for (DType kv_dtype : {fp16, e4m3, e5m2}) {
    for (Store store : {Store::rows, Store::x_packed, Store::odd}) {
      shape.dtype = fp16;
      shape.kv_dtype = kv_dtype;
      shape.store = store;
      shape.alibi = store == Store::rows ? Alibi::query : Alibi::context;
      HostProblem problem(shape, fresh_seed());
      expect_exact_on_every_instruction_set(problem);
    }
  }
}

// One key has the weight 1, so the result is its value: every code of the 8-bit types.
TEST_F(HostOrder, EveryInstructionSetReadsEveryFp8Code) {
  for (DType kv_dtype : {e4m3, e5m2}) {
    HostShape shape{.heads = 1, .kv_heads = 1, .dim = 256, .query_len = {1}, .kv_len = {1}};
    shape.kv_dtype = kv_dtype;
    HostProblem problem(shape, fresh_seed());
    for (int code = 0; code < 256; ++code) problem.v.bytes[code] = static_cast<std::byte>(code);
    for (int page : {0, 4}) {
      problem.shape.page = page;
      problem.shape.store = Store::x_packed;
      on_every_instruction_set(problem, [&](const Result& result, std::int64_t target) {
        for (int code = 0; code < 256; ++code) {
          const double value = problem.v[code];
          if (std::isnan(value))
            EXPECT_TRUE(std::isnan(result.out[code])) << code;
          else
            EXPECT_EQ(result.out[code], value) << hwy::TargetName(target);
        }
      });
    }
  }
}

// With one key the result is its values, so each code of an fp8 shows its conversion.
TEST_F(HostOrder, EveryCodeOfFp8OnEveryInstructionSet) {
  for (const DType kv_dtype : {e4m3, e5m2})
    for (const int dim : {16, 32, 64, 128, 256})
      for (const int group : {1, 4, 8}) {
        HostShape shape{.heads = 256 / dim * group, .kv_heads = 256 / dim, .dim = dim};
        shape.kv_dtype = kv_dtype;
        shape.query_len = shape.kv_len = {1};
        HostProblem problem(shape, fresh_seed());
        for (int code = 0; code < 256; ++code) {
          problem.k.bytes[code] = std::byte{0};
          problem.v.bytes[code] = static_cast<std::byte>(code);
        }
        on_every_instruction_set(problem, [&](const Result& result, std::int64_t target) {
          for (int h = 0; h < shape.heads; ++h)
            for (int c = 0; c < dim; ++c) {
              const float value = problem.v[h / group * dim + c], out = result.out[h * dim + c];
              EXPECT_TRUE(out == value || (std::isnan(out) && std::isnan(value)))
                  << hwy::TargetName(target) << " dim " << dim << " group " << group << " "
                  << name(kv_dtype) << " code " << h / group * dim + c << ": " << out << ", not "
                  << value;
            }
        });
      }
}

}  // namespace
}  // namespace longspan::tests

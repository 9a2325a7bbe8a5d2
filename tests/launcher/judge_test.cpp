// The judge must be able to find an answer wrong, and the inputs must not depend on who reads them:
// what `longspan verify` says rests on both.
#include "launcher/judge.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "launcher/elements.hpp"
#include "launcher/oracle.hpp"

namespace longspan::launcher {
namespace {

constexpr int kHeads = 4, kKvHeads = 2, kDim = 16, kTokens = 6, kKeys = 50;

Problem make_problem(DType dtype) {
  Problem p;
  p.options = {
      .heads = kHeads, .kv_heads = kKvHeads, .dim = kDim, .dtype = dtype, .mask = {.causal = true}};
  p.q_lens = {kTokens};
  p.kv_lens = {kKeys};
  p.q = generated(7, 0, dtype, kTokens, kHeads, kDim);
  p.k = generated(7, 1, dtype, kKeys, kKvHeads, kDim);
  p.v = generated(7, 2, dtype, kKeys, kKvHeads, kDim);
  return p;
}

Eigen::VectorXd row_of(const Source& source, std::int64_t row, int head) {
  std::vector<float> memory(source.dim);
  source.read(row, std::int64_t{head} * source.dim, source.dim, memory.data());
  Eigen::VectorXd values(source.dim);
  for (int d = 0; d < source.dim; ++d) values[d] = load(memory.data(), source.dtype, d);
  return values;
}

/// The exact answer, rounded once.
Answer answer_of(const Problem& p) {
  Answer a;
  a.rows.resize(kTokens);
  std::iota(a.rows.begin(), a.rows.end(), std::int64_t{0});
  a.out.resize(kTokens * p.q.row_bytes());
  a.lse.resize(kTokens * kHeads);
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      RowMajor k(kKeys, kDim), v(kKeys, kDim);
      for (int j = 0; j < kKeys; ++j) {
        k.row(j) = row_of(p.k, j, h / 2);
        v.row(j) = row_of(p.v, j, h / 2);
      }
      const Exact exact = attend_exactly(
          row_of(p.q, t, h), k, v, p.options.mask.visible(kKeys - kTokens + t, kKeys), p.scale());
      for (int d = 0; d < kDim; ++d)
        store(a.out.data(), p.options.dtype, (t * kHeads + h) * kDim + d,
              static_cast<float>(exact.out[d]));
      a.lse[t * kHeads + h] = static_cast<float>(exact.lse);
    }
  }
  return a;
}

Judgement judge_all(const Problem& p, const Answer& a) {
  return judge(self(), p, a, sample_rows(p, -1, 0));
}

class JudgeTest : public ::testing::TestWithParam<DType> {
 protected:
  Problem problem_ = make_problem(GetParam());
  Answer answer_ = answer_of(problem_);

  void add(std::int64_t element, float difference) {
    const DType dtype = GetParam();
    const auto value = static_cast<float>(load(answer_.out.data(), dtype, element));
    store(answer_.out.data(), dtype, element, value + difference);
  }
};

TEST_P(JudgeTest, FindsTheExactAnswerRight) {
  const Judgement j = judge_all(problem_, answer_);
  EXPECT_TRUE(j.right);
  EXPECT_EQ(j.wrong, 0);
  EXPECT_EQ(j.rows, kTokens);
  EXPECT_GT(j.bound, 0);
  EXPECT_LE(j.max_error, j.bound);
}

TEST_P(JudgeTest, FindsOneElementWrong) {
  const double bound = judge_all(problem_, answer_).bound;
  add(3 * kHeads * kDim + 5, static_cast<float>(4 * bound));
  const Judgement j = judge_all(problem_, answer_);
  EXPECT_FALSE(j.right);
  EXPECT_EQ(j.wrong, 1);
}

TEST_P(JudgeTest, FindsNaNWrong) {
  add(17, std::numeric_limits<float>::quiet_NaN());
  const Judgement j = judge_all(problem_, answer_);
  EXPECT_FALSE(j.right);
  EXPECT_EQ(j.wrong, 1);
}

TEST_P(JudgeTest, FindsAnLseWrong) {
  answer_.lse[9] += 1e-4f;
  const Judgement j = judge_all(problem_, answer_);
  EXPECT_FALSE(j.right);
  EXPECT_EQ(j.wrong, 1);
}

TEST_P(JudgeTest, FindsOtherRowsWrong) {
  std::swap_ranges(answer_.out.begin(), answer_.out.begin() + problem_.q.row_bytes(),
                   answer_.out.begin() + problem_.q.row_bytes());
  EXPECT_GT(judge_all(problem_, answer_).wrong, kHeads * kDim);
}

TEST_P(JudgeTest, DigestKnowsEveryBitAndPlace) {
  const Communicator alone = self();
  const std::uint64_t before = digest(alone, problem_, answer_);
  std::set<std::uint64_t> seen{before};
  for (std::size_t byte = 0; byte < answer_.out.size(); byte += 37) {
    answer_.out[byte] ^= std::byte{1};
    EXPECT_TRUE(seen.insert(digest(alone, problem_, answer_)).second);
    answer_.out[byte] ^= std::byte{1};
  }
  EXPECT_EQ(digest(alone, problem_, answer_), before);
  std::swap(answer_.rows[0], answer_.rows[1]);
  EXPECT_NE(digest(alone, problem_, answer_), before);
}

INSTANTIATE_TEST_SUITE_P(DTypes, JudgeTest, ::testing::Values(fp32, fp16, bf16),
                         [](const auto& param) { return std::string(name(param.param)); });

TEST(Inputs, AreAFunctionOfTheGlobalIndex) {
  const Source source = generated(3, 1, fp32, 20, 3, 16);
  std::vector<float> whole(20 * 48), part(8);
  for (int row = 0; row < 20; ++row) source.read(row, 0, 48, whole.data() + row * 48);
  for (int row = 0; row < 20; ++row) {
    for (int first = 0; first + 8 <= 48; first += 4) {
      source.read(row, first, 8, part.data());
      EXPECT_EQ(std::memcmp(part.data(), whole.data() + row * 48 + first, 8 * sizeof(float)), 0);
    }
  }
  std::vector<float> other(48);
  for (const Source& differs :
       {generated(4, 1, fp32, 20, 3, 16), generated(3, 2, fp32, 20, 3, 16)}) {
    differs.read(0, 0, 48, other.data());
    EXPECT_NE(std::memcmp(other.data(), whole.data(), 48 * sizeof(float)), 0);
  }
}

TEST(Inputs, HaveMeanZeroAndVarianceOne) {
  constexpr int kRows = 4000;
  const Source source = generated(5, 0, fp32, kRows, 1, 64);
  double sum = 0, squares = 0;
  std::vector<float> row(64);
  for (int r = 0; r < kRows; ++r) {
    source.read(r, 0, 64, row.data());
    for (const float x : row) sum += x, squares += double{x} * x;
  }
  const double count = kRows * 64.0;
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 5 / std::sqrt(count));
}

TEST(Rows, AreSpreadAndKeepTheEnds) {
  Problem p = make_problem(fp32);
  p.q_lens = {1000, 0, 500};
  p.kv_lens = {1000, 10, 600};
  const auto rows = sample_rows(p, 20, 1);
  EXPECT_EQ(rows.size(), 20u);
  EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
  for (const std::int64_t end : {0, 999, 1000, 1499})
    EXPECT_TRUE(std::binary_search(rows.begin(), rows.end(), end)) << end;
  EXPECT_EQ(sample_rows(p, -1, 1).size(), 1500u);
  EXPECT_EQ(sample_rows(p, 5000, 1).size(), 1500u);
  EXPECT_TRUE(sample_rows(p, 0, 1).empty());
}

}  // namespace
}  // namespace longspan::launcher

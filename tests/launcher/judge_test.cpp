// The judge must be able to find an answer wrong, and the inputs must not depend on the rank that
// reads them: the results of `longspan verify` depend on both.
#include "launcher/judge/judge.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"

namespace longspan::launcher {
namespace {

constexpr int kHeads = 4, kKvHeads = 2, kDim = 16, kTokens = 6, kKeys = 50;

Problem make_problem(DType dtype, std::uint64_t seed = 7) {
  Problem p;
  p.options = {.heads = kHeads,
               .kv_heads = kKvHeads,
               .head_dim = kDim,
               .dtypes = {.compute = dtype},
               .mask = {.causal = true}};
  p.q_lens = {kTokens};
  p.kv_lens = {kKeys};
  p.q = generated(seed, 0, dtype, kTokens, kHeads, kDim);
  p.k = generated(seed, 1, dtype, kKeys, kKvHeads, kDim);
  p.v = generated(seed, 2, dtype, kKeys, kKvHeads, kDim);
  return p;
}

Eigen::VectorXd row_of(const Source& source, std::int64_t row, int head) {
  std::vector<float> memory(source.dim);
  source.read(row, std::int64_t{head} * source.dim, source.dim, memory.data());
  Eigen::VectorXd values(source.dim);
  for (int d = 0; d < source.dim; ++d) values[d] = load(memory.data(), source.dtype, d);
  return values;
}

using Row = std::function<Eigen::VectorXd(const Eigen::VectorXd& q, const RowMajor& k,
                                          const RowMajor& v, Interval seen, double& lse)>;

/// The result of `attend` for each row and head, rounded once. The lse is exact unless noted.
Answer answer_by(const Problem& p, const Row& attend) {
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
      const Interval seen = seen_keys(p.options.mask, kKeys - kTokens + t, kKeys);
      const Eigen::VectorXd q = row_of(p.q, t, h);
      double lse = attend_exactly(q, k, v, seen, p.scale()).lse;
      const Eigen::VectorXd out = attend(q, k, v, seen, lse);
      for (int d = 0; d < kDim; ++d)
        store(a.out.data(), p.options.dtypes.compute, (t * kHeads + h) * kDim + d,
              static_cast<float>(out[d]));
      a.lse[t * kHeads + h] = static_cast<float>(lse);
    }
  }
  return a;
}

/// The exact answer, at a scale that is off by the factor.
Answer answer_of(const Problem& p, double factor = 1) {
  return answer_by(p, [&](const auto& q, const auto& k, const auto& v, Interval seen, double&) {
    return attend_exactly(q, k, v, seen, factor * p.scale()).out;
  });
}

/// In fp32, with sums from the first to the last element, as in a simple kernel.
Answer serial_answer_of(const Problem& p) {
  return answer_by(p, [&](const auto& q, const auto& k, const auto& v, Interval seen, double& lse) {
    std::vector<float> weights;
    float top = -std::numeric_limits<float>::infinity();
    for (auto j = seen.begin; j < seen.end; ++j) {
      float sum = 0;
      for (int d = 0; d < kDim; ++d) sum += static_cast<float>(q[d]) * static_cast<float>(k(j, d));
      weights.push_back(sum * static_cast<float>(p.scale()));
      top = std::max(top, weights.back());
    }
    std::vector<float> out(kDim);
    float total = 0;
    for (std::size_t j = 0; j < weights.size(); ++j) {
      const float weight = std::exp(weights[j] - top);
      total += weight;
      for (int d = 0; d < kDim; ++d)
        out[d] += weight * static_cast<float>(v(seen.begin + static_cast<std::int64_t>(j), d));
    }
    lse = top + std::log(total);
    Eigen::VectorXd result(kDim);
    for (int d = 0; d < kDim; ++d) result[d] = out[d] / total;
    return result;
  });
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

TEST_P(JudgeTest, JudgesEachOfSeveralAnswers) {
  const std::vector<std::int64_t> rows = sample_rows(problem_, -1, 0);
  const double bound = judge_all(problem_, answer_).bound;
  const Answer exact = answer_;
  add(2 * kHeads * kDim + 1, static_cast<float>(4 * bound));
  const auto judged = judge_gathered(self(), problem_, {exact, answer_, exact}, rows);
  ASSERT_EQ(judged.size(), 3u);
  EXPECT_TRUE(judged[0].right);
  EXPECT_EQ(judged[1].wrong, 1);
  EXPECT_TRUE(judged[2].right);
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

/// Scores from hundredths to millions, of inputs of order 1: amplified errors are allowed, and no
/// others.
class ScaleTest : public JudgeTest {
 protected:
  static constexpr float kScales[] = {0.01f, 0.1f, 1.0f, 4.0f, 10.0f, 100.0f, 1e3f, 1e4f, 1e6f};
};

TEST_P(ScaleTest, FindsRightWhatFp32CanDo) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    for (const float scale : kScales) {
      problem_ = make_problem(GetParam(), seed);
      problem_.options.score.scale = scale;
      const Judgement j = judge_all(problem_, serial_answer_of(problem_));
      EXPECT_TRUE(j.right) << "scale " << scale << ": " << complaint(j);
      EXPECT_EQ(complaint(j), "");
    }
  }
}

TEST_P(ScaleTest, FindsOneElementWrongAtAnyScale) {
  const float small = GetParam() == fp32 ? 2e-3f : 5e-2f;
  for (const float scale : kScales) {
    problem_.options.score.scale = scale;
    for (const int element : {0, 3 * kHeads * kDim + 5, kTokens * kHeads * kDim - 1}) {
      answer_ = serial_answer_of(problem_);
      add(element, small);
      const Judgement j = judge_all(problem_, answer_);
      EXPECT_FALSE(j.right) << scale;
      EXPECT_EQ(j.wrong_elements, 1) << scale;
      EXPECT_NE(complaint(j).find("1 elements are farther"), std::string::npos) << complaint(j);
      EXPECT_GT(j.element.error, j.element.bound);
    }
  }
}

TEST_P(ScaleTest, FindsAnLseWrongAtAnyScale) {
  for (const float scale : kScales) {
    problem_.options.score.scale = scale;
    answer_ = serial_answer_of(problem_);
    answer_.lse[9] += 1e-4f * std::max(1.0f, scale);
    const Judgement j = judge_all(problem_, answer_);
    EXPECT_FALSE(j.right) << scale;
    EXPECT_EQ(j.wrong_lse, 1) << scale;
    EXPECT_NE(complaint(j).find("1 values of lse are farther"), std::string::npos) << complaint(j);
  }
}

TEST(Scale, FindsScoresThatAreALittleOff) {
  for (const float scale : {0.1f, 1.0f, 4.0f, 10.0f}) {
    Problem p = make_problem(fp32);
    p.options.score.scale = scale;
    EXPECT_TRUE(judge_all(p, answer_of(p)).right);
    for (const double factor : {1 + 1e-4, 1 - 1e-4})
      EXPECT_FALSE(judge_all(p, answer_of(p, factor)).right) << scale << " " << factor;
  }
}

TEST(Scale, FindsAKeyThatIsLeftOut) {
  for (const float scale : {0.01f, 1.0f, 10.0f, 1e3f, 1e6f}) {
    Problem p = make_problem(fp32);
    p.options.score.scale = scale;
    const Answer without =
        answer_by(p, [&](const auto& q, const auto& k, auto v, Interval seen, double&) {
          // The heaviest key loses its value, as if it were not there.
          Eigen::Index heaviest = 0;
          (k.topRows(seen.end) * q).maxCoeff(&heaviest);
          v.row(heaviest).setZero();
          return attend_exactly(q, k, v, seen, p.scale()).out;
        });
    EXPECT_FALSE(judge_all(p, without).right) << scale;
  }
}

TEST(Scale, OrdinaryScoresAreHeldToTheOldBounds) {
  Problem p = make_problem(fp32);
  const Judgement j = judge_all(p, serial_answer_of(p));
  EXPECT_EQ(j.relative_bound, 2e-6);
  EXPECT_EQ(j.element.bound, j.bound);
}

INSTANTIATE_TEST_SUITE_P(DTypes, ScaleTest, ::testing::Values(fp32, fp16, bf16),
                         [](const auto& param) { return std::string(name(param.param)); });

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

/// A problem that goes back, and the answer of the library.
struct Backward {
  Problem problem;
  Answer answer;

  explicit Backward(DType dtype) : problem(make_problem(dtype)) {
    problem.options.gradients = true;
    problem.fp32_gradients = dtype == fp32;
    problem.dout = generated(7, kOfDout, dtype, kTokens, kHeads, kDim);
    problem.dlse = generated(7, kOfDlse, fp32, kTokens, kHeads, 1);
    problem.sinks = {0.5f, -1.0f, 1.0f, 0.0f};
    Trial trial(self(), problem);
    trial.run();
    answer = trial.answer();
  }
  Judgement judged() const {
    return judge(self(), problem, answer, sample_rows(problem, -1, 0), sample_keys(problem, -1, 0));
  }
};

TEST_P(JudgeTest, FindsGradientsRight) {
  const Judgement j = Backward(GetParam()).judged();
  EXPECT_TRUE(j.right) << complaint(j);
  ASSERT_EQ(j.gradients.size(), 4u);
  for (const GradientErrors& of : j.gradients) {
    EXPECT_EQ(of.wrong, 0) << of.name;
    EXPECT_GT(of.largest, 0) << of.name;
  }
}

/// One element that is off by some units in the last place of the largest is found, in each
/// gradient.
TEST_P(JudgeTest, FindsOneWrongElementOfAGradient) {
  const Backward right(GetParam());
  const DType dtype = right.problem.gradient_dtype();
  const double ulp = dtype == fp32 ? 0x1p-23 : dtype == fp16 ? 0x1p-10 : 0x1p-7;
  const Judgement before = right.judged();
  for (std::size_t which = 0; which < 4; ++which) {
    Backward wrong = right;
    const bool of_sinks = which == 3;
    const GradientErrors& of = before.gradients[which];
    void* const gradients[] = {wrong.answer.dq.data(), wrong.answer.dk.data(),
                               wrong.answer.dv.data(), wrong.answer.dsinks.data()};
    const DType type = of_sinks ? fp32 : dtype;
    const auto more = static_cast<float>((of_sinks ? 64 * 0x1p-23 : 16 * ulp) * of.largest);
    store(gradients[which], type, 1, static_cast<float>(load(gradients[which], type, 1)) + more);
    const Judgement j = wrong.judged();
    EXPECT_FALSE(j.right) << of.name;
    EXPECT_EQ(j.wrong, 1) << of.name;
    EXPECT_EQ(j.gradients[which].wrong, 1) << of.name;
    EXPECT_NE(complaint(j).find(std::string("elements of ") + of.name), std::string::npos);
  }
}

/// A key's gradients that leave out one row, and a row's that leave out one key.
TEST_P(JudgeTest, FindsAMissingTerm) {
  Backward other(GetParam());
  other.problem.options.mask.window = kKeys - 1;  // the last row does not see the first key
  Trial trial(self(), other.problem);
  trial.run();
  other.problem.options.mask.window = 0;
  Answer found = trial.answer();
  found.out = other.answer.out;
  found.lse = other.answer.lse;
  other.answer = found;
  const Judgement j = other.judged();
  EXPECT_FALSE(j.right);
  for (std::size_t which = 0; which < 3; ++which)
    EXPECT_GT(j.gradients[which].wrong, 0) << j.gradients[which].name;
}

TEST(JudgeOfGradients, KeepsNan) {
  Backward b(fp32);
  std::memset(b.answer.dk.data(), 0xff, sizeof(float));
  EXPECT_EQ(b.judged().wrong, 1);
}

}  // namespace
}  // namespace longspan::launcher

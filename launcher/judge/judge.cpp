#include "launcher/judge/judge.hpp"

#include <Random123/philox.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "launcher/judge/judge_gradients.hpp"
#include "launcher/judge/judged_rows.hpp"
#include "launcher/judge/oracle.hpp"
#include "launcher/judge/plain.hpp"
#include "launcher/judge/rounding.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

constexpr double kNormBound = 2e-6;
constexpr double kFp8LseBound = 0x1p-8;
/// Half the distance between the numbers of the type near x: the error of one rounding. 0 for types
/// other than fp16 and bf16.
double rounding_error(DType dtype, double x) {
  if (x == 0 || (dtype != DType::fp16 && dtype != DType::bf16)) return 0;
  return dtype == DType::fp16 ? std::ldexp(1.0, std::max(std::ilogb(x), -14) - 11)
                              : std::ldexp(1.0, std::ilogb(x) - 8);
}

/// The findings of one rank. Errors are kept, since the bound is known only when all have finished.
struct Findings {
  std::vector<Farthest> errors;  // of elements of out, with the bounds of their rows
  double error2 = 0, exact2 = 0, bound2 = 0, exact_max = 0, plain = 0, lse = 0;
  Farthest farthest_lse;
  std::int64_t wrong_lse = 0;

  void add(const Findings& other) {
    errors.insert(errors.end(), other.errors.begin(), other.errors.end());
    error2 += other.error2;
    exact2 += other.exact2;
    bound2 += other.bound2;
    exact_max = std::max(exact_max, other.exact_max);
    plain = std::max(plain, other.plain);
    lse = std::max(lse, other.lse);
    farthest_lse.add(other.farthest_lse);
    wrong_lse += other.wrong_lse;
  }
};

/// The oracle's result for one row and head, and how far from it an answer may be.
struct Expected {
  Exact exact;
  Eigen::VectorXf plain;
  Rounding rounding;
};

/// The unit in which an answer's elements are stored.
double unit_of(const Problem& problem) { return problem.out_scale != 0 ? problem.out_scale : 1.0; }

/// Asks the oracle for a row and head.
Expected expect(const Problem& problem, const JudgedRow& row) {
  const auto& [number, i, at, b, t, head, keys, values] = row;
  const Options& o = problem.options;
  const Eigen::VectorXd q = query_row(problem, at, b, t, head);
  std::optional<float> sink;
  if (!problem.sinks.empty()) sink = problem.sinks[head];

  const Interval visible = problem.visible(b, problem.position(b, t));
  const std::vector<double> bias = problem.bias(b, t, head);
  const std::vector<double> kept = problem.dropout(b, t, head);
  Exact exact =
      attend_exactly(q, keys, values, visible, problem.scale(), o.score.softcap, sink, bias, kept);
  Eigen::VectorXf plain =
      attend_plainly(q, keys, values, visible, static_cast<float>(problem.scale()), o.score.softcap,
                     sink, o.dtypes.fp8_products ? DType::e4m3 : o.dtypes.compute,
                     Stored{problem.out_dtype(), static_cast<float>(unit_of(problem))}, bias, kept);
  Rounding rounding = rounding_of(q, keys, values, visible, problem.scale(), o.score.softcap, bias,
                                  exact, score_unit(o), kept);
  return {std::move(exact), std::move(plain), std::move(rounding)};
}

/// Compares row i and one head of an answer with the expected result.
Findings compare(const Problem& problem, const Answer& answer, std::size_t i, int head,
                 const Expected& expected) {
  const auto& [exact, plain, rounding] = expected;
  const Options& o = problem.options;
  const DType out_dtype = problem.out_dtype();
  const double unit = unit_of(problem);
  const int value_dim = problem.value_dim();

  Findings f;
  const std::int64_t at = static_cast<std::int64_t>(i) * o.heads + head;
  for (int d = 0; d < value_dim; ++d) {
    const double error =
        distance(unit * load(answer.out.data(), out_dtype, at * value_dim + d), exact.out[d]);
    f.errors.push_back({error, rounding.out[d]});
    if (!std::isfinite(exact.out[d])) continue;
    f.error2 += error * error;
    f.exact2 += exact.out[d] * exact.out[d];
    f.bound2 += rounding.out[d] * rounding.out[d];
    f.exact_max = std::max(f.exact_max, std::abs(exact.out[d]));
    f.plain = std::max(f.plain, distance(plain[d], exact.out[d]));
  }
  const double base = o.dtypes.fp8_products ? kFp8LseBound : kNormBound;
  f.lse = distance(answer.lse[at], exact.lse);
  f.farthest_lse = {f.lse, std::max(base * std::max(1.0, std::abs(exact.lse)), rounding.lse)};
  f.wrong_lse = f.lse > f.farthest_lse.bound;
  return f;
}

/// Examines this rank's part of the rows and heads. All answers are of these rows of the whole q,
/// and the oracle is asked once for all of them.
std::vector<Findings> examine(const Communicator& world, const Problem& problem,
                              const std::vector<Answer>& answers,
                              const std::vector<std::int64_t>& rows) {
  std::vector<std::vector<Findings>> parts(
      static_cast<std::size_t>(count_judged(world, problem.options, std::ssize(rows))));
  for_judged_rows(world, problem, rows, [&](const JudgedRow& row) {
    const Expected expected = expect(problem, row);
    for (const Answer& answer : answers)
      parts[static_cast<std::size_t>(row.number)].push_back(
          compare(problem, answer, row.i, row.head, expected));
  });
  std::vector<Findings> found(answers.size());
  for (const std::vector<Findings>& of_row : parts)
    for (std::size_t a = 0; a < answers.size(); ++a) found[a].add(of_row[a]);
  return found;
}

/// Judges by the findings of all ranks. Collective.
Judgement conclude(const Communicator& world, const Problem& problem, const Findings& mine,
                   std::int64_t rows) {
  const bool fp32 = problem.options.dtypes.compute == DType::fp32;
  Findings all;
  for (const std::vector<double>& s : gather_numbers(
           world,
           {mine.error2, mine.exact2, mine.bound2, mine.exact_max, mine.plain, mine.lse,
            static_cast<double>(mine.wrong_lse), mine.farthest_lse.error, mine.farthest_lse.bound},
           "gather of errors"))
    all.add(
        {{}, s[0], s[1], s[2], s[3], s[4], s[5], {s[7], s[8]}, static_cast<std::int64_t>(s[6])});
  Judgement j;
  j.rows = rows;
  j.plain_error = all.plain;
  // In a few elements, all of plain attention's roundings may happen to be small.
  const double unit = unit_of(problem);
  const double rounding = unit * rounding_error(problem.out_dtype(), all.exact_max / unit);
  j.bound = std::max(2 * std::max(all.plain, rounding), fp32 ? kNormBound * all.exact_max : 0.0);
  const double norm = all.exact2 > 0 ? std::sqrt(all.exact2) : 1;
  j.relative_error = std::sqrt(all.error2) / norm;
  if (fp32) j.relative_bound = std::max(kNormBound, std::sqrt(all.bound2) / norm);
  j.lse_error = all.lse;
  j.lse = all.farthest_lse;
  j.wrong_lse = all.wrong_lse;

  double max_error = 0;
  Farthest farthest;
  std::int64_t wrong = 0;
  for (const auto& [error, bound] : mine.errors) {
    const Farthest one{error, std::max(j.bound, bound)};
    max_error = std::max(max_error, error);
    farthest.add(one);
    wrong += !(one.error <= one.bound);
  }
  for (const std::vector<double>& s : gather_numbers(
           world, {max_error, static_cast<double>(wrong), farthest.error, farthest.bound},
           "gather of wrong elements")) {
    j.max_error = std::max(j.max_error, s[0]);
    j.wrong_elements += static_cast<std::int64_t>(s[1]);
    j.element.add({s[2], s[3]});
  }
  j.wrong = j.wrong_elements + j.wrong_lse;
  j.right = j.wrong == 0 && (!fp32 || j.relative_error <= j.relative_bound);
  return j;
}

}  // namespace

namespace {

/// Samples rows of sequences of these lengths, as sample_rows says.
std::vector<std::int64_t> sample(const std::vector<std::int32_t>& lengths, std::int64_t count,
                                 std::uint64_t seed, std::uint32_t stream) {
  const std::int64_t all = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  if (count < 0 || count > all) count = all;
  std::set<std::int64_t> rows;
  std::int64_t start = 0;
  for (const std::int32_t length : lengths) {
    for (const std::int64_t row : {start + length - 1, start})
      if (length > 0 && std::ssize(rows) < count) rows.insert(row);
    start += length;
  }
  r123::Philox4x32 philox;
  const r123::Philox4x32::key_type key{
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}};
  for (std::uint32_t i = 0; std::ssize(rows) < count; ++i) {
    // Even strata, with one draw in each; full strata are filled from the front.
    std::int64_t row = 0;
    if (i < count) {
      const std::int64_t low = all * i / count, high = all * (i + 1) / count;
      const auto word = philox({{i, 0, stream, 0}}, key)[0];
      row = low + (high > low ? word % (high - low) : 0);
    } else {
      row = i - count;
    }
    rows.insert(row);
  }
  return {rows.begin(), rows.end()};
}

constexpr std::uint32_t kRowStream = 0xffffffff, kKeyStream = 0xfffffffe;  // no tensor's

}  // namespace

std::vector<std::int64_t> sample_rows(const Problem& problem, std::int64_t count,
                                      std::uint64_t seed) {
  return sample(problem.q_lens, count, seed, kRowStream);
}

std::vector<std::int64_t> sample_keys(const Problem& problem, std::int64_t count,
                                      std::uint64_t seed) {
  if (!problem.goes_back()) return {};
  return sample(problem.kv_lens, count, seed, kKeyStream);
}

Judgement judge(const Communicator& world, const Problem& problem, const Answer& answer,
                const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys) {
  const Answer judged = gather_rows(world, problem, answer, rows, keys);
  Judgement j = judge_gathered(world, problem, {judged}, rows).front();
  if (problem.goes_back()) judge_gradients(world, problem, answer, judged, j);
  return j;
}

std::vector<Judgement> judge_gathered(const Communicator& world, const Problem& problem,
                                      const std::vector<Answer>& answers,
                                      const std::vector<std::int64_t>& rows) {
  std::vector<Findings> mine;
  together(world, "comparison with float64",
           [&] { mine = examine(world, problem, answers, rows); });
  std::vector<Judgement> judgements;
  judgements.reserve(mine.size());
  for (const Findings& of_one : mine)
    judgements.push_back(conclude(world, problem, of_one, std::ssize(rows)));
  return judgements;
}

void Farthest::add(const Farthest& other) {
  // Compares error / bound by cross products: a bound may be 0, and an error infinite.
  const double mine = error * other.bound, theirs = other.error * bound;
  if (theirs > mine || (theirs == mine && other.error > error) || !std::isfinite(other.error))
    *this = other;
}

Judgement worse(const Judgement& a, const Judgement& b) {
  Judgement j = a;
  j.rows += b.rows;
  j.max_error = std::max(a.max_error, b.max_error);
  if (b.relative_error * a.relative_bound > a.relative_error * b.relative_bound)
    j.relative_bound = b.relative_bound;
  j.relative_error = std::max(a.relative_error, b.relative_error);
  j.plain_error = std::max(a.plain_error, b.plain_error);
  j.lse_error = std::max(a.lse_error, b.lse_error);
  j.bound = std::max(a.bound, b.bound);
  j.element.add(b.element);
  j.lse.add(b.lse);
  j.wrong_elements += b.wrong_elements;
  j.wrong_lse += b.wrong_lse;
  j.wrong += b.wrong;
  j.right = a.right && b.right;
  return j;
}

std::string complaint(const Judgement& j) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (j.wrong_elements > 0)
    add(
        fmt::format("{} elements are farther from float64 than they may be (one by {:.1e}, bound "
                    "{:.1e})",
                    j.wrong_elements, j.element.error, j.element.bound));
  if (j.wrong_lse > 0)
    add(fmt::format(
        "{} values of lse are farther from float64 than they may be (one by {:.1e}, bound {:.1e})",
        j.wrong_lse, j.lse.error, j.lse.bound));
  if (j.relative_bound > 0 && !(j.relative_error <= j.relative_bound))
    add(fmt::format("the relative error is {:.1e}, bound {:.1e}", j.relative_error,
                    j.relative_bound));
  for (const GradientErrors& of : j.gradients)
    if (of.wrong > 0)
      add(fmt::format(
          "{} elements of {} are farther from float64 than they may be (one by {:.1e}, bound "
          "{:.1e})",
          of.wrong, of.name, of.farthest.error, of.farthest.bound));
  return text;
}

}  // namespace longspan::launcher

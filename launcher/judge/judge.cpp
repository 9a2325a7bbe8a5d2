#include "launcher/judge/judge.hpp"

#include <Random123/philox.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "launcher/judge/oracle.hpp"
#include "launcher/judge/plain.hpp"
#include "launcher/judge/rounding.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

constexpr double kNormBound = 2e-6;
constexpr double kFp8LseBound = 0x1p-8;
constexpr double kScoreUnit = 0x1p-23, kFp8ScoreUnit = 0x1p-13;  // units of rounding_of

/// The unit of scores for the bounds. A rotated element is rounded to the type of q, and may become
/// its neighbour if it lies between two numbers.
double score_unit(const Options& o) {
  if (o.dtypes.fp8_products) return kFp8ScoreUnit;
  if (o.rope.dim == 0 || o.dtypes.compute == DType::fp32) return kScoreUnit;
  return o.dtypes.compute == DType::fp16 ? 0x1p-10 : 0x1p-7;
}

/// Half the distance between the numbers of the type near x: the error of one rounding. 0 for types
/// other than fp16 and bf16.
double rounding_error(DType dtype, double x) {
  if (x == 0 || (dtype != DType::fp16 && dtype != DType::bf16)) return 0;
  return dtype == DType::fp16 ? std::ldexp(1.0, std::max(std::ilogb(x), -14) - 11)
                              : std::ldexp(1.0, std::ilogb(x) - 8);
}

/// |a - b|, where two NaNs or two equal infinities agree, and only one is an infinite error.
double distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double d = std::abs(a - b);
  return std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
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

/// The factor by which a stored element of a sequence's kv head is multiplied.
double factor_of(const std::vector<float>& scale, int sequence, int kv_head, int kv_heads) {
  if (scale.empty()) return 1.0;
  const auto heads = static_cast<std::size_t>(kv_heads), head = static_cast<std::size_t>(kv_head);
  if (scale.size() == 1) return scale[0];
  return scale[scale.size() == heads ? head : static_cast<std::size_t>(sequence) * heads + head];
}

/// Reads the keys or values of one kv head of one sequence, in order of position.
RowMajor whole_head(const Source& source, const std::vector<float>& scale, int sequence,
                    std::int64_t first, std::int64_t count, int head, int threads) {
  const double factor = factor_of(scale, sequence, head, source.heads);
  RowMajor matrix(count, source.dim);
  parallel_for(count, threads, [&](std::int64_t i) {
    std::vector<float> row(source.dim);  // room for any dtype
    source.read(first + i, std::int64_t{head} * source.dim, source.dim, row.data());
    for (int d = 0; d < source.dim; ++d) matrix(i, d) = factor * load(row.data(), source.dtype, d);
  });
  return matrix;
}

/// The oracle's result for one row and head, and how far from it an answer may be.
struct Expected {
  Exact exact;
  Eigen::VectorXf plain;
  Rounding rounding;
};

/// The unit in which an answer's elements are stored.
double unit_of(const Problem& problem) { return problem.out_scale != 0 ? problem.out_scale : 1.0; }

/// Asks the oracle for row t of sequence b, which is row `at` of the whole q, and one head.
Expected expect(const Problem& problem, std::int64_t at, int b, std::int64_t t, int head,
                const RowMajor& keys, const RowMajor& values) {
  const Options& o = problem.options;
  std::vector<float> row(o.head_dim);
  problem.q.read(at, std::int64_t{head} * o.head_dim, o.head_dim, row.data());
  const double factor = factor_of(problem.q_scale, b, head / (o.heads / o.kv_heads), o.kv_heads);
  Eigen::VectorXd q(o.head_dim);
  for (int d = 0; d < o.head_dim; ++d) q[d] = factor * load(row.data(), problem.q.dtype, d);
  if (o.rope.dim > 0) {
    rotate_exactly(q, o.rope, problem.position(b, t));
    for (double& element : q) element = rounded(problem.q.dtype, static_cast<float>(element));
  }
  std::optional<float> sink;
  if (!problem.sinks.empty()) sink = problem.sinks[head];

  const Interval visible = problem.visible(b, problem.position(b, t));
  const std::vector<double> bias = problem.bias(b, t, head);
  Exact exact =
      attend_exactly(q, keys, values, visible, problem.scale(), o.score.softcap, sink, bias);
  Eigen::VectorXf plain =
      attend_plainly(q, keys, values, visible, static_cast<float>(problem.scale()), o.score.softcap,
                     sink, o.dtypes.fp8_products ? DType::e4m3 : o.dtypes.compute,
                     Stored{problem.out_dtype(), static_cast<float>(unit_of(problem))}, bias);
  Rounding rounding = rounding_of(q, keys, values, visible, problem.scale(), o.score.softcap, bias,
                                  exact, score_unit(o));
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

/// Examines this rank's part of the (kv head, row) pairs. All answers are of these rows of the
/// whole q, and the oracle is asked once for all of them.
std::vector<Findings> examine(const Communicator& world, const Problem& problem,
                              const std::vector<Answer>& answers,
                              const std::vector<std::int64_t>& of_q) {
  const Options& o = problem.options;
  const auto rows = static_cast<std::int64_t>(of_q.size());
  const std::int64_t pairs = o.kv_heads * rows;
  const std::int64_t begin = pairs * world.rank() / world.size();
  const std::int64_t end = pairs * (world.rank() + 1) / world.size();
  const auto query_start = problem.query_start();
  const auto key_start = problem.key_start();
  const int group = o.heads / o.kv_heads;

  // A stretch of pairs has one kv head and one sequence, so that its keys are read once.
  struct Stretch {
    int kv_head, sequence;
    std::int64_t begin, end;
  };
  std::vector<Stretch> stretches;
  std::int64_t longest = 0;
  for (std::int64_t at = begin; at < end;) {
    Stretch s{static_cast<int>(at / rows), 0, at, at};
    while (of_q[at % rows] >= query_start[s.sequence + 1]) ++s.sequence;
    while (s.end < end && s.end / rows == s.kv_head &&
           of_q[s.end % rows] < query_start[s.sequence + 1])
      ++s.end;
    longest = std::max<std::int64_t>(longest, problem.kv_lens[s.sequence]);
    at = s.end;
    stretches.push_back(s);
  }

  const auto count = static_cast<std::int64_t>(stretches.size());
  const int all_threads =
      o.threads > 0 ? o.threads : static_cast<int>(std::thread::hardware_concurrency());
  const std::int64_t most = std::min<std::int64_t>(count, all_threads);
  const int at_once = static_cast<int>(std::clamp<std::int64_t>(
      heads_at_once(o, static_cast<double>(longest)), 1, std::max<std::int64_t>(1, most)));
  const int threads = std::max(1, all_threads / at_once);
  std::vector<std::vector<std::vector<Findings>>> parts(stretches.size());  // by pair, by answer
  parallel_for(count, at_once, [&](std::int64_t number) {
    const Stretch& s = stretches[number];
    const std::int64_t first_key = key_start[s.sequence], kv_len = problem.kv_lens[s.sequence];
    const RowMajor keys =
        whole_head(problem.k, problem.k_scale, s.sequence, first_key, kv_len, s.kv_head, threads);
    const RowMajor values =
        whole_head(problem.v, problem.v_scale, s.sequence, first_key, kv_len, s.kv_head, threads);
    parts[number].resize((s.end - s.begin) * group);
    parallel_for((s.end - s.begin) * group, threads, [&](std::int64_t p) {
      const std::int64_t i = (s.begin + p / group) % rows;
      const int head = static_cast<int>(std::int64_t{s.kv_head} * group + p % group);
      const Expected expected = expect(problem, of_q[i], s.sequence,
                                       of_q[i] - query_start[s.sequence], head, keys, values);
      for (const Answer& answer : answers)
        parts[number][p].push_back(compare(problem, answer, i, head, expected));
    });
  });
  std::vector<Findings> found(answers.size());
  for (const auto& of_stretch : parts)
    for (const std::vector<Findings>& of_pair : of_stretch)
      for (std::size_t a = 0; a < answers.size(); ++a) found[a].add(of_pair[a]);
  return found;
}

/// Judges by the findings of all ranks. Collective.
Judgement conclude(const Communicator& world, const Problem& problem, const Findings& mine,
                   std::int64_t rows) {
  using nlohmann::json;
  const bool fp32 = problem.options.dtypes.compute == DType::fp32;
  Findings all;
  const json sums{mine.error2,
                  mine.exact2,
                  mine.bound2,
                  mine.exact_max,
                  mine.plain,
                  mine.lse,
                  mine.wrong_lse,
                  mine.farthest_lse.error,
                  mine.farthest_lse.bound};
  const auto bytes_of = [](const json& value) {  // keeps infinities, which text would not
    const std::vector<std::uint8_t> bytes = json::to_cbor(value);
    return std::string(bytes.begin(), bytes.end());
  };
  for (const std::string& text : world.gather(bytes_of(sums), "gather of errors")) {
    const json s = json::from_cbor(text);
    all.add({{}, s[0], s[1], s[2], s[3], s[4], s[5], {s[7], s[8]}, s[6]});
  }
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
  const json found{max_error, wrong, farthest.error, farthest.bound};
  for (const std::string& text : world.gather(bytes_of(found), "gather of wrong elements")) {
    const json s = json::from_cbor(text);
    j.max_error = std::max(j.max_error, s[0].get<double>());
    j.wrong_elements += s[1].get<std::int64_t>();
    j.element.add({s[2], s[3]});
  }
  j.wrong = j.wrong_elements + j.wrong_lse;
  j.right = j.wrong == 0 && (!fp32 || j.relative_error <= j.relative_bound);
  return j;
}

}  // namespace

int heads_at_once(const Options& options, double kv_len) {
  constexpr double kMost = 1 << 30;
  const double columns = options.head_dim + options.of_values();
  return static_cast<int>(
      std::clamp(kMost / (std::max(1.0, kv_len) * 8 * columns), 1.0, 1.0 * options.kv_heads));
}

std::vector<std::int64_t> sample_rows(const Problem& problem, std::int64_t count,
                                      std::uint64_t seed) {
  const std::int64_t tokens = problem.tokens();
  if (count < 0 || count > tokens) count = tokens;
  std::set<std::int64_t> rows;
  const auto start = problem.query_start();
  for (int b = 0; b < problem.batch(); ++b) {
    for (const std::int64_t row : {start[b + 1] - 1, start[b]}) {
      if (problem.q_lens[b] > 0 && static_cast<std::int64_t>(rows.size()) < count) rows.insert(row);
    }
  }
  r123::Philox4x32 philox;
  const r123::Philox4x32::key_type key{
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}};
  constexpr std::uint32_t kStream = 0xffffffff;  // apart from every tensor's
  for (std::uint32_t i = 0; static_cast<std::int64_t>(rows.size()) < count; ++i) {
    // Even strata, with one draw in each; full strata are filled from the front.
    std::int64_t row = 0;
    if (i < count) {
      const std::int64_t low = tokens * i / count, high = tokens * (i + 1) / count;
      const auto word = philox({{i, 0, kStream, 0}}, key)[0];
      row = low + (high > low ? word % (high - low) : 0);
    } else {
      row = i - count;
    }
    rows.insert(row);
  }
  return {rows.begin(), rows.end()};
}

Judgement judge(const Communicator& world, const Problem& problem, const Answer& answer,
                const std::vector<std::int64_t>& rows) {
  return judge_gathered(world, problem, {gather_rows(world, problem, answer, rows)}, rows).front();
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
    judgements.push_back(conclude(world, problem, of_one, static_cast<std::int64_t>(rows.size())));
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
  return text;
}

}  // namespace longspan::launcher

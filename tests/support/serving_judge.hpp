// A serving problem's result against float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/serving_problem.hpp"

namespace longspan::tests {

inline void compare(const ServingProblem& p, Verdict& verdict, int b, std::int64_t t, int head,
                    std::int64_t i, const std::vector<std::byte>& out,
                    const std::vector<float>& lse, const launcher::RowMajor& keys,
                    const launcher::RowMajor& values, const Tolerance& tolerance) {
  const Serving& s = p.shape;
  const auto wrong = [&](const std::string& what) {
    ++verdict.wrong;
    if (verdict.first.empty())
      verdict.first = "sequence " + std::to_string(b) + " (q " + std::to_string(s.q_lens[b]) +
                      " kv " + std::to_string(s.kv_lens[b]) + ") row " + std::to_string(t) +
                      " head " + std::to_string(head) + ": " + what;
  };
  const std::int64_t at = i * s.heads + head;
  if (p.skipped(b)) {
    const std::size_t bytes = s.of_value() * size_of(s.of_out());
    for (std::size_t j = 0; j < bytes; ++j)
      if (out[at * bytes + j] != std::byte{0xff}) return wrong("a skipped row was written");
    return;
  }
  const launcher::Exact truth = p.exact(b, t, head, keys, values);
  for (int d = 0; d < s.of_value(); ++d) {
    ++verdict.compared;
    const double found = launcher::load(out.data(), s.of_out(), at * s.of_value() + d);
    const double margin = tolerance.absolute + tolerance.relative * std::abs(truth.out[d]);
    if (is_fp8(s.of_out())) {  // rounding is monotone: between both ends of the margin
      const double unit = s.out_scale != 0 ? s.out_scale : 1.0;
      const auto stored = [&](double value) {
        return launcher::rounded(s.of_out(), static_cast<float>(value / unit));
      };
      if (!(found >= stored(truth.out[d] - margin) && found <= stored(truth.out[d] + margin)))
        wrong("out[" + std::to_string(d) + "] is " + std::to_string(found * unit) + ", exactly " +
              std::to_string(truth.out[d]));
      continue;
    }
    const double unit = s.out_scale != 0 ? s.out_scale : 1.0;
    const double error = std::abs(found * unit - truth.out[d]);
    const bool exact_zero = std::isinf(truth.lse) || (s.sinks && truth.out.isZero(0));
    if (!(error <= (exact_zero ? 0.0 : margin)))
      wrong("out[" + std::to_string(d) + "] is " + std::to_string(found * unit) + ", exactly " +
            std::to_string(truth.out[d]));
    verdict.worst = std::isnan(error) ? HUGE_VAL : std::max(verdict.worst, error);
  }
  if (lse.empty()) return;
  const double found = lse[at];
  if (std::isinf(truth.lse)) {
    if (found != truth.lse) wrong("lse is " + std::to_string(found) + ", must be -inf");
    return;
  }
  const double error = std::abs(found - truth.lse) / std::max(1.0, std::abs(truth.lse));
  if (!(error <= tolerance.lse))
    wrong("lse is " + std::to_string(found) + ", exactly " + std::to_string(truth.lse));
  verdict.worst_lse = std::isnan(error) ? HUGE_VAL : std::max(verdict.worst_lse, error);
}

/// Compares out [rows.size(), heads, dim] and lse [rows.size(), heads] (or none), whose row i is
/// the token rows[i]. With `sampled` > 0 it compares about that many rows of each sequence, with
/// its first and last. A skipped row must hold the bytes 0xff that it was poisoned with.
inline Verdict judge(const ServingProblem& p, const std::vector<std::byte>& out,
                     const std::vector<float>& lse, const std::vector<std::int64_t>& rows,
                     const Tolerance& tolerance, std::int64_t sampled = 0) {
  const Serving& s = p.shape;
  std::vector<Verdict> parts(s.batch() * s.kv_heads);
  in_parallel(static_cast<std::int64_t>(parts.size()), [&](std::int64_t part) {
    const int b = static_cast<int>(part / s.kv_heads),
              kv_head = static_cast<int>(part % s.kv_heads);
    const std::int64_t stride = sampled > 0 ? std::max<std::int64_t>(1, s.q_lens[b] / sampled) : 1;
    launcher::RowMajor keys, values;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t t = rows[i] - p.query_start[b];
      if (t < 0 || t >= s.q_lens[b]) continue;
      if (t % stride != 0 && t != s.q_lens[b] - 1) continue;
      if (keys.size() == 0 && !p.skipped(b)) {
        keys = p.matrix(false, b, kv_head);
        values = p.matrix(true, b, kv_head);
      }
      for (int g = 0; g < s.heads / s.kv_heads; ++g)
        compare(p, parts[part], b, t, kv_head * (s.heads / s.kv_heads) + g, i, out, lse, keys,
                values, tolerance);
    }
  });
  Verdict all;
  for (const Verdict& part : parts) {
    all.compared += part.compared;
    all.wrong += part.wrong;
    all.worst = std::max(all.worst, part.worst);
    all.worst_lse = std::max(all.worst_lse, part.worst_lse);
    if (all.first.empty()) all.first = part.first;
  }
  return all;
}

/// A row of one head, and its keys and values, after scales.
struct SampledRow {
  std::int64_t at;  // of out and lse, both [tokens, heads]
  Eigen::VectorXd q;
  const launcher::RowMajor& keys;  // of the whole sequence
  const launcher::RowMajor& values;
  Interval seen;
  launcher::Exact exact;
};

/// f(const SampledRow&) for about `sampled` rows of each sequence, in every head.
template <class F>
void for_sampled_rows(const ServingProblem& p, std::int64_t sampled, const F& f) {
  const Serving& s = p.shape;
  const int group = s.heads / s.kv_heads;
  for (int b = 0; b < s.batch(); ++b)
    for (int kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
      const launcher::RowMajor keys = p.matrix(false, b, kv_head);
      const launcher::RowMajor values = p.matrix(true, b, kv_head);
      const std::int64_t step = std::max<std::int64_t>(1, s.q_lens[b] / sampled);
      for (std::int64_t t = 0; t < s.q_lens[b]; t += step)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
          f(SampledRow{(p.query_start[b] + t) * s.heads + head, p.query(b, t, head), keys, values,
                       p.visible(b, p.context(b) + t), p.exact(b, t, head, keys, values)});
    }
}

/// The distance of elements from exact ones, by norm.
struct Distance {
  double difference = 0, size = 0;  // squares
  std::int64_t compared = 0;

  void add(double found, double exact) {
    difference += (found - exact) * (found - exact);
    size += exact * exact;
    ++compared;
  }
  double norm() const { return std::sqrt(difference / size); }
};

}  // namespace longspan::tests

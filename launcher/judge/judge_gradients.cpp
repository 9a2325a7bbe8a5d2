#include "launcher/judge/judge_gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "launcher/judge/gradient_rounding.hpp"
#include "launcher/judge/gradients.hpp"
#include "launcher/judge/judged_rows.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

constexpr double kUnit = 0x1p-23;

/// The errors of one gradient, whose bound is known only when all are there.
struct Errors {
  std::vector<Farthest> each;  // with its bound by rounding
  double plain = 0, largest = 0;

  void add(double found, double exact, double of_plain, double rounding) {
    each.push_back({distance(found, exact), rounding});
    if (!std::isfinite(exact)) return;
    plain = std::max(plain, distance(of_plain, exact));
    largest = std::max(largest, std::abs(exact));
  }
  void add(const Errors& other) {
    each.insert(each.end(), other.each.begin(), other.each.end());
    plain = std::max(plain, other.plain);
    largest = std::max(largest, other.largest);
  }
};

/// The type whose ulp bounds gradients: kernels that multiply 16 bits round the weights to it. tf32
/// has as many bits as fp16.
DType type_of_bound(const Communicator& world, const Problem& p) {
  const DTypes& types = p.options.dtypes;
  const bool on_gpu = world.device() == Device::cuda;
  if (types.compute == DType::fp32) return on_gpu && types.tf32 ? DType::fp16 : p.gradient_dtype();
  return on_gpu || types.bf16_products ? types.compute : p.gradient_dtype();
}

/// 1.5 times plain's error, and 2 units in the last place of the largest.
GradientErrors conclude(const char* name, const Errors& errors, DType dtype) {
  const double ulp = dtype == DType::fp32 ? kUnit : dtype == DType::fp16 ? 0x1p-10 : 0x1p-7;
  GradientErrors found{.name = name, .plain_error = errors.plain, .largest = errors.largest};
  for (const auto& [error, rounding] : errors.each) {
    const Farthest one{error, std::max(1.5 * errors.plain + 2 * ulp * errors.largest, rounding)};
    found.max_error = std::max(found.max_error, error);
    found.farthest.add(one);
    found.wrong += !(one.error <= one.bound);
  }
  return found;
}

/// The gradients of one head of one row, as given.
struct Given {
  Eigen::VectorXd dout, out;
  double dlse = 0, lse = 0;

  /// Row i of `answer` is row `at` of the whole q.
  Given(const Problem& p, const Answer& answer, std::size_t i, std::int64_t at, int head)
      : dout(head_of(p.dout, at, head)),
        out(p.value_dim()),
        dlse(p.dlse ? head_of(*p.dlse, at, head)[0] : 0.0) {
    const std::int64_t of_head = static_cast<std::int64_t>(i) * p.options.heads + head;
    for (int d = 0; d < p.value_dim(); ++d)
      out[d] = load(answer.out.data(), p.out_dtype(), of_head * p.value_dim() + d);
    lse = answer.lse[static_cast<std::size_t>(of_head)];
  }
};

/// A matrix in `Real`, without a copy where it is that already.
template <class Real>
decltype(auto) in(const RowMajor& matrix) {
  if constexpr (std::is_same_v<Real, double>)
    return (matrix);
  else
    return MatrixOf<Real>(matrix.cast<Real>());
}

/// Weighs keys for a row in `Real`; from the run's results where `starts_from_them`.
template <class Real>
RowWeights<Real> weigh_in(const Problem& problem, int head, const Eigen::VectorXd& q,
                          const RowMajor& keys, const RowMajor& values, Interval visible,
                          std::span<const double> bias, std::span<const double> kept,
                          const Given& given, bool starts_from_them) {
  std::optional<Real> sink;
  if (!problem.sinks.empty()) sink = problem.sinks[static_cast<std::size_t>(head)];
  const std::vector<Real> added(bias.begin(), bias.end()), factors(kept.begin(), kept.end());
  const RowResult<Real> result{given.out.cast<Real>(), static_cast<Real>(given.lse)};
  return weigh<Real>(
      q.cast<Real>(), in<Real>(keys), in<Real>(values), visible, static_cast<Real>(problem.scale()),
      static_cast<Real>(problem.options.score.softcap), sink, added, given.dout.cast<Real>(),
      static_cast<Real>(given.dlse), starts_from_them ? &result : nullptr, factors);
}

WeighedRow weighed(const Problem& problem, const Eigen::VectorXd& q, const RowMajor& keys,
                   const RowMajor& values, std::span<const double> bias, const Given& given,
                   const RowWeights<double>& weights) {
  return {.q = q,
          .keys = keys,
          .values = values,
          .scale = problem.scale(),
          .softcap = problem.options.score.softcap,
          .bias = bias,
          .dout = given.dout,
          .dlse = given.dlse,
          .out = given.out,
          .lse = given.lse,
          .weights = weights,
          .unit = score_unit(problem.options)};
}

/// Compares dq of one row and head.
Errors compare_row(const Problem& problem, const Answer& judged, const JudgedRow& row) {
  const Options& o = problem.options;
  const std::int64_t position = problem.position(row.sequence, row.t);
  const Eigen::VectorXd q = query_row(problem, row.at, row.sequence, row.t, row.head);
  const Given given(problem, judged, row.i, row.at, row.head);
  const Interval visible = problem.visible(row.sequence, position);
  const std::vector<double> bias = problem.bias(row.sequence, row.t, row.head);
  const std::vector<double> kept = problem.dropout(row.sequence, row.t, row.head);
  const auto weights = [&]<class Real>(Real, bool starts_from_them) {
    return weigh_in<Real>(problem, row.head, q, row.keys, row.values, visible, bias, kept, given,
                          starts_from_them);
  };
  const RowWeights<double> exact = weights(0.0, false);
  Eigen::VectorXd dq = gradient_of_row<double>(exact, row.keys);
  Eigen::VectorXd plain =
      gradient_of_row<float>(weights(0.0f, true), in<float>(row.keys)).cast<double>();
  const Eigen::VectorXd rounding =
      rounding_of_gradients(weighed(problem, q, row.keys, row.values, bias, given, exact));
  if (o.rope.dim > 0)  // dq is that of the row before its rotation
    for (Eigen::VectorXd* gradient : {&dq, &plain}) rotate_exactly(*gradient, o.rope, -position);
  Errors errors;
  const std::int64_t first = (static_cast<std::int64_t>(row.i) * o.heads + row.head) * o.head_dim;
  for (int c = 0; c < o.head_dim; ++c)
    errors.add(load(judged.dq.data(), problem.gradient_dtype(), first + c), dq[c],
               rounded(problem.gradient_dtype(), static_cast<float>(plain[c])), rounding[c]);
  return errors;
}

GradientErrors judge_rows(const Communicator& world, const Problem& problem, const Answer& judged) {
  std::vector<Errors> parts(
      static_cast<std::size_t>(count_judged(world, problem.options, std::ssize(judged.rows))));
  Errors mine;
  together(world, "comparison of gradients with float64", [&] {
    for_judged_rows(world, problem, judged.rows, [&](const JudgedRow& row) {
      parts[static_cast<std::size_t>(row.number)] = compare_row(problem, judged, row);
    });
    for (const Errors& part : parts) mine.add(part);
  });
  for (const std::vector<double>& theirs :
       gather_numbers(world, {mine.plain, mine.largest}, "gather of errors")) {
    mine.plain = std::max(mine.plain, theirs[0]);
    mine.largest = std::max(mine.largest, theirs[1]);
  }
  const GradientErrors own = conclude("dq", mine, type_of_bound(world, problem));
  GradientErrors all{.name = own.name, .plain_error = mine.plain, .largest = mine.largest};
  for (const std::vector<double>& theirs : gather_numbers(
           world,
           {own.max_error, static_cast<double>(own.wrong), own.farthest.error, own.farthest.bound},
           "gather of wrong elements")) {
    all.max_error = std::max(all.max_error, theirs[0]);
    all.wrong += static_cast<std::int64_t>(theirs[1]);
    all.farthest.add({theirs[2], theirs[3]});
  }
  return all;
}

/// The sums over rows for the judged keys of a sequence, and one kv head.
struct KeySums {
  GradientsOf<double> exact;
  GradientsOf<float> plain;
  GradientsOf<double> squares, common;  // bounds of rounding, in units of 2 u

  KeySums(std::int64_t keys, const Problem& p)
      : exact{RowMajor::Zero(keys, p.k.dim), RowMajor::Zero(keys, p.v.dim)},
        plain{MatrixOf<float>::Zero(keys, p.k.dim), MatrixOf<float>::Zero(keys, p.v.dim)},
        squares(exact),
        common(exact) {}

  void add(const KeyRounding& of_head) {
    squares.dk += of_head.dk_squares;
    squares.dv += of_head.dv_squares;
    common.dk += of_head.dk_scores.cwiseAbs() + of_head.dk_biases.cwiseAbs();
    common.dv += of_head.dv_scores.cwiseAbs() + of_head.dv_biases.cwiseAbs();
  }
};

/// The same of sinks: one head's.
struct SinkSums {
  double exact = 0, plain = 0;
  double terms = 0;  // absolute ones
};

/// The judged keys of one sequence.
struct JudgedKeys {
  int sequence;
  std::vector<std::int64_t> positions;  // ascending
  std::size_t first;                    // of all judged keys

  /// Those that lie in an interval of positions, by their index here.
  Interval within(Interval visible) const {
    const auto at = [&](std::int64_t position) {
      return std::lower_bound(positions.begin(), positions.end(), position) - positions.begin();
    };
    return {at(visible.begin), visible.empty() ? at(visible.begin) : at(visible.end)};
  }
};

std::vector<JudgedKeys> by_sequence(const Problem& problem, const std::vector<std::int64_t>& keys) {
  const auto start = problem.key_start();
  std::vector<JudgedKeys> all;
  std::size_t at = 0;
  for (int b = 0; b < problem.batch(); ++b) {
    JudgedKeys own{b, {}, at};
    for (; at < keys.size() && keys[at] < start[b + 1]; ++at)
      own.positions.push_back(keys[at] - start[b]);
    all.push_back(own);
  }
  return all;
}

/// A rank's part of the sums over rows, for one kv head: the judged keys by sequence, and the sinks
/// of its heads.
struct HeadSums {
  std::vector<KeySums> keys;
  std::vector<SinkSums> sinks;
};

HeadSums sum_rows(const Communicator& world, const Problem& problem, const Answer& answer,
                  const std::vector<JudgedKeys>& judged, int kv_head) {
  const Options& o = problem.options;
  const int group = o.heads / o.kv_heads;
  const auto query_start = problem.query_start();
  const auto key_start = problem.key_start();
  HeadSums sums{{}, std::vector<SinkSums>(static_cast<std::size_t>(group))};
  std::vector<RowMajor> keys, values;
  for (const JudgedKeys& own : judged) {
    const auto count = std::ssize(own.positions);
    sums.keys.emplace_back(count, problem);
    keys.emplace_back(count, problem.k.dim);
    values.emplace_back(count, problem.v.dim);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t key = key_start[own.sequence] + own.positions[j];
      keys.back().row(j) = head_of(problem.k, key, kv_head).transpose();
      values.back().row(j) = head_of(problem.v, key, kv_head).transpose();
    }
  }
  // Rows that every rank has are shared between the ranks.
  const auto rows = std::ssize(answer.rows);
  const bool all_have_them = !problem.queries;
  const std::int64_t begin = all_have_them ? rows * world.rank() / world.size() : 0;
  const std::int64_t end = all_have_them ? rows * (world.rank() + 1) / world.size() : rows;
  for (int h = 0; h < group; ++h) {
    const int head = kv_head * group + h;
    std::vector<KeyRounding> rounding;
    rounding.reserve(keys.size());
    for (const RowMajor& own : keys)
      rounding.emplace_back(own.rows(), problem.k.dim, problem.v.dim);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = answer.rows[i];
      const int b = static_cast<int>(std::upper_bound(query_start.begin(), query_start.end(), at) -
                                     query_start.begin() - 1);
      const std::int64_t t = at - query_start[b];
      const Interval visible = judged[b].within(problem.visible(b, problem.position(b, t)));
      const Eigen::VectorXd q = query_row(problem, at, b, t, head);
      const Given given(problem, answer, static_cast<std::size_t>(i), at, head);
      const std::vector<double> whole = problem.bias(b, t, head);
      const std::vector<double> whole_kept = problem.dropout(b, t, head);
      std::vector<double> bias, kept;
      for (const std::int64_t position : judged[b].positions) {
        if (!whole.empty()) bias.push_back(whole[position]);
        if (!whole_kept.empty()) kept.push_back(whole_kept[position]);
      }
      const auto weights = [&]<class Real>(Real) {
        return weigh_in<Real>(problem, head, q, keys[b], values[b], visible, bias, kept, given,
                              true);
      };
      const RowWeights<double> exact = weights(0.0);
      const RowWeights<float> plain = weights(0.0f);
      add_to_keys<double>(exact, q, given.dout, sums.keys[b].exact);
      add_to_keys<float>(plain, q.cast<float>(), given.dout.cast<float>(), sums.keys[b].plain);
      rounding_of_gradients(weighed(problem, q, keys[b], values[b], bias, given, exact),
                            &rounding[b]);
      SinkSums& sink = sums.sinks[h];
      sink.exact += exact.dsink;
      sink.plain += plain.dsink;
      if (!problem.sinks.empty())
        sink.terms += std::exp(problem.sinks[head] - given.lse) *
                      (given.dout.cwiseProduct(given.out).cwiseAbs().sum() + std::abs(given.dlse));
    }
    for (std::size_t b = 0; b < rounding.size(); ++b) sums.keys[b].add(rounding[b]);
  }
  return sums;
}

/// Calls visit for every number of the sums, in one order.
template <class Visit>
void visit_numbers(HeadSums& sums, const Visit& visit) {
  const auto all = [&](auto& matrix) {
    for (Eigen::Index i = 0; i < matrix.size(); ++i) visit(matrix.data()[i]);
  };
  for (KeySums& keys : sums.keys) {
    all(keys.exact.dk), all(keys.exact.dv);
    all(keys.plain.dk), all(keys.plain.dv);
    all(keys.squares.dk), all(keys.squares.dv);
    all(keys.common.dk), all(keys.common.dv);
  }
  for (SinkSums& sink : sums.sinks) visit(sink.exact), visit(sink.plain), visit(sink.terms);
}

/// Adds the parts of all ranks.
void add_ranks(const Communicator& world, std::vector<HeadSums>& sums) {
  std::vector<double> mine;
  for (HeadSums& head : sums) visit_numbers(head, [&](auto& number) { mine.push_back(number); });
  std::vector<double> all(mine.size(), 0.0);
  for (const std::vector<double>& theirs : gather_numbers(world, mine, "sums of gradients"))
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += theirs[i];
  auto at = all.begin();
  for (HeadSums& head : sums)
    visit_numbers(head, [&](auto& number) {
      number = static_cast<std::remove_reference_t<decltype(number)>>(*at++);
    });
}

/// Compares dk or dv of the judged keys of a sequence and a kv head.
void compare_keys(const Problem& problem, const std::vector<std::byte>& found, const JudgedKeys& of,
                  int kv_head, const RowMajor& exact, const MatrixOf<float>& plain,
                  const RowMajor& squares, const RowMajor& common, Errors& errors) {
  const DType dtype = problem.gradient_dtype();
  for (Eigen::Index j = 0; j < exact.rows(); ++j) {
    const auto key = static_cast<std::int64_t>(of.first) + j;
    for (Eigen::Index c = 0; c < exact.cols(); ++c) {
      const std::int64_t at = (key * problem.options.kv_heads + kv_head) * exact.cols() + c;
      const double rounding =
          kUnit *
          (std::sqrt(squares(j, c) + kSegment / 2.0 * exact(j, c) * exact(j, c)) + common(j, c));
      errors.add(load(found.data(), dtype, at), exact(j, c), rounded(dtype, plain(j, c)), rounding);
    }
  }
}

}  // namespace

void judge_gradients(const Communicator& world, const Problem& problem, const Answer& answer,
                     const Answer& judged, Judgement& judgement) {
  const Options& o = problem.options;
  judgement.gradients = {judge_rows(world, problem, judged)};

  const std::vector<JudgedKeys> keys = by_sequence(problem, judged.keys);
  std::vector<HeadSums> sums(static_cast<std::size_t>(o.kv_heads));
  together(world, "comparison of gradients with float64", [&] {
    parallel_for(o.kv_heads, o.threads, [&](std::int64_t h) {
      sums[h] = sum_rows(world, problem, answer, keys, static_cast<int>(h));
    });
  });
  add_ranks(world, sums);
  Errors dk, dv, dsinks;
  double most_terms = 0;
  for (const HeadSums& head : sums)
    for (const SinkSums& sink : head.sinks) most_terms = std::max(most_terms, sink.terms);
  for (int h = 0; h < o.kv_heads; ++h) {
    for (std::size_t b = 0; b < keys.size(); ++b) {
      const KeySums& own = sums[h].keys[b];
      compare_keys(problem, judged.dk, keys[b], h, own.exact.dk, own.plain.dk, own.squares.dk,
                   own.common.dk, dk);
      compare_keys(problem, judged.dv, keys[b], h, own.exact.dv, own.plain.dv, own.squares.dv,
                   own.common.dv, dv);
    }
    for (std::size_t i = 0; i < sums[h].sinks.size() && !judged.dsinks.empty(); ++i) {
      const SinkSums& sink = sums[h].sinks[i];
      dsinks.add(judged.dsinks[h * sums[h].sinks.size() + i], sink.exact, sink.plain,
                 2 * kUnit * most_terms);
    }
  }
  judgement.gradients.push_back(conclude("dk", dk, type_of_bound(world, problem)));
  judgement.gradients.push_back(conclude("dv", dv, type_of_bound(world, problem)));
  if (!judged.dsinks.empty())
    judgement.gradients.push_back(conclude("dsinks", dsinks, DType::fp32));
  for (const GradientErrors& of : judgement.gradients) judgement.wrong += of.wrong;
  judgement.right = judgement.right && judgement.wrong == 0;
}

}  // namespace longspan::launcher

// The oracle: attention of one query row in float64, with the softmax materialised. It is naive on
// purpose, and calls no code of the library: the rule of visible keys is written here once more.
//
//     s_j = score(q . k_j) + bias_j for visible j,  p = exp(s - max s),  out = sum p_j v_j / sum p
//
// and with dropout out = sum z_j p_j v_j / sum p.
#pragma once

#include <Random123/philox.h>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "longspan/mask.hpp"
#include "longspan/options.hpp"
#include "longspan/types.hpp"

namespace longspan::launcher {

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// The keys of a prefix that the query at `position` sees: the first mask.prefix keys, as far as
/// window, chunks and lookback hide them only because they are too far on the left.
inline Interval seen_prefix(Mask mask, std::int64_t position, std::int64_t kv_len,
                            std::int64_t first_key) {
  Interval seen{first_key, std::min(kv_len, mask.prefix)};
  if (mask.causal) seen.end = std::min(seen.end, position + 1);
  if (!mask.causal && mask.right >= 0) seen.end = std::min(seen.end, position + mask.right + 1);
  if (mask.chunk > 0 && position < first_key) seen.end = std::min(seen.end, first_key);
  if (mask.chunk > 0 && position >= first_key)
    seen.end =
        std::min(seen.end, first_key + ((position - first_key) / mask.chunk + 1) * mask.chunk);
  return seen;
}

/// The keys that the query at `position` of a sequence of `kv_len` keys sees: those j with
///
///     0 <= j < kv_len,   causal: j <= position,   window w > 0: position - j < w,
///     right r >= 0, not causal: j - position <= r,   first_key <= j,
///     chunk c > 0: their chunks, floor((j - first_key) / c), are equal, or that of j is one of the
///     `lookback` before
///
/// or in the range of the query, if some range [ranges[2 r], ranges[2 r + 1]) has it. With
/// clamp_ranges such a key must obey window and chunk too, on the left. In either case it is in the
/// sequence, no padding, and of the query's document. With a prefix this is an interval that holds
/// them; hide_unseen says which others it holds. Document d of `documents`, if given, has the
/// positions from documents[d] up to documents[d + 1]. A position outside of all sees nothing.
inline Interval seen_keys(const Mask& mask, std::int64_t position, std::int64_t kv_len,
                          std::span<const std::int64_t> documents = {}, std::int64_t first_key = 0,
                          std::span<const std::int64_t> ranges = {}) {
  Interval seen{first_key, kv_len};
  if (const Interval early = seen_prefix(mask, position, kv_len, first_key); !early.empty()) {
    Mask rest = mask;
    rest.prefix = 0;
    const Interval late = seen_keys(rest, position, kv_len, documents, first_key, ranges);
    return {first_key, late.empty() ? early.end : std::max(early.end, late.end)};
  }
  const auto no_earlier = [&](std::int64_t first) { seen.begin = std::max(seen.begin, first); };
  const auto no_later = [&](std::int64_t last) { seen.end = std::min(seen.end, last + 1); };
  if (mask.causal) no_later(position);
  if (!mask.causal && mask.right >= 0) no_later(position + mask.right);
  if (mask.window > 0) no_earlier(position - mask.window + 1);
  if (mask.chunk > 0) {
    const std::int64_t number =
        position < first_key ? -1 : (position - first_key) / mask.chunk;  // padding sees nothing
    no_earlier(first_key + (number - mask.lookback) * mask.chunk);
    no_later(first_key + (number + 1) * mask.chunk - 1);
  }
  for (std::size_t r = 0; r + 1 < ranges.size(); r += 2) {
    if (position < ranges[r] || position >= ranges[r + 1]) continue;
    if (!mask.clamp_ranges) seen.begin = std::max(first_key, std::min(seen.begin, ranges[r]));
    seen.end = std::min(kv_len, std::max(seen.end, ranges[r + 1]));
  }
  if (documents.empty()) return seen;
  for (std::size_t d = 0; d + 1 < documents.size(); ++d) {
    if (position < documents[d] || position >= documents[d + 1]) continue;
    no_earlier(documents[d]);
    no_later(documents[d + 1] - 1);
    return seen;
  }
  return {position, position};
}

/// Hides keys between the prefix and the other keys that the query at `position` sees, in its bias
/// [kv_len], which is made if there is none.
inline void hide_unseen(std::vector<double>& bias, const Mask& mask, std::int64_t position,
                        std::int64_t kv_len, std::int64_t first_key = 0,
                        std::span<const std::int64_t> ranges = {}) {
  if (mask.prefix == 0) return;
  bias.resize(static_cast<std::size_t>(kv_len));
  Mask rest = mask;
  rest.prefix = 0;
  const Interval early = seen_prefix(mask, position, kv_len, first_key);
  const Interval late = seen_keys(rest, position, kv_len, {}, first_key, ranges);
  for (std::int64_t j = 0; j < kv_len; ++j)
    if (!early.contains(j) && !late.contains(j))
      bias[static_cast<std::size_t>(j)] = -std::numeric_limits<double>::infinity();
}

/// The starts of sequence b in those of a batch of `sequences`, [batch, count + 1].
inline std::span<const std::int64_t> of_sequence(std::span<const std::int64_t> documents, int b,
                                                 int sequences) {
  const std::size_t each = documents.size() / static_cast<std::size_t>(sequences);
  return documents.subspan(static_cast<std::size_t>(b) * each, each);
}

/// The factor of ALiBi's slope, for the query at position i and the key at position j:
///
///     context: j - context_len,   query: -|i - j|,   sqrt: -sqrt(i - j), and 0 for keys behind i.
inline double alibi_term(Alibi alibi, std::int64_t i, std::int64_t j, std::int64_t context_len) {
  const auto ahead = static_cast<double>(i - j);
  if (alibi == Alibi::context) return static_cast<double>(j - context_len);
  return alibi == Alibi::query ? -std::abs(ahead) : -std::sqrt(std::max(ahead, 0.0));
}

/// Rotates a row by RoPE: `cos_sin(i)` is the cosine and the sine of pair i.
template <class CosSin>
void rotate_exactly(Eigen::Ref<Eigen::VectorXd> row, const RopeOptions& rope,
                    const CosSin& cos_sin) {
  const int half = rope.dim / 2;
  for (int i = 0; i < half; ++i) {
    double& x = row[rope.interleaved ? 2 * i : i];
    double& y = row[rope.interleaved ? 2 * i + 1 : half + i];
    const auto [cos, sin] = cos_sin(i);
    const double turned = x * cos - y * sin;
    y = x * sin + y * cos;
    x = turned;
  }
}

/// The cosine and the sine of a pair at a position. A long double keeps those of large positions.
inline std::pair<double, double> cos_sin_of(const RopeOptions& rope, std::int64_t position,
                                            int pair) {
  const long double power = -2.0L * pair / rope.dim;
  const long double angle = static_cast<long double>(position) / rope.scale *
                            std::pow(static_cast<long double>(rope.base), power);
  return {static_cast<double>(std::cos(angle)), static_cast<double>(std::sin(angle))};
}

/// The same by the angles of a position.
inline void rotate_exactly(Eigen::Ref<Eigen::VectorXd> row, const RopeOptions& rope,
                           std::int64_t position) {
  rotate_exactly(row, rope, [&](int i) { return cos_sin_of(rope, position, i); });
}

/// A row of weights, as dropout counts it, and the probability that one is dropped.
struct DropoutOf {
  double p = 0;
  std::uint64_t seed = 0, offset = 0;
  std::uint32_t sequence = 0, head = 0;
  std::int64_t position = 0;
};

/// The factors z of a row's keys, [kv_len]: 0, or 1 / (1 - p) in `Real`.
template <class Real>
std::vector<double> dropout_factors(const DropoutOf& of, std::int64_t kv_len) {
  const auto low = [](auto x) { return static_cast<std::uint32_t>(x); };
  const r123::Philox4x32 philox;
  const auto key =
      philox({{low(of.offset), low(of.offset >> 32), 0, 0}}, {{low(of.seed), low(of.seed >> 32)}});
  const double least = std::floor(of.p * 0x1p32), factor = static_cast<Real>(1 / (1 - of.p));
  std::vector<double> factors(static_cast<std::size_t>(kv_len));
  for (std::int64_t j = 0; j < kv_len; ++j) {
    const auto words =
        philox({{low(j / 4), low(of.position), of.head, of.sequence}}, {{key[0], key[1]}});
    factors[static_cast<std::size_t>(j)] =
        words[static_cast<std::size_t>(j % 4)] >= least ? factor : 0;
  }
  return factors;
}

struct Exact {
  Eigen::VectorXd out;  // [dim]
  double lse;           // natural log, with the sink; -inf when nothing is visible
};

/// Attends one row. keys and values are [kv_len, dim]: the whole sequence of one kv head, in order
/// of position; they may be blocks of a larger matrix. A sink takes part in the sum and adds no
/// value. `bias` [kv_len] (ALiBi, qq_bias; natural units) is added to the scores; -inf hides its
/// key: neither its score nor its value counts, whatever they hold. `kept` [kv_len] are the factors
/// of dropout.
inline Exact attend_exactly(const Eigen::VectorXd& q, const Eigen::Ref<const RowMajor>& keys,
                            const Eigen::Ref<const RowMajor>& values, Interval visible,
                            double scale, double softcap = 0,
                            std::optional<double> sink = std::nullopt,
                            std::span<const double> bias = {}, std::span<const double> kept = {}) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Exact exact{Eigen::VectorXd::Zero(values.cols()), sink.value_or(-kInfinity)};
  if (visible.empty()) return exact;
  const Eigen::Index first = visible.begin, count = visible.end - visible.begin;

  Eigen::ArrayXd s = (keys.middleRows(first, count) * q).array() * scale;
  if (softcap != 0) s = softcap * (s / softcap).tanh();
  bool some_hidden = false;
  for (Eigen::Index j = 0; j < count && !bias.empty(); ++j) {
    const double extra = bias[first + j];
    s[j] = extra == -kInfinity ? extra : s[j] + extra;
    some_hidden = some_hidden || s[j] == -kInfinity;
  }
  const double top = std::max(s.maxCoeff(), sink.value_or(-kInfinity));
  if (top == -kInfinity) return exact;
  const Eigen::VectorXd p = (s - top).exp();
  const double sum = p.sum() + (sink ? std::exp(*sink - top) : 0.0);
  if (some_hidden || !kept.empty()) {
    for (Eigen::Index j = 0; j < count; ++j) {
      const double z = kept.empty() ? 1.0 : kept[first + j];
      if (s[j] != -kInfinity && z != 0)
        exact.out += z * p[j] / sum * values.row(first + j).transpose();
    }
  } else {
    exact.out = values.middleRows(first, count).transpose() * p / sum;
  }
  exact.lse = top + std::log(sum);
  return exact;
}

}  // namespace longspan::launcher

// A merge of finished outputs for its tests: parts with gaps between their rows, empty sides with
// NaN payloads, everything poisoned, and the merge in float64.
#pragma once

#include <ostream>

#include "tests/support/on_device.hpp"

namespace longspan::tests {

struct OutputsCase {
  std::int64_t tokens = 7;
  int heads = 3, dim = 64, parts = 2;
  DType in = DType::fp32, out = DType::fp32;
  std::optional<DType> suffix = {};     // of the second of two parts; like `in` by default
  std::vector<float> part_scales = {};  // a stored x means x * scale; empty: none
  LogBase base = LogBase::e;
  bool nan_is_empty = false;
  bool heads_first = false;  // layout of every lse
  bool wants_lse = true;
  bool in_place = false;
  int place = 0;  // the part that then becomes the result: the first, or of two the second
  std::int64_t with_prefix = -1;
  std::optional<float> scale;
  bool inverse = false;
  int row_gap = 0, head_gap = 0, offset = 0;  // elements

  std::int64_t rows() const { return tokens * heads; }
  DType type(int part) const { return part == 1 && parts == 2 ? suffix.value_or(in) : in; }
  float part_scale(int part) const { return part_scales.empty() ? 1.0f : part_scales[part]; }
  /// Bytes ahead of a part; of all parts for part == parts.
  std::int64_t part_at(int part) const {
    std::int64_t bytes = 0;
    for (int n = 0; n < part; ++n) {
      bytes += size() * static_cast<std::int64_t>(size_of(type(n)));
      const auto next = static_cast<std::int64_t>(n + 1 < parts ? size_of(type(n + 1)) : 1);
      bytes = (bytes + next - 1) / next * next;
    }
    return bytes;
  }
  std::int64_t head_stride() const { return dim + head_gap; }
  std::int64_t row_stride() const { return heads * head_stride() + row_gap; }
  std::int64_t size() const { return offset + tokens * row_stride(); }  // elements of a part
  std::int64_t at(std::int64_t token, int head) const {
    return offset + token * row_stride() + head * head_stride();
  }
  std::int64_t lse_at(std::int64_t token, int head) const {
    return heads_first ? head * tokens + token : token * heads + head;
  }
};

inline std::ostream& operator<<(std::ostream& out, const OutputsCase& c) {
  return out << c.parts << " parts, " << c.tokens << " x " << c.heads << " x " << c.dim << " "
             << name(c.in) << " " << (c.suffix ? name(*c.suffix) : "") << " -> " << name(c.out)
             << " base " << (c.base == LogBase::e ? "e" : "2") << " heads first " << c.heads_first
             << " in place " << c.in_place << " of part " << c.place << " with prefix "
             << c.with_prefix << " gaps " << c.row_gap << " " << c.head_gap << " offset "
             << c.offset;
}

/// [parts, size] elements and [parts, rows] lse, on the host.
struct OutputsData {
  std::vector<std::byte> out;
  std::vector<float> lse;

  float value(const OutputsCase& c, int part, std::int64_t at) const {
    return load_element(out.data() + c.part_at(part), c.type(part), at) * c.part_scale(part);
  }
  void set(const OutputsCase& c, int part, std::int64_t at, float value) {
    store_element(out.data() + c.part_at(part), c.type(part), at, value);
  }
};

struct OutputsResult {
  std::vector<std::byte> out;
  std::vector<float> lse;

  bool same_bits(const OutputsResult& other) const {
    return out == other.out && lse.size() == other.lse.size() &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

/// The expected merge of one (token, head): float64, straight from the definition.
struct ExactOutput {
  std::vector<double> out, size;  // and the size of what was added, see below
  double lse = -std::numeric_limits<double>::infinity();
  bool copied = false;  // the suffix as it is, whatever its lse
};
inline ExactOutput merge_exactly(const OutputsCase& c, const OutputsData& data, std::int64_t token,
                                 int head) {
  ExactOutput exact{std::vector<double>(c.dim), std::vector<double>(c.dim)};
  const double unit = c.base == LogBase::e ? 1.0 : std::log(2.0);
  const double factor = !c.scale ? 1.0 : c.inverse ? *c.scale : 1.0 / *c.scale;
  if (c.parts == 2 && c.with_prefix >= 0 && token >= c.with_prefix) {  // a copy
    for (int d = 0; d < c.dim; ++d) {
      exact.out[d] = factor * data.value(c, 1, c.at(token, head) + d);
      exact.size[d] = std::abs(exact.out[d]);
    }
    exact.lse = data.lse[c.rows() + c.lse_at(token, head)];
    exact.copied = true;
    return exact;
  }
  std::vector<double> lse(c.parts);
  double top = -std::numeric_limits<double>::infinity();
  bool is_nan = false;
  for (int n = 0; n < c.parts; ++n) {
    const float given = data.lse[n * c.rows() + c.lse_at(token, head)];
    lse[n] = given * unit;
    if (std::isinf(given) || (std::isnan(given) && c.nan_is_empty)) lse[n] = -kInf;
    is_nan = is_nan || std::isnan(lse[n]);
    top = std::max(top, lse[n]);
  }
  double sum = 0;
  for (int n = 0; n < c.parts; ++n) {
    if (lse[n] == -kInf) continue;
    const double weight = std::exp(lse[n] - top);
    sum += weight;
    // fp32 arithmetic rounds their difference, and its conversion to base 2. So a weight errs the
    // more, the farther they are from 0; for numbers far from 0 it is 0 or 1. one_rounding() allows
    // for 10 roundings.
    const double roundings = 10 + 2 * std::min(std::abs(lse[n]) + std::abs(top), 100.0);
    for (int d = 0; d < c.dim; ++d) {
      const double value = data.value(c, n, c.at(token, head) + d);
      exact.out[d] += weight * value;
      exact.size[d] += weight * std::abs(value) * roundings / 10;
    }
  }
  if (sum == 0 && !is_nan) return exact;
  for (double& value : exact.out) value *= is_nan ? kNaN : factor / sum;
  for (double& value : exact.size) value *= factor / sum;
  exact.lse = is_nan ? kNaN : (top + std::log(sum)) / unit;
  return exact;
}

class MergeOutputs : public OnDevice {
 protected:
  /// Random parts. Of 10 sides one or two are empty, with an lse of +inf or -inf and NaN payloads.
  OutputsData make(const OutputsCase& c, int empty_in_ten = 2) {
    OutputsData data{std::vector<std::byte>(c.part_at(c.parts), std::byte{0xff}),
                     std::vector<float>(c.parts * c.rows())};
    for (int n = 0; n < c.parts; ++n)
      for (std::int64_t token = 0; token < c.tokens; ++token)
        for (int head = 0; head < c.heads; ++head) {
          float& lse = data.lse[n * c.rows() + c.lse_at(token, head)];
          lse = 3 * normal();
          const bool empty = below(10) < empty_in_ten;
          if (empty) lse = below(2) == 0 ? kInf : -kInf;
          if (empty) continue;
          for (int d = 0; d < c.dim; ++d) data.set(c, n, c.at(token, head) + d, normal());
        }
    return data;
  }

  OutputsResult merge(const OutputsCase& c, const OutputsData& data) const {
    const auto in = on_device(data.out);
    const auto in_lse = on_device(data.lse);
    const std::size_t bytes = static_cast<std::size_t>(c.size()) * size_of(c.out);
    const auto own = poisoned<std::byte>(c.in_place ? 0 : bytes);
    const auto own_lse = poisoned<float>(static_cast<std::size_t>(c.rows()));
    const auto scale = on_device(std::vector<float>{c.scale.value_or(1.0f)});
    kernels::MergeOutputsParams p;
    p.parts = c.parts;
    const auto part_scales = on_device(c.part_scales);
    for (int n : {0, 1}) {
      p.in_dtype[n] = c.type(n);
      if (!c.part_scales.empty()) p.in_scale[n] = part_scales.data() + (c.parts == 2 ? n : 0);
    }
    const auto lse_view = [&](float* from) {
      return kernels::LseView{from, c.heads_first ? 1 : c.heads, c.heads_first ? c.tokens : 1};
    };
    for (int n = 0; n < std::min(c.parts, 2); ++n) {
      const std::int64_t ahead = c.offset * static_cast<std::int64_t>(size_of(c.type(n)));
      p.in[n] = {in.data() + c.part_at(n) + ahead, c.row_stride(), c.head_stride()};
      p.in_lse[n] = lse_view(in_lse.data() + n * c.rows());
    }
    p.part_stride = c.size();
    p.lse_part_stride = c.rows();
    p.base = c.base;
    p.nan_is_empty = c.nan_is_empty;
    p.with_prefix = c.with_prefix;
    p.tokens = c.tokens;
    p.heads = c.heads;
    p.dim = c.dim;
    p.dtype = c.out;
    if (c.scale) p.out_scale = {scale.data(), c.inverse};
    p.out = {c.in_place ? p.in[c.place].data
                        : own.data() + c.offset * static_cast<std::int64_t>(size_of(c.out)),
             c.row_stride(), c.head_stride()};
    if (c.wants_lse) p.lse = c.in_place ? p.in_lse[c.place] : lse_view(own_lse.data());
    backend().merge_outputs(p, {});
    OutputsResult result{c.in_place ? in.values() : own.values(),
                         c.in_place ? in_lse.values() : own_lse.values()};
    if (c.in_place) {
      result.out.erase(result.out.begin(), result.out.begin() + c.part_at(c.place));
      result.lse.erase(result.lse.begin(), result.lse.begin() + c.place * c.rows());
    }
    result.out.resize(bytes);
    result.lse.resize(static_cast<std::size_t>(c.rows()));
    return result;
  }

  /// One (token, head) of a result. False once something is wrong, to stop there.
  static bool row_is_right(const OutputsCase& c, const OutputsData& data,
                           const OutputsResult& result, std::int64_t token, int head) {
    const ExactOutput exact = merge_exactly(c, data, token, head);
    for (int d = 0; d < c.dim; ++d) {
      const double got = load_element(result.out.data(), c.out, c.at(token, head) + d);
      double expected = exact.out[d];
      if (is_fp8(c.out)) expected = std::clamp(expected, -largest(c.out), largest(c.out));
      const double allowed = one_rounding(c.out, expected, exact.size[d]);
      const bool right = std::isnan(expected) ? std::isnan(got)
                         : std::isinf(exact.lse) && !exact.copied
                             ? got == 0
                             : std::abs(got - expected) <= allowed;  // false for NaN
      EXPECT_TRUE(right) << c << ": token " << token << " head " << head << " element " << d
                         << " is " << got << ", not " << expected;
      if (!right) return false;
    }
    const float lse = result.lse[c.lse_at(token, head)];
    const bool right = !c.wants_lse            ? std::isnan(lse)
                       : std::isnan(exact.lse) ? std::isnan(lse)
                       : std::isinf(exact.lse)
                           ? lse == exact.lse
                           : std::abs(lse - exact.lse) <= 1e-6 * (1 + std::abs(exact.lse));
    EXPECT_TRUE(right) << c << ": lse of token " << token << " head " << head << " is " << lse
                       << ", not " << exact.lse;
    return right;
  }

  void expect_right(const OutputsCase& c, const OutputsData& data, const OutputsResult& result) {
    for (std::int64_t token = 0; token < c.tokens; ++token)
      for (int head = 0; head < c.heads; ++head)
        if (!row_is_right(c, data, result, token, head)) return;
  }
  void expect_right(const OutputsCase& c) {
    const OutputsData data = make(c);
    expect_right(c, data, merge(c, data));
  }
};

}  // namespace longspan::tests

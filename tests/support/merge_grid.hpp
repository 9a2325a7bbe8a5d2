// The acceptance grid of the two-way merge: 2,592 cases as in the tests of serving engines, with
// rows that are empty on one side or on both, against float64.
#pragma once

#include <sstream>
#include <string>

#include "tests/support/on_device.hpp"
#include "tests/support/random_elements.hpp"

namespace longspan::tests {

struct GridCase {
  std::int64_t tokens;
  int heads, dim;
  DType dtype;
  std::int64_t with_prefix;  // -1: none
  bool fp8;

  std::int64_t rows() const { return tokens * heads; }
  std::int64_t size() const { return rows() * dim; }
  DType out() const { return fp8 ? e4m3 : dtype; }
  static constexpr float kScale = 0.05f;

  std::string text() const {
    std::ostringstream out;
    out << tokens << " tokens, " << heads << " heads, dim " << dim << ", " << name(dtype)
        << ", with prefix " << with_prefix << ", fp8 " << fp8;
    return out.str();
  }
};

inline std::vector<GridCase> merge_grid() {
  std::vector<GridCase> cases;
  for (std::int64_t tokens : {256, 512, 613, 1024, 1536, 4096})
    for (int heads : {4, 8, 16, 32, 48, 64})
      for (int dim : {32, 48, 64, 96, 128, 256})
        for (DType dtype : {fp32, fp16, bf16})
          for (std::int64_t with_prefix : {-1, 128})
            for (bool fp8 : {false, true})
              cases.push_back({tokens, heads, dim, dtype, with_prefix, fp8});
  return cases;
}

inline constexpr std::int64_t kMostElements = std::int64_t{4096} * 64 * 256;

/// [2, heads, tokens]. Of all rows 25 % have both sides -inf, 10 % both +inf; of the others 10 %
/// have a prefix of +inf, and 10 % a suffix. Rows past the prefix are copied, whatever their lse.
inline std::vector<float> grid_lse(const GridCase& c, std::mt19937& random) {
  std::vector<float> lse(2 * c.rows());
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < c.rows(); ++i) {
    float &prefix = lse[i], &suffix = lse[c.rows() + i];
    prefix = normal(random);
    suffix = normal(random);
    const unsigned both = random() % 100, one = random() % 100;
    if (both < 35) {
      prefix = suffix = both < 25 ? -kInf : kInf;
    } else if (one < 10) {
      prefix = kInf;
    } else if (one < 20) {
      suffix = kInf;
    }
  }
  return lse;
}

inline kernels::MergeOutputsParams grid_params(const GridCase& c, void* prefix, void* suffix,
                                               float* lse, void* out, float* out_lse,
                                               const float* scale) {
  kernels::MergeOutputsParams p;
  p.in_dtype[0] = p.in_dtype[1] = c.dtype;
  const std::int64_t row = std::int64_t{c.heads} * c.dim;
  p.in[0] = {prefix, row, c.dim};
  p.in[1] = {suffix, row, c.dim};
  p.in_lse[0] = {lse, 1, c.tokens};
  p.in_lse[1] = {lse + c.rows(), 1, c.tokens};
  p.with_prefix = c.with_prefix;
  p.tokens = c.tokens;
  p.heads = c.heads;
  p.dim = c.dim;
  p.dtype = c.out();
  if (c.fp8) p.out_scale = {scale, false};
  p.out = {out, row, c.dim};
  p.lse = {out_lse, 1, c.tokens};
  return p;
}

/// The tolerance of the engines' own test, fp8 after dequantising, and never more than one
/// rounding.
inline double grid_tolerance(const GridCase& c, double expected, double size) {
  const double absolute = c.fp8 ? 1e-1 : 1e-3;
  const double relative = c.fp8 ? 1e-1 : c.dtype == bf16 ? 1e-2 : 1e-3;
  const double unit = c.fp8 ? GridCase::kScale : 1.0;
  return std::min(absolute + relative * std::abs(expected),
                  unit * one_rounding(c.out(), expected / unit, size / unit));
}

/// Everything of a case on the host.
struct GridResult {
  const std::byte* prefix;
  const std::byte* suffix;
  const float* lse;
  const std::byte* out;
  const float* out_lse;
};

/// Every lse, every empty row, and the elements of 512 rows or more. Returns the error, or "".
inline std::string grid_fault(const GridCase& c, const GridResult& r, unsigned seed) {
  std::mt19937 random(seed);
  std::ostringstream fault;
  const std::int64_t every = std::max<std::int64_t>(1, c.rows() / 600);
  const std::int64_t phase = static_cast<std::int64_t>(random() % every);
  const std::int64_t row_bytes = c.dim * static_cast<std::int64_t>(size_of(c.out()));
  for (std::int64_t token = 0; token < c.tokens; ++token)
    for (int head = 0; head < c.heads; ++head) {
      const std::int64_t at = head * c.tokens + token, row = token * c.heads + head;
      double a = r.lse[at], b = r.lse[c.rows() + at];
      const bool copied = c.with_prefix >= 0 && token >= c.with_prefix;
      if (copied && r.out_lse[at] != r.lse[c.rows() + at]) {
        fault << c.text() << ": lse of token " << token << ", head " << head << " is "
              << r.out_lse[at] << ", not a copy of " << r.lse[c.rows() + at];
        return fault.str();
      }
      if (std::isinf(a) || copied) a = -kInf;
      if (copied) b = 0;  // which alone counts, and whose lse was checked
      if (std::isinf(b)) b = -kInf;
      const std::byte* out = r.out + row * row_bytes;
      const double top = std::max(a, b);
      if (top == -kInf) {
        bool zero = r.out_lse[at] == -kInf;
        for (std::int64_t i = 0; i < row_bytes; ++i) zero = zero && out[i] == std::byte{0};
        if (zero) continue;
        fault << c.text() << ": the empty row of token " << token << ", head " << head
              << " is not zeros and -inf";
        return fault.str();
      }
      const double wa = std::exp(a - top), wb = std::exp(b - top);
      const double lse = top + std::log(wa + wb);
      if (!copied && !(std::abs(r.out_lse[at] - lse) <= 2e-6 * (1 + std::abs(lse)))) {
        fault << c.text() << ": lse of token " << token << ", head " << head << " is "
              << r.out_lse[at] << ", not " << lse;
        return fault.str();
      }
      if (row % every != phase) continue;
      for (int d = 0; d < c.dim; ++d) {
        double expected = 0, size = 0;
        if (wa != 0) {
          const double x = load_element(r.prefix, c.dtype, row * c.dim + d);
          expected += wa / (wa + wb) * x;
          size += wa / (wa + wb) * std::abs(x);
        }
        if (wb != 0) {
          const double x = load_element(r.suffix, c.dtype, row * c.dim + d);
          expected += wb / (wa + wb) * x;
          size += wb / (wa + wb) * std::abs(x);
        }
        const double got = load_element(out, c.out(), d) * (c.fp8 ? GridCase::kScale : 1.0f);
        if (std::abs(got - expected) <= grid_tolerance(c, expected, size)) continue;
        fault << c.text() << ": token " << token << ", head " << head << ", element " << d << " is "
              << got << ", not " << expected;
        return fault.str();
      }
    }
  return "";
}

}  // namespace longspan::tests

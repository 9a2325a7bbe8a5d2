// Causal attention over latent keys in float64, for tests: by definition, a row after the other.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace longspan::tests {

struct LatentSizes {
  std::int64_t rows;  // the last ones of the sequence
  int heads;
  std::int64_t keys;
  int dim, value_dim;
};

/// The largest difference of `found` from float64: out [rows, heads, value_dim], and behind it lse
/// [rows, heads]. q is [rows, heads, dim] and k [keys, dim]. NaN if one of `found` is.
inline double latent_error(const std::vector<float>& q, const std::vector<float>& k,
                           const std::vector<float>& found, const LatentSizes& s) {
  const std::int64_t count = s.rows * s.heads;
  double most = 0;
  const auto differ = [&](double right, std::int64_t i) {
    const double error = std::abs(right - found[static_cast<std::size_t>(i)]);
    if (!(error <= most)) most = error;  // also NaN
  };
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t seen = s.keys - s.rows + i / s.heads + 1;
    std::vector<double> out(static_cast<std::size_t>(s.value_dim));
    double sum = 0;
    for (std::int64_t j = 0; j < seen; ++j) {
      const float* const row = &q[static_cast<std::size_t>(i * s.dim)];
      const float* const key = &k[static_cast<std::size_t>(j * s.dim)];
      double score = 0;
      for (int d = 0; d < s.dim; ++d) score += double{row[d]} * key[d];
      const double weight = std::exp(score / std::sqrt(double(s.dim)));
      sum += weight;
      for (int d = 0; d < s.value_dim; ++d) out[static_cast<std::size_t>(d)] += weight * key[d];
    }
    for (int d = 0; d < s.value_dim; ++d)
      differ(out[static_cast<std::size_t>(d)] / sum, i * s.value_dim + d);
    differ(std::log(sum), count * s.value_dim + i);
  }
  return most;
}

}  // namespace longspan::tests

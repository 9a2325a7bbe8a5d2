// Inputs of products of e4m3 for which the kernel's roundings lose nothing, and their judge: an
// error is a wrong place or a wrong key.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {

/// Everything in e4m3, one key after the other.
inline Serving in_e4m3(Serving s) {
  if (s.dtype == DType::fp32) s.dtype = DType::bf16;
  s.q_dtype = s.kv_dtype = DType::e4m3;
  s.page = 0;
  return s;
}

inline void set(std::vector<std::byte>& elements, std::size_t i, float value) {
  launcher::store(elements.data(), DType::e4m3, static_cast<std::int64_t>(i), value);
  ASSERT_EQ(launcher::load(elements.data(), DType::e4m3, static_cast<std::int64_t>(i)), value);
}

/// Scores of -2 to 2 in base 2, so that weights are powers of two, and values of -2 to 2: all sums
/// are whole numbers of few bits. Scales are powers of two, another for each head. A tensor core
/// keeps 14 bits of a sum; sums of weights of at most 192 keys have 12 or fewer.
inline ServingProblem exact_problem(Serving s, std::uint64_t seed) {
  s = in_e4m3(s);
  s.scale = kLn2;
  s.per_head_scales = true;
  ServingProblem p(s, seed);
  std::mt19937_64 random(seed);
  const auto sign = [&] { return random() % 2 ? 1.0f : -1.0f; };
  for (auto* scales : {&p.q_scale, &p.k_scale, &p.v_scale})
    for (float& scale : *scales) scale = std::exp2(static_cast<float>(random() % 7) - 3);
  const auto dim = static_cast<std::size_t>(s.dim);
  const auto head = [&](std::size_t i, int heads) {
    return i / dim % static_cast<unsigned>(heads);
  };
  const auto group = static_cast<unsigned>(s.heads / s.kv_heads);
  for (std::size_t i = 0; i < p.q.size(); ++i)
    set(p.q, i, sign() / p.q_scale[head(i, s.heads) / group]);
  std::fill(p.k.begin(), p.k.end(), std::byte{});
  for (std::size_t row = 0; row < p.k.size(); row += dim)
    for (int one = 0; one < 2; ++one)
      set(p.k, row + random() % dim, sign() / p.k_scale[head(row, s.kv_heads)]);
  for (std::size_t i = 0; i < p.v.size(); ++i)
    set(p.v, i, (static_cast<float>(random() % 5) - 2) / p.v_scale[head(i, s.kv_heads)]);
  return p;
}

inline void expect_exact(const ServingProblem& problem, const ServingResult& found,
                         std::int64_t sampled) {
  const Tolerance tolerance{2e-5, problem.shape.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11, 2e-6};
  const Verdict verdict =
      judge(problem, found.out, found.lse, problem.all_rows(), tolerance, sampled);
  EXPECT_TRUE(verdict.right()) << verdict.wrong << " of " << verdict.compared
                               << " wrong: " << verdict.first;
}

}  // namespace longspan::tests

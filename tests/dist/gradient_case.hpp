// Random problems of gradients, and the arrays that all their runs are given.
#pragma once

#include <cstdint>
#include <iterator>
#include <random>

#include "longspan/attention.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {

/// Gives a run the lengths, masks and qq_bias of a problem.
inline void give_terms(AttentionArgs& a, HostProblem& p) {
  HostShape& s = p.shape;
  if (p.batch() == 1) {
    a.total_keys = s.kv_len[0];
  } else {
    a.query_start = Tensor(p.query_start.data(), {p.batch() + 1});
    a.kv_len = Tensor(s.kv_len.data(), {p.batch()});
  }
  if (s.qq) {
    a.qq_bias = Tensor(p.qq.data(), p.qq.dtype, {p.qq_width(), p.qq_width()});
    a.qq_bias.stride[0] = p.qq_width() + HostProblem::kGap;
  }
  if (!s.causal.empty()) a.causal = Tensor(s.causal.data(), {p.batch()});
  if (!s.documents.empty())
    a.documents = Tensor(s.documents.data(), {p.batch(), p.starts_of_one()});
  if (!s.bidirectional.empty())
    a.bidirectional = Tensor(s.bidirectional.data(), {p.batch(), p.ranges_of_one(), 2});
  if (!s.prefix.empty()) a.prefix_len = Tensor(s.prefix.data(), {p.batch()});
  if (!s.left_padding.empty()) a.left_padding = Tensor(s.left_padding.data(), {p.batch()});
  if (!s.used_rows.empty()) a.query_len = Tensor(s.used_rows.data(), {p.batch()});
}

inline HostShape random_shape(std::mt19937& random) {
  const auto one_in = [&](int n) { return random() % n == 0; };
  HostShape s;
  s.kv_heads = 1 << random() % 3;
  s.heads = s.kv_heads * (1 + static_cast<int>(random() % 3));
  s.dim = 1 + static_cast<int>(random() % 72);
  s.dtype = one_in(3) ? bf16 : fp32;
  const bool one = one_in(2);
  s.query_len.clear();
  s.kv_len.clear();
  for (int b = 0; b < (one ? 1 : 3); ++b) {
    s.query_len.push_back(static_cast<std::int32_t>(one_in(8) ? 0 : 1 + random() % 150));
    s.kv_len.push_back(s.query_len.back() + static_cast<std::int32_t>(random() % 200));
  }
  s.mask.causal = one_in(2);
  if (one_in(3)) s.mask.window = 1 + static_cast<int>(random() % 100);
  if (one_in(3)) s.mask.right = static_cast<int>(random() % 40);
  if (one_in(3)) {
    s.mask.alignment = Alignment::upper_left;
    for (std::int32_t& keys : s.kv_len)
      if (one_in(2)) keys = static_cast<std::int32_t>(1 + random() % 200);
  }
  if (one_in(3)) s.softcap = 2;
  if (one_in(3)) s.alibi = static_cast<Alibi>(random() % 3);
  if (one_in(4)) s.qq = true;
  if (one_in(one ? 2 : 3))
    for (const std::int64_t n : s.kv_len) {
      const std::int64_t starts[] = {n / 10, n / 3, n / 3, n - n / 8};
      s.documents.insert(s.documents.end(), std::begin(starts), std::end(starts));
    }
  if (one_in(3)) {
    s.mask.chunk = 1 + static_cast<int>(random() % 100);
    s.mask.lookback = static_cast<int>(random() % 3);
  }
  if (s.documents.empty() && one_in(3)) {
    s.mask.prefix = 1 + static_cast<int>(random() % 60);
    if (one_in(2))
      for (std::size_t b = 0; b < s.kv_len.size(); ++b)
        s.prefix.push_back(static_cast<std::int32_t>(random() % (s.mask.prefix + 1)));
  }
  if (one_in(3)) {
    s.mask.clamp_ranges = one_in(2);
    for (const std::int64_t n : s.kv_len) {
      const std::int64_t bounds[] = {n / 9, n / 3, n / 3, n - n / 4};
      s.bidirectional.insert(s.bidirectional.end(), std::begin(bounds), std::end(bounds));
    }
  }
  if (one_in(3))
    for (const std::int32_t n : s.kv_len)
      s.left_padding.push_back(static_cast<std::int32_t>(random() % (n / 2 + 1)));
  if (one_in(3))
    for (const std::int32_t n : s.query_len)
      s.used_rows.push_back(static_cast<std::int32_t>(one_in(2) ? random() % (n + 1) : n));
  if (!one && one_in(2)) s.causal = {1, 0, 1};
  return s;
}

}  // namespace longspan::tests

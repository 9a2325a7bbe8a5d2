// Random sequences for the CUDA kernels, and helpers for their tests on a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <ostream>
#include <random>
#include <vector>

#include "kernels/backend.hpp"
#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"
#include "longspan/buffer.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/random_elements.hpp"
#include "tests/support/reduced.hpp"

namespace longspan::test {

using tests::fresh_seed;
using tests::is_left_out;
using tests::kOnHopper;
using tests::reduced;

#define LONGSPAN_NEEDS_GPU()                                                     \
  do {                                                                           \
    int longspan_gpus = 0;                                                       \
    if (cudaGetDeviceCount(&longspan_gpus) != cudaSuccess || longspan_gpus == 0) \
      GTEST_SKIP() << "no GPU: cudaGetDeviceCount found none";                   \
  } while (0)

#define LONGSPAN_NEEDS_HOPPER()                                                         \
  LONGSPAN_NEEDS_GPU();                                                                 \
  do {                                                                                  \
    cudaDeviceProp longspan_gpu;                                                        \
    ASSERT_EQ(cudaGetDeviceProperties(&longspan_gpu, 0), cudaSuccess);                  \
    if (longspan_gpu.major != 9) GTEST_SKIP() << longspan_gpu.name << " is not Hopper"; \
  } while (0)

/// The GPU's, without the part after the point.
inline int compute_capability() {
  int major = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  return major;
}

/// A typed array on the GPU.
template <class T>
struct OnGpu {
  Buffer buffer;
  OnGpu() = default;
  explicit OnGpu(std::size_t count)
      : buffer(Device::cuda, std::max<std::size_t>(count, 1) * sizeof(T)) {
    poison();
  }
  explicit OnGpu(const std::vector<T>& values) : OnGpu(values.size()) {
    const std::size_t bytes = values.size() * sizeof(T);
    EXPECT_EQ(cudaMemcpy(data(), values.data(), bytes, cudaMemcpyDefault), cudaSuccess);
  }
  T* data() const { return static_cast<T*>(buffer.data()); }
  void poison() { EXPECT_EQ(cudaMemset(buffer.data(), 0xff, buffer.bytes()), cudaSuccess); }
  std::vector<T> values(std::size_t count) const {
    std::vector<T> host(count);
    EXPECT_EQ(cudaMemcpy(host.data(), data(), count * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    return host;
  }
};

/// Bounds on no side, on either, and on both; to the right at the query itself and behind it.
inline constexpr Mask kMasks[] = {{},
                                  {.causal = true},
                                  {.causal = true, .window = 1},
                                  {.causal = true, .window = 100},
                                  {.window = 64, .right = 0},
                                  {.window = 30, .right = 17},
                                  {.right = 5}};

/// How keys are dealt out to ranks.
struct Cut {
  Layout layout = Layout::contiguous;
  std::int64_t block = kSegment;
};

struct Case {
  DType dtype = DType::bf16;
  int heads = 4, kv_heads = 2, dim = 64;
  int value_dim = 0;  // 0: dim
  std::vector<int> q_lens{8}, kv_lens{300};
  Mask mask{};
  std::vector<std::uint8_t> causal{};  // of each sequence, in place of the mask's; or none
  float softcap = 0;
  std::optional<Alibi> alibi{};
  float scale = 0;  // 0: 1 / sqrt(dim)
  Layout layout = Layout::contiguous;
  std::int64_t block = kSegment;
  int ranks = 1;
  bool invariant = false;
  bool sinks = false;
  bool device_lengths = false;  // lengths from arrays also where one sequence would not need them
  int q_gap = 0, kv_gap = 0, out_gap = 0;  // elements between rows, NaN
  unsigned seed = 1;
  double dropout = 0;  // with kDropoutSeed and kFirstHead

  static constexpr std::int64_t kDropoutSeed[] = {-11, 12};
  static constexpr int kFirstHead = 3;

  int of_value() const { return value_dim > 0 ? value_dim : dim; }
  int batch() const { return static_cast<int>(q_lens.size()); }
  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (int n : q_lens) sum += n;
    return sum;
  }
  float scale_used() const {
    return scale != 0 ? scale : 1.0f / std::sqrt(static_cast<float>(dim));
  }
  /// Without arrays, and so without lengths and a bias.
  kernels::AttendParams params() const {
    kernels::AttendParams p;
    p.dtype = p.q_dtype = p.kv_dtype = dtype;
    p.tokens = tokens();
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = dim;
    p.value_dim = of_value();
    p.batch.size = batch();
    p.mask = mask;
    p.score = {scale_used(), softcap};
    p.invariant = invariant;
    p.dropout.on = dropout > 0;
    p.dropout.threshold = kernels::dropout_threshold(dropout);
    p.dropout.scale = static_cast<float>(1 / (1 - dropout));
    p.dropout.first_head = kFirstHead;
    return p;
  }
  /// Positions that row t of sequence b sees.
  Interval visible(std::size_t b, std::int64_t t) const {
    Mask rule = mask;
    if (!causal.empty()) rule.causal = causal[b] != 0;
    return launcher::seen_keys(rule, kv_lens[b] - q_lens[b] + t, kv_lens[b]);
  }
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << name(c.dtype) << " heads " << c.heads << "/" << c.kv_heads << " dim " << c.dim << "/"
      << c.of_value() << " q";
  for (int n : c.q_lens) out << " " << n;
  out << " kv";
  for (int n : c.kv_lens) out << " " << n;
  out << " causal " << c.mask.causal;
  for (int flag : c.causal) out << "," << flag;
  if (c.alibi) out << " ALiBi " << name(*c.alibi);
  if (c.dropout > 0) out << " dropout " << c.dropout;
  return out << " window " << c.mask.window << " right " << c.mask.right << " softcap " << c.softcap
             << " scale " << c.scale << " " << name(c.layout) << " block " << c.block << " ranks "
             << c.ranks << " invariant " << c.invariant << " sinks " << c.sinks << " gaps "
             << c.q_gap << " " << c.kv_gap << " " << c.out_gap
             << (c.device_lengths ? " device lengths" : "") << " seed " << c.seed;
}

/// Of one run on all ranks, for is_left_out().
inline double work_of(const Case& c) {
  return tests::work_of_attention(c.q_lens, c.kv_lens, c.heads, c.kv_heads, c.dim, c.ranks);
}

/// The data of a case: whole sequences on the host.
struct Data {
  std::vector<std::byte> q;                         // [tokens, heads, dim]
  std::vector<std::vector<std::byte>> k;            // of each sequence [kv_len, kv_heads, dim]
  std::vector<std::vector<std::byte>> v;            // [kv_len, kv_heads, value_dim]
  std::vector<float> sinks;                         // [heads]
  std::vector<float> slopes;                        // [heads], as published
  std::vector<std::vector<std::int64_t>> permuted;  // listed: all positions, in random order

  explicit Data(const Case& c) {
    q = tests::random_elements(c.dtype, c.tokens() * c.heads * c.dim, c.seed);
    std::mt19937 rng(c.seed);
    std::uint32_t tensor = 1;
    for (int len : c.kv_lens) {
      const auto drawn = [&](int dim) {
        return tests::random_elements(c.dtype, std::int64_t{len} * c.kv_heads * dim, c.seed,
                                      tensor++);
      };
      k.push_back(drawn(c.dim));
      v.push_back(drawn(c.of_value()));
      permuted.emplace_back(static_cast<std::size_t>(len));
      for (int i = 0; i < len; ++i) permuted.back()[static_cast<std::size_t>(i)] = i;
      std::shuffle(permuted.back().begin(), permuted.back().end(), rng);
    }
    sinks = tests::random_floats(c.heads, c.seed, tensor);
    for (int h = 0; h < c.heads; ++h)
      slopes.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(c.heads)));
  }

  /// ALiBi's bias of the scores of row t of sequence b: [kv_len]; or nothing.
  std::vector<double> bias(const Case& c, std::size_t b, std::int64_t t, int head) const {
    std::vector<double> bias;
    if (!c.alibi) return bias;
    const double slope = slopes[static_cast<std::size_t>(head)];
    const std::int64_t context = c.kv_lens[b] - c.q_lens[b];
    for (std::int64_t j = 0; j < c.kv_lens[b]; ++j)
      bias.push_back(slope * launcher::alibi_term(*c.alibi, context + t, j, context));
    return bias;
  }

  /// The factors of dropout for row t of sequence b: [kv_len]; or nothing.
  static std::vector<double> kept(const Case& c, std::size_t b, std::int64_t t, int head) {
    if (c.dropout == 0) return {};
    return launcher::dropout_factors<float>(
        {c.dropout, static_cast<std::uint64_t>(Case::kDropoutSeed[0]),
         static_cast<std::uint64_t>(Case::kDropoutSeed[1]), static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(Case::kFirstHead + head), c.kv_lens[b] - c.q_lens[b] + t},
        c.kv_lens[b]);
  }
};

}  // namespace longspan::test

// One call of the Hopper kernel by itself, and its judgement by float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "tests/gpu/gpu_judge.hpp"
#include "tests/gpu/long_queries.hpp"

namespace longspan::test {

/// One rank that holds all keys: sequences have gaps, with NaN between and around them.
class Sm90Run {
 public:
  Sm90Run(const Case& c, const Data& data)
      : c_(c), q_(data.q), sinks_(data.sinks), slopes_(data.slopes), causal_(c.causal) {
    constexpr std::int64_t kGap = 7;
    const std::int64_t heads_bytes = c.kv_heads * static_cast<std::int64_t>(size_of(c.dtype)),
                       k_bytes = heads_bytes * c.dim, v_bytes = heads_bytes * c.of_value();
    std::vector<std::byte> k, v;
    std::vector<std::int64_t> key_start;
    std::vector<std::int32_t> query_start{0};
    for (std::size_t b = 0; b < c.q_lens.size(); ++b) {
      query_start.push_back(query_start.back() + c.q_lens[b]);
      k.insert(k.end(), kGap * k_bytes, std::byte{0xff});
      v.insert(v.end(), kGap * v_bytes, std::byte{0xff});
      key_start.push_back(static_cast<std::int64_t>(k.size()) / k_bytes);
      k.insert(k.end(), data.k[b].begin(), data.k[b].end());
      v.insert(v.end(), data.v[b].begin(), data.v[b].end());
    }
    k_ = OnGpu<std::byte>(k);
    v_ = OnGpu<std::byte>(v);
    key_start_ = OnGpu<std::int64_t>(key_start);
    query_start_ = OnGpu<std::int32_t>(query_start);
    kv_len_ = OnGpu<std::int32_t>(std::vector<std::int32_t>(c.kv_lens.begin(), c.kv_lens.end()));
    rows_ = c.tokens() * c.heads;
    out_ = OnGpu<std::byte>(static_cast<std::size_t>(rows_ * c.of_value()) * size_of(c.dtype));
    lse_ = OnGpu<float>(static_cast<std::size_t>(rows_));
    state_ =
        OnGpu<std::byte>(static_cast<std::size_t>(kernels::StateSlots::bytes(rows_, c.of_value())));
    scratch_ = OnGpu<std::byte>(
        kernels::sm90::scratch_bytes(params(), kernels::cuda::current_gpu().multiprocessors));
  }

  kernels::AttendParams params() const {
    kernels::AttendParams p = c_.params();
    p.q = {q_.data(), std::int64_t{c_.heads} * c_.dim, c_.dim};
    p.k = {k_.data(), std::int64_t{c_.kv_heads} * c_.dim, c_.dim};
    p.v = {v_.data(), std::int64_t{c_.kv_heads} * c_.of_value(), c_.of_value()};
    p.batch = {c_.batch(), query_start_.data(), kv_len_.data(), key_start_.data()};
    if (!c_.causal.empty()) p.batch.causal = causal_.data();
    if (c_.alibi) p.bias = {Floats(slopes_.data()), *c_.alibi};
    p.state = {state_.data(), rows_, c_.of_value(), 1};
    p.scratch = scratch_.data();
    p.scratch_bytes = scratch_.buffer.bytes();
    return p;
  }

  /// The result as the kernel finishes it.
  Result finish() {
    kernels::sm90::attend(params(), poisoned(), 0, nullptr);
    return result();
  }
  /// Where the kernel finishes it, in empty memory.
  kernels::sm90::Finished poisoned() {
    poison();
    kernels::sm90::Finished finished;
    finished.out = {out_.data(), std::int64_t{c_.heads} * c_.of_value(), c_.of_value()};
    finished.lse = {lse_.data(), c_.heads, 1};
    finished.sinks = c_.sinks ? sinks_.data() : nullptr;
    return finished;
  }
  /// The contents when the GPU is done.
  Result result() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return {out_.values(out_.buffer.bytes()), lse_.values(static_cast<std::size_t>(rows_))};
  }

  /// The result from the state that the kernel writes.
  Result merge() {
    poison();
    kernels::sm90::attend(params(), {}, 0, nullptr);
    kernels::MergeParams m;
    m.states = params().state;
    m.heads = c_.heads;
    m.sinks = c_.sinks ? sinks_.data() : nullptr;
    m.tokens = c_.tokens();
    m.dtype = c_.dtype;
    m.out = {out_.data(), std::int64_t{c_.heads} * c_.of_value(), c_.of_value()};
    m.lse = {lse_.data(), c_.heads, 1};
    kernels::cuda_backend()->merge(m, {});
    return result();
  }

  std::vector<std::byte> state() const { return state_.values(state_.buffer.bytes()); }

 private:
  void poison() {
    out_.poison();
    lse_.poison();
    state_.poison();
    scratch_.poison();
  }

  Case c_;
  std::int64_t rows_ = 0;
  OnGpu<std::byte> q_, k_, v_, out_, state_, scratch_;
  OnGpu<float> sinks_, slopes_, lse_;
  OnGpu<std::uint8_t> causal_;
  OnGpu<std::int64_t> key_start_;
  OnGpu<std::int32_t> query_start_, kv_len_;
};

inline void check(const Case& c, const Data& data, int stride) {
  Sm90Run run(c, data);
  ASSERT_TRUE(is_on_hopper(run.params())) << c;
  expect_within_rounding(c, data, run.finish(), stride);
  expect_within_rounding(c, data, run.merge(), stride);
}

inline void check(const Case& c, int stride = 1) {
  if (!is_left_out(2 * kOnHopper * work_of(c))) check(c, Data(c), stride);
}

/// A NaN in the keys that a causal row sees stays NaN in its lse, and earlier rows have the bits of
/// a run without it.
inline void expect_nan_stays(const Case& c) {
  if (is_left_out(2 * kOnHopper * work_of(c))) return;
  SCOPED_TRACE(::testing::Message() << c);
  Data data(c);
  const Result clean = Sm90Run(c, data).finish();
  constexpr int kBad = 150;
  const auto row = static_cast<std::int64_t>(c.dim * size_of(c.dtype));
  std::fill_n(data.k[0].begin() + kBad * row, row, std::byte{0xff});
  const Result found = Sm90Run(c, data).finish();
  for (std::size_t at = 0; at < found.lse.size(); ++at) {
    if (at / c.heads < kBad)
      EXPECT_EQ(found.lse[at], clean.lse[at]) << at;
    else
      EXPECT_TRUE(std::isnan(found.lse[at])) << at;
  }
}

}  // namespace longspan::test

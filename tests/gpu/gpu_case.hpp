// One call of the CUDA kernels as a test sees it: random sequences, dealt out to simulated ranks on
// one GPU, attended rank by rank into the slots of the gathered states, merged. Outputs are
// poisoned with NaN first, so a row that nobody writes shows.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "launcher/elements.hpp"
#include "launcher/oracle.hpp"
#include "longspan/buffer.hpp"
#include "tests/fresh_seed.hpp"
#include "tests/rounding.hpp"

namespace longspan::test {

using testing::fresh_seed;

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

struct Case {
  DType dtype = DType::bf16;
  int heads = 4, kv_heads = 2, dim = 64;
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

  int batch() const { return static_cast<int>(q_lens.size()); }
  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (int n : q_lens) sum += n;
    return sum;
  }
  float scale_used() const {
    return scale != 0 ? scale : 1.0f / std::sqrt(static_cast<float>(dim));
  }
  /// Positions that row t of sequence b sees.
  Interval visible(std::size_t b, std::int64_t t) const {
    Mask rule = mask;
    if (!causal.empty()) rule.causal = causal[b] != 0;
    return rule.visible(kv_lens[b] - q_lens[b] + t, kv_lens[b]);
  }
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << name(c.dtype) << " heads " << c.heads << "/" << c.kv_heads << " dim " << c.dim << " q";
  for (int n : c.q_lens) out << " " << n;
  out << " kv";
  for (int n : c.kv_lens) out << " " << n;
  out << " causal " << c.mask.causal;
  for (int flag : c.causal) out << "," << flag;
  if (c.alibi) out << " ALiBi " << name(*c.alibi);
  return out << " window " << c.mask.window << " right " << c.mask.right << " softcap " << c.softcap
             << " scale " << c.scale << " " << name(c.layout) << " block " << c.block << " ranks "
             << c.ranks << " invariant " << c.invariant << " sinks " << c.sinks << " gaps "
             << c.q_gap << " " << c.kv_gap << " " << c.out_gap
             << (c.device_lengths ? " device lengths" : "") << " seed " << c.seed;
}

/// `count` elements of order 1.
inline std::vector<std::byte> random_elements(DType dtype, std::int64_t count, std::mt19937& rng) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < count; ++i) launcher::store(bytes.data(), dtype, i, normal(rng));
  return bytes;
}

/// The data of a case: whole sequences on the host.
struct Data {
  std::vector<std::byte> q;               // [tokens, heads, dim]
  std::vector<std::vector<std::byte>> k;  // of each sequence [kv_len, kv_heads, dim]
  std::vector<std::vector<std::byte>> v;
  std::vector<float> sinks;                         // [heads]
  std::vector<float> slopes;                        // [heads], as published
  std::vector<std::vector<std::int64_t>> permuted;  // listed: all positions, in random order

  explicit Data(const Case& c) {
    std::mt19937 rng(c.seed);
    q = random_elements(c.dtype, c.tokens() * c.heads * c.dim, rng);
    for (int len : c.kv_lens) {
      k.push_back(random_elements(c.dtype, std::int64_t{len} * c.kv_heads * c.dim, rng));
      v.push_back(random_elements(c.dtype, std::int64_t{len} * c.kv_heads * c.dim, rng));
      permuted.emplace_back(static_cast<std::size_t>(len));
      for (int i = 0; i < len; ++i) permuted.back()[static_cast<std::size_t>(i)] = i;
      std::shuffle(permuted.back().begin(), permuted.back().end(), rng);
    }
    std::normal_distribution<float> normal;
    for (int h = 0; h < c.heads; ++h) {
      sinks.push_back(normal(rng));
      slopes.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(c.heads)));
    }
  }

  /// What ALiBi adds to the scores of row t of sequence b: [kv_len]; or nothing.
  std::vector<double> bias(const Case& c, std::size_t b, std::int64_t t, int head) const {
    std::vector<double> bias;
    if (!c.alibi) return bias;
    const double slope = slopes[static_cast<std::size_t>(head)];
    const std::int64_t context = c.kv_lens[b] - c.q_lens[b];
    for (std::int64_t j = 0; j < c.kv_lens[b]; ++j)
      bias.push_back(slope * static_cast<double>(*c.alibi == Alibi::context
                                                     ? j - context
                                                     : -std::abs(j - context - t)));
    return bias;
  }
};

struct Result {
  std::vector<std::byte> out;  // [tokens, heads, dim] of the case's dtype
  std::vector<float> lse;      // [tokens, heads]
};

/// Rows of `row` bytes, `gap` bytes of NaN behind each.
inline std::vector<std::byte> spread(const std::vector<std::byte>& rows, std::size_t row,
                                     std::size_t gap) {
  if (gap == 0) return rows;
  std::vector<std::byte> wide(rows.size() / row * (row + gap), std::byte{0xff});
  for (std::size_t i = 0; i < rows.size() / row; ++i)
    std::copy_n(rows.data() + i * row, row, wide.data() + i * (row + gap));
  return wide;
}

/// Everything on the GPU, ready to run again and again.
class GpuRun {
 public:
  GpuRun(const Case& c, const Data& data) : c_(c), backend_(kernels::cuda_backend()) {
    const std::int64_t row = std::int64_t{c.kv_heads} * c.dim;
    const std::size_t size = size_of(c.dtype),
                      q_row = static_cast<std::size_t>(std::int64_t{c.heads} * c.dim) * size;
    q_ = OnGpu<std::byte>(spread(data.q, q_row, static_cast<std::size_t>(c.q_gap) * size));
    sinks_ = OnGpu<float>(data.sinks);
    slopes_ = OnGpu<float>(data.slopes);
    causal_ = OnGpu<std::uint8_t>(c.causal);
    std::vector<std::int32_t> starts{0};
    for (int n : c.q_lens) starts.push_back(starts.back() + n);
    query_start_ = OnGpu<std::int32_t>(starts);
    kv_len_ = OnGpu<std::int32_t>(std::vector<std::int32_t>(c.kv_lens.begin(), c.kv_lens.end()));
    for (int rank = 0; rank < c.ranks; ++rank) {
      // The rank's own keys, sequence after sequence.
      std::vector<std::byte> k, v;
      std::vector<std::int64_t> table;
      Rank on;
      on.shard = {c.layout, rank, c.ranks, c.batch() == 1 ? c.kv_lens[0] : 0, c.block};
      if (c.layout == Layout::ranges)
        for (std::int64_t len : c.kv_lens)
          for (int r = 0; r <= c.ranks; ++r)  // uneven on purpose
            table.push_back(len * r * r / (c.ranks * c.ranks));
      for (int b = 0; b < c.batch(); ++b) {
        Shard host = on.shard;
        host.table = table.data();
        host = host.of(b);
        const std::int64_t len = c.kv_lens[static_cast<std::size_t>(b)];
        std::vector<std::int64_t> positions;
        if (c.layout == Layout::listed) {
          const auto& all = data.permuted[static_cast<std::size_t>(b)];
          positions.assign(all.begin() + len * rank / c.ranks,
                           all.begin() + len * (rank + 1) / c.ranks);
          table = positions;
          host.table = table.data();
          host.listed = on.shard.listed = static_cast<std::int64_t>(table.size());
        } else {
          for (std::int64_t i = 0; i < host.local_len(len); ++i)
            positions.push_back(host.position(i, len));
        }
        const auto append = [&](std::vector<std::byte>& to, const std::vector<std::byte>& from) {
          const std::size_t bytes = static_cast<std::size_t>(row) * size_of(c.dtype);
          for (std::int64_t position : positions) {
            const auto first = from.begin() + position * static_cast<std::int64_t>(bytes);
            to.insert(to.end(), first, first + static_cast<std::int64_t>(bytes));
          }
        };
        append(k, data.k[static_cast<std::size_t>(b)]);
        append(v, data.v[static_cast<std::size_t>(b)]);
      }
      const std::size_t bytes = static_cast<std::size_t>(row) * size,
                        gap = static_cast<std::size_t>(c.kv_gap) * size;
      on.k = OnGpu<std::byte>(spread(k, bytes, gap));
      on.v = OnGpu<std::byte>(spread(v, bytes, gap));
      on.table = OnGpu<std::int64_t>(table);
      on.key_start = OnGpu<std::int64_t>(static_cast<std::size_t>(c.batch()));
      if (!table.empty() || c.layout == Layout::listed) on.shard.table = on.table.data();
      ranks_.push_back(std::move(on));
    }
    out_ = OnGpu<std::byte>(static_cast<std::size_t>(c.tokens() * out_row()) * size);
    lse_ = OnGpu<float>(static_cast<std::size_t>(c.tokens() * c.heads));
    states_.rows = c.tokens() * c.heads;
    states_.dim = c.dim;
    states_.slots = c.ranks;
    state_memory_ = OnGpu<std::byte>(static_cast<std::size_t>(states_.slot_bytes() * c.ranks));
    states_.data = state_memory_.data();
    scratch_ = OnGpu<std::byte>(backend_->attend_scratch(bounds()));
  }

  /// Queues key starts, attention of every rank, and the merge.
  void queue(cudaStream_t stream = nullptr) {
    for (int rank = 0; rank < c_.ranks; ++rank) {
      find_key_starts(rank, stream);
      backend_->attend(params(rank), {stream});
    }
    backend_->merge(merge_params(), {stream});
  }

  /// Attend and merge in one, where the backend has a kernel for it; else false, and nothing.
  bool queue_finished(cudaStream_t stream = nullptr) {
    find_key_starts(0, stream);
    return backend_->attend_finished(params(0), merge_params(), {stream});
  }

  void poison() {
    out_.poison();
    lse_.poison();
    state_memory_.poison();
    scratch_.poison();
  }

  Result result() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Result found{out_.values(out_.buffer.bytes()),
                 lse_.values(static_cast<std::size_t>(c_.tokens() * c_.heads))};
    if (c_.out_gap == 0) return found;
    const std::size_t wide = static_cast<std::size_t>(out_row()) * size_of(c_.dtype),
                      row = wide - static_cast<std::size_t>(c_.out_gap) * size_of(c_.dtype);
    std::vector<std::byte> rows;
    for (std::size_t at = 0; at + wide <= found.out.size(); at += wide) {
      const std::byte* first = found.out.data() + at;
      rows.insert(rows.end(), first, first + row);
      EXPECT_TRUE(
          std::all_of(first + row, first + wide, [](std::byte b) { return b == std::byte{0xff}; }))
          << "written between rows of the output: " << c_;
    }
    found.out = std::move(rows);
    return found;
  }

  Result run() {
    poison();
    queue();
    return result();
  }

  OnGpu<std::int32_t>& kv_len() { return kv_len_; }
  OnGpu<std::int32_t>& query_start() { return query_start_; }

  kernels::AttendParams params(int rank) const {
    const Rank& on = ranks_[static_cast<std::size_t>(rank)];
    const std::int64_t row = std::int64_t{c_.kv_heads} * c_.dim + c_.kv_gap;
    kernels::AttendParams p = bounds();
    p.q = {q_.data(), std::int64_t{c_.heads} * c_.dim + c_.q_gap, c_.dim};
    p.k = {on.k.data(), row, c_.dim};
    p.v = {on.v.data(), row, c_.dim};
    if (lengths_on_device())
      p.batch = {c_.batch(), query_start_.data(), kv_len_.data(), on.key_start.data()};
    if (!c_.causal.empty()) p.batch.causal = causal_.data();
    p.shard = on.shard;
    p.state = states_;
    p.slot = rank;
    p.scratch = scratch_.data();
    p.scratch_bytes = scratch_.buffer.bytes();
    return p;
  }

 private:
  struct Rank {
    Shard shard;
    OnGpu<std::byte> k, v;
    OnGpu<std::int64_t> table, key_start;
  };

  bool lengths_on_device() const { return c_.batch() > 1 || c_.device_lengths; }

  void find_key_starts(int rank, cudaStream_t stream) {
    const Rank& on = ranks_[static_cast<std::size_t>(rank)];
    if (lengths_on_device())
      backend_->key_starts({.shard = on.shard,
                            .kv_len = kv_len_.data(),
                            .batch = c_.batch(),
                            .key_start = on.key_start.data()},
                           {stream});
  }

  /// As the layer plans: no arrays and no length.
  kernels::AttendParams bounds() const {
    kernels::AttendParams p;
    p.dtype = p.q_dtype = p.kv_dtype = c_.dtype;
    p.tokens = c_.tokens();
    p.heads = c_.heads;
    p.kv_heads = c_.kv_heads;
    p.dim = c_.dim;
    p.batch.size = c_.batch();
    p.mask = c_.mask;
    p.score = {c_.scale_used(), c_.softcap};
    if (c_.alibi) p.bias = {slopes_.data(), *c_.alibi};
    p.invariant = c_.invariant;
    return p;
  }

  kernels::MergeParams merge_params() const {
    kernels::MergeParams m;
    m.states = states_;
    m.interleaved = c_.layout == Layout::interleaved;
    m.heads = c_.heads;
    m.sinks = c_.sinks ? sinks_.data() : nullptr;
    m.tokens = c_.tokens();
    m.dtype = c_.dtype;
    m.out = {out_.data(), out_row(), c_.dim};
    m.lse = lse_.data();
    m.lse_row_stride = c_.heads;
    m.lse_head_stride = 1;
    m.batch = params(0).batch;
    return m;
  }

  std::int64_t out_row() const { return std::int64_t{c_.heads} * c_.dim + c_.out_gap; }

  Case c_;
  std::unique_ptr<kernels::Backend> backend_;
  OnGpu<std::byte> q_, out_, state_memory_, scratch_;
  OnGpu<float> sinks_, slopes_, lse_;
  OnGpu<std::uint8_t> causal_;
  OnGpu<std::int32_t> query_start_, kv_len_;
  std::vector<Rank> ranks_;
  kernels::StateSlots states_;
};

/// What float64 says of an fp32 result, and what a plain computation would have made of it: every
/// step in fp32, one key after the other.
struct Judgement {
  double worst_lse = 0;   // max |lse - exact| / (1 + |exact|); infinities must agree
  double norm = 0;        // |out - exact| / |exact|
  double norm_plain = 0;  // |plain - exact| / |exact|
};

/// One row in fp32. bias: of these keys, or nothing.
inline Eigen::VectorXd attend_plainly(const Case& c, const Eigen::VectorXd& q,
                                      const Eigen::Ref<const launcher::RowMajor>& keys,
                                      const Eigen::Ref<const launcher::RowMajor>& values,
                                      std::optional<double> sink, std::span<const double> bias) {
  std::vector<float> scores;
  float top = sink ? static_cast<float>(*sink) : -infinity();
  for (Eigen::Index i = 0; i < keys.rows(); ++i) {
    float s = 0;
    for (int d = 0; d < c.dim; ++d) s += static_cast<float>(q[d]) * static_cast<float>(keys(i, d));
    s *= c.scale_used();
    if (c.softcap != 0) s = c.softcap * std::tanh(s / c.softcap);
    if (!bias.empty()) s += static_cast<float>(bias[static_cast<std::size_t>(i)]);
    scores.push_back(s);
    top = std::max(top, s);
  }
  float sum = sink ? std::exp(static_cast<float>(*sink) - top) : 0.0f;
  Eigen::VectorXf out = Eigen::VectorXf::Zero(c.dim);
  for (Eigen::Index i = 0; i < keys.rows(); ++i) {
    const float weight = std::exp(scores[static_cast<std::size_t>(i)] - top);
    sum += weight;
    out += weight * values.row(i).transpose().cast<float>();
  }
  return (out / sum).cast<double>();
}

/// One head [kv_len, dim] of a sequence's keys or values.
inline launcher::RowMajor matrix_of(const Case& c, const std::vector<std::byte>& rows,
                                    std::int64_t kv_len, int kv_head) {
  launcher::RowMajor matrix(kv_len, c.dim);
  for (std::int64_t i = 0; i < kv_len; ++i)
    for (int d = 0; d < c.dim; ++d)
      matrix(i, d) = launcher::load(rows.data(), c.dtype, (i * c.kv_heads + kv_head) * c.dim + d);
  return matrix;
}

/// Compares the rows of every `stride`-th token.
inline Judgement judge(const Case& c, const Data& data, const Result& result, int stride = 1) {
  Judgement verdict;
  const int group = c.heads / c.kv_heads;
  double difference = 0, difference_plain = 0, size = 0;
  std::int64_t first_row = 0;
  for (int b = 0; b < c.batch(); ++b) {
    const std::int64_t q_len = c.q_lens[static_cast<std::size_t>(b)];
    const std::int64_t kv_len = c.kv_lens[static_cast<std::size_t>(b)];
    for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
      const launcher::RowMajor keys =
          matrix_of(c, data.k[static_cast<std::size_t>(b)], kv_len, kv_head);
      const launcher::RowMajor values =
          matrix_of(c, data.v[static_cast<std::size_t>(b)], kv_len, kv_head);
      for (std::int64_t t = 0; t < q_len; t += stride)
        for (int g = 0; g < group; ++g) {
          const int head = kv_head * group + g;
          const std::int64_t row = (first_row + t) * c.heads + head;
          Eigen::VectorXd q(c.dim);
          for (int d = 0; d < c.dim; ++d)
            q[d] = launcher::load(data.q.data(), c.dtype, row * c.dim + d);
          const Interval seen = c.visible(static_cast<std::size_t>(b), t);
          const std::vector<double> bias = data.bias(c, static_cast<std::size_t>(b), t, head);
          std::optional<double> sink;
          if (c.sinks) sink = data.sinks[static_cast<std::size_t>(head)];
          const launcher::Exact exact = launcher::attend_exactly(
              q, keys, values, seen, c.scale_used(), c.softcap, sink, bias);
          Eigen::VectorXd plain = Eigen::VectorXd::Zero(c.dim);
          if (!seen.empty()) {
            const auto k = keys.middleRows(seen.begin, seen.end - seen.begin);
            const auto v = values.middleRows(seen.begin, seen.end - seen.begin);
            const std::span<const double> own =
                bias.empty() ? std::span<const double>() : std::span(bias).subspan(seen.begin);
            plain = attend_plainly(c, q, k, v, sink, own);
          }
          for (int d = 0; d < c.dim; ++d) {
            const double got = launcher::load(result.out.data(), c.dtype, row * c.dim + d);
            difference += (got - exact.out[d]) * (got - exact.out[d]);
            difference_plain += (plain[d] - exact.out[d]) * (plain[d] - exact.out[d]);
            size += exact.out[d] * exact.out[d];
          }
          const double lse = result.lse[static_cast<std::size_t>(row)];
          const double lse_error =
              lse == exact.lse ? 0.0 : std::abs(lse - exact.lse) / (1 + std::abs(exact.lse));
          verdict.worst_lse = lse_error <= verdict.worst_lse ? verdict.worst_lse : lse_error;
        }
    }
    first_row += q_len;
  }
  verdict.norm = std::sqrt(difference / (size > 0 ? size : 1));
  verdict.norm_plain = std::sqrt(difference_plain / (size > 0 ? size : 1));
  return verdict;
}

/// The GPU's, without what is behind the point.
inline int compute_capability() {
  int major = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  return major;
}

/// A bias is rounded when it is made, when it is added and when the maximum is taken off: relative
/// to its size, which may be far above that of a score.
constexpr double kOfBias = 4 * 0x1p-24;

/// Every element within what two roundings can do: of the weights before they meet the values, and
/// of the output; every lse within lse_bound. Unlike a comparison of worst errors this never fails
/// by chance, and it is tight: a key too many or too few shows.
inline void expect_within_rounding(const Case& c, const Data& data, const Result& result,
                                   int stride = 1) {
  const double unit = c.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;        // of one rounding
  const double smallest = c.dtype == DType::bf16 ? 0x1p-134 : 0x1p-25;  // half the least number
  constexpr double kSingle = 3e-6;  // of fp32 sums and of the fast exponential, relative
  const testing::TensorCore core = testing::TensorCore::of(compute_capability());
  SCOPED_TRACE(::testing::Message() << c);
  std::int64_t first_row = 0;
  for (std::size_t b = 0; b < c.q_lens.size(); ++b) {
    const std::int64_t q_len = c.q_lens[b], kv_len = c.kv_lens[b];
    for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
      const launcher::RowMajor keys = matrix_of(c, data.k[b], kv_len, kv_head);
      const launcher::RowMajor values = matrix_of(c, data.v[b], kv_len, kv_head);
      const int group = c.heads / c.kv_heads;
      for (std::int64_t t = 0; t < q_len; t += stride)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const std::int64_t row = (first_row + t) * c.heads + head;
          Eigen::VectorXd q(c.dim);
          for (int d = 0; d < c.dim; ++d)
            q[d] = launcher::load(data.q.data(), c.dtype, row * c.dim + d);
          const Interval seen = c.visible(b, t);
          const std::vector<double> bias = data.bias(c, b, t, head);
          std::optional<double> sink;
          if (c.sinks) sink = data.sinks[static_cast<std::size_t>(head)];
          const launcher::Exact exact = launcher::attend_exactly(
              q, keys, values, seen, c.scale_used(), c.softcap, sink, bias);
          const double lse = result.lse[static_cast<std::size_t>(row)];
          double lse_off = 4 * 0x1p-24 * std::abs(exact.lse);    // a sink alone, to base 2 and back
          Eigen::VectorXd moved = Eigen::VectorXd::Zero(c.dim);  // by rounding weights
          double single = kSingle;                               // what fp32 may do to a weight
          if (!seen.empty()) {
            const auto k = keys.middleRows(seen.begin, seen.end - seen.begin);
            const auto v = values.middleRows(seen.begin, seen.end - seen.begin);
            const std::span<const double> own =
                bias.empty() ? std::span<const double>() : std::span(bias).subspan(seen.begin);
            const double lift =
                c.alibi == Alibi::context
                    ? data.slopes[static_cast<std::size_t>(head)] * static_cast<double>(t)
                    : 0.0;
            lse_off =
                testing::lse_bound(core, q, k, c.scale_used(), c.softcap, own, lift, exact.lse);
            Eigen::ArrayXd s = (k * q).array() * c.scale_used();
            single += kSingle * s.abs().maxCoeff();
            if (c.softcap != 0) s = c.softcap * (s / c.softcap).tanh();
            if (!bias.empty()) {
              const Eigen::Map<const Eigen::ArrayXd> added(own.data(), s.size());
              single += kOfBias * added.abs().maxCoeff();
              s += added;
            }
            const Eigen::VectorXd error = (s - exact.lse).exp() * (unit + single) + smallest;
            moved = v.cwiseAbs().transpose() * error;
          }
          if (std::isinf(exact.lse))
            EXPECT_EQ(lse, exact.lse);
          else
            EXPECT_NEAR(lse, exact.lse, lse_off) << "row " << row;
          for (int d = 0; d < c.dim; ++d) {
            const double got = launcher::load(result.out.data(), c.dtype, row * c.dim + d);
            const double bound = moved[d] + (std::abs(exact.out[d]) + moved[d]) * unit +
                                 single * std::abs(exact.out[d]) + smallest;
            EXPECT_LE(std::abs(got - exact.out[d]), bound) << "row " << row << " column " << d;
          }
        }
    }
    first_row += q_len;
  }
}

/// 16 bits: every element. fp32: at most twice the error of a plain computation by norm, where 2e-6
/// is good enough: with scores of order 10 fp32 itself is worse.
inline void expect_exact(const Case& c, const Data& data, const Result& result, int stride = 1) {
  if (c.dtype != DType::fp32) return expect_within_rounding(c, data, result, stride);
  const Judgement verdict = judge(c, data, result, stride);
  SCOPED_TRACE(::testing::Message() << c);
  EXPECT_LE(verdict.norm, std::max(2e-6, 2 * verdict.norm_plain));
  EXPECT_LE(verdict.worst_lse, 2e-6);
}

inline void expect_same_bits(const Result& a, const Result& b) {
  ASSERT_EQ(a.out.size(), b.out.size());
  EXPECT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size()), 0) << "outputs differ";
  EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0)
      << "lse differ";
}

}  // namespace longspan::test

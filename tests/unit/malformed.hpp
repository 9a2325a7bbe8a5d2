// Random malformed arguments to every public call: it works or throws an Error, and an Error leaves
// every result as it was. Nothing else may come of it: no crash, no other exception, no access that
// the sanitizers see. What a call cannot know stays out of it: memory that is smaller than a tensor
// says, arrays that are shorter than the batch.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "longspan/kernels.hpp"
#include "tests/fresh_seed.hpp"

namespace longspan {

inline constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 16, kPages = 9, kColumns = 4;
inline constexpr int kTokens = 4, kBatch = 2, kSegments = 3, kKeys = 60;
inline constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kLeast = -kMost - 1;
inline constexpr int kRounds = 4000;

/// Draws what is wrong.
struct Chaos {
  std::mt19937_64 random;

  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[random() % values.size()];
  }
  bool once_in(int n) { return random() % n == 0; }
  std::int64_t count() { return of<std::int64_t>({kLeast, -7, -1, 0, 1, 2, kMost}); }
  DType dtype() { return static_cast<DType>(of({0, 1, 2, 3, 4, 5, 9, 255})); }
  float number() {
    return of({NAN, INFINITY, -INFINITY, 0.0f, -0.0f, -1.0f, 1e-40f, 0.5f, 3e38f, -3e38f});
  }

  /// Shapes and strides become smaller than the memory, or absurd.
  void tensor(Tensor& t) {
    const int d = static_cast<int>(random() % Tensor::kMaxDims);
    switch (random() % 8) {
      case 0:
        t.dims = of({-1, 0, 1, 2, 3, 4, 5, 6, 7, 1000});
        break;
      case 1:
        t.shape[d] = of<std::int64_t>({kLeast, -1, 0, 1, t.shape[d] / 2, kMost});
        break;
      case 2:
        t.stride[d] = of<std::int64_t>({kLeast, -64, 0, 1, t.stride[d] / 2, kMost});
        break;
      case 3:
        t.dtype = dtype();
        break;
      case 4:
        t.device = Device::cuda;
        break;
      case 5:
        t.data = nullptr;
        break;
      case 6:
        t.data = static_cast<std::byte*>(t.data) + (t.data == nullptr ? 0 : of({1, 2, 4, 8}));
        break;
      default:
        t = {};
    }
  }
  template <class T>
  void entry(std::vector<T>& values) {
    values[random() % values.size()] =
        of<T>({std::numeric_limits<T>::min(), -1, 0, 1, 5, 33, std::numeric_limits<T>::max()});
  }
  void scales(Scales& s, std::vector<float>& values) {
    s = {once_in(3) ? nullptr : values.data(), once_in(2)};
    values[random() % values.size()] = number();
  }
  void mask(Mask& m) {
    if (once_in(2)) m.causal = !m.causal;
    (once_in(2) ? m.window : m.right) = count();
  }
  void shard(Shard& s) {
    switch (random() % 7) {
      case 0:
        s.layout = static_cast<Layout>(of({0, 1, 2, 3, 4, 5, 6, 255}));
        break;
      case 1:
        s.rank = of({-1, 0, 1, std::numeric_limits<int>::max()});
        break;
      case 2:
        s.ranks = of({-1, 0, 1, 2, std::numeric_limits<int>::max()});
        break;
      case 3:
        s.length = of<std::int64_t>({kLeast, -1, 0, 1, 33, 1 << 20, kMost});
        break;
      case 4:
        s.block = count();
        break;
      case 5:
        s.table = nullptr;
        break;
      default:
        s.listed = of<std::int64_t>({kLeast, -1, 0, 1, 2});
    }
  }
};

/// Memory of every call, with room past its end; what is written begins as NaN.
struct Memory {
  static constexpr int kRoom = 16;
  std::vector<float> q, k, v, new_k, new_v, parts, lses, one, sinks, qq;
  std::vector<float> out, lse, seg_output, seg_max, seg_expsum;
  std::vector<std::int32_t> table{7, 2, 1, 4, 0, 5, 3, 6}, query_start{0, 1, 4}, kv_len{20, 33};
  std::vector<std::int64_t> slots{7 * kPage + 3, 3, 40, -1}, numbers{0, 20, 0, 33};
  std::vector<std::uint8_t> causal{1, 0};
  Buffer workspace;

  explicit Memory(std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& to, std::size_t n) {
      to.resize(n + kRoom);
      for (float& value : to) value = normal(random);
    };
    fill(q, kTokens * kHeads * kDim);
    fill(k, kPages * kPage * kKvHeads * kDim);
    fill(v, k.size() - kRoom);
    fill(new_k, kTokens * kKvHeads * kDim);
    fill(new_v, kTokens * kKvHeads * kDim);
    fill(parts, 3 * kTokens * kHeads * kDim);
    fill(lses, 3 * kTokens * kHeads);
    fill(sinks, kHeads);
    fill(qq, 9);
    one.assign(kHeads, 1.0f);
    poison();
  }
  /// Each as large as the largest, since changes put one in the place of another.
  void poison() {
    for (std::vector<float>* to : {&out, &lse, &seg_output, &seg_max, &seg_expsum})
      to->assign(kTokens * kHeads * kSegments * kDim + kRoom, NAN);
  }
  static bool is_poison(const std::vector<float>& values) {
    for (const float value : values)
      if (!std::isnan(value)) return false;
    return true;
  }

  Tensor rows(std::vector<float>& data, std::int64_t heads) {
    return Tensor(data.data(), fp32, {kTokens, heads, kDim});
  }
  Tensor pages(std::vector<float>& data) {
    return Tensor(data.data(), fp32, {kPages, kPage, kKvHeads, kDim});
  }
  Lse out_lse() { return Lse::tokens_heads(Tensor(lse.data(), fp32, {kTokens, kHeads})); }
  Segments segments() {
    return {Tensor(seg_output.data(), fp32, {kTokens, kHeads, kSegments, kDim}),
            Tensor(seg_max.data(), fp32, {kTokens, kHeads, kSegments}),
            Tensor(seg_expsum.data(), fp32, {kTokens, kHeads, kSegments})};
  }
  template <class Args>
  Args paged(const Kernels& kernels) {
    Args a;
    a.q = rows(q, kHeads);
    a.k_cache = pages(k);
    a.v_cache = pages(v);
    a.block_table = {table.data(), kColumns};
    a.batch = kBatch;
    a.query_start = query_start.data();
    a.kv_len = kv_len.data();
    a.out = rows(out, kHeads);
    a.lse = out_lse();
    if constexpr (std::is_same_v<Args, ContextAttention>) {
      a.k = rows(new_k, kKvHeads);
      a.v = rows(new_v, kKvHeads);
    }
    workspace = Buffer(Device::host, kernels.workspace_bytes(a) + 4096);
    a.workspace = {workspace.data(), workspace.bytes()};
    return a;
  }
};

class Malformed : public ::testing::Test {
 protected:
  Malformed() : seed_(testing::fresh_seed()), chaos_{std::mt19937_64(seed_)} {
    std::cerr << "seed " << seed_ << std::endl;  // ahead of what may crash
  }

  /// Calls, and looks at what an Error left behind.
  void attempt(Memory& m, const std::function<void()>& call) {
    m.poison();
    const std::vector<float> k = m.k, v = m.v;
    try {
      call();
      ++worked_;
    } catch (const Error&) {
      ++refused_;
      EXPECT_TRUE(Memory::is_poison(m.out) && Memory::is_poison(m.lse) &&
                  Memory::is_poison(m.seg_output) && Memory::is_poison(m.seg_max) &&
                  Memory::is_poison(m.seg_expsum))
          << "seed " << seed_;
      EXPECT_TRUE(same(m.k, k) && same(m.v, v)) << "seed " << seed_;
    } catch (const std::exception& other) {
      ADD_FAILURE() << "no Error: " << other.what() << ", seed " << seed_;
    }
  }
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
  /// Both must come, or the test looks at nothing.
  void TearDown() override {
    EXPECT_GT(worked_, 0);
    EXPECT_GT(refused_, 0);
  }

  using Change = std::function<void()>;
  /// One to three of the changes.
  void apply(std::initializer_list<Change> changes) {
    for (auto n = 1 + chaos_.random() % 3; n > 0; --n)
      changes.begin()[chaos_.random() % changes.size()]();
  }

  template <class Args>
  void change_paged(Args& a, Memory& m) {
    Chaos& c = chaos_;
    apply({[&] { c.tensor(a.q); },
           [&] { c.tensor(a.k_cache); },
           [&] { c.tensor(a.v_cache); },
           [&] { c.tensor(a.out); },
           [&] { c.tensor(a.lse.tensor); },
           [&] { a.lse = c.once_in(2) ? Lse{} : Lse::heads_tokens(a.lse.tensor); },
           [&] {
             a.out.data = c.of({a.q.data, a.k_cache.data, a.v_cache.data});
           },
           [&] { a.out.data = a.lse.tensor.data; },
           [&] { c.entry(m.table); },
           [&] { c.entry(m.query_start); },
           [&] { c.entry(m.kv_len); },
           [&] {
             a.block_table.columns = c.of<std::int64_t>({kLeast, -1, 0, 1, kMost});
           },
           [&] {
             a.block_table.row_stride = c.of<std::int64_t>({kLeast, -1, 0, kMost});
           },
           [&] {
             a.block_table.column_stride = c.of<std::int64_t>({kLeast, -1, 0, kMost});
           },
           [&] { a.block_table.data = nullptr; },
           [&] {
             a.batch = c.of({std::numeric_limits<int>::min(), -1, 0, 1, 2});
           },
           [&] { a.query_start = nullptr; },
           [&] { a.kv_len = nullptr; },
           [&] { a.max_kv_len = c.count(); },
           [&] { a.max_query_len = c.count(); },
           [&] { a.dtype = c.dtype(); },
           [&] { a.scale = c.number(); },
           [&] { a.softcap = c.number(); },
           [&] { c.mask(a.mask); },
           [&] { a.causal = m.causal.data(); },
           [&] { a.sinks = m.sinks.data(); },
           [&] { a.slopes = m.sinks.data(); },
           [&] {
             a.qq_bias = {m.qq.data(), c.of<std::int64_t>({kLeast, -1, 0, 1, 3, kMost}),
                          c.of<std::int64_t>({kLeast, 0, 3, kMost})};
           },
           [&] { c.scales(a.q_scale, m.one); },
           [&] { c.scales(a.k_scale, m.one); },
           [&] { c.scales(a.v_scale, m.one); },
           [&] { a.out_scale = m.one.data(); },
           [&] { a.out_scale = m.one.data(), m.one[0] = c.number(); },
           [&] { a.tf32 = true; },
           [&] {
             a.workspace.bytes = c.of<std::size_t>({0, 1, 4096});
           },
           [&] { a.workspace.data = static_cast<std::byte*>(a.workspace.data) + 64; },
           [&] { a.workspace.data = nullptr; }});
  }

  unsigned seed_;
  Chaos chaos_;
  Kernels kernels_{Device::host, 2};
  int worked_ = 0, refused_ = 0;
};

}  // namespace longspan

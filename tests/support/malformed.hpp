// Random malformed arguments to every public call. It must work or throw an Error, and an Error
// leaves every result unchanged. Nothing else may happen: no crash, no other exception, no access
// that the sanitizers report. What a call cannot know is excluded: memory smaller than a tensor
// claims.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
#include "longspan/serving.hpp"
#include "tests/support/fresh_seed.hpp"

#if defined(__SANITIZE_ADDRESS__)
/// A failed allocation must end in an Error, not in the sanitizer.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace longspan {

inline constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 16, kPages = 9, kColumns = 4;
inline constexpr int kTokens = 4, kBatch = 2, kSegments = 3, kKeys = 60;
inline constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kLeast = -kMost - 1;
inline constexpr int kMostInt = std::numeric_limits<int>::max(),
                     kLeastInt = std::numeric_limits<int>::min();
inline constexpr int kRounds = 4000;

/// Draws the defects.
struct Chaos {
  std::mt19937_64 random;

  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[random() % values.size()];
  }
  bool once_in(int n) { return random() % n == 0; }
  std::int64_t count() { return of<std::int64_t>({kLeast, -7, -1, 0, 1, 2, kMost}); }
  DType dtype() { return static_cast<DType>(of({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 255})); }
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
  /// Not in the room past the end.
  template <class T>
  void entry(std::vector<T>& values);
  /// As many as allowed, or not.
  void scales(Tensor& s, std::vector<float>& values) {
    s = Tensor(once_in(3) ? nullptr : values.data(),
               {of<std::int64_t>({0, 1, kKvHeads, 3, kMost})});
    if (once_in(4)) tensor(s);
    values[random() % kHeads] = number();
  }
  void mask(Mask& m) {
    if (once_in(2)) m.causal = !m.causal;
    (once_in(2) ? m.window : m.right) = count();
  }
  void sharding(Sharding& s) {
    if (once_in(2))
      s.layout = static_cast<Layout>(of({0, 1, 2, 3, 4, 5, 6, 255}));
    else
      s.block = count();
  }
};

/// Room past the end of what a call is given.
inline constexpr int kRoom = 16;

template <class T>
std::vector<T> with_room(std::vector<T> values) {
  values.resize(values.size() + kRoom);
  return values;
}

template <class T>
void Chaos::entry(std::vector<T>& values) {
  values[random() % (values.size() - kRoom)] =
      of<T>({std::numeric_limits<T>::min(), -1, 0, 1, 5, 33, std::numeric_limits<T>::max()});
}

/// Memory of every call, with room past its end; written memory begins as NaN.
struct Memory {
  std::vector<float> q, k, v, new_k, new_v, parts, lses, one, sinks, qq, angles;
  std::vector<float> out, lse, seg_output, seg_max, seg_expsum;
  std::vector<std::int32_t> table = with_room<std::int32_t>({7, 2, 1, 4, 0, 5, 3, 6}),
                            query_start = with_room<std::int32_t>({0, 1, 4}),
                            kv_len = with_room<std::int32_t>({20, 33});
  std::vector<std::int64_t> slots = with_room<std::int64_t>({7 * kPage + 3, 3, 40, -1}),
                            numbers = with_room<std::int64_t>({0, 20, 0, 33}),
                            rows = with_room<std::int64_t>({0, 4, 2, 3});
  std::vector<std::uint8_t> causal = with_room<std::uint8_t>({1, 0});
  Buffer state{Device::host, ServingOps::state_bytes(kTokens, kHeads, kDim)}, workspace;

  explicit Memory(std::mt19937_64& random) {
    // Drawing each value would take longer than the calls. The table does not depend on `random`,
    // so that a seed gives the same inputs whichever test comes first.
    static const std::vector<float> normals = [] {
      std::mt19937_64 engine(1);
      std::normal_distribution<float> normal;
      std::vector<float> drawn(1 << 14);
      for (float& value : drawn) value = normal(engine);
      return drawn;
    }();
    const auto fill = [&](std::vector<float>& to, std::size_t n) {
      to.resize(n + kRoom);
      std::size_t from = random();
      for (float& value : to) value = normals[from++ % normals.size()];
    };
    fill(q, kTokens * kHeads * kDim);
    fill(k, kPages * kPage * kKvHeads * kDim);
    fill(v, k.size() - kRoom);
    fill(new_k, q.size() - kRoom);  // a change makes it the place of out
    fill(new_v, q.size() - kRoom);
    fill(parts, 3 * kTokens * kHeads * kDim);
    fill(lses, 3 * kTokens * kHeads);
    fill(sinks, kHeads);
    fill(qq, 9);
    fill(angles, kKeys * kDim / 2);
    one.assign(kHeads + kRoom, 1.0f);
    poison();
  }
  /// Each as large as the largest, since changes put one in the place of another.
  void poison() {
    for (std::vector<float>* to : {&out, &lse, &seg_output, &seg_max, &seg_expsum})
      to->assign(kTokens * kHeads * kSegments * kDim + kRoom, NAN);
    std::memset(state.data(), 0xff, state.bytes());
  }
  /// A copy of all that calls write, except caches, which are not poisoned.
  bool is_poison() const {
    const auto* bytes = static_cast<const unsigned char*>(state.data());
    return is_poison(out) && is_poison(lse) && is_poison(seg_output) && is_poison(seg_max) &&
           is_poison(seg_expsum) &&
           std::all_of(bytes, bytes + state.bytes(), [](unsigned char b) { return b == 0xff; });
  }
  static bool is_poison(const std::vector<float>& values) {
    for (const float value : values)
      if (!std::isnan(value)) return false;
    return true;
  }

  Tensor tokens(std::vector<float>& data, std::int64_t heads) {
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
  Tensor block_table() { return Tensor(table.data(), {kBatch, kColumns}); }
  Tensor starts() { return Tensor(query_start.data(), {kBatch + 1}); }
  Tensor lengths() { return Tensor(kv_len.data(), {kBatch}); }
  /// Cosines or sines for all elements of a row.
  Tensor rotation() { return Tensor(angles.data(), {kKeys, kDim / 2}); }
  Tensor bias() { return Tensor(qq.data(), {3, 3}); }
  template <class Args>
  Args paged(const ServingOps& kernels) {
    Args a;
    a.attention.q = tokens(q, kHeads);
    a.attention.k_cache = pages(k);
    a.attention.v_cache = pages(v);
    a.attention.block_table = block_table();
    a.attention.query_start = starts();
    a.attention.kv_len = lengths();
    a.attention.out = tokens(out, kHeads);
    a.attention.lse = out_lse();
    if constexpr (std::is_same_v<Args, ContextAttention>) {
      a.k = tokens(new_k, kKvHeads);
      a.v = tokens(new_v, kKvHeads);
    }
    workspace = Buffer(Device::host, kernels.workspace_bytes(a) + 4096);
    a.attention.workspace = {workspace.data(), workspace.bytes()};
    return a;
  }
};

class Malformed : public ::testing::Test {
 protected:
  Malformed() : seed_(tests::fresh_seed()), chaos_{std::mt19937_64(seed_)} {
    std::cerr << "seed " << seed_ << std::endl;  // before the calls that may crash
  }

  /// Calls, and checks the memory after an Error.
  void attempt(Memory& m, const std::function<void()>& call) {
    m.poison();
    const std::vector<float> k = m.k, v = m.v;
    try {
      call();
      ++worked_;
    } catch (const Error&) {
      ++refused_;
      EXPECT_TRUE(m.is_poison()) << "seed " << seed_;
      EXPECT_TRUE(same(m.k, k) && same(m.v, v)) << "seed " << seed_;
    } catch (const std::exception& other) {
      ADD_FAILURE() << "no Error: " << other.what() << ", seed " << seed_;
    }
  }
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
  /// Both must occur, or the test checks nothing.
  void TearDown() override {
    EXPECT_GT(worked_, 0);
    EXPECT_GT(refused_, 0);
  }

  using Change = std::function<void()>;
  /// One to three of the changes.
  void apply(const std::vector<Change>& changes) {
    for (auto n = 1 + chaos_.random() % 3; n > 0; --n) changes[chaos_.random() % changes.size()]();
  }

  template <class Args>
  void change_paged(Args& a, Memory& m) {
    std::vector<Change> changes = changes_of_attention(a.attention, m);
    Chaos& c = chaos_;
    for (const Change& change : std::initializer_list<Change>{
             [&] { c.tensor(a.attention.k_cache); }, [&] { c.tensor(a.attention.v_cache); },
             [&] { c.tensor(a.attention.out); }, [&] { c.tensor(a.attention.lse.tensor); },
             [&] {
               a.attention.lse = c.once_in(2) ? Lse{} : Lse::heads_tokens(a.attention.lse.tensor);
             },
             [&] {
               a.attention.out.data =
                   c.of({a.attention.q.data, a.attention.k_cache.data, a.attention.v_cache.data});
             },
             [&] { a.attention.out.data = a.attention.lse.tensor.data; },
             [&] {
               a.attention.sinks = Tensor(m.sinks.data(), {kHeads});
               if (c.once_in(2)) c.tensor(a.attention.sinks);
             },
             [&] {
               a.attention.out_scale = Tensor(m.one.data(), {1});
               if (c.once_in(3)) c.tensor(a.attention.out_scale);
             },
             [&] { a.attention.out_scale = Tensor(m.one.data(), {1}), m.one[0] = c.number(); }})
      changes.push_back(change);
    apply(changes);
  }

  /// Changes common to all attention on one rank.
  template <class Args>
  std::vector<Change> changes_of_attention(Args& a, Memory& m) {
    Chaos& c = chaos_;
    return {[&] { c.tensor(a.q); },
            [&] { c.entry(m.table); },
            [&] { c.entry(m.query_start); },
            [&] { c.entry(m.kv_len); },
            [&] { c.tensor(a.block_table); },
            [&] {
              a.block_table.shape[1] = c.of<std::int64_t>({0, 1, 3});
            },
            [&] { a.block_table.data = nullptr; },
            [&] { c.tensor(a.query_start); },
            [&] { c.tensor(a.kv_len); },
            [&] {
              a.kv_len.shape[0] = 1;
              a.query_start.shape[0] = 2;
            },
            [&] { a.query_start = {}; },
            [&] { a.kv_len = {}; },
            [&] { a.max_kv_len = c.count(); },
            [&] { a.max_query_len = c.count(); },
            [&] { a.dtypes.compute = c.dtype(); },
            [&] { a.score.scale = c.number(); },
            [&] { a.score.softcap = c.number(); },
            [&] { c.mask(a.mask); },
            [&] {
              a.causal = Tensor(m.causal.data(), {kBatch});
              if (c.once_in(2)) c.tensor(a.causal);
            },
            [&] {
              a.slopes = Tensor(m.sinks.data(), {kHeads});
              if (c.once_in(2)) c.tensor(a.slopes);
            },
            [&] {
              a.qq_bias = m.bias();
              if (c.once_in(2)) c.tensor(a.qq_bias);
            },
            [&] {
              a.qq_bias = m.bias();
              a.qq_bias.shape[0] = a.qq_bias.shape[1] =
                  c.of<std::int64_t>({kLeast, -1, 0, 1, 2, kMost});
            },
            [&] { c.scales(a.q_scale, m.one); },
            [&] { c.scales(a.k_scale, m.one); },
            [&] { c.scales(a.v_scale, m.one); },
            [&] { a.dtypes.query = c.dtype(); },
            [&] { a.dtypes.kv = c.dtype(); },
            [&] { a.dtypes.out = c.dtype(); },
            [&] { a.dtypes.fp8_products = true; },
            [&] {
              a.score.alibi = static_cast<Alibi>(c.of({0, 1, 2, 3, 255}));
            },
            [&] { a.dtypes.tf32 = true; },
            [&] { a.dtypes.bf16_products = true; },
            [&] {
              a.workspace.bytes = c.of<std::size_t>({0, 1, 4096});
            },
            [&] { a.workspace.data = static_cast<std::byte*>(a.workspace.data) + 64; },
            [&] { a.workspace.data = nullptr; }};
  }

  unsigned seed_;
  Chaos chaos_;
  ServingOps kernels_{Device::host, 2};
  int worked_ = 0, refused_ = 0;
};

}  // namespace longspan

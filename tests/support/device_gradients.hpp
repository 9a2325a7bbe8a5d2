// Gradients of kernels that run on a device, against float64: a random problem of any shape, cut
// into shares of rows and shards of keys as ranks have them, and taken backward block by block in
// one process. Sums start as NaN, as do the gaps between rows, and the rows that nobody sees.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"
#include "longspan/buffer.hpp"
#include "tests/support/random_elements.hpp"

namespace longspan::tests {

struct GradientCase {
  DType dtype = DType::fp32;  // of q, k, v
  std::optional<DType> dout_dtype = {};
  int heads = 2;
  int kv_heads = 1;
  int dim = 64;
  int value_dim = 0;  // 0: dim
  std::vector<std::int32_t> query_len = {70};
  std::vector<std::int32_t> kv_len = {150};
  Mask mask = {};
  float softcap = 0;
  std::optional<Alibi> alibi = {};
  bool slopes_of_sequences = false;
  double dropout = 0;
  bool qq = false;                               // a third of the entries off the diagonal are -inf
  std::vector<std::uint8_t> causal = {};         // per sequence
  std::vector<std::int64_t> documents = {};      // [batch, count + 1]
  std::vector<std::int64_t> bidirectional = {};  // [batch, count, 2]
  std::vector<std::int32_t> prefix = {};         // per sequence, in place of the mask's
  std::vector<std::int32_t> left_padding = {};   // per sequence
  std::vector<std::int32_t> used_rows = {};      // per sequence
  Sharding keys = {};
  int key_ranks = 1;
  Sharding rows = {};
  int row_ranks = 1;
  int dout_power = 0;  // gradients of results are of order 2^this
  bool invariant = false;
  bool tf32 = false;
  int gap = 8;             // elements between rows, of NaN
  bool padded = false;     // sequences of keys begin at multiples of the longest
  bool only_rows = false;  // dk and dv are not wanted
  bool only_keys = false;  // dq is not wanted

  int values() const { return value_dim > 0 ? value_dim : dim; }
  int batch() const { return static_cast<int>(query_len.size()); }
};

/// The largest rounding of a weight, relative to it; 0: that of fp32.
inline double largest_rounding(const GradientCase& c) {
  if (c.dtype == DType::bf16) return 0x1p-8;
  return c.dtype == DType::fp16 || c.tf32 ? 0x1p-11 : 0;
}

/// Whether the factors of a product are rounded as its weights are: those of tf32, and dout of
/// another type.
inline bool rounds_factors(const GradientCase& c) {
  return c.tf32 || c.dout_dtype.value_or(c.dtype) != c.dtype;
}

/// Gradients of whole tensors.
struct Gradients {
  std::vector<double> dq;  // [tokens, heads, dim]
  std::vector<double> dk;  // [keys, kv_heads, dim]
  std::vector<double> dv;  // [keys, kv_heads, value_dim]
  std::vector<double> dslopes, dqq;
  // Of plain(): the sums of the squares of all terms of each, and of what they change if factors do
  // by 1 part, and of each slope the sum of the absolute terms.
  double squares[5] = {}, by_factors[5] = {};
  std::vector<double> slope_terms;

  bool operator==(const Gradients&) const = default;
};

class DeviceGradients {
 public:
  DeviceGradients(GradientCase of, std::uint32_t seed) : c(std::move(of)), random_(seed) {
    row_start = starts(c.query_len);
    key_start = starts(c.kv_len);
    q = drawn(c.dtype, tokens() * c.heads * c.dim, seed, 0);
    k = drawn(c.dtype, keys() * c.kv_heads * c.dim, seed, 1);
    v = drawn(c.dtype, keys() * c.kv_heads * c.values(), seed, 2);
    dout = drawn(dout_dtype(), tokens() * c.heads * c.values(), seed, 3);
    if (c.dout_power != 0)  // on fp16's grid
      for (float& x : dout) x = std::ldexp(std::nearbyint(std::ldexp(x, c.dout_power + 24)), -24);
    draw_biases();
    find_terms(seed);
    hide_unseen();
  }

  std::int64_t tokens() const { return row_start.back(); }
  std::int64_t keys() const { return key_start.back(); }
  DType dout_dtype() const { return c.dout_dtype.value_or(c.dtype); }

  /// Everything by definition, in Real: float64 judges, and fp32 is the yardstick.
  template <class Real>
  Gradients plain() const {
    Gradients all = zeros();
    double of_score = 0, of_weight = 0;  // how much factors change a weight, and dS by dout.v
    const auto add = [&](Real& sum, Real term, int which, Real of_ds = 0) {
      const double square = double{term} * double{term};
      sum += term;
      all.squares[which] += square;
      all.by_factors[which] += square * (2 + of_score) + of_weight * double{of_ds} * double{of_ds};
    };
    all.slope_terms.resize(all.dslopes.size());
    std::vector<Real> dq(all.dq.size()), dk(all.dk.size()), dv(all.dv.size());
    std::vector<Real> dslopes(all.dslopes.size()), dqq(all.dqq.size());
    for_each_seen([&](int b, int h, std::int64_t t, std::int64_t j) {
      const std::int64_t row = (row_start[b] + t) * c.heads + h;
      const std::int64_t key = (key_start[b] + j) * c.kv_heads + h / group();
      Real slope = 1;
      const Real score = score_of<Real>(b, h, t, j, &slope);
      if (std::isinf(score)) return;
      const Real p = std::exp(score - static_cast<Real>(lse_[row]));
      Real of_value = 0;
      const auto kept = static_cast<Real>(kept_of(b, h, t, j));
      of_score = of_weight = 0;
      for (int d = 0; d < c.values(); ++d) {
        const Real product =
            kept * Real{dout[row * c.values() + d]} * Real{v[key * c.values() + d]};
        of_value += product;
        of_weight += 2 * double{product} * double{product};
      }
      for (int d = 0; d < c.dim; ++d) {
        const double product = double{q[row * c.dim + d]} * k[key * c.dim + d] * scale();
        of_score += 2 * product * product;
      }
      const Real ds = p * (of_value - static_cast<Real>(delta_[row]));
      const Real turn = slope * Real{scale()}, dx = ds * turn;
      for (int d = 0; d < c.dim; ++d) {
        const Real of_k = Real{k[key * c.dim + d]}, of_q = Real{q[row * c.dim + d]};
        add(dq[row * c.dim + d], dx * of_k, 0, p * turn * of_k);
        add(dk[key * c.dim + d], dx * of_q, 1, p * turn * of_q);
      }
      for (int d = 0; d < c.values(); ++d)
        add(dv[key * c.values() + d], p * kept * Real{dout[row * c.values() + d]}, 2);
      const std::int64_t column = j - context(b);
      if (c.alibi) {
        const std::int64_t at = (c.slopes_of_sequences ? b * c.heads : 0) + h;
        const auto distance =
            static_cast<Real>(launcher::alibi_term(*c.alibi, context(b) + t, j, context(b)));
        add(dslopes[at], ds * distance, 3, p * distance);
        all.slope_terms[at] += std::abs(double{ds * distance});
      }
      if (c.qq && column >= 0 && column < qq_width()) add(dqq[t * qq_width() + column], ds, 4, p);
    });
    std::copy(dq.begin(), dq.end(), all.dq.begin());
    std::copy(dk.begin(), dk.end(), all.dk.begin());
    std::copy(dv.begin(), dv.end(), all.dv.begin());
    std::copy(dslopes.begin(), dslopes.end(), all.dslopes.begin());
    std::copy(dqq.begin(), dqq.end(), all.dqq.begin());
    return all;
  }

  /// Backward by a backend, block by block of rows and keys. `stored`: the kernels store the
  /// gradients, rounded, of the only block.
  Gradients run(const kernels::Backend& backend, bool stored = false) const {
    Gradients all = zeros();
    const Device device = backend.device();
    std::vector<Buffer> dk, dv;
    for (int r = 0; r < c.key_ranks; ++r) {
      dk.push_back(sums(device, local_keys(r) * c.kv_heads, c.dim));
      dv.push_back(sums(device, local_keys(r) * c.kv_heads, c.values()));
    }
    const std::int64_t qq_stride = qq_width() + 5;
    const Buffer dslopes = on(device, std::vector<float>(all.dslopes.size() + 1, 0.0f));
    const Buffer dqq = on(device, std::vector<float>(qq_width() * qq_stride, 0.0f));
    const Arrays arrays(*this, device);
    for (int from = 0; from < c.row_ranks; ++from) {
      const OwnRows rows(*this, from, device);
      const Buffer dq = sums(device, rows.count * c.heads, c.dim);
      for (int r = 0; r < c.key_ranks; ++r) {
        const OwnKeys own(*this, r, device);
        kernels::GradientParams p;
        give_geometry(p);
        arrays.give(*this, p);
        rows.give(*this, p);
        own.give(*this, p);
        if (!c.only_keys) p.dq = {static_cast<float*>(dq.data()), rows.count * group(), c.dim};
        if (!c.only_rows) {
          p.dk = {static_cast<float*>(dk[r].data()), local_keys(r), c.dim};
          p.dv = {static_cast<float*>(dv[r].data()), local_keys(r), c.values()};
        }
        p.resume_rows = r > 0;
        p.resume_keys = from > 0;
        if (c.alibi) p.biases.slopes = static_cast<float*>(dslopes.data());
        if (c.slopes_of_sequences) p.biases.slope_stride = c.heads;
        if (c.qq) p.biases.qq = static_cast<float*>(dqq.data());
        p.biases.qq_stride = qq_stride;
        Buffer scratch(device, backend.gradient_scratch(p) + 1);
        poison(scratch);
        p.scratch = static_cast<std::byte*>(scratch.data());
        p.scratch_bytes = scratch.bytes() - 1;
        std::optional<Stored> stores;
        if (stored) stores.emplace(*this, device, p);
        EXPECT_EQ(backend.stores_gradients(p), stored);
        backend.attend_gradients(p, {});
        if (stored) return stores->gradients(*this);
        if (device == Device::cuda) from_device(dslopes);  // waits: memory ends here
      }
      if (!c.only_keys) collect_rows(from, from_device(dq), all.dq);
    }
    for (int r = 0; r < c.key_ranks && !c.only_rows; ++r) {
      collect_keys(r, from_device(dk[r]), c.dim, all.dk);
      collect_keys(r, from_device(dv[r]), c.values(), all.dv);
    }
    const std::vector<float> of_slopes = from_device(dslopes), of_qq = from_device(dqq);
    for (std::size_t i = 0; i < all.dslopes.size(); ++i) all.dslopes[i] = of_slopes[i];
    for (std::size_t i = 0; i < all.dqq.size(); ++i)
      all.dqq[i] = of_qq[i / qq_width() * qq_stride + i % qq_width()];
    return all;
  }

  /// NaN in dout of a row of the first sequence, and so in its D; or in a key and its value, and so
  /// in the terms of the rows that see it.
  void poison_row(std::int64_t row) {
    poison(dout, row * c.heads, c.heads, c.values());
    for (int h = 0; h < c.heads; ++h)
      terms_[row * c.heads + h].d = std::numeric_limits<float>::quiet_NaN();
  }
  void poison_key(std::int64_t key) {
    poison(k, key * c.kv_heads, c.kv_heads, c.dim);
    poison(v, key * c.kv_heads, c.kv_heads, c.values());
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t t = 0; t < c.query_len[0]; ++t)
      for (int h = 0; sees(t, key) && h < c.heads; ++h)
        terms_[t * c.heads + h] = {kNan, kNan, kNan};
  }
  /// Whether row t of the first sequence sees a key.
  bool sees(std::int64_t t, std::int64_t key) const { return visible(0, t).contains(key); }

  GradientCase c;
  std::vector<std::int32_t> row_start, key_start;  // [batch + 1] of whole sequences, packed
  std::vector<float> q, k, v, dout;                // whole, without gaps; rounded to their types

 private:
  int group() const { return c.heads / c.kv_heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c.dim)); }
  std::int64_t context(int b) const {
    return c.mask.alignment == Alignment::upper_left ? 0 : c.kv_len[b] - used(b);
  }
  std::int64_t used(int b) const { return c.used_rows.empty() ? c.query_len[b] : c.used_rows[b]; }
  std::int64_t qq_width() const {
    return *std::max_element(c.query_len.begin(), c.query_len.end()) + 3;
  }
  static std::vector<std::int32_t> starts(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> start = {0};
    for (const std::int32_t n : lengths) start.push_back(start.back() + n);
    return start;
  }
  static std::vector<float> drawn(DType dtype, std::int64_t count, std::uint32_t seed,
                                  std::uint32_t tensor) {
    std::vector<float> values = random_floats(count, seed, tensor);
    for (float& value : values) value = static_cast<float>(launcher::rounded(dtype, value));
    return values;
  }
  Gradients zeros() const {
    Gradients all;
    all.dq.assign(tokens() * c.heads * c.dim, 0);
    all.dk.assign(keys() * c.kv_heads * c.dim, 0);
    all.dv.assign(keys() * c.kv_heads * c.values(), 0);
    if (c.alibi) all.dslopes.assign((c.slopes_of_sequences ? c.batch() : 1) * c.heads, 0);
    if (c.qq) all.dqq.assign(qq_width() * qq_width(), 0);
    return all;
  }

  Mask mask_of(int b) const {
    Mask mask = c.mask;
    if (!c.causal.empty()) mask.causal = c.causal[b] != 0;
    if (!c.prefix.empty()) mask.prefix = c.prefix[b];
    return mask;
  }
  Interval visible(int b, std::int64_t t) const {
    if (t >= used(b)) return {};
    const Interval seen = launcher::seen_keys(mask_of(b), context(b) + t, c.kv_len[b],
                                              launcher::of_sequence(c.documents, b, c.batch()),
                                              c.left_padding.empty() ? 0 : c.left_padding[b],
                                              launcher::of_sequence(c.bidirectional, b, c.batch()));
    return {std::max<std::int64_t>(0, seen.begin), seen.end};
  }
  template <class Visit>
  void for_each_seen(const Visit& visit) const {
    for (int b = 0; b < c.batch(); ++b)
      for (std::int64_t t = 0; t < c.query_len[b]; ++t) {
        const Interval seen = visible(b, t);
        std::vector<double> hidden;
        launcher::hide_unseen(hidden, mask_of(b), context(b) + t, c.kv_len[b],
                              c.left_padding.empty() ? 0 : c.left_padding[b],
                              launcher::of_sequence(c.bidirectional, b, c.batch()));
        for (int h = 0; h < c.heads; ++h)
          for (std::int64_t j = seen.begin; j < seen.end; ++j)
            if (hidden.empty() || hidden[j] == 0) visit(b, h, t, j);
      }
  }

  template <class Real>
  Real score_of(int b, int h, std::int64_t t, std::int64_t j, Real* slope = nullptr) const {
    const std::int64_t row = (row_start[b] + t) * c.heads + h;
    const std::int64_t key = (key_start[b] + j) * c.kv_heads + h / group();
    Real score = 0;
    for (int d = 0; d < c.dim; ++d) score += Real{q[row * c.dim + d]} * Real{k[key * c.dim + d]};
    score *= Real{scale()};
    if (c.softcap != 0) {
      const Real capped = std::tanh(score / Real{c.softcap});
      score = Real{c.softcap} * capped;
      if (slope != nullptr) *slope = 1 - capped * capped;
    }
    const std::int64_t column = j - context(b);
    if (c.alibi)
      score += Real{slopes_[(c.slopes_of_sequences ? b * c.heads : 0) + h]} *
               static_cast<Real>(launcher::alibi_term(*c.alibi, context(b) + t, j, context(b)));
    if (c.qq && column >= 0 && column < qq_width()) score += Real{qq_[t * qq_width() + column]};
    return score;
  }

  kernels::Dropout dropout() const {
    kernels::Dropout of;
    of.on = c.dropout > 0;
    of.threshold = kernels::dropout_threshold(c.dropout);
    of.wide_scale = 1 / (1 - c.dropout);
    of.scale = static_cast<float>(of.wide_scale);
    of.own_seed = 12345;
    of.own_offset = 678;
    of.first_head = 3;
    return of;
  }
  /// The factor of dropout, which is 1 without.
  double kept_of(int b, int h, std::int64_t t, std::int64_t j) const {
    const kernels::Dropout of = dropout();
    if (!of) return 1;
    const std::uint32_t word = of.row(of.key(), b, h, context(b) + t).one(j);
    return of.keeps(word) ? double{of.scale} : 0;
  }

  void draw_biases() {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> slope(0.001f, 0.01f);
    for (int i = 0; i < c.heads * c.batch(); ++i) slopes_.push_back(slope(random_));
    for (std::int64_t i = 0; i < qq_width() * qq_width(); ++i)
      qq_.push_back(i / qq_width() != i % qq_width() && random_() % 3 == 0
                        ? -std::numeric_limits<float>::infinity()
                        : normal(random_));
  }

  /// The lse of each row, and D = dout.out - dlse of random dlse.
  void find_terms(std::uint32_t seed) {
    const std::int64_t rows = tokens() * c.heads;
    std::vector<double> sum(rows, 0), of_out(rows, 0);
    const std::vector<float> dlse = random_floats(rows + 1, seed, 4);
    for_each_seen([&](int b, int h, std::int64_t t, std::int64_t j) {
      const std::int64_t row = (row_start[b] + t) * c.heads + h;
      const std::int64_t key = (key_start[b] + j) * c.kv_heads + h / group();
      const double weight = std::exp(score_of<double>(b, h, t, j));
      sum[row] += weight;
      double of_value = 0;
      for (int d = 0; d < c.values(); ++d)
        of_value += double{dout[row * c.values() + d]} * v[key * c.values() + d];
      of_out[row] += weight * kept_of(b, h, t, j) * of_value;
    });
    for (std::int64_t row = 0; row < rows; ++row) {
      lse_.push_back(std::log(sum[row]));
      delta_.push_back(static_cast<float>((sum[row] > 0 ? of_out[row] / sum[row] : 0.0) -
                                          std::ldexp(double{dlse[row]}, c.dout_power)));
      const double base2 =
          static_cast<double>(static_cast<float>(lse_.back())) * 1.4426950408889634;
      const auto high = static_cast<float>(base2);
      if (sum[row] == 0)
        terms_.push_back({-infinity(), 0.0f, 0.0f});
      else
        terms_.push_back({high, static_cast<float>(base2 - high), delta_.back()});
      lse_.back() = static_cast<float>(lse_.back());
    }
  }

  /// NaN where nobody looks: keys that no row sees, and rows that see nothing.
  void hide_unseen() {
    std::vector<bool> row_sees(tokens() * c.heads), key_is_seen(keys());
    for_each_seen([&](int b, int h, std::int64_t t, std::int64_t j) {
      row_sees[(row_start[b] + t) * c.heads + h] = true;
      key_is_seen[key_start[b] + j] = true;
    });
    const auto hide = [](std::vector<float>& rows, std::int64_t row, int dim) {
      poison(rows, row, 1, dim);
    };
    for (std::size_t row = 0; row < row_sees.size(); ++row)
      if (!row_sees[row]) hide(q, row, c.dim), hide(dout, row, c.values());
    for (std::int64_t key = 0; key < keys() * c.kv_heads; ++key)
      if (!key_is_seen[key / c.kv_heads]) hide(k, key, c.dim), hide(v, key, c.values());
  }

  static void poison(std::vector<float>& values, std::int64_t row, int rows, int dim) {
    std::fill_n(values.begin() + row * dim, std::int64_t{rows} * dim,
                std::numeric_limits<float>::quiet_NaN());
  }

  // ---- memory of the device -------------------------------------------------------------------

  template <class T>
  static Buffer on(Device device, std::vector<T> values) {
    if (values.empty()) values.resize(1);
    Buffer buffer(device, values.size() * sizeof(T));
    buffer.upload(values.data());
    return buffer;
  }
  static void poison(Buffer& buffer) {
    buffer.upload(std::vector<std::byte>(buffer.bytes(), std::byte{0xff}).data());
  }
  static Buffer sums(Device device, std::int64_t rows, int dim) {
    Buffer buffer(device, static_cast<std::size_t>(std::max<std::int64_t>(1, rows) *
                                                   kernels::GradientSums::padded(dim) * 4));
    poison(buffer);
    return buffer;
  }
  static std::vector<float> from_device(const Buffer& buffer) {
    std::vector<float> values(buffer.bytes() / 4);
    buffer.download(values.data());
    return values;
  }

  /// Rows of a whole tensor, those in `which`, with gaps between them.
  Buffer rows_on(Device device, DType dtype, const std::vector<float>& whole,
                 const std::vector<std::int64_t>& which, int heads, int dim) const {
    const std::int64_t stride = std::int64_t{heads} * dim + c.gap;
    std::vector<std::byte> bytes((which.size() + 1) * stride * size_of(dtype), std::byte{0xff});
    for (std::size_t i = 0; i < which.size(); ++i)
      for (std::int64_t d = 0; d < std::int64_t{heads} * dim && which[i] >= 0; ++d)
        store_element(bytes.data(), dtype, i * stride + d, whole[which[i] * heads * dim + d]);
    return on(device, std::move(bytes));
  }

  struct Arrays {
    Arrays(const DeviceGradients& of, Device device)
        : kv_len(on(device, of.c.kv_len)),
          whole_start(on(device, of.row_start)),
          causal(on(device, of.c.causal)),
          documents(on(device, of.c.documents)),
          bidirectional(on(device, of.c.bidirectional)),
          prefix(on(device, of.c.prefix)),
          left_padding(on(device, of.c.left_padding)),
          used_rows(on(device, of.c.used_rows)),
          slopes(on(device, of.slopes_)),
          qq(on(device, of.qq_)) {}
    void give(const DeviceGradients& of, kernels::GradientParams& p) const {
      const GradientCase& c = of.c;
      p.batch.size = c.batch();
      if (c.batch() > 1) p.batch.kv_len = static_cast<const std::int32_t*>(kv_len.data());
      if (c.row_ranks > 1 && c.batch() > 1)
        p.batch.whole_query_start = static_cast<const std::int32_t*>(whole_start.data());
      if (!c.causal.empty()) p.batch.causal = static_cast<const std::uint8_t*>(causal.data());
      const std::int64_t each = std::ssize(c.documents) / c.batch();
      if (each > 0)
        p.documents = {static_cast<const std::int64_t*>(documents.data()), each - 1, each};
      const std::int64_t ranges = std::ssize(c.bidirectional) / c.batch() / 2;
      if (ranges > 0)
        p.ranges = {static_cast<const std::int64_t*>(bidirectional.data()), ranges, 2 * ranges};
      if (!c.prefix.empty()) p.batch.prefix = static_cast<const std::int32_t*>(prefix.data());
      if (!c.left_padding.empty())
        p.batch.left_padding = static_cast<const std::int32_t*>(left_padding.data());
      if (!c.used_rows.empty())
        p.batch.used_rows = static_cast<const std::int32_t*>(used_rows.data());
      if (c.alibi) {
        p.bias.alibi = *c.alibi;
        p.bias.slopes = {{static_cast<const float*>(slopes.data())},
                         c.slopes_of_sequences ? c.heads : 0};
      }
      if (c.qq) p.bias.qq = {{static_cast<const float*>(qq.data())}, of.qq_width(), of.qq_width()};
    }
    Buffer kv_len, whole_start, causal, documents, bidirectional, prefix, left_padding, used_rows,
        slopes, qq;
  };

  void give_geometry(kernels::GradientParams& p) const {
    p.dtype = p.q_dtype = p.kv_dtype = c.dtype;
    p.dout_dtype = dout_dtype();
    p.heads = c.heads;
    p.kv_heads = c.kv_heads;
    p.head_dim = c.dim;
    p.value_dim = c.values();
    p.mask = c.mask;
    p.score = {scale(), c.softcap};
    p.dropout = dropout();
    p.invariant = c.invariant;
    p.tf32 = c.tf32;
    p.max_kv_len = *std::max_element(c.kv_len.begin(), c.kv_len.end());
  }

  Shard rows_of(int rank) const { return share(c.rows, rank, c.row_ranks, c.query_len[0]); }
  Shard keys_of(int rank) const {
    if (c.keys.layout != Layout::listed) return share(c.keys, rank, c.key_ranks, c.kv_len[0]);
    const std::int64_t first = c.kv_len[0] * rank / c.key_ranks;
    return Shard::at_positions(c.kv_len[0], rank, c.key_ranks, listed().data() + first,
                               c.kv_len[0] * (rank + 1) / c.key_ranks - first);
  }
  static Shard share(const Sharding& rule, int rank, int ranks, std::int64_t length) {
    return rule.resolve(length, rank, ranks);
  }
  /// The positions of one sequence, in random order.
  const std::vector<std::int64_t>& listed() const {
    if (listed_.empty()) {
      listed_.resize(c.kv_len[0]);
      std::iota(listed_.begin(), listed_.end(), 0);
      std::shuffle(listed_.begin(), listed_.end(), std::mt19937(7));
    }
    return listed_;
  }

  /// The query rows of a rank.
  struct OwnRows {
    OwnRows(const DeviceGradients& of, int rank, Device device) : shard(of.rows_of(rank)) {
      std::vector<std::int32_t> row_starts = {0};
      std::vector<kernels::RowTerm> own_terms;
      for (int b = 0; b < of.c.batch(); ++b) {
        const std::int64_t length = of.c.query_len[b];
        for (std::int64_t t = 0; t < shard.for_sequence(b).local_len(length); ++t)
          which.push_back(of.row_start[b] + shard.for_sequence(b).position(t, length));
        row_starts.push_back(static_cast<std::int32_t>(which.size()));
      }
      count = std::ssize(which);
      for (const std::int64_t row : which)
        for (int h = 0; h < of.c.heads; ++h) own_terms.push_back(of.terms_[row * of.c.heads + h]);
      q = of.rows_on(device, of.c.dtype, of.q, which, of.c.heads, of.c.dim);
      dout = of.rows_on(device, of.dout_dtype(), of.dout, which, of.c.heads, of.c.values());
      terms = on(device, own_terms);
      start = on(device, row_starts);
    }
    void give(const DeviceGradients& of, kernels::GradientParams& p) const {
      const GradientCase& c = of.c;
      p.tokens = count;
      p.queries = shard;
      p.q = kernels::Rows{q.data(), std::int64_t{c.heads} * c.dim + c.gap, c.dim};
      p.dout = kernels::Rows{dout.data(), std::int64_t{c.heads} * c.values() + c.gap, c.values()};
      p.terms = static_cast<const kernels::RowTerm*>(terms.data());
      if (c.batch() > 1) p.batch.query_start = static_cast<const std::int32_t*>(start.data());
    }
    Shard shard;
    std::vector<std::int64_t> which;
    std::int64_t count = 0;
    Buffer q, dout, terms, start;
  };

  /// The first key of each sequence on a rank, and behind the last one.
  std::vector<std::int64_t> local_starts(int rank) const {
    std::vector<std::int64_t> start = {0};
    std::int64_t most = 0;
    for (int b = 0; b < c.batch(); ++b)
      most = std::max(most, keys_of(rank).for_sequence(b).local_len(c.kv_len[b]));
    for (int b = 0; b < c.batch(); ++b)
      start.push_back(start.back() +
                      (c.padded ? most + 3 : keys_of(rank).for_sequence(b).local_len(c.kv_len[b])));
    return start;
  }
  std::int64_t local_keys(int rank) const { return local_starts(rank).back(); }

  /// The keys of a rank.
  struct OwnKeys {
    OwnKeys(const DeviceGradients& of, int rank, Device device) : shard(of.keys_of(rank)) {
      const std::vector<std::int64_t> own_starts = of.local_starts(rank);
      std::vector<std::int64_t> which(own_starts.back(), -1);
      for (int b = 0; b < of.c.batch(); ++b)
        for (std::int64_t i = 0; i < shard.for_sequence(b).local_len(of.c.kv_len[b]); ++i)
          which[own_starts[b] + i] =
              of.key_start[b] + shard.for_sequence(b).position(i, of.c.kv_len[b]);
      k = of.rows_on(device, of.c.dtype, of.k, which, of.c.kv_heads, of.c.dim);
      v = of.rows_on(device, of.c.dtype, of.v, which, of.c.kv_heads, of.c.values());
      start = on(device, own_starts);
      if (shard.layout == Layout::listed) {
        table = on(device, std::vector<std::int64_t>(shard.table, shard.table + shard.listed));
        shard.table = static_cast<const std::int64_t*>(table.data());
      }
    }
    void give(const DeviceGradients& of, kernels::GradientParams& p) const {
      const GradientCase& c = of.c;
      p.shard = shard;
      p.k = {k.data(), std::int64_t{c.kv_heads} * c.dim + c.gap, c.dim};
      p.v = {v.data(), std::int64_t{c.kv_heads} * c.values() + c.gap, c.values()};
      if (c.batch() > 1) p.batch.key_start = static_cast<const std::int64_t*>(start.data());
    }
    Shard shard;
    Buffer k, v, start, table;
  };

  /// Places for gradients of the type of q. Keys of several sequences lie apart, further than those
  /// of the sums.
  struct Stored {
    Stored(const DeviceGradients& of, Device device, kernels::GradientParams& p)
        : capacity(of.c.batch() > 1 ? *std::max_element(of.c.kv_len.begin(), of.c.kv_len.end()) + 9
                                    : 0),
          dq(of, device, of.tokens(), of.c.heads, of.c.dim),
          dk(of, device, key_rows(of), of.c.kv_heads, of.c.dim),
          dv(of, device, key_rows(of), of.c.kv_heads, of.c.values()) {
      p.stores = {dq.tensor(), dk.tensor(), dv.tensor(), capacity};
    }
    Gradients gradients(const DeviceGradients& of) const {
      Gradients all = of.zeros();
      std::vector<std::int64_t> rows(of.tokens()), keys;
      std::iota(rows.begin(), rows.end(), 0);
      for (int b = 0; b < of.c.batch(); ++b)
        for (std::int64_t j = 0; j < of.c.kv_len[b]; ++j)
          keys.push_back((capacity > 0 ? b * capacity : of.key_start[b]) + j);
      dq.collect(rows, all.dq);
      dk.collect(keys, all.dk);
      dv.collect(keys, all.dv);
      return all;
    }

   private:
    struct Tensor {
      Tensor(const DeviceGradients& of, Device device, std::int64_t rows, int of_heads, int of_dim)
          : dtype(of.c.dtype),
            heads(of_heads),
            dim(of_dim),
            stride(std::int64_t{of_heads} * of_dim + of.c.gap),
            buffer(device, (rows + 1) * stride * size_of(dtype)) {
        poison(buffer);
      }
      kernels::TokenRows tensor() const { return {buffer.data(), stride, dim}; }
      /// Also expects that nothing else was written.
      void collect(const std::vector<std::int64_t>& rows, std::vector<double>& to) const {
        std::vector<std::byte> bytes(buffer.bytes());
        buffer.download(bytes.data());
        const std::int64_t columns = std::int64_t{heads} * dim;
        const std::size_t size = size_of(dtype);
        for (std::size_t i = 0; i < rows.size(); ++i) {
          std::byte* const row = bytes.data() + rows[i] * stride * size;
          for (std::int64_t d = 0; d < columns; ++d)
            to[i * columns + d] = load_element(row, dtype, d);
          std::fill_n(row, columns * size, std::byte{0xff});
        }
        EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte{0xff}), std::ssize(bytes));
      }
      DType dtype;
      int heads, dim;
      std::int64_t stride;
      Buffer buffer;
    };
    std::int64_t key_rows(const DeviceGradients& of) const {
      return capacity > 0 ? of.c.batch() * capacity : of.keys();
    }
    std::int64_t capacity;
    Tensor dq, dk, dv;
  };

  void collect_rows(int rank, const std::vector<float>& found, std::vector<double>& all) const {
    const int columns = kernels::GradientSums::padded(c.dim);
    const std::int64_t count = std::ssize(found) / columns / c.heads;
    std::int64_t row = 0;
    for (int b = 0; b < c.batch(); ++b) {
      const Shard shard = rows_of(rank).for_sequence(b);
      for (std::int64_t t = 0; t < shard.local_len(c.query_len[b]); ++t, ++row)
        for (int h = 0; h < c.heads; ++h) {
          const std::int64_t at = h / group() * count * group() + row * group() + h % group();
          const std::int64_t to = (row_start[b] + shard.position(t, c.query_len[b])) * c.heads + h;
          copy(found, at, columns, all, to, c.dim);
        }
    }
  }
  void collect_keys(int rank, const std::vector<float>& found, int dim,
                    std::vector<double>& all) const {
    const int columns = kernels::GradientSums::padded(dim);
    const std::vector<std::int64_t> start = local_starts(rank);
    for (int b = 0; b < c.batch(); ++b) {
      const Shard shard = keys_of(rank).for_sequence(b);
      for (std::int64_t i = 0; i < shard.local_len(c.kv_len[b]); ++i)
        for (int h = 0; h < c.kv_heads; ++h)
          copy(found, h * start.back() + start[b] + i, columns, all,
               (key_start[b] + shard.position(i, c.kv_len[b])) * c.kv_heads + h, dim);
    }
  }
  /// Copies a row of sums, whose padding has to be zeros.
  static void copy(const std::vector<float>& from, std::int64_t row, int columns,
                   std::vector<double>& to, std::int64_t to_row, int dim) {
    bool is_padded = true;
    for (int d = dim; d < columns; ++d) is_padded &= from[row * columns + d] == 0.0f;
    for (int d = 0; d < dim; ++d)
      to[to_row * dim + d] =
          is_padded ? from[row * columns + d] : std::numeric_limits<double>::quiet_NaN();
  }

  std::mt19937 random_;
  std::vector<float> slopes_, qq_;
  std::vector<double> lse_;  // natural, rounded to fp32
  std::vector<float> delta_;
  std::vector<kernels::RowTerm> terms_;
  mutable std::vector<std::int64_t> listed_;
};

/// Whether gradients of a case are those of float64. fp32 may err twice as much as plain fp32,
/// and 4 units in the last place of the largest gradient; few slopes are sums whose terms cancel,
/// so it is that of the largest sum of absolute terms. Products of fewer bits round each term by up
/// to a part of it, in either direction: of all terms that is less than this part of the root of
/// the sum of their squares. The rounding of a factor is common to many terms, hence three times.
inline ::testing::AssertionResult is_close(const GradientCase& c, const Gradients& found,
                                           const Gradients& exact, const Gradients& plain) {
  const double unit = largest_rounding(c);
  const auto check = [&](const char* name, const std::vector<double>& a,
                         const std::vector<double>& e, const std::vector<double>& p, int which) {
    double error = 0, largest = 0, of_plain = 0, squares = 0;
    for (std::size_t i = 0; i < e.size(); ++i) {
      const double off = std::abs(a[i] - e[i]);
      if (!(off <= error)) error = off;  // keeps a NaN
      squares += off * off;
      largest = std::max(largest, std::abs(e[i]));
      of_plain = std::max(of_plain, std::abs(p[i] - e[i]));
    }
    if (which == 3)
      for (const double terms : exact.slope_terms) largest = std::max(largest, terms);
    double bound = 2 * of_plain + 4 * 0x1p-23 * largest;
    if (unit > 0) {
      error = std::isfinite(error) ? std::sqrt(squares) : error;
      const double terms = exact.squares[which] + (rounds_factors(c) ? exact.by_factors[which] : 0);
      bound += (rounds_factors(c) ? 3 : 1) * unit * std::sqrt(terms);
    }
    if (error <= bound) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << name << ": error " << error << ", bound " << bound;
  };
  if (auto r = check("dq", found.dq, exact.dq, plain.dq, 0); !r) return r;
  if (auto r = check("dk", found.dk, exact.dk, plain.dk, 1); !r) return r;
  if (auto r = check("dv", found.dv, exact.dv, plain.dv, 2); !r) return r;
  if (auto r = check("dslopes", found.dslopes, exact.dslopes, plain.dslopes, 3); !r) return r;
  return check("dqq", found.dqq, exact.dqq, plain.dqq, 4);
}

}  // namespace longspan::tests

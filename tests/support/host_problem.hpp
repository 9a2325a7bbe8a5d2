// One attention problem for the tests of the host backend: whole sequences of random numbers, cut
// into shards, attended rank by rank in one process, and merged. All written memory starts as NaN,
// and so does every gap between rows.
#pragma once

#include <gtest/gtest.h>

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "kernels/backend.hpp"
#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"
#include "tests/support/host_pages.hpp"
#include "tests/support/random_elements.hpp"
#include "tests/support/rope_tables.hpp"
#include "tests/support/sanitized.hpp"

namespace longspan::tests {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct HostShape {
  int heads = 4;
  int kv_heads = 2;
  int dim = 64;
  DType dtype = DType::fp32;
  std::vector<std::int32_t> query_len = {5};
  std::vector<std::int32_t> kv_len = {300};
  Mask mask = {};
  float softcap = 0;
  bool bf16_products = false;

  std::optional<DType> q_dtype = {};  // as dtype
  std::optional<DType> kv_dtype = {};
  int page = 0;  // keys in a page; 0: not paged
  Store store = Store::rows;
  bool scales = false;  // of q, k and v
  bool scales_per_head = false;
  bool scales_of_sequences = false;  // and of each kv head
  std::optional<Alibi> alibi = {};
  bool slopes_of_sequences = false;              // else all have the same
  bool qq = false;                               // a third of the entries off the diagonal are -inf
  DType bias_dtype = DType::fp32;                // of slopes and qq
  std::vector<std::uint8_t> causal = {};         // per sequence
  std::vector<std::int64_t> documents = {};      // [batch, count + 1]
  std::vector<std::int64_t> bidirectional = {};  // [batch, count, 2]
  std::vector<std::int32_t> prefix = {};         // per sequence, in place of the mask's
  std::vector<std::int32_t> left_padding = {};   // per sequence
  std::vector<std::int32_t> used_rows = {};      // per sequence
  bool skip_decode = false;
  kernels::KeyParts parts = {};
  RopeOptions rope = {};                 // of layers: q is not rotated yet, nor is new_k; k is
  std::optional<DType> rope_table = {};  // tables of this type in place of base and scale
};

/// Of bf16, multiplied by the CPU's own products.
inline HostShape bf16_shape(std::int32_t queries, std::int32_t keys, int dim = 64) {
  HostShape shape{.heads = 4, .kv_heads = 2, .dim = dim, .dtype = bf16};
  shape.query_len = {queries};
  shape.kv_len = {keys};
  shape.bf16_products = true;
  return shape;
}

struct Result {
  std::vector<float> out;  // [tokens, heads, dim]
  std::vector<float> lse;  // [tokens, heads]

  bool same_bits(const Result& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
    };
    return same(out, other.out) && same(lse, other.lse);
  }
};

class HostProblem {
 public:
  static constexpr int kGap = 8;  // elements between rows, of NaN

  HostProblem(HostShape s, std::uint32_t seed) : shape(std::move(s)) {
    query_start = starts(shape.query_len);
    key_start = starts(shape.kv_len);
    q = Array(shape.q_dtype.value_or(shape.dtype), tokens() * q_stride());
    k = Array(shape.kv_dtype.value_or(shape.dtype), key_start.back() * kv_stride());
    v = k;
    fill(q, tokens(), q_stride(), shape.heads * shape.dim, normal_values(seed, 0));
    fill(k, key_start.back(), kv_stride(), shape.kv_heads * shape.dim, normal_values(seed, 1));
    fill(v, key_start.back(), kv_stride(), shape.kv_heads * shape.dim, normal_values(seed, 2));
    new_k = k;
    if (shape.rope.dim > 0) rotate_keys();
    std::mt19937 random(seed);
    draw_scales_and_biases(random);
    table_seed_ = static_cast<std::uint32_t>(random());
  }

  std::int64_t tokens() const { return query_start.back(); }
  std::int64_t q_stride() const { return std::int64_t{shape.heads} * shape.dim + kGap; }
  std::int64_t kv_stride() const { return std::int64_t{shape.kv_heads} * shape.dim + kGap; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.dim)); }
  int batch() const { return static_cast<int>(shape.kv_len.size()); }
  /// The position of the first query row of sequence b.
  std::int64_t context(int b) const {
    return shape.mask.alignment == Alignment::upper_left ? 0 : shape.kv_len[b] - used_rows(b);
  }
  /// Its rows that are used, the first ones.
  std::int64_t used_rows(int b) const {
    return shape.used_rows.empty() ? shape.query_len[b] : shape.used_rows[b];
  }
  /// The numbers in shape.documents of each sequence.
  std::int64_t starts_of_one() const { return std::ssize(shape.documents) / batch(); }
  /// The ranges in shape.bidirectional of each sequence.
  std::int64_t ranges_of_one() const { return std::ssize(shape.bidirectional) / batch() / 2; }

  /// The arguments of a rank's attention; `shard.rank` and `shard.table` as given.
  kernels::AttendParams params(const Shard& shard, kernels::StateSlots state, int slot) {
    kernels::AttendParams p;
    p.dtype = shape.dtype;
    p.bf16_products = shape.bf16_products;
    p.q_dtype = q.dtype;
    p.kv_dtype = k.dtype;
    p.tokens = tokens();
    p.heads = shape.heads;
    p.kv_heads = shape.kv_heads;
    p.head_dim = p.value_dim = shape.dim;
    p.q = {q.data(), q_stride(), shape.dim};
    p.batch = {batch(), query_start.data(), shape.kv_len.data(), nullptr};
    p.max_kv_len = *std::max_element(shape.kv_len.begin(), shape.kv_len.end());
    p.shard = shard;
    p.mask = shape.mask;
    p.score = {scale(), shape.softcap};
    p.batch.causal = shape.causal.empty() ? nullptr : shape.causal.data();
    p.batch.skip_decode = shape.skip_decode;
    if (!shape.documents.empty())
      p.documents = {shape.documents.data(), starts_of_one() - 1, starts_of_one()};
    if (!shape.bidirectional.empty())
      p.ranges = {shape.bidirectional.data(), ranges_of_one(), 2 * ranges_of_one()};
    p.batch.prefix = shape.prefix.empty() ? nullptr : shape.prefix.data();
    p.batch.left_padding = shape.left_padding.empty() ? nullptr : shape.left_padding.data();
    p.batch.used_rows = shape.used_rows.empty() ? nullptr : shape.used_rows.data();
    if (shape.scales) {
      const int head = shape.scales_per_head || shape.scales_of_sequences ? 1 : 0;
      const int sequence = shape.scales_of_sequences ? shape.kv_heads : 0;
      p.q_scale = {q_scale.data(), 0, 0, head, sequence};
      p.k_scale = {k_scale.data(), 0, 0, head, sequence};
      p.v_scale = {v_scale.data(), 0, 0, head, sequence};
    }
    if (shape.alibi) {
      p.bias.slopes = {{slopes.data(), slopes.dtype}, shape.slopes_of_sequences ? shape.heads : 0};
      p.bias.alibi = *shape.alibi;
    }
    if (shape.qq) p.bias.qq = {{qq.data(), qq.dtype}, qq_width(), qq_width() + kGap};
    p.parts = shape.parts;
    p.state = state;
    p.slot = slot;
    return p;
  }

  /// The keys that a rank holds.
  Local local(const Shard& rule) const {
    if (shape.page > 0)
      return Whole{k, v, kv_stride(), shape.kv_heads, shape.dim, shape.kv_len, key_start, seen()}
          .paged(rule, shape.page, shape.store, table_seed_);
    Local l;
    std::int64_t count = 0;
    for (int b = 0; b < batch(); ++b) {
      l.start.push_back(count);
      count += rule.for_sequence(b).local_len(shape.kv_len[b]);
    }
    l.k = Array(k.dtype, count * kv_stride());
    l.v = l.k;
    l.k_rows = l.v_rows = {nullptr, kv_stride(), shape.dim};
    const std::size_t row = kv_stride() * size_of(k.dtype);
    for (int b = 0; b < batch(); ++b) {
      const Shard shard = rule.for_sequence(b);
      for (std::int64_t i = 0; i < shard.local_len(shape.kv_len[b]); ++i) {
        const std::int64_t at = key_start[b] + shard.position(i, shape.kv_len[b]);
        std::memcpy(l.k.bytes.data() + (l.start[b] + i) * row, k.bytes.data() + at * row, row);
        std::memcpy(l.v.bytes.data() + (l.start[b] + i) * row, v.bytes.data() + at * row, row);
      }
    }
    return l;
  }

  /// Attends `shards`, one a rank, and merges; fp32 results. With `slot`, of that slot alone.
  Result run(const kernels::Backend& backend, const std::vector<Shard>& shards,
             const std::vector<float>* sinks = nullptr, int slot = -1) {
    const int ranks = static_cast<int>(shards.size());
    const std::int64_t rows = tokens() * shape.heads;
    const int slots = std::max(1, shape.parts.count);  // of a rank
    const std::int64_t slot_bytes = kernels::StateSlots::bytes(rows, shape.dim);
    std::vector<std::byte> memory(slot_bytes * ranks * slots, std::byte{0xff});
    const kernels::StateSlots state{memory.data(), rows, shape.dim, ranks * slots};
    for (int r = 0; r < ranks; ++r) attend(backend, params(shards[r], state, r * slots));
    kernels::StateSlots merged = state;
    if (slot >= 0) merged = {memory.data() + slot * slot_bytes, rows, shape.dim, 1};
    return merge(backend, merged, shards[0].layout == Layout::interleaved, sinks);
  }

  /// The same by shares of the query rows: each share of `queries` attends by itself to the keys of
  /// all ranks.
  Result run_by_rows(const kernels::Backend& backend, const std::vector<Shard>& shards,
                     const Shard& queries, const std::vector<float>* sinks = nullptr) {
    const std::int64_t row = std::int64_t{shape.heads} * shape.dim;
    Result whole{std::vector<float>(tokens() * row, kNan),
                 std::vector<float>(tokens() * shape.heads, kNan)};
    for (const Shard& share : on_all(queries)) {
      std::vector<std::int64_t> own;  // rows of the whole q
      std::vector<std::int32_t> start{0};
      for (int b = 0; b < batch(); ++b) {
        for (std::int64_t t = 0; t < share.for_sequence(b).local_len(shape.query_len[b]); ++t)
          own.push_back(query_start[b] + share.for_sequence(b).position(t, shape.query_len[b]));
        start.push_back(static_cast<std::int32_t>(own.size()));
      }
      const auto count = static_cast<std::int64_t>(own.size());
      Array share_q(q.dtype, count * q_stride());
      const std::size_t bytes = q_stride() * size_of(q.dtype);
      for (std::int64_t t = 0; t < count; ++t)
        std::memcpy(share_q.bytes.data() + t * bytes, q.bytes.data() + own[t] * bytes, bytes);
      const int ranks = static_cast<int>(shards.size());
      std::vector<std::byte> memory(
          kernels::StateSlots::bytes(count * shape.heads, shape.dim) * ranks, std::byte{0xff});
      const kernels::StateSlots state{memory.data(), count * shape.heads, shape.dim, ranks};
      for (int r = 0; r < ranks; ++r) {
        kernels::AttendParams p = params(shards[r], state, r);
        p.tokens = count;
        p.q.data = share_q.data();
        p.batch.query_start = start.data();
        p.batch.whole_query_start = query_start.data();
        p.queries = share;
        attend(backend, p);
      }
      const Result part =
          merge(backend, state, shards[0].layout == Layout::interleaved, sinks, count);
      for (std::int64_t t = 0; t < count; ++t) {
        std::copy_n(part.out.begin() + t * row, row, whole.out.begin() + own[t] * row);
        std::copy_n(part.lse.begin() + t * shape.heads, shape.heads,
                    whole.lse.begin() + own[t] * shape.heads);
      }
    }
    return whole;
  }

  /// The shards in a chain, each from the state of those before. Each part of the keys has a slot,
  /// and only the parts are merged. `empty_first`: the first shard begins from empty states.
  /// Between the shards, max and o of empty states become NaN.
  Result run_chain(const kernels::Backend& backend, const std::vector<Shard>& shards,
                   const std::vector<float>* sinks = nullptr, bool empty_first = false) {
    const std::int64_t rows = tokens() * shape.heads;
    const int slots = std::max(1, shape.parts.count);
    std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, shape.dim) * slots,
                                  std::byte{0xff});
    const kernels::StateSlots state{memory.data(), rows, shape.dim, slots};
    bool resume = empty_first;
    if (empty_first)
      for (int s = 0; s < slots; ++s) std::fill_n(state.stats(s), rows, Stats{kNan, 0.0f});
    for (const Shard& shard : shards) {
      kernels::AttendParams p = params(shard, state, 0);
      p.resume = resume;
      attend(backend, p);
      resume = true;
      for (int s = 0; s < slots; ++s)
        for (std::int64_t row = 0; row < rows; ++row)
          if (is_empty(state.stats(s)[row])) {
            state.stats(s)[row].max = kNan;
            std::fill_n(state.o(s, row), shape.dim, kNan);
          }
    }
    return merge(backend, state, false, sinks);
  }

  /// Keys as `p.shard` holds them, and scratch of any content.
  void attend(const kernels::Backend& backend, kernels::AttendParams p) {
    Local l = local(p.shard);
    l.give(p);
    backend.check(p);
    std::vector<std::byte> scratch(backend.attend_scratch(p) + 256, std::byte{0xff});
    p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
    p.scratch_bytes = scratch.size() - 256;
    backend.attend(p, {});
  }

  /// Over poisoned results.
  Result merge(const kernels::Backend& backend, const kernels::StateSlots& state, bool interleaved,
               const std::vector<float>* sinks, std::optional<std::int64_t> count = {}) const {
    const std::int64_t rows = state.rows;
    Result result{std::vector<float>(rows * shape.dim, kNan), std::vector<float>(rows, kNan)};
    kernels::MergeParams m;
    m.states = state;
    m.interleaved = interleaved;
    m.heads = shape.heads;
    m.sinks = sinks ? sinks->data() : nullptr;
    m.tokens = count.value_or(tokens());
    m.out = {result.out.data(), std::int64_t{shape.heads} * shape.dim, shape.dim};
    m.lse = {result.lse.data(), shape.heads, 1};
    if (shape.skip_decode) {
      m.batch = {batch(), query_start.data(), shape.kv_len.data()};
      m.batch.skip_decode = true;
    }
    backend.merge(m, {});
    return result;
  }

  Result run(const kernels::Backend& backend) {
    return run(backend, {Shard::contiguous(shape.kv_len[0], 0, 1)});
  }

  /// The same rule on each of `ranks` ranks.
  static std::vector<Shard> on_all(const Shard& shard) {
    std::vector<Shard> shards;
    for (int r = 0; r < shard.ranks; ++r) shards.push_back(shard.with_rank(r));
    return shards;
  }

  /// Distance from float64: |out - ref| / |ref| over everything, and |lse - ref| / max(1, |ref|),
  /// root mean square and worst; infinity where an empty row is not exactly 0 and -inf, or a
  /// skipped one was written.
  struct Error {
    double out = 0, lse = 0, worst_lse = 0;
  };
  Error error(const Result& result, const std::vector<float>* sinks = nullptr) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    double wrong = 0, norm = 0, wrong_lse = 0, rows = 0;
    Error e;
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < shape.heads; ++h) {
        const int kv_head = h / (shape.heads / shape.kv_heads);
        const launcher::RowMajor keys = sequence(k, b, h);
        const launcher::RowMajor values = sequence(v, b, h) * double{scale_of(v_scale, b, kv_head)};
        const double product_scale =
            double{scale()} * scale_of(q_scale, b, kv_head) * scale_of(k_scale, b, kv_head);
        for (std::int64_t t = 0; t < shape.query_len[b]; ++t) {
          const std::int64_t token = query_start[b] + t, row = token * shape.heads + h;
          if (shape.skip_decode && shape.query_len[b] == 1) {
            for (int c = 0; c < shape.dim; ++c)
              if (!std::isnan(result.out[row * shape.dim + c])) e.worst_lse = kInfinity;
            continue;
          }
          Interval seen = visible(b, t);
          if (only) seen = {std::max(seen.begin, only->begin), std::min(seen.end, only->end)};
          Eigen::VectorXd query(shape.dim);
          for (int c = 0; c < shape.dim; ++c) query[c] = q[token * q_stride() + h * shape.dim + c];
          rotate(query, context(b) + t, q.dtype);
          const launcher::Exact exact = launcher::attend_exactly(
              query, keys, values, seen, product_scale, shape.softcap,
              sinks ? std::optional<double>((*sinks)[h]) : std::nullopt, biases(b, h, t));
          for (int c = 0; c < shape.dim; ++c) {
            const double out = result.out[row * shape.dim + c];
            wrong += (out - exact.out[c]) * (out - exact.out[c]);
            norm += exact.out[c] * exact.out[c];
          }
          const double lse = result.lse[row];
          if (std::isinf(exact.lse)) {
            if (lse != exact.lse) e.worst_lse = kInfinity;
          } else {
            // Not std::max: a NaN must not pass.
            const double off = std::abs(lse - exact.lse) / std::max(1.0, std::abs(exact.lse));
            if (!(off <= e.worst_lse)) e.worst_lse = off;
            wrong_lse += off * off;
            ++rows;
          }
        }
      }
    }
    e.lse = rows == 0 ? 0 : std::sqrt(wrong_lse / rows);
    e.out = norm == 0 ? (wrong == 0 ? 0 : kInfinity) : std::sqrt(wrong / norm);
    return e;
  }

  HostShape shape;
  std::vector<std::int32_t> query_start;  // [batch + 1]
  std::vector<std::int32_t> key_start;    // [batch + 1] of the whole sequences, packed
  Array q, k, v;
  Array new_k;                                   // k before its rotation
  std::optional<RopeTables> tables;              // by rope_table
  std::optional<Interval> only;                  // the judge looks only at these keys
  std::vector<float> q_scale, k_scale, v_scale;  // [batch, kv_heads]
  Array slopes;                                  // [heads] or [batch, heads]
  Array qq;                                      // [width, width + kGap]

  /// Wider than any query needs.
  std::int64_t qq_width() const {
    return *std::max_element(shape.query_len.begin(), shape.query_len.end()) + 3;
  }

  /// The cosines and sines by pair that rotate a row.
  auto angles(std::int64_t position) const {
    return [this, position](int pair) {
      return tables ? tables->at(position, pair) : launcher::cos_sin_of(shape.rope, position, pair);
    };
  }

  Mask mask_of(int b) const {
    Mask mask = shape.mask;
    if (!shape.causal.empty()) mask.causal = shape.causal[b] != 0;
    if (!shape.prefix.empty()) mask.prefix = shape.prefix[b];
    return mask;
  }
  /// An interval that holds the keys which a row sees; biases() hides the others in it.
  Interval visible(int b, std::int64_t t) const {
    if (t >= used_rows(b)) return {};
    return launcher::seen_keys(mask_of(b), context(b) + t, shape.kv_len[b],
                               launcher::of_sequence(shape.documents, b, batch()),
                               shape.left_padding.empty() ? 0 : shape.left_padding[b],
                               launcher::of_sequence(shape.bidirectional, b, batch()));
  }

  /// [batch][kv_len] whether some row sees the key.
  std::vector<std::vector<bool>> seen() const {
    std::vector<std::vector<bool>> keys;
    for (int b = 0; b < batch(); ++b) {
      keys.emplace_back(shape.kv_len[b]);
      if (shape.skip_decode && shape.query_len[b] == 1) continue;
      for (std::int64_t t = 0; t < shape.query_len[b]; ++t) {
        const Interval own = visible(b, t);
        for (std::int64_t j = own.begin; j < own.end; ++j) keys[b][j] = true;
      }
    }
    return keys;
  }

  /// [kv_len] in natural units, for row t of sequence b; empty where there are none.
  std::vector<double> biases(int b, int head, std::int64_t t) const {
    std::vector<double> bias;
    const std::int64_t first = context(b);
    launcher::hide_unseen(bias, mask_of(b), first + t, shape.kv_len[b],
                          shape.left_padding.empty() ? 0 : shape.left_padding[b],
                          launcher::of_sequence(shape.bidirectional, b, batch()));
    if (!shape.alibi && !shape.qq) return bias;
    bias.resize(shape.kv_len[b]);
    for (std::int64_t j = 0; j < shape.kv_len[b]; ++j) {
      if (shape.alibi)
        bias[j] += slope_of(b, head) * launcher::alibi_term(*shape.alibi, first + t, j, first);
      if (shape.qq && j >= first && j - first < qq_width())
        bias[j] += qq[t * (qq_width() + kGap) + j - first];
    }
    return bias;
  }

  /// Keys or values of a query head of sequence b, [kv_len, dim].
  launcher::RowMajor sequence(const Array& a, int b, int head) const {
    const int kv_head = head / (shape.heads / shape.kv_heads);
    launcher::RowMajor m(shape.kv_len[b], shape.dim);
    for (std::int64_t i = 0; i < shape.kv_len[b]; ++i)
      for (int c = 0; c < shape.dim; ++c)
        m(i, c) = a[(key_start[b] + i) * kv_stride() + kv_head * shape.dim + c];
    return m;
  }

 private:
  /// Rotates a row in float64, and rounds it to the type.
  void rotate(Eigen::VectorXd& row, std::int64_t position, DType dtype) const {
    if (shape.rope.dim == 0) return;
    launcher::rotate_exactly(row, shape.rope, angles(position));
    for (double& element : row) element = launcher::rounded(dtype, static_cast<float>(element));
  }

  void rotate_keys() {
    if (shape.rope_table) {
      std::int64_t positions = 1;
      for (int b = 0; b < batch(); ++b)
        positions = std::max<std::int64_t>(
            {positions, shape.kv_len[b], context(b) + shape.query_len[b], 1 - context(b)});
      tables.emplace(shape.rope, positions, *shape.rope_table);
    }
    for (int b = 0; b < batch() && !is_fp8(k.dtype); ++b)
      for (std::int64_t i = 0; i < shape.kv_len[b]; ++i)
        for (int h = 0; h < shape.kv_heads; ++h) {
          const std::int64_t at = (key_start[b] + i) * kv_stride() + h * shape.dim;
          Eigen::VectorXd row(shape.dim);
          for (int c = 0; c < shape.dim; ++c) row[c] = k[at + c];
          rotate(row, i, k.dtype);
          for (int c = 0; c < shape.dim; ++c) k.set(at + c, static_cast<float>(row[c]));
        }
  }

  float scale_of(const std::vector<float>& scales, int b, int kv_head) const {
    if (!shape.scales) return 1.0f;
    if (shape.scales_of_sequences) return scales[b * shape.kv_heads + kv_head];
    return scales[shape.scales_per_head ? kv_head : 0];
  }

  double slope_of(int b, int head) const {
    return slopes[(shape.slopes_of_sequences ? b * shape.heads : 0) + head];
  }

  void draw_scales_and_biases(std::mt19937& random) {
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> factor(0.7f, 1.4f), slope(0.001f, 0.008f);
    for (auto* scales : {&q_scale, &k_scale, &v_scale})
      for (int h = 0; h < batch() * shape.kv_heads; ++h) scales->push_back(factor(random));
    const int count = shape.heads * (shape.slopes_of_sequences ? batch() : 1);
    slopes = Array(shape.bias_dtype, count);
    for (int i = 0; i < count; ++i) slopes.set(i, slope(random));
    if (!shape.qq) return;
    qq = Array(shape.bias_dtype, qq_width() * (qq_width() + kGap));
    for (std::int64_t i = 0; i < qq_width(); ++i)
      for (std::int64_t j = 0; j < qq_width(); ++j)
        qq.set(i * (qq_width() + kGap) + j,
               i != j && random() % 3 == 0 ? kMinusInfinity : normal(random));
  }

  static std::vector<std::int32_t> starts(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> start = {0};
    for (std::int32_t n : lengths) start.push_back(start.back() + n);
    return start;
  }

  /// Fills rows, and leaves the gaps between them.
  static void fill(Array& a, std::int64_t rows, std::int64_t stride, std::int64_t row_size,
                   const launcher::RandomTensor& values) {
    values.for_each(0, rows * row_size, [&](std::int64_t i, float value) {
      a.set(i / row_size * stride + i % row_size, value);
    });
  }

  std::uint32_t table_seed_ = 0;
};

/// As close as fp32 arithmetic must be, with scores of order 1. An lse has the error of a dot
/// product. Of 256 such terms summed one by one it is 6e-7 on average, and in the worst of 20,000
/// rows 5e-6, so the worst has its own bound.
inline ::testing::AssertionResult is_close(const HostProblem::Error& error) {
  constexpr double kNorm = 2e-6, kWorst = 1e-5;
  if (error.out < kNorm && error.lse < kNorm && error.worst_lse < kWorst)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "out " << error.out << " and lse " << error.lse << " (below " << kNorm
         << "), worst lse " << error.worst_lse << " (below " << kWorst << ")";
}

/// 700 positions in random order, listed by three ranks, of which the second has none.
struct ListedKeys {
  explicit ListedKeys(std::uint32_t seed) {
    std::iota(positions.begin(), positions.end(), 0);
    std::shuffle(positions.begin(), positions.end(), std::mt19937(seed));
    shards = {Shard::at_positions(700, 0, 3, positions.data(), 450),
              Shard::at_positions(700, 1, 3, nullptr, 0),
              Shard::at_positions(700, 2, 3, positions.data() + 450, 250)};
  }
  ListedKeys(const ListedKeys&) = delete;
  ListedKeys& operator=(const ListedKeys&) = delete;

  std::vector<std::int64_t> positions = std::vector<std::int64_t>(700);
  std::vector<Shard> shards;  // they point to the positions
};

}  // namespace longspan::tests

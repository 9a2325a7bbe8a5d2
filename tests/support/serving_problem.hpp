// A batch of a serving engine: sequences of mixed lengths, keys and values in pages of any layout
// and any dtype, dealt out to ranks by a shard, and every feature of scores. The exact answer is
// float64 of the stored values, so that quantisation is not an error.
//
// What no row may see is NaN (keys outside every window, the tails of pages, unused pages), and
// unneeded table entries are -1 or garbage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"
#include "longspan/mask.hpp"
#include "longspan/score_terms.hpp"
#include "longspan/shard.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"
#include "tests/support/random_elements.hpp"
#include "tests/support/serving.hpp"

namespace longspan::tests {

class ServingProblem {
 public:
  ServingProblem(const Serving& given, std::uint64_t seed) : shape(given), seed_(seed) {
    const Serving& s = shape;
    query_start.assign(1, 0);
    key_start.assign(1, 0);
    for (int b = 0; b < s.batch(); ++b) {
      query_start.push_back(query_start.back() + s.q_lens[b]);
      key_start.push_back(key_start.back() + s.kv_lens[b]);
    }
    tokens = query_start.back();
    std::mt19937_64 random(seed);
    draw_scales(random);
    draw_small(random);
    q = quantised(drawn(1, tokens, s.heads, s.dim), s.of_q(), q_scale, s.heads, s.dim);
    raw_k = drawn(2, key_start.back(), s.kv_heads, s.dim);
    raw_v = s.values_in_keys ? first_columns(raw_k)
                             : drawn(3, key_start.back(), s.kv_heads, s.of_value());
    for (int b = 1; b < s.batch(); ++b) {
      const std::int64_t same = std::min<std::int64_t>({s.shared, s.kv_lens[0], s.kv_lens[b]});
      std::copy_n(raw_k.begin(), same * raw_row(s.dim),
                  raw_k.begin() + key_start[b] * raw_row(s.dim));
      std::copy_n(raw_v.begin(), same * raw_row(s.of_value()),
                  raw_v.begin() + key_start[b] * raw_row(s.of_value()));
    }
    if (s.pool > 0) draw_pool(random);
    k = quantised(raw_k, s.of_kv(), k_scale, s.kv_heads, s.dim);
    v = quantised(raw_v, s.of_kv(), v_scale, s.kv_heads, s.of_value());
  }

  /// The same sequences at an earlier length: `q_lens` new tokens end at `kv_lens`.
  ServingProblem step(const std::vector<std::int32_t>& q_lens,
                      const std::vector<std::int32_t>& kv_lens) const {
    Serving s = shape;
    s.q_lens = q_lens;
    s.kv_lens = kv_lens;
    ServingProblem early(s, seed_);
    const auto cut = [&](std::vector<std::byte>& to, const std::vector<std::byte>& from, DType d,
                         int dim) {
      const std::size_t row = size_of(d) * s.kv_heads * dim;
      for (int b = 0; b < s.batch(); ++b)
        std::copy_n(from.begin() + key_start[b] * row, kv_lens[b] * row,
                    to.begin() + early.key_start[b] * row);
    };
    cut(early.raw_k, raw_k, s.dtype, s.dim);
    cut(early.raw_v, raw_v, s.dtype, s.of_value());
    cut(early.k, k, s.of_kv(), s.dim);
    cut(early.v, v, s.of_kv(), s.of_value());
    return early;
  }

  /// Some of the sequences, in this order, as a separate batch. Not for documents, padding, used
  /// rows or a pool.
  ServingProblem pick(const std::vector<int>& sequences) const {
    ServingProblem some(*this);
    Serving& s = some.shape;
    s.q_lens.clear();
    s.kv_lens.clear();
    s.causal.clear();
    some.query_start.assign(1, 0);
    some.key_start.assign(1, 0);
    for (auto* data : {&some.q, &some.raw_k, &some.raw_v, &some.k, &some.v}) data->clear();
    const auto take = [](std::vector<std::byte>& to, const std::vector<std::byte>& from,
                         std::int64_t first, std::int64_t last, std::size_t row) {
      to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(first * row),
                from.begin() + static_cast<std::ptrdiff_t>(last * row));
    };
    const std::size_t q_row = size_of(s.of_q()) * s.heads * s.dim,
                      head = size_of(s.of_kv()) * s.kv_heads;
    for (const int b : sequences) {
      s.q_lens.push_back(shape.q_lens[b]);
      s.kv_lens.push_back(shape.kv_lens[b]);
      if (!shape.causal.empty()) s.causal.push_back(shape.causal[b]);
      some.query_start.push_back(some.query_start.back() + shape.q_lens[b]);
      some.key_start.push_back(some.key_start.back() + shape.kv_lens[b]);
      take(some.q, q, query_start[b], query_start[b + 1], q_row);
      take(some.raw_k, raw_k, key_start[b], key_start[b + 1], raw_row(s.dim));
      take(some.raw_v, raw_v, key_start[b], key_start[b + 1], raw_row(s.of_value()));
      take(some.k, k, key_start[b], key_start[b + 1], head * s.dim);
      take(some.v, v, key_start[b], key_start[b + 1], head * s.of_value());
    }
    some.tokens = some.query_start.back();
    return some;
  }

  std::int64_t context(int b) const {
    return shape.kv_lens[b] - (shape.used_rows.empty() ? shape.q_lens[b] : shape.used_rows[b]);
  }
  std::int64_t max_kv_len() const {
    return *std::max_element(shape.kv_lens.begin(), shape.kv_lens.end());
  }
  std::int64_t max_q_len() const {
    return *std::max_element(shape.q_lens.begin(), shape.q_lens.end());
  }
  bool skipped(int b) const { return shape.skip_decode && shape.q_lens[b] == 1; }

  Mask mask_of(int b) const {
    Mask rule = shape.mask;
    if (!shape.causal.empty()) rule.causal = shape.causal[b] != 0;
    if (!shape.prefix.empty()) rule.prefix = shape.prefix[b];
    return rule;
  }
  /// Positions that the query at `position` of sequence b sees. Rows that are not used see nothing.
  Interval visible(int b, std::int64_t position) const {
    if (position >= shape.kv_lens[b]) return {};
    return launcher::seen_keys(mask_of(b), position, shape.kv_lens[b],
                               launcher::of_sequence(shape.documents, b, shape.batch()),
                               shape.left_padding.empty() ? 0 : shape.left_padding[b],
                               launcher::of_sequence(shape.bidirectional, b, shape.batch()));
  }

  /// The new keys or values of every sequence, of `dtype`: rows as q's [tokens, kv_heads, dim].
  std::vector<std::byte> new_rows(bool values) const {
    const std::vector<std::byte>& raw = values ? raw_v : raw_k;
    const std::size_t row = raw_row(values ? shape.of_value() : shape.dim);
    std::vector<std::byte> rows(tokens * row);
    for (int b = 0; b < shape.batch(); ++b)
      for (std::int64_t t = 0; t < shape.q_lens[b]; ++t) {
        const std::int64_t position = context(b) + t;
        if (position >= 0)
          std::copy_n(raw.begin() + (key_start[b] + position) * row, row,
                      rows.begin() + (query_start[b] + t) * row);
      }
    return rows;
  }

  /// The keys of the shard's rank. The shard's table, if any, is on the host. With `until`, a cache
  /// with pages for everything that holds only the keys below until[b].
  Cache cache(const Shard& shard, const std::vector<std::int64_t>* until = nullptr) const {
    const Serving& s = shape;
    Cache c;
    std::mt19937_64 random(seed_ + 17 * shard.rank + 3);
    std::vector<std::int64_t> own(s.batch()), first(s.batch() + 1);
    for (int b = 0; b < s.batch(); ++b) {
      own[b] = s.separate_new ? context(b) : shard.for_sequence(b).local_len(s.kv_lens[b]);
      first[b + 1] = first[b] + own[b];
    }
    const std::int64_t in_page = s.page > 0 ? s.page : 1;
    if (s.page == 0) {
      c.pages = first.back();
    } else {
      std::int64_t most = 0, used = 0;
      for (std::int64_t n : own) {
        most = std::max(most, (n + in_page - 1) / in_page);
        used += (n + in_page - 1) / in_page;
      }
      c.columns = most + 1;
      c.row_stride = c.columns + 2;
      c.pages = s.pool > 0 ? s.pool : used + 3;
      std::vector<std::int32_t> free(c.pages);
      std::iota(free.begin(), free.end(), 0);
      std::shuffle(free.begin(), free.end(), random);
      c.table.resize(s.batch() * c.row_stride);
      for (std::int32_t& entry : c.table) {
        constexpr std::int32_t kGarbage[] = {-1, -1, std::numeric_limits<std::int32_t>::max(),
                                             std::numeric_limits<std::int32_t>::min(), -77};
        entry = kGarbage[random() % 5];
      }
      std::vector<bool> of_first(c.columns);  // pages that sequence 0 needs too
      for (int b = 0; b < s.batch(); ++b)
        for (std::int64_t p = 0; p * in_page < own[b]; ++p) {
          bool needed = s.whole_table, common = b > 0 && !s.whole_table;
          for (std::int64_t i = p * in_page; i < (p + 1) * in_page; ++i) {
            const bool here = i < own[b];
            needed = needed || (here && is_needed(b, place(shard, b, i)));
            common = common && here && i < own[0] && place(shard, b, i) < s.shared &&
                     place(shard, b, i) == place(shard, 0, i) && s.shared <= s.kv_lens[0];
          }
          if (!needed) continue;
          if (b == 0) of_first[p] = true;
          if (s.pool > 0) {
            c.table[b * c.row_stride + p] = pool_table_[b][p];
          } else if (common && of_first[p]) {
            c.table[b * c.row_stride + p] = c.table[p];
          } else {
            c.table[b * c.row_stride + p] = free.back();
            free.pop_back();
          }
        }
    }
    const std::size_t size = size_of(s.of_kv());
    c.k.assign(c.pages * page_stride(false) * size, std::byte{0xff});
    if (!s.values_in_keys) c.v.assign(c.pages * page_stride(true) * size, std::byte{0xff});
    for (int b = 0; b < s.batch(); ++b)
      in_parallel(own[b], [&](std::int64_t i) {
        const std::int64_t position = place(shard, b, i);
        if (until != nullptr ? position >= (*until)[b] : !s.whole_table && !is_needed(b, position))
          return;
        const std::int64_t page =
            s.page == 0 ? first[b] + i : c.table[b * c.row_stride + i / in_page];
        for (const bool values : {false, true}) {
          if (values && s.values_in_keys) break;
          const int dim = values ? s.of_value() : s.dim;
          const std::byte* from =
              (values ? v : k).data() + (key_start[b] + position) * s.kv_heads * dim * size;
          std::byte* to = (values ? c.v : c.k).data() + page * page_stride(values) * size;
          if (!s.x_packed) {  // the heads of a key are side by side
            const std::size_t bytes = size * s.kv_heads * dim;
            std::memcpy(to + i % in_page * bytes, from, bytes);
            continue;
          }
          for (int h = 0; h < s.kv_heads; ++h)
            for (int d = 0; d < dim; ++d)
              std::memcpy(to + packed_offset(values, i % in_page, h, d) * size,
                          from + (h * dim + d) * size, size);
        }
      });
    return c;
  }

  /// A view of the cache's keys (or values) in `memory`.
  Tensor view(const Cache& c, void* memory, bool values, Device device) const {
    const Serving& s = shape;
    const DType d = s.of_kv();
    const int dim = values && !s.values_in_keys ? s.of_value() : s.dim;
    Tensor t;
    if (s.page == 0)
      t = Tensor(memory, d, {c.pages, s.kv_heads, dim}, device);
    else if (!s.x_packed)
      t = Tensor(memory, d, {c.pages, s.page, s.kv_heads, dim}, device);
    else if (values)
      t = Tensor(memory, d, {c.pages, s.kv_heads, dim, s.page}, device);
    else
      t = Tensor(memory, d, {c.pages, s.kv_heads, dim / x(), s.page, x()}, device);
    t.stride[0] = page_stride(values);
    if (values && s.values_in_keys) t.shape[t.dims - 1] = s.of_value();
    return t;
  }

  /// Keys or values of one head of one sequence after scales, in order of position.
  launcher::RowMajor matrix(bool values, int b, int kv_head) const {
    const Serving& s = shape;
    const auto& scale = values ? v_scale : k_scale;
    const double factor = scale.empty() ? 1.0 : scale[s.per_head_scales ? kv_head : 0];
    const int dim = values ? s.of_value() : s.dim;
    launcher::RowMajor m(s.kv_lens[b], dim);
    for (std::int64_t i = 0; i < s.kv_lens[b]; ++i) {
      const std::int64_t from = ((key_start[b] + i) * s.kv_heads + kv_head) * dim;
      const bool is_new = s.separate_new && i >= context(b);
      for (int d = 0; d < dim; ++d)
        m(i, d) = is_new ? launcher::load((values ? raw_v : raw_k).data(), s.dtype, from + d)
                         : factor * launcher::load((values ? v : k).data(), s.of_kv(), from + d);
    }
    return m;
  }

  /// Row t of sequence b after scales.
  Eigen::VectorXd query(int b, std::int64_t t, int head) const {
    const Serving& s = shape;
    const int kv_head = head / (s.heads / s.kv_heads);
    const double factor = q_scale.empty() ? 1.0 : q_scale[s.per_head_scales ? kv_head : 0];
    Eigen::VectorXd row(s.dim);
    for (int d = 0; d < s.dim; ++d)
      row[d] = factor * launcher::load(q.data(), s.of_q(),
                                       ((query_start[b] + t) * s.heads + head) * s.dim + d);
    return row;
  }

  /// Exact answer of row t of sequence b; `keys` and `values` from matrix().
  launcher::Exact exact(int b, std::int64_t t, int head, const launcher::RowMajor& keys,
                        const launcher::RowMajor& values) const {
    const Serving& s = shape;
    const std::int64_t position = context(b) + t;
    std::vector<double> bias;
    launcher::hide_unseen(bias, mask_of(b), position, s.kv_lens[b],
                          s.left_padding.empty() ? 0 : s.left_padding[b],
                          launcher::of_sequence(s.bidirectional, b, s.batch()));
    if (s.alibi || s.qq_bias) {
      bias.resize(s.kv_lens[b]);
      for (std::int64_t j = 0; j < s.kv_lens[b]; ++j) {
        if (s.alibi) {
          const int row = s.slopes_of_sequences ? b : 0;
          const double slope =
              launcher::load(slopes.data(), s.small_dtype, std::int64_t{row} * s.heads + head);
          bias[j] += slope * launcher::alibi_term(*s.alibi, position, j, context(b));
        }
        const std::int64_t column = j - context(b);
        if (s.qq_bias && column >= 0 && column < qq_width)
          bias[j] += launcher::load(qq.data(), s.small_dtype, t * qq_stride + column);
      }
    }
    std::optional<double> sink;
    if (s.sinks) sink = launcher::load(sinks.data(), s.small_dtype, head);
    return launcher::attend_exactly(query(b, t, head), keys, values, visible(b, position),
                                    s.scale_used(), s.softcap, sink, bias);
  }

  std::vector<std::int64_t> all_rows() const {
    std::vector<std::int64_t> rows(tokens);
    std::iota(rows.begin(), rows.end(), std::int64_t{0});
    return rows;
  }

  /// The error of rounding products' operands and the result for values of order 1. A score is
  /// rounded in proportion to its size, and its weight errs by as much: ALiBi by columns raises the
  /// scores that count by up to slope x q_len, and values are 4 or less.
  Tolerance tolerance() const {
    if (shape.dtype == DType::fp32 && shape.of_out() == DType::fp32) {
      double raised = 0;
      if (shape.alibi && *shape.alibi == Alibi::context)
        for (int head = 0; head < shape.heads; ++head)
          raised =
              std::max(raised, launcher::load(slopes.data(), shape.small_dtype, head) *
                                   static_cast<double>(*std::ranges::max_element(shape.q_lens)));
      return {5e-6 + 4 * raised * std::ldexp(1.0, -24)};
    }
    return {shape.dtype == DType::bf16 ? 3e-2 : 4e-3};
  }

  Serving shape;
  std::int64_t tokens = 0;
  std::vector<std::int32_t> query_start;         // [batch + 1]
  std::vector<std::int64_t> key_start;           // [batch + 1]
  std::vector<std::byte> q;                      // [tokens, heads, dim] of q's dtype
  std::vector<std::byte> raw_k, raw_v;           // [keys, kv_heads, dim or value_dim] of `dtype`
  std::vector<std::byte> k, v;                   // the same in the cache's type
  std::vector<float> q_scale, k_scale, v_scale;  // [1] or [kv_heads]; or none
  std::vector<std::byte> sinks, slopes;          // [heads] of small_dtype
  std::vector<std::byte> qq;                     // [qq_width, qq_stride] of small_dtype
  std::int64_t qq_width = 0, qq_stride = 0;

  /// Elements between pages; of one key when they are not paged.
  std::int64_t page_stride(bool values) const {
    const bool narrow = values && !shape.values_in_keys;
    const std::int64_t row = std::int64_t{shape.kv_heads} * (narrow ? shape.of_value() : shape.dim);
    return shape.page == 0 ? row : row * shape.page + shape.padding;
  }
  /// Elements in a chunk of x-packed keys: 16 bytes, or less where they do not divide the dim.
  int x() const {
    int chunk = static_cast<int>(16 / size_of(shape.of_kv()));
    while (shape.dim % chunk != 0) chunk /= 2;
    return chunk;
  }

 private:
  std::int64_t place(const Shard& shard, int b, std::int64_t i) const {
    return shape.separate_new ? i : shard.for_sequence(b).position(i, shape.kv_lens[b]);
  }

  bool is_needed(int b, std::int64_t key) const {
    // Both ends of a row's visible keys ascend with the row, so the first and the last row bound
    // them, without a gap between.
    if (shape.q_lens[b] == 0 || skipped(b)) return false;
    const Interval first = visible(b, context(b)), last = visible(b, shape.kv_lens[b] - 1);
    for (const Interval& seen : {first, last})
      if (seen.contains(key)) return true;
    if (key < first.begin || key >= last.end) return false;
    for (std::int64_t t = 0; t < shape.q_lens[b]; ++t)
      if (visible(b, context(b) + t).contains(key)) return true;
    return false;
  }

  /// In x-packed pages.
  std::int64_t packed_offset(bool values, std::int64_t row, int h, int d) const {
    const Serving& s = shape;
    if (values) return (std::int64_t{h} * s.of_value() + d) * s.page + row;
    return ((std::int64_t{h} * (s.dim / x()) + d / x()) * s.page + row) * x() + d % x();
  }

  /// Bytes of a row of raw_k or raw_v.
  std::size_t raw_row(int dim) const { return size_of(shape.dtype) * shape.kv_heads * dim; }

  /// The values that lie in these keys.
  std::vector<std::byte> first_columns(const std::vector<std::byte>& keys) const {
    const std::size_t size = size_of(shape.dtype), from = size * shape.dim,
                      count = size * shape.of_value();
    std::vector<std::byte> values;
    for (std::size_t at = 0; at < keys.size(); at += from)
      values.insert(values.end(), keys.begin() + at, keys.begin() + at + count);
    return values;
  }

  std::vector<std::byte> drawn(std::uint32_t tensor, std::int64_t rows, int heads, int dim) const {
    const std::int64_t row = std::int64_t{heads} * dim;
    std::vector<std::byte> values(rows * row * size_of(shape.dtype));
    in_parallel(rows, [&](std::int64_t r) {
      normal_values(seed_, tensor).for_each(r * row, (r + 1) * row, [&](std::int64_t i, float x) {
        launcher::store(values.data(), shape.dtype, i, x * shape.magnitude);
      });
    });
    return values;
  }

  std::vector<std::byte> quantised(const std::vector<std::byte>& values, DType to,
                                   const std::vector<float>& scale, int heads, int dim) const {
    if (to == shape.dtype) return values;
    const std::int64_t row = std::int64_t{heads} * dim;
    const std::int64_t rows = static_cast<std::int64_t>(values.size() / size_of(shape.dtype)) /
                              std::max<std::int64_t>(1, row);
    const int group = heads / shape.kv_heads;
    std::vector<std::byte> stored(rows * row * size_of(to));
    in_parallel(rows, [&](std::int64_t r) {
      for (std::int64_t i = 0; i < row; ++i) {
        const auto kv_head = static_cast<std::size_t>(i / dim / group);
        const float factor = scale.empty() ? 1.0f : scale[scale.size() == 1 ? 0 : kv_head];
        launcher::store(
            stored.data(), to, r * row + i,
            static_cast<float>(launcher::load(values.data(), shape.dtype, r * row + i)) / factor);
      }
    });
    return stored;
  }

  /// Pages of a pool, drawn with repetition: a second sequence (or the same one) finds in a page
  /// what the first one left there.
  void draw_pool(std::mt19937_64& random) {
    const Serving& s = shape;
    const std::size_t row = raw_row(s.dim), value_row = raw_row(s.of_value());
    std::vector<std::int64_t> owner(s.pool * s.page, -1);
    for (int b = 0; b < s.batch(); ++b) {
      pool_table_.emplace_back();
      for (std::int64_t i = 0; i < s.kv_lens[b]; ++i) {
        if (i % s.page == 0)
          pool_table_.back().push_back(static_cast<std::int32_t>(random() % s.pool));
        std::int64_t& first = owner[pool_table_.back().back() * s.page + i % s.page];
        if (first < 0) first = key_start[b] + i;
        std::memmove(&raw_k[(key_start[b] + i) * row], &raw_k[first * row], row);
        std::memmove(&raw_v[(key_start[b] + i) * value_row], &raw_v[first * value_row], value_row);
      }
    }
  }

  void draw_scales(std::mt19937_64& random) {
    const Serving& s = shape;
    std::uniform_real_distribution<float> factor(0.2f, 0.9f);
    const auto draw = [&](DType stored, std::vector<float>& to) {
      if (!is_fp8(stored)) return;
      to.resize(s.per_head_scales ? s.kv_heads : 1);
      for (float& scale : to) scale = factor(random) * s.magnitude;
    };
    draw(s.of_q(), q_scale);
    draw(s.of_kv(), k_scale);
    draw(s.of_kv(), v_scale);
    if (s.values_in_keys) v_scale = k_scale;
  }

  void draw_small(std::mt19937_64& random) {
    const Serving& s = shape;
    std::normal_distribution<float> normal;
    sinks.resize(s.heads * size_of(s.small_dtype));
    for (int h = 0; h < s.heads; ++h)
      launcher::store(sinks.data(), s.small_dtype, h, 1.0f + normal(random));
    const int rows = s.slopes_of_sequences ? s.batch() : 1;
    slopes.resize(rows * s.heads * size_of(s.small_dtype));
    for (int i = 0; i < rows * s.heads; ++i)  // as published; smaller ones for later sequences
      launcher::store(slopes.data(), s.small_dtype, i,
                      std::exp2(-8.0f * static_cast<float>(i + 1) / static_cast<float>(s.heads)));
    if (!s.qq_bias) return;
    qq_width = max_q_len() + 2;
    qq_stride = qq_width + 5;
    qq.assign(qq_width * qq_stride * size_of(s.small_dtype), std::byte{0xff});  // NaN between rows
    std::vector<std::int64_t> parent(qq_width);
    for (std::int64_t t = 0; t < qq_width; ++t) {
      parent[t] = t == 0 ? -1 : static_cast<std::int64_t>(random() % t);
      for (std::int64_t u = 0; u < qq_width; ++u) {
        std::int64_t ancestor = t;
        while (ancestor > u) ancestor = parent[ancestor];
        // Drafts of other branches are hidden; the causal bound hides later ones.
        const float bias =
            u > t || ancestor == u ? normal(random) : -std::numeric_limits<float>::infinity();
        launcher::store(qq.data(), s.small_dtype, t * qq_stride + u, bias);
      }
    }
  }

  std::uint64_t seed_;
  std::vector<std::vector<std::int32_t>> pool_table_;  // of each sequence
};

}  // namespace longspan::tests

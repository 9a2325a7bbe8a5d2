// The description of a serving batch in tests, and the bounds of its result.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "longspan/mask.hpp"
#include "longspan/score_terms.hpp"
#include "longspan/types.hpp"

namespace longspan::tests {

/// f(i) for i in [0, count) on the machine's threads.
inline void in_parallel(std::int64_t count, const std::function<void(std::int64_t)>& f) {
  const std::int64_t threads = std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1,
                                                        std::max<std::int64_t>(1, count));
  std::vector<std::thread> others;
  const auto work = [&](std::int64_t t) {
    for (std::int64_t i = t; i < count; i += threads) f(i);
  };
  for (std::int64_t t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& thread : others) thread.join();
}

/// The shape of a batch and its features; describe() prints lists for error messages.
struct Serving {
  int heads = 8, kv_heads = 2, dim = 64;
  int value_dim = 0;            // 0: dim
  bool values_in_keys = false;  // values are the first columns of the keys
  DType dtype = DType::fp32;    // of the products
  std::optional<DType> q_dtype = {}, kv_dtype = {}, out_dtype = {};
  std::vector<std::int32_t> q_lens{1, 5, 33}, kv_lens{300, 170, 400};
  Mask mask{.causal = true};
  std::vector<std::uint8_t> causal = {};  // of each sequence; empty: mask.causal
  float scale = 0;                        // 0: 1 / sqrt(dim)
  float softcap = 0;
  std::optional<Alibi> alibi = {};
  bool slopes_of_sequences = false;  // else all have the same
  bool qq_bias = false;              // a tree of drafts: -inf between branches
  bool sinks = false;
  DType small_dtype = DType::fp32;               // of sinks, slopes and qq_bias
  std::vector<std::int64_t> documents = {};      // [batch, count + 1] starts and end
  std::vector<std::int64_t> bidirectional = {};  // [batch, count, 2] ranges
  std::vector<std::int32_t> prefix = {};         // of each sequence, in place of the mask's
  std::vector<std::int32_t> left_padding = {};   // of each sequence
  std::vector<std::int32_t> used_rows = {};      // of each sequence
  bool per_head_scales = false;                  // of fp8
  float out_scale = 0;                           // 0: none
  bool skip_decode = false;

  int page = 16;            // keys in a page; 0: keys follow each other
  bool x_packed = false;    // K [pages, kv_heads, dim / x, page, x], V [pages, kv_heads, dim, page]
  int padding = 0;          // elements between pages
  std::int64_t shared = 0;  // leading keys that all sequences have in common: their pages too
  std::int64_t pool = 0;    // > 0, one rank: pages are drawn from this many, with repetition
  bool whole_table = false;   // every entry is valid and every key stored (a cache that grows)
  bool separate_new = false;  // the last q_len keys are separate, in `dtype` (chunked prefill)
  float magnitude = 1;        // of q, k and v

  int batch() const { return static_cast<int>(q_lens.size()); }
  std::int64_t starts_of_one() const { return std::ssize(documents) / batch(); }
  int of_value() const { return value_dim > 0 ? value_dim : dim; }
  DType of_q() const { return q_dtype.value_or(dtype); }
  DType of_kv() const { return kv_dtype.value_or(dtype); }
  DType of_out() const { return out_dtype.value_or(dtype); }
  double scale_used() const {
    return scale != 0 ? scale : 1.0f / std::sqrt(static_cast<float>(dim));
  }
};

/// One rank's arrays.
struct Cache {
  std::vector<std::byte> k, v;
  std::vector<std::int32_t> table;  // [batch, row_stride]
  std::int64_t columns = 0, row_stride = 0;
  std::int64_t pages = 0;  // or keys, when they are not paged
};

/// The allowed error of a result: an element is wrong when |error| > absolute + relative |exact|.
/// The same for every number of ranks.
struct Tolerance {
  double absolute, relative = 0, lse = 1e-5;
};

struct Verdict {
  std::int64_t compared = 0, wrong = 0;
  double worst = 0, worst_lse = 0;
  std::string first;  // the first error

  bool right() const { return wrong == 0 && compared > 0; }
};

/// One line for a failure's trace.
inline std::string describe(const Serving& s) {
  std::string text = fmt::format("{} q:{} kv:{} out:{} heads {}/{} dim {} q {} kv {}",
                                 name(s.dtype), name(s.of_q()), name(s.of_kv()), name(s.of_out()),
                                 s.heads, s.kv_heads, s.dim, s.q_lens, s.kv_lens);
  if (s.value_dim > 0) text += fmt::format(" value_dim {}", s.value_dim);
  if (s.values_in_keys) text += " values in keys";
  if (s.page > 0) text += fmt::format(" page {}", s.page);
  if (s.mask.window > 0) text += fmt::format(" window {}", s.mask.window);
  if (s.mask.right >= 0) text += fmt::format(" right {}", s.mask.right);
  if (!s.causal.empty()) text += fmt::format(" causal {}", s.causal);
  if (s.softcap != 0) text += fmt::format(" softcap {}", s.softcap);
  if (s.alibi)
    text += fmt::format(" ALiBi {}{}", name(*s.alibi), s.slopes_of_sequences ? " by sequence" : "");
  if (!s.documents.empty()) text += fmt::format(" documents {}", s.documents);
  if (s.mask.chunk > 0) text += fmt::format(" chunk {}, {}", s.mask.chunk, s.mask.lookback);
  if (s.mask.prefix > 0) text += fmt::format(" prefix {} {}", s.mask.prefix, s.prefix);
  if (!s.bidirectional.empty())
    text += fmt::format(" ranges {}{}", s.bidirectional, s.mask.clamp_ranges ? " clamped" : "");
  if (!s.left_padding.empty()) text += fmt::format(" padding {}", s.left_padding);
  if (!s.used_rows.empty()) text += fmt::format(" used rows {}", s.used_rows);
  if (s.out_scale != 0) text += fmt::format(" out_scale {}", s.out_scale);
  if (s.mask.causal) text += " causal";
  if (s.x_packed) text += " x-packed";
  if (s.qq_bias) text += " qq_bias";
  if (s.sinks) text += " sinks";
  if (s.per_head_scales) text += " scales per head";
  if (s.skip_decode) text += " skip_decode";
  return text;
}

}  // namespace longspan::tests

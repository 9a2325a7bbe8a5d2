#include "src/arguments/validate.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>

#include "kernels/features.hpp"
#include "kernels/key_indices.hpp"
#include "longspan/error.hpp"
#include "longspan/limits.hpp"
#include "longspan/option_table.hpp"
#include "longspan/state.hpp"

namespace longspan {

namespace {

/// Throws for a rotation that no row of queries and keys can have.
void check_rope(const Options& o) {
  const RopeOptions& rope = o.rope;
  const bool fits = rope.dim >= 0 && rope.dim <= o.head_dim && rope.dim % 2 == 0;
  usage(fits,
        fmt::format("rope.dim {} with head_dim {}: it is an even number of 2 to head_dim, the "
                    "elements of a row that are rotated, or 0 for no RoPE",
                    rope.dim, o.head_dim));
  usage(rope.dim > 0 || rope == RopeOptions{},
        fmt::format("rope.dim is 0, which is no RoPE, and rope.interleaved ({}), rope.base ({}) or "
                    "rope.scale ({}) is given: give rope.dim too",
                    rope.interleaved, rope.base, rope.scale));
  usage(std::isnormal(rope.base) && rope.base > 0,
        fmt::format("rope.base is {}; it is a finite number above 0, such as 10000", rope.base));
  usage(std::isnormal(rope.scale) && rope.scale > 0,
        fmt::format("rope.scale is {}; it is a finite number above 0, 1 for positions as they are",
                    rope.scale));
  if (rope.dim > 0 && is_fp8(o.dtypes.of_query()))
    throw Unsupported(
        fmt::format("RoPE with queries of {} is not supported: a rotated row would be rounded to "
                    "fp8 a second time. Give q as {}, or rotate it before it is quantised",
                    name(o.dtypes.of_query()), name(o.dtypes.compute)));
}

/// Throws for values that cannot be the first columns of their keys.
void check_values_in_keys(const Options& o) {
  if (!o.values_in_keys) return;
  usage(o.of_values() <= o.head_dim,
        fmt::format("values_in_keys with head_dim {} and value_dim {}: values that are the first "
                    "columns of their keys are no wider than these",
                    o.head_dim, o.of_values()));
  if (o.gradients)
    throw Unsupported(
        "values_in_keys with gradients is not supported: leave it out. A run may then still have a "
        "v that is the first columns of k, and dk holds the gradient of both");
}

/// Throws for options that rows which carry their scales do not have.
void check_latent_rows(const Options& o) {
  const DType kv = o.dtypes.of_kv();
  const RowFormat format = row_format_of(kv);
  if (format.bytes == 0) return;
  usage(
      o.values_in_keys && o.kv_heads == 1,
      fmt::format("dtypes.kv {} with values_in_keys {} and kv_heads {}: its rows are latent keys, "
                  "whose first columns are the values: set values_in_keys, and kv_heads 1",
                  name(kv), o.values_in_keys, o.kv_heads));
  usage(o.head_dim == format.dim && o.of_values() == format.value_dim,
        fmt::format("dtypes.kv {} with head_dim {} and value_dim {}: its rows have {} numbers, of "
                    "which the first {} are the values",
                    name(kv), o.head_dim, o.of_values(), format.dim, format.value_dim));
  usage(o.dtypes.compute == DType::bf16 || o.dtypes.compute == DType::fp32,
        fmt::format("dtypes.kv {} with dtypes.compute {}: its rows hold bf16, which other types do "
                    "not; compute in bf16 or fp32",
                    name(kv), name(o.dtypes.compute)));
  const auto refuse = [&](const char* what) {
    throw Unsupported(fmt::format("{} with dtypes.kv {} is not supported", what, name(kv)));
  };
  if (o.gradients) refuse("gradients");
  if (o.dropout.p > 0) refuse("dropout");
  if (o.rope.dim > 0) refuse("RoPE (rope.dim; rotate rows before the call)");
}

/// Throws for options that no call could have.
void check_fp8_products(const Options& o) {
  const DType q = o.dtypes.of_query(), kv = o.dtypes.of_kv();
  if (q != DType::e4m3 || kv != DType::e4m3)
    throw UsageError(
        fmt::format("fp8_products multiplies e4m3 by e4m3; dtypes.query is {} and dtypes.kv is {}: "
                    "give both as "
                    "e4m3, or leave fp8_products off",
                    name(q), name(kv)));
  if (o.dtypes.compute == DType::fp32)
    throw UsageError(
        "fp8_products with dtypes.compute fp32: take bf16 or fp16, the type of all other products "
        "and, by default, of the results");
  if (o.invariant)
    throw UsageError(
        "fp8_products with invariant: products of e4m3 have no fixed order; leave one of them off");
  const int value_dim = o.of_values();
  if (o.head_dim < 48 || o.head_dim > 256 || o.head_dim % 16 != 0 || value_dim != o.head_dim)
    throw Unsupported(
        fmt::format("fp8_products with head_dim {} and value_dim {}: equal ones of 48 to 256 in "
                    "steps of 16 are supported; leave it off",
                    o.head_dim, value_dim));
  if (o.score.softcap != 0)
    throw Unsupported(fmt::format(
        "fp8_products with softcap {} is not supported; leave one of them off", o.score.softcap));
}

/// Throws for options that have no fp64 arithmetic.
void check_fp64(const Options& o) {
  for (const DType dtype : {o.dtypes.of_query(), o.dtypes.of_kv(), o.dtypes.of_out()})
    usage(
        dtype == DType::fp64,
        fmt::format("dtypes.compute is fp64, and one of dtypes.query, dtypes.kv and dtypes.out is "
                    "{}: all of them are fp64",
                    name(dtype)));
  if (o.rope.dim > 0)
    throw Unsupported(
        "RoPE (rope.dim) of fp64 is not supported: its angles are of fp32; rotate q and k before "
        "the call");
  if (o.dout == Dout::partial)
    throw Unsupported(
        "dout partial with products of fp64 is not supported: parts are added up in fp32; leave it "
        "replicated, and add them up before the call");
}

/// Throws Unsupported unless ranks that share rows or keys by `dealt` hold whole subtrees of the
/// fixed order.
void check_gradient_order(const Sharding& dealt, const char* what, int ranks) {
  if (Shard{dealt.layout, 0, ranks, 0, dealt.block}.keeps_order()) return;
  throw Unsupported(fmt::format(
      "gradients with invariant, {} {} and {} ranks are not supported; contiguous ones, "
      "and those interleaved by a multiple of {}, have the same bits for every number "
      "of ranks that divides {}",
      name(dealt.layout), what, ranks, kSegment, kVirtualRanks));
}

void check_dropout(const Options& o) {
  const double p = o.dropout.p;
  usage(p >= 0 && p < 1,  // and not NaN
        fmt::format("dropout.p is {}; it is a probability in [0, 1), and 0 means none", p));
  const std::int64_t end = std::int64_t{o.dropout.first_head} + o.heads;
  usage(
      o.dropout.first_head >= 0 && end <= std::numeric_limits<std::int32_t>::max(),
      fmt::format("dropout.first_head {} with heads {}: the numbers of heads are in 0 to 2^31 - 1",
                  o.dropout.first_head, o.heads));
  if (p == 0) return;
  for (const DType dtype : {o.dtypes.of_query(), o.dtypes.of_kv(), o.dtypes.of_out()})
    if (is_fp8(dtype))
      throw Unsupported(
          fmt::format("dropout with {} tensors is not supported: it is for training", name(dtype)));
}

/// Throws for options that do not go with indices.
void check_indices(const Options& o) {
  check_index_options(o.indices, [](const std::string& what) { throw UsageError(what); });
  if (o.indices.top_k == 0) return;
  if (o.gradients)
    throw Unsupported("gradients with indices are not supported: leave one of them off");
  kernels::AttendParams p;
  p.dtype = o.dtypes.compute;
  p.kv_dtype = o.dtypes.of_kv();
  p.mask = o.mask;
  p.invariant = o.invariant;
  p.dropout.on = o.dropout.p > 0;
  p.queries.ranks = o.queries ? 2 : 1;
  p.shard.layout = o.keys.layout;
  p.indices.are_slots = o.indices.slots;
  kernels::check_indices(p);
}

void check_gradient_options(const Options& o, int ranks) {
  for (const DType dtype : {o.dtypes.of_query(), o.dtypes.of_kv(), o.dtypes.of_out()})
    if (is_fp8(dtype))
      throw Unsupported(fmt::format("gradients of {} tensors are not supported", name(dtype)));
  if (o.queries && o.queries->layout == Layout::listed)
    throw Unsupported(
        "gradients of listed query rows are not supported; shard them by a rule or by ranges");
  usage(o.results.part == ResultPart::all,
        fmt::format("gradients of results by {} are not supported; shard the queries "
                    "(Options::queries)",
                    name(o.results.part)));
  usage(o.dout == Dout::replicated || !o.queries,
        "dout partial with sharded queries: each rank then has the gradient of its own rows, which "
        "no other rank has; leave it replicated");
  usage(o.limits.max_kv_len > 0,
        "gradients need max_kv_len, the most keys of a sequence: their sums are allocated for it");
  if (!o.invariant || ranks == 1) return;
  if (o.dtypes.compute == DType::fp64)
    throw Unsupported(
        "gradients of fp64 with invariant on several ranks are not supported: their sums have no "
        "fixed order; leave invariant off");
  check_gradient_order(o.keys, "keys", ranks);
  if (o.queries) check_gradient_order(*o.queries, "queries", ranks);
}

}  // namespace

void check_mask(const Mask& mask, void (*refuse)(const std::string&)) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (mask.alignment > Alignment::upper_left)
    refuse(fmt::format("alignment of number {} is not one of {}", static_cast<int>(mask.alignment),
                       fmt::join(choice_names<Alignment>(), ", ")));
  if (mask.window < 0) refuse(fmt::format("window {} is negative; 0 means no window", mask.window));
  if (mask.window > kMost)
    refuse(fmt::format("window {} is beyond 2^31 - 1; 0 means no window", mask.window));
  if (mask.right < -1) refuse(fmt::format("right {} is below -1; -1 means no bound", mask.right));
  if (mask.right > kMost)
    refuse(fmt::format("right {} is beyond 2^31 - 1; -1 means no bound", mask.right));
  if (mask.chunk < 0 || mask.chunk > kMost)
    refuse(fmt::format("chunk {} is not in 0 to 2^31 - 1; 0 means no chunks", mask.chunk));
  if (mask.lookback < 0 || mask.lookback > kMost)
    refuse(fmt::format("lookback {} is not in 0 to 2^31 - 1; 0 means the own chunk alone",
                       mask.lookback));
  if (mask.prefix < 0 || mask.prefix > kMost)
    refuse(fmt::format("prefix {} is not in 0 to 2^31 - 1; 0 means none", mask.prefix));
  if (mask.lookback > 0 && mask.chunk == 0)
    refuse(fmt::format("lookback {} without a chunk: it is a number of chunks", mask.lookback));
}

void check_index_options(const IndexOptions& o, void (*refuse)(const std::string&)) {
  if (o.top_k < 0 || o.top_k > 1 << 24)
    refuse(fmt::format("top_k {} is not in 0 to 2^24; 0 means that rows name no keys", o.top_k));
  if (o.top_k == 0 && o.slots)
    refuse("indices are slots, and top_k is 0, so there are no indices: give the most of a row");
}

void check_score(const ScoreOptions& score, int head_dim, void (*refuse)(const std::string&)) {
  if (score.scale && !std::isfinite(*score.scale))
    refuse(fmt::format("scale is {}; it is a finite number, or not given: 1 / sqrt(head_dim)",
                       *score.scale));
  visit_score_options(score, [&]<class T>(const OptionInfo& option, const T& number) {
    if constexpr (std::is_same_v<T, double>) {
      if (number < 0) refuse(fmt::format("{} {} is negative; 0 means none", option.name, number));
      if (!std::isfinite(number))
        refuse(fmt::format("{} is {}; it is a finite number, 0 for none", option.name, number));
    }
  });
  if (score.alibi > Alibi::sqrt)
    refuse(fmt::format("alibi of number {} is not one of {}", static_cast<int>(score.alibi),
                       fmt::join(choice_names<Alibi>(), ", ")));
  // Kernels multiply by these. If a product leaves the normal numbers, a score is NaN or has lost
  // its digits. A scale of 0 is valid: all scores are alike.
  const float scale = score.scale_of(head_dim), softcap = static_cast<float>(score.softcap);
  if (score.wide_scale_of(head_dim) != 0 && !std::isnormal(scale * kLog2E))
    refuse(
        fmt::format("scale is {}; times log2(e) it is {}, which is not a normal fp32 number: it "
                    "is 0, or between 1e-38 and 2.3e38 in size",
                    scale, scale * kLog2E));
  if (score.softcap == 0) return;
  if (!std::isnormal(1 / softcap) || !std::isnormal(softcap * kLog2E))
    refuse(
        fmt::format("softcap is {}; 1 / softcap and softcap log2(e) are {} and {}, of which "
                    "each must be a normal number of fp32: it is between 1e-38 and 8e37, or 0 "
                    "for none",
                    softcap, 1 / softcap, softcap * kLog2E));
  if (scale != 0 && !std::isnormal(scale / softcap))
    refuse(
        fmt::format("softcap is {} with a scale of {}; scale / softcap is {}, which is no "
                    "normal number of fp32: give a softcap nearer to the scores, or 0 for none",
                    softcap, scale, scale / softcap));
}

void check_score_factors(const ScoreOptions& score, int head_dim, const RunArrays& arrays,
                         int heads, int kv_heads) {
  const float scale = score.scale_of(head_dim), softcap = static_cast<float>(score.softcap);
  const ScaleView &of_q = arrays.q_scale, &of_k = arrays.k_scale;
  const int heads_apart = of_q || of_k ? std::max(of_q.count(kv_heads), of_k.count(kv_heads)) : 0;
  for (int b = 0; b < std::max(of_q.sequences(arrays.batch), of_k.sequences(arrays.batch)); ++b)
    for (int h = 0; h < heads_apart; ++h) {
      const float product = scale * of_q.of(b, h) * of_k.of(b, h);
      const float factor = softcap == 0 ? product * kLog2E : product / softcap;
      require(
          std::isfinite(product) && std::isfinite(factor),
          "q_scale[{}] {} and k_scale[{}] {} make {} of the scores' scale {}, which leaves fp32: "
          "scores would be NaN",
          scale_index(of_q, b, h), of_q.of(b, h), scale_index(of_k, b, h), of_k.of(b, h), product,
          scale);
    }
  constexpr float kMostSlope = 1e29f;  // with 2^31 positions its biases are finite in base 2
  const Slopes& slopes = arrays.slopes;
  const std::int64_t rows = slopes.sequence_stride > 0 ? arrays.batch : 1;
  for (std::int64_t i = 0; slopes && i < rows * heads; ++i)
    require(std::abs(slopes.values[i]) <= kMostSlope,
            "slopes[{}] is {}; an ALiBi slope is a finite number, at most 1e29 in size", i,
            slopes.values[i]);
}

void check_values(const Options& o, int ranks) {
  usage(ranks >= 1 && ranks <= 1 << 20,
        fmt::format("there are {} ranks; 1 to 2^20 are possible", ranks));
  usage(o.heads > 0 && o.kv_heads > 0 && o.heads % o.kv_heads == 0,
        fmt::format("heads {} and kv_heads {}: heads must be a multiple of kv_heads", o.heads,
                    o.kv_heads));
  const int value_dim = o.of_values();
  kernels::check_head_dims(o.head_dim, value_dim);
  usage(o.limits.max_tokens >= 0 && o.limits.max_tokens <= std::numeric_limits<std::int32_t>::max(),
        fmt::format("max_tokens {} is not in 0 to 2^31 - 1", o.limits.max_tokens));
  const auto check_sharding = [&](const Sharding& s, const char* what) {
    usage(s.layout <= Layout::listed,
          fmt::format("{} have a layout of number {}, which does not exist", what,
                      static_cast<int>(s.layout)));
    usage(s.block >= 1 && s.block <= std::numeric_limits<std::int32_t>::max(),
          fmt::format("{} have blocks of {}; a block has 1 to 2^31 - 1", what, s.block));
  };
  check_sharding(o.keys, "keys");
  if (o.queries) check_sharding(*o.queries, "queries");
  usage(o.results.part <= ResultPart::heads,
        fmt::format("results have a part of number {}, which is not one of all, rows, heads",
                    static_cast<int>(o.results.part)));
  if (o.results.part == ResultPart::rows) check_sharding(o.results.rows, "results");
  usage(!o.queries || o.results.part == ResultPart::all,
        fmt::format("results by {} with sharded queries: a rank gets the rows that it holds; leave "
                    "one of Options::queries and Options::results out",
                    name(o.results.part)));
  usage(
      o.results.part != ResultPart::heads || o.heads >= ranks,
      fmt::format("results by heads: {} heads cannot be dealt out to {} ranks, each of which gets "
                  "one at least; take results by rows, or all",
                  o.heads, ranks));
  usage(
      o.exchange <= Exchange::gather,
      fmt::format(
          "exchange of number {} is not one of automatic, peer_buffers, peer_buffers_apart, gather",
          static_cast<int>(o.exchange)));
  usage(o.ranks_per_node >= 0,
        fmt::format("ranks_per_node {} is negative; 0 means those that share a machine",
                    o.ranks_per_node));
  usage(o.limits.max_batch >= 1, fmt::format("max_batch {} is below 1", o.limits.max_batch));
  const auto refuse = [](const std::string& what) { throw UsageError(what); };
  check_mask(o.mask, refuse);
  check_score(o.score, o.head_dim, refuse);
  const DType compute = o.dtypes.compute;
  usage((is_float(compute) && !is_fp8(compute)) || compute == DType::fp64,
        fmt::format("dtypes.compute {}: products are of fp64, fp32, fp16 or bf16; fp8 is given as "
                    "dtypes.query, dtypes.kv or dtypes.out",
                    name(compute)));
  if (compute == DType::fp64) check_fp64(o);
  for (const auto& [given, what] :
       {std::pair{o.dtypes.query, "dtypes.query"}, std::pair{o.dtypes.kv, "dtypes.kv"},
        std::pair{o.dtypes.out, "dtypes.out"}}) {
    const bool is_row = given && is_latent_row(*given) && what == std::string_view("dtypes.kv");
    usage(!given || *given == o.dtypes.compute || *given == DType::e4m3 || *given == DType::e5m2 ||
              is_row,
          fmt::format("{} {}: it is dtypes.compute ({}) or fp8", what,
                      name(given.value_or(o.dtypes.compute)), name(o.dtypes.compute)));
  }
  usage(!o.dtypes.tf32 || o.dtypes.compute == DType::fp32,
        fmt::format("tf32 is a way to make fp32 products; dtypes.compute is {}",
                    name(o.dtypes.compute)));
  usage(!o.dtypes.bf16_products || o.dtypes.compute == DType::bf16,
        fmt::format("bf16_products is a way to make bf16 products; dtypes.compute is {}",
                    name(o.dtypes.compute)));
  if (o.dtypes.fp8_products) check_fp8_products(o);
  usage(o.dout <= Dout::partial,
        fmt::format("dout of number {} is not one of {}", static_cast<int>(o.dout),
                    fmt::join(choice_names<Dout>(), ", ")));
  check_dropout(o);
  if (o.gradients) check_gradient_options(o, ranks);
  usage(o.gradients || (o.dout == Dout::replicated && o.limits.max_qq_gradient == 0),
        "dout partial and max_qq_gradient are for gradients, which the layer does not have; set "
        "gradients, or leave them out");
  constexpr std::int64_t kWidest = 1 << 20;
  usage(o.limits.max_qq_gradient >= 0 && o.limits.max_qq_gradient <= kWidest,
        fmt::format("max_qq_gradient {} is not in 0 to 2^20; 0 means no gradient of qq_bias",
                    o.limits.max_qq_gradient));
  check_rope(o);
  check_indices(o);
  check_values_in_keys(o);
  check_latent_rows(o);
  usage(o.limits.max_query_len >= 0 &&
            o.limits.max_query_len <= std::numeric_limits<std::int32_t>::max(),
        fmt::format("max_query_len {} is not in 0 to 2^31 - 1; 0 means unknown",
                    o.limits.max_query_len));
  usage(o.limits.max_kv_len >= 0 && o.limits.max_kv_len <= std::numeric_limits<std::int32_t>::max(),
        fmt::format("max_kv_len {} is not in 0 to 2^31 - 1; 0 means unknown", o.limits.max_kv_len));
  usage(
      o.limits.max_total_keys >= 0 && o.limits.max_total_keys < std::int64_t{1} << 48,
      fmt::format("max_total_keys {} is not in 0 to 2^48 - 1; 0 means max_kv_len of each sequence",
                  o.limits.max_total_keys));
  usage(o.limits.max_workspace >= 0,
        fmt::format("max_workspace {} is negative; 0 means no limit", o.limits.max_workspace));
  check_threads(o.threads);
}

void check_threads(int threads) {
  usage(threads >= 0 && threads <= kMostThreads,
        fmt::format("threads {} is not in 0 to {}; 0 means by itself", threads, kMostThreads));
}

void check_options(const Options& o, int ranks) {
  check_values(o, ranks);
  // The states of one run on one rank, in numbers that cannot overflow. A machine has less than
  // 2^48 bytes, so every sum of sizes stays far inside 63 bits.
  const double rows = static_cast<double>(o.limits.max_tokens) * o.heads * (o.queries ? ranks : 1);
  const double bytes = rows * (4.0 * o.of_values() + 8) * ranks;
  usage(bytes < 0x1p48,
        fmt::format(
            "max_tokens {} with heads {} and value_dim {} on {} ranks: the states of such a run "
            "take {:.3g} bytes on each rank; give the most rows of one run",
            o.limits.max_tokens, o.heads, o.of_values(), ranks, bytes));
}

namespace {

std::string text_of(bool yes) { return yes ? "true" : "false"; }
std::string text_of(int number) { return fmt::to_string(number); }
std::string text_of(std::int64_t number) { return fmt::to_string(number); }
std::string text_of(const std::string& text) { return text; }
std::string text_of(DType dtype) { return name(dtype); }
std::string text_of(Alibi alibi) { return name(alibi); }
std::string text_of(Alignment alignment) { return name(alignment); }
std::string text_of(Dout dout) { return name(dout); }
std::string text_of(Exchange exchange) { return name(exchange); }
std::string text_of(float number) { return fmt::format("{}", number); }
std::string text_of(double number) { return fmt::format("{}", number); }
/// The scale of the scores is the only one that may be left out.
std::string text_of(const std::optional<double>& scale) {
  return scale ? text_of(*scale) : "1/sqrt(head_dim)";
}
/// Others have their defaults.
template <class T>
std::string text_of(const std::optional<T>& value) {
  return text_of(value.value());
}
std::string text_of(const Sharding& s) {
  return s.layout == Layout::interleaved ? fmt::format("{}:{}", name(s.layout), s.block)
                                         : std::string(name(s.layout));
}
std::string text_of(const std::optional<Sharding>& s) { return s ? text_of(*s) : "not sharded"; }
std::string text_of(const Results& results) {
  return results.part == ResultPart::rows ? fmt::format("rows, {}", text_of(results.rows))
                                          : std::string(name(results.part));
}

template <class T>
constexpr bool is_sharding =
    std::is_same_v<T, Sharding> || std::is_same_v<T, std::optional<Sharding>> ||
    std::is_same_v<T, Results>;

Options with_defaults(Options o) {
  o.value_dim = o.of_values();
  o.dtypes.query = o.dtypes.of_query();
  o.dtypes.kv = o.dtypes.of_kv();
  o.dtypes.out = o.dtypes.of_out();
  return o;
}

}  // namespace

NamedValues describe_shardings(const Options& o) {
  NamedValues all;
  visit_options(o, [&]<class T>(const OptionInfo& option, const T& value) {
    if constexpr (is_sharding<T>) all.emplace_back(option.name, text_of(value));
  });
  return all;
}

NamedValues describe(const Options& given, const std::string& bf16_products) {
  const Options o = with_defaults(given);
  NamedValues all;
  visit_options(o, [&](const OptionInfo& option, const auto& value) {
    if (option.own != nullptr) return;
    const bool by_cpu = static_cast<const void*>(&value) == &o.dtypes.bf16_products &&
                        o.dtypes.bf16_products && !bf16_products.empty();
    all.emplace_back(option.name, by_cpu ? bf16_products : text_of(value));
  });
  return all;
}

}  // namespace longspan

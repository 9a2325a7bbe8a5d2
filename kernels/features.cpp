#include "kernels/features.hpp"

#include <string>

#include "kernels/key_indices.hpp"
#include "longspan/error.hpp"
#include "longspan/limits.hpp"

namespace longspan::kernels {
namespace {

using P = AttendParams;

constexpr bool kYes = true, kNo = false;

// The callers that may ask for a feature: `Attention`, `ServingOps`, or a strategy that calls a
// backend.
constexpr const char *kBoth = "layer, calls", *kLayer = "layer", *kCalls = "calls",
                     *kBackend = nullptr;

constexpr Feature kFeatures[] = {
    // name, meaning, by, host, cuda, asked
    {"causal", "by global position", kBoth, kYes, kYes, [](const P& p) { return p.mask.causal; }},
    {"first rows", "queries at the first positions of their sequence (upper left)", kBoth, kYes,
     kYes, [](const P& p) { return p.mask.alignment == Alignment::upper_left; }},
    {"window", "sliding, to the left and to the right", kBoth, kYes, kYes,
     [](const P& p) { return p.mask.window > 0 || p.mask.right >= 0; }},
    {"chunks", "a query sees its own chunk of keys, and some before it", kBoth, kYes, kYes,
     [](const P& p) { return p.mask.chunk > 0; }},
    {"prefix", "first keys that window and chunks do not hide", kLayer, kYes, kYes,
     [](const P& p) { return p.mask.prefix > 0; }},
    {"causal per sequence", "a flag for each sequence of the batch", kBoth, kYes, kYes,
     [](const P& p) { return p.batch.causal != nullptr; }},
    {"packed documents", "a query sees keys of its own document", kLayer, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.documents); }},
    {"bidirectional ranges", "tokens that see each other: images, a prefix", kLayer, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.ranges); }},
    {"left padding", "first keys of a sequence that nobody sees", kLayer, kYes, kYes,
     [](const P& p) { return p.batch.left_padding != nullptr; }},
    {"used queries", "the other rows of a sequence see nothing", kLayer, kYes, kYes,
     [](const P& p) { return p.batch.used_rows != nullptr; }},
    {"softcap", "cap * tanh(score / cap)", kBoth, kYes, kYes,
     [](const P& p) { return p.score.softcap != 0.0f; }},
    {"ALiBi",
     "by the distance from the context, from the query, or its root; slopes of heads or of "
     "sequences and heads",
     kBoth, kYes, kYes, [](const P& p) { return static_cast<bool>(p.bias.slopes); }},
    {"qq_bias", "between the new tokens, -inf hides", kBoth, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.bias.qq); }},
    {"dropout", "of weights, by seed, sequence, head and positions", kLayer, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.dropout); }},
    {"indices", "a row sees the keys that it names, by position or by slot", kBoth, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.indices); }},
    {"paged", "block tables, pages of any size", kBoth, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.pages); }},
    {"x-packed pages",
     "K [pages, kv_heads, head_dim/x, page, x], V [pages, kv_heads, value_dim, page]", kBoth, kYes,
     kYes, [](const P& p) { return !p.k.dense() || !p.v.dense(); }},
    {"value_dim", "values of another width than keys", kBoth, kYes, kYes,
     [](const P& p) { return p.head_dim != p.value_dim; }},
    {"fp8 keys and values",
     "e4m3 and e5m2, a scale for the tensor, each kv head, or each sequence and kv head", kBoth,
     kYes, kYes, [](const P& p) { return is_fp8(p.kv_dtype); }},
    {"latent rows", "keys of 8 or 4 bits in rows that carry their scales", kLayer, kYes, kYes,
     [](const P& p) { return is_latent_row(p.kv_dtype); }},
    {"fp8 queries", "e4m3 and e5m2 with a scale", kBoth, kYes, kYes,
     [](const P& p) { return is_fp8(p.q_dtype); }},
    {"ranges of a batch", "a table of cuts for each sequence", kBoth, kYes, kYes,
     [](const P& p) { return p.shard.layout == Layout::ranges && p.batch.size > 1; }},
    {"sharded queries", "a rank attends to its own rows of each sequence", kLayer, kYes, kYes,
     [](const P& p) { return p.queries.ranks > 1; }},
    {"listed queries", "rows of a sequence that do not ascend", kBackend, kNo, kNo,
     [](const P& p) { return p.queries.layout == Layout::listed; }},
    {"RoPE", "of queries, and of new keys as they are appended; in halves or interleaved", kLayer,
     kYes, kYes, [](const P& p) { return static_cast<bool>(p.rope); }},
    {"skip decode", "sequences of one query are left out", kBoth, kYes, kYes,
     [](const P& p) { return p.batch.skip_decode; }},
    {"segments handed out", "a state for each part of the keys", kCalls, kYes, kYes,
     [](const P& p) { return static_cast<bool>(p.parts); }},
    {"state in", "rows begin from a previous state", kCalls, kYes, kYes,
     [](const P& p) { return p.resume; }},
    {"fp64", "q, k, v and the result of fp64, computed in fp64", kLayer, kYes, kNo,
     [](const P& p) { return p.dtype == DType::fp64; }},
    // The host's products stay exact, as the option allows.
    {"tf32", "fp32 products rounded to tf32", kBoth, kYes, kYes, [](const P& p) { return p.tf32; }},
    // CUDA's bf16 products are like that anyway.
    {"bf16 products", "bf16 products by the CPU's own instructions, weights in bf16", kBoth, kYes,
     kYes, [](const P& p) { return p.bf16_products; }},
    {"fp8 products", "e4m3 queries, keys and values multiplied as they are; on Hopper", kLayer, kNo,
     kYes, [](const P& p) { return p.fp8_products; }},
};

}  // namespace

void check_head_dims(std::int64_t head_dim, std::int64_t value_dim) {
  const auto check = [](const char* what, std::int64_t dim, int most) {
    if (dim < 1 || dim > most)
      throw Unsupported(std::string(what) + " " + std::to_string(dim) + " is not supported: 1 to " +
                        std::to_string(most) + " are");
  };
  check("head_dim", head_dim, kMaxHeadDim);
  check("value_dim", value_dim, kMaxValueDim);
}

std::span<const Feature> features() { return kFeatures; }

void check_features(const AttendParams& p, Device device) {
  for (const Feature& feature : kFeatures)
    if (!feature.on(device) && feature.asked(p))
      throw Unsupported(std::string(feature.name) + " (" + feature.meaning +
                        ") is not supported on the " + name(device));
  if (p.indices) check_indices(p);
  if (p.queries.ranks > 1 && p.new_k.data != nullptr)
    throw Unsupported(
        "new keys with sharded queries are not supported: those of the other ranks' rows are "
        "missing; "
        "append first");
  if (p.queries.ranks > 1 && p.batch.skip_decode)
    throw Unsupported(
        "skip_decode with sharded queries is not supported: a sequence of several queries may have "
        "one row here");
}

}  // namespace longspan::kernels

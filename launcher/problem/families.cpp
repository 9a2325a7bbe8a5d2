#include "launcher/problem/families.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

#include "launcher/problem/latent_rows.hpp"
#include "longspan/machine.hpp"
#include "longspan/strategy.hpp"

namespace longspan::launcher {
namespace {

constexpr DType kDTypes[] = {fp32, fp16, bf16};
using Random = std::mt19937_64;
using LengthList = std::vector<std::int32_t>;

int below(Random& random, int n) { return static_cast<int>(random() % n); }

template <class T>
T pick(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

struct Shape {
  DType dtype = fp32;
  int heads = 4, kv_heads = 2, dim = 64, value_dim = 0;  // value_dim 0 means dim
  LengthList q_lens{9}, kv_lens{1300};
};

Problem make(const Sweep& sweep, const Shape& shape, std::uint64_t salt) {
  const int value_dim = shape.value_dim > 0 ? shape.value_dim : shape.dim;
  Problem p;
  p.options = {.heads = shape.heads,
               .kv_heads = shape.kv_heads,
               .head_dim = shape.dim,
               .value_dim = value_dim,
               .dtypes = {.compute = shape.dtype},
               .threads = sweep.threads};
  p.q_lens = shape.q_lens;
  p.kv_lens = shape.kv_lens;
  const std::int64_t keys = p.key_start().back();
  const std::uint64_t seed = sweep.seed * 1000003 + salt;
  p.q = generated(seed, 0, shape.dtype, p.tokens(), shape.heads, shape.dim);
  p.k = generated(seed, 1, shape.dtype, keys, shape.kv_heads, shape.dim);
  p.v = generated(seed, 2, shape.dtype, keys, shape.kv_heads, value_dim);
  return p;
}

std::vector<float> draw_sinks(const Problem& p, std::uint64_t seed) {
  const Source source = generated(seed, 3, fp32, 1, p.options.heads, 4);
  std::vector<float> values(std::size_t{4} * p.options.heads);
  source.read(0, 0, static_cast<std::int64_t>(values.size()), values.data());
  values.resize(p.options.heads);
  return values;
}

/// The source with NaN in the rows that `spoiled` picks.
Source with_nan(Source source, std::function<bool(std::int64_t)> spoiled) {
  const auto read = source.read;
  const StorageFormat format = storage_of(source.dtype);
  source.read = [=](std::int64_t row, std::int64_t first, std::int64_t count, void* to) {
    if (spoiled(row))
      std::memset(to, 0xff, static_cast<std::size_t>(format.bytes(count)));
    else
      read(row, first, count, to);
  };
  return source;
}

/// Draws uneven ranges, some of them empty.
std::vector<std::int64_t> uneven(Random& random, std::int64_t length, int ranks) {
  std::vector<std::int64_t> table{0, length};
  for (int r = 1; r < ranks; ++r)
    table.push_back(below(random, 3) == 0 ? 0 : static_cast<std::int64_t>(random() % (length + 1)));
  std::sort(table.begin(), table.end());
  return table;
}

/// Shuffles all positions and deals them to ranks at random.
std::vector<std::vector<std::int64_t>> dealt(Random& random, std::int64_t length, int ranks) {
  std::vector<std::int64_t> all(length);
  std::iota(all.begin(), all.end(), std::int64_t{0});
  std::shuffle(all.begin(), all.end(), random);
  std::vector<std::vector<std::int64_t>> on(ranks);
  for (const std::int64_t position : all) on[random() % ranks].push_back(position);
  return on;
}

constexpr std::pair<Layout, std::int64_t> kRules[] = {
    {Layout::contiguous, kSegment},  {Layout::zigzag, kSegment}, {Layout::striped, kSegment},
    {Layout::interleaved, kSegment}, {Layout::interleaved, 48},  {Layout::interleaved, 512}};

Cut rule(std::pair<Layout, std::int64_t> layout) {
  Cut cut;
  cut.layout = layout.first;
  cut.block = layout.second;
  return cut;
}

Shape any_shape(Random& random, DType dtype, int longest) {
  Shape shape;
  shape.dtype = dtype;
  const auto [heads, kv_heads] =
      pick<std::pair<int, int>>(random, {{1, 1}, {4, 2}, {6, 1}, {8, 8}, {5, 5}, {8, 2}, {12, 4}});
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.dim = pick(random, {1,  8,  15, 16,  21,  24,  32,  40,  59,  64,
                            72, 80, 96, 104, 128, 136, 192, 200, 203, 256});
  if (below(random, 4) == 0) {  // also draws values of another width, and wide heads
    const auto [dim, value_dim] = pick<std::pair<int, int>>(random, {{192, 128},
                                                                     {576, 512},
                                                                     {512, 512},
                                                                     {264, 264},
                                                                     {128, 40},
                                                                     {40, 136},
                                                                     {8, 512},
                                                                     {21, 59},
                                                                     {203, 15},
                                                                     {3, 509}});
    shape.dim = dim;
    shape.value_dim = value_dim;
  }
  shape.q_lens = {pick(random, {1, 2, 3, 16, 17, 65, 130})};
  shape.kv_lens = {pick(random, {1, 2, 127, 128, 129, 256, 300, 1000, longest})};
  return shape;
}

Family shapes(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 1);
  for (DType dtype : kDTypes) {
    for (int i = 0; i < sweep.pick(4, 12, 40); ++i)
      family.problems.push_back(
          make(sweep, any_shape(random, dtype, sweep.pick(2000, 4097, 20001)), 100 + i));
  }
  return family;
}

Family shards(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 2);
  for (DType dtype : kDTypes) {
    const Shape shape{.dtype = dtype, .q_lens = {20}, .kv_lens = {sweep.pick(1300, 3001, 20001)}};
    for (const auto& layout : kRules) {
      Problem p = make(sweep, shape, 200);
      p.options.mask.causal = true;
      p.keys = rule(layout);
      family.problems.push_back(std::move(p));
    }
    for (Layout layout : {Layout::ranges, Layout::listed}) {
      Problem p = make(sweep, shape, 201);
      p.options.mask.causal = true;
      p.keys.layout = layout;
      p.keys.ranges = uneven(random, shape.kv_lens[0], sweep.ranks);
      p.keys.listed = dealt(random, shape.kv_lens[0], sweep.ranks);
      family.problems.push_back(std::move(p));
    }
  }
  return family;
}

Family masks(const Sweep& sweep) {
  Family family;
  const Mask all[] = {{.causal = true},
                      {.window = 1},
                      {.window = 100},
                      {.causal = true, .window = 150},
                      {.right = 0},
                      {.right = 3},
                      {.window = 40, .right = 5},
                      {.causal = true, .chunk = 100},
                      {.causal = true, .window = 170, .chunk = 90, .lookback = 1},
                      {.chunk = 64, .lookback = 2},
                      {.causal = true, .window = 60, .prefix = 90}};
  for (DType dtype : kDTypes) {
    for (const Mask& mask : all) {
      for (const LengthList& q_lens : {LengthList{7}, LengthList{150}}) {
        Problem p = make(sweep, {.dtype = dtype, .q_lens = q_lens, .kv_lens = {700}}, 300);
        p.options.mask = mask;
        family.problems.push_back(std::move(p));
      }
    }
    for (const Mask& mask : {Mask{.causal = true}, Mask{.causal = true, .window = 90},
                             Mask{.causal = true, .window = 90, .clamp_ranges = true},
                             Mask{.causal = true, .chunk = 80, .prefix = 200}}) {
      Problem p = make(sweep, {.dtype = dtype, .q_lens = {300}, .kv_lens = {700}}, 302);
      p.options.mask = mask;
      p.bidirectional = {0, 450, 470, 600, 600, 600, 650, 699};
      family.problems.push_back(std::move(p));
    }
    // More rows than keys: the first rows are before the sequence.
    Problem p = make(sweep, {.dtype = dtype, .q_lens = {90}, .kv_lens = {50}}, 301);
    p.options.mask.causal = true;
    family.problems.push_back(std::move(p));
  }
  return family;
}

Family scores(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (int kind = 0; kind < 5; ++kind) {
      Problem p = make(sweep, {.dtype = dtype}, 400);
      p.options.mask.causal = true;
      if (kind == 0) p.options.score.scale = 0.5f;
      if (kind == 1 || kind == 4) p.options.score.softcap = 2.0f;
      if (kind == 2) p.options.score.softcap = 50.0f;
      if (kind >= 3) p.sinks = draw_sinks(p, sweep.seed);
      family.problems.push_back(std::move(p));
    }
  }
  return family;
}

/// RoPE of the query rows: their keys are taken as rotated.
Family ropes(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 15);
  for (DType dtype : kDTypes) {
    for (const int rotary : {2, 22, 64, 128}) {
      for (const bool interleaved : {false, true}) {
        Problem p = make(
            sweep, {.dtype = dtype, .dim = 128, .q_lens = {40, 1, 70}, .kv_lens = {700, 90, 50}},
            1500 + rotary);
        p.options.mask.causal = below(random, 2) == 0;
        p.options.rope = {.dim = rotary, .interleaved = interleaved};
        if (rotary == 22) p.options.rope.base = 500.0f;
        if (rotary == 64) p.options.rope.scale = 4.0f;
        p.keys = rule(kRules[below(random, std::size(kRules))]);
        if (below(random, 2) == 0) p.queries = p.keys;
        family.problems.push_back(std::move(p));
      }
    }
  }
  return family;
}

Family batches(const Sweep& sweep) {
  Family family;
  const LengthList q_lens{3, 1, 0, 5, 40, 2}, kv_lens{500, 1, 77, 0, 1000, 129};
  for (DType dtype : kDTypes) {
    for (const auto& layout : kRules) {
      for (bool padded : {false, true}) {
        Problem p = make(sweep, {.dtype = dtype, .q_lens = q_lens, .kv_lens = kv_lens}, 500);
        p.options.mask.causal = true;
        p.keys = rule(layout);
        if (padded) p.capacity = 1024;
        family.problems.push_back(std::move(p));
      }
    }
  }
  return family;
}

Family sharded_queries(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (const auto& layout : kRules) {
      Problem p = make(sweep, {.dtype = dtype, .q_lens = {600}, .kv_lens = {900}}, 600);
      p.options.mask.causal = true;
      p.keys = rule(layout);
      p.queries = p.keys;
      family.problems.push_back(std::move(p));
    }
    Problem p =
        make(sweep, {.dtype = dtype, .q_lens = {30, 1, 150}, .kv_lens = {300, 5, 400}}, 601);
    p.options.mask.causal = true;
    p.queries = rule({Layout::striped, kSegment});
    family.problems.push_back(std::move(p));
  }
  return family;
}

Family empties(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (const std::int32_t keys : {0, 1, std::max(0, sweep.ranks - 1)}) {
      for (const auto& layout : kRules) {
        Problem p = make(sweep, {.dtype = dtype, .q_lens = {3}, .kv_lens = {keys}}, 700);
        p.keys = rule(layout);
        family.problems.push_back(std::move(p));
      }
    }
    Problem p = make(sweep, {.dtype = dtype, .q_lens = {3}, .kv_lens = {0}}, 701);
    p.sinks = draw_sinks(p, sweep.seed);  // a sink is alone: out = 0, lse = sink
    family.problems.push_back(std::move(p));
    family.problems.push_back(make(sweep, {.dtype = dtype, .q_lens = {0}, .kv_lens = {10}}, 702));
    for (int full = 0; full < sweep.ranks; ++full) {
      Problem q = make(sweep, {.dtype = dtype, .q_lens = {3}, .kv_lens = {200}}, 703);
      q.keys.layout = Layout::ranges;  // one rank holds everything
      q.keys.ranges.assign(sweep.ranks + 1, 0);
      std::fill(q.keys.ranges.begin() + full + 1, q.keys.ranges.end(), 200);
      family.problems.push_back(std::move(q));
    }
  }
  return family;
}

Family nans(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (const auto& layout : kRules) {
      Problem p = make(sweep, {.dtype = dtype, .q_lens = {12}, .kv_lens = {700}}, 800);
      p.options.mask = {.causal = true, .window = 90};
      p.keys = rule(layout);
      p.q = with_nan(p.q, [](std::int64_t row) { return row == 5; });
      const std::int64_t unseen = 700 - 12 - 90 + 1;  // keys that lie before every window
      const auto spoiled = [unseen](std::int64_t key) { return key < unseen; };
      p.k = with_nan(p.k, spoiled);
      p.v = with_nan(p.v, spoiled);
      family.problems.push_back(std::move(p));
    }
  }
  return family;
}

Family bits(const Sweep& sweep) {
  Family family{.problems = {}, .same_bits = true, .why_empty = {}};
  if (kVirtualRanks % sweep.ranks != 0) {  // they are exact, but not bitwise (docs)
    family.why_empty =
        fmt::format("not compared: 1, 2, 4 ... {} ranks give the same bits, and these are {}",
                    kVirtualRanks, sweep.ranks);
    return family;
  }
  LengthList lengths{1, 127, 4097, 5000};
  if (sweep.size == VerifyOptions::Size::full) lengths.push_back(131073);
  for (DType dtype : kDTypes) {
    for (const std::int32_t kv : lengths) {
      for (const std::pair<Layout, std::int64_t>& layout :
           {std::pair{Layout::contiguous, std::int64_t{kSegment}},
            {Layout::interleaved, std::int64_t{kSegment}},
            {Layout::interleaved, std::int64_t{2} * kSegment}}) {
        Problem p = make(sweep, {.dtype = dtype, .q_lens = {5}, .kv_lens = {kv}}, 900);
        p.options.mask.causal = true;
        p.options.invariant = true;
        if (layout.second != kSegment) p.options.rope.dim = 64;
        p.keys = rule(layout);
        family.problems.push_back(std::move(p));
      }
    }
  }
  return family;
}

Family everything(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 10);
  for (int i = 0; i < sweep.pick(12, 40, 300); ++i) {
    Shape shape = any_shape(random, kDTypes[i % 3], sweep.pick(1500, 3000, 9000));
    const int batch = 1 + below(random, 3);
    for (int b = 1; b < batch; ++b) {
      shape.q_lens.push_back(below(random, 30));
      shape.kv_lens.push_back(below(random, 700));
    }
    Problem p = make(sweep, shape, 1000 + i);
    p.options.mask.causal = below(random, 2) == 0;
    if (below(random, 3) == 0) p.options.mask.window = 1 + below(random, 400);
    if (below(random, 4) == 0) p.options.mask.right = below(random, 100);
    if (below(random, 3) == 0) p.options.score.softcap = 5.0f;
    if (below(random, 3) == 0) p.sinks = draw_sinks(p, i);
    const bool shards_queries = below(random, 3) == 0;
    p.options.invariant = below(random, 2) == 0;
    p.keys = rule(kRules[below(random, std::size(kRules))]);
    p.queries = rule(kRules[below(random, std::size(kRules))]);
    if (!shards_queries) p.queries.reset();
    if (below(random, 3) == 0 && shape.dim > 1)
      p.options.rope = {.dim = 2 * (1 + below(random, shape.dim / 2)),
                        .interleaved = below(random, 2) == 0};
    if (below(random, 3) == 0)
      p.capacity = 1 + *std::max_element(shape.kv_lens.begin(), shape.kv_lens.end());
    family.problems.push_back(std::move(p));
  }
  return family;
}

/// Draws sequences as in a server: decode, drafts, a chunk of prefill, an idle one.
Shape serving_shape(DType dtype) {
  Shape shape;
  shape.dtype = dtype;
  shape.q_lens = {1, 6, 40, 0};
  shape.kv_lens = {500, 133, 300, 70};
  return shape;
}

constexpr std::int64_t kDeals[] = {1, 16, 64, kSegment};  // blocks of an interleaved cache

Family paged(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (const int page : {1, 8, 16, 32, 64, 128, 256, 544}) {
      for (const bool x_packed : {false, true}) {
        Problem p = make(sweep, serving_shape(dtype), 1100 + page);
        p.options.mask.causal = true;
        p.cache = {page, x_packed};
        p.keys = rule({Layout::interleaved, kDeals[family.problems.size() % std::size(kDeals)]});
        if (family.problems.size() % 5 == 0) p.keys = rule({Layout::contiguous, kSegment});
        family.problems.push_back(std::move(p));
      }
    }
  }
  return family;
}

std::vector<float> draw(std::uint64_t seed, std::uint32_t tensor, std::int64_t count) {
  const Source source = generated(seed, tensor, fp32, 1, 1, static_cast<int>((count + 3) / 4 * 4));
  std::vector<float> values(source.dim);
  source.read(0, 0, source.dim, values.data());
  values.resize(count);
  return values;
}

/// Takes the published slopes; those of `sequences` differ from one to the next.
void take_slopes(Problem& p, Alibi alibi, int sequences = 1) {
  p.options.score.alibi = alibi;
  for (int i = 0; i < sequences * p.options.heads; ++i)
    p.slopes.push_back(
        std::exp2(-8.0f * static_cast<float>(i + 1) / static_cast<float>(p.options.heads)));
}

/// Makes a tree of drafts: each follows an earlier one, and does not see other branches.
void take_drafts(Problem& p, std::uint64_t seed) {
  p.qq_width = *std::max_element(p.q_lens.begin(), p.q_lens.end());
  p.qq_bias = draw(seed, 5, p.qq_width * p.qq_width);
  for (std::int64_t t = 1; t < p.qq_width; ++t) {
    const std::int64_t parent = (t - 1) / 2;
    for (std::int64_t u = 0; u < t; ++u)
      if (u > parent || (u < parent && std::isinf(p.qq_bias[parent * p.qq_width + u])))
        p.qq_bias[t * p.qq_width + u] = -std::numeric_limits<float>::infinity();
  }
}

/// Cuts each sequence into 0 to 3 documents.
void take_documents(Problem& p, std::uint64_t seed) {
  constexpr std::int64_t kMost = 3;
  Random random(seed);
  for (const std::int32_t length : p.kv_lens) {
    std::vector<std::int64_t> starts(kMost + 1);
    for (std::int64_t& start : starts) start = below(random, length + 1);
    if (below(random, 3) != 0) starts[0] = 0, starts[kMost] = length;
    std::sort(starts.begin(), starts.end());
    const auto end = starts.begin() + 1 + below(random, kMost + 1);
    std::fill(end, starts.end(), *(end - 1));  // fewer documents than the most
    p.documents.insert(p.documents.end(), starts.begin(), starts.end());
  }
}

/// Cuts keys into chunks.
void take_chunks(Problem& p, Random& random) {
  p.options.mask.chunk = 1 + below(random, 400);
  p.options.mask.lookback = below(random, 3);
}

/// Keeps first keys, which differ between the sequences of a batch. Not with documents.
void take_prefix(Problem& p, Random& random) {
  if (!p.documents.empty()) return;
  p.options.mask.prefix = 1 + below(random, 200);
  if (below(random, 2) == 0) return;
  for (int b = 0; b < p.batch(); ++b)
    p.prefix.push_back(below(random, static_cast<int>(p.options.mask.prefix) + 1));
}
/// CUDA kernels have no fixed order for a prefix with a window or chunks.
bool has_fixed_order(const Problem& p, const Sweep& sweep) {
  return !sweep.gpu || !p.options.mask.sees_prefix_apart();
}

/// Gives each sequence 3 bidirectional ranges, of which some may be empty.
void take_ranges(Problem& p, std::uint64_t seed) {
  Random random(seed);
  p.options.mask.clamp_ranges = below(random, 2) == 0;
  for (const std::int32_t length : p.kv_lens) {
    std::vector<std::int64_t> bounds(6);
    for (std::int64_t& bound : bounds) bound = below(random, length + 1);
    std::sort(bounds.begin(), bounds.end());
    p.bidirectional.insert(p.bidirectional.end(), bounds.begin(), bounds.end());
  }
}

/// Pads each sequence on the left.
void take_padding(Problem& p, std::uint64_t seed) {
  Random random(seed);
  for (const std::int32_t length : p.kv_lens)
    p.left_padding.push_back(below(random, below(random, 2) == 0 ? length + 1 : length / 2 + 1));
}

/// Makes q, k and v fp8, or some of them.
void quantise(Problem& p, std::optional<DType> q, std::optional<DType> kv, bool per_head,
              std::uint64_t seed) {
  const int count = per_head ? p.options.kv_heads : 1;
  const auto scales = [&](std::uint32_t tensor) {
    std::vector<float> values = draw(seed, tensor, count);
    for (float& value : values) value = 0.3f + 0.2f * std::abs(value);
    return values;
  };
  if (q) {
    p.q_scale = scales(6);
    p.q = quantised(p.q, *q, p.q_scale);
    p.options.dtypes.query = q;
  }
  if (kv) {
    p.k_scale = scales(7);
    p.v_scale = scales(8);
    p.k = quantised(p.k, *kv, p.k_scale);
    p.v = quantised(p.v, *kv, p.v_scale);
    p.options.dtypes.kv = kv;
  }
}

/// Gives each sequence its own scales: the stored elements then stand for other numbers.
void scale_sequences(Problem& p, std::uint64_t seed) {
  std::uint32_t tensor = 9;
  for (std::vector<float>* scale : {&p.q_scale, &p.k_scale, &p.v_scale}) {
    ++tensor;
    if (scale->empty()) continue;
    *scale = draw(seed, tensor, std::int64_t{p.batch()} * p.options.kv_heads);
    for (float& value : *scale) value = 0.3f + 0.2f * std::abs(value);
  }
}

Family biases(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (int kind = 0; kind < 9; ++kind) {
      Problem p = make(sweep, serving_shape(dtype), 1200 + kind);
      p.options.mask.causal = kind != 1;
      if (kind == 0) take_slopes(p, Alibi::context);
      if (kind == 1) take_slopes(p, Alibi::query);
      if (kind == 2 || kind == 3) take_drafts(p, sweep.seed + kind);
      if (kind == 3) take_slopes(p, Alibi::context);
      if (kind == 4) p.causal = {0, 1, 0, 1};
      if (kind == 6) take_slopes(p, Alibi::sqrt, p.batch());
      if (kind == 7) take_documents(p, sweep.seed);
      if (kind == 8) take_padding(p, sweep.seed);
      if (kind == 5) {
        p = make(sweep, {.dtype = dtype, .q_lens = {70}, .kv_lens = {700}}, 1206);
        p.options.mask.causal = true;
        p.documents = {0, 100, 640, 641, 700};
      }
      for (const auto& layout : {kRules[0], kRules[4]}) {
        p.keys = rule(layout);
        family.problems.push_back(p);
      }
    }
  }
  return family;
}

Family fp8(const Sweep& sweep) {
  Family family;
  for (DType dtype : kDTypes) {
    for (const DType kv : {e4m3, e5m2}) {
      for (const bool per_head : {false, true}) {
        for (const bool fp8_q : {false, true}) {
          Problem p = make(sweep, serving_shape(dtype), 1300);
          p.options.mask.causal = true;
          quantise(p, fp8_q ? std::optional(kv) : std::nullopt, kv, per_head, sweep.seed);
          p.keys = rule({Layout::interleaved, 16});
          if (fp8_q) p.cache = {32, per_head};
          family.problems.push_back(p);
          if (per_head) {
            scale_sequences(p, sweep.seed);
            family.problems.push_back(std::move(p));
          }
        }
      }
    }
    if (dtype == fp32) continue;
    Problem p = make(sweep, serving_shape(dtype), 1301);
    p.options.dtypes.out = e4m3;
    p.out_scale = 0.04f;
    family.problems.push_back(std::move(p));
  }
  return family;
}

/// Draws a sharded paged cache at random, with all options.
Family serving(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 14);
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  for (int i = 0; i < sweep.pick(9, 40, 300); ++i) {
    const DType dtype = kDTypes[i % 3];
    Shape shape = any_shape(random, dtype, sweep.pick(1500, 3000, 9000));
    const int batch = 1 + below(random, 4);
    for (int b = 1; b < batch; ++b) {
      shape.q_lens.push_back(chance(3) ? 1 : below(random, 30));
      shape.kv_lens.push_back(shape.q_lens.back() + below(random, 700));
    }
    Problem p = make(sweep, shape, 1400 + i);
    p.options.mask.causal = !chance(3);
    if (chance(2)) p.options.mask.window = 1 + below(random, 400);
    if (chance(2)) p.options.score.softcap = 5.0f;
    if (chance(2)) p.sinks = draw_sinks(p, i);
    if (chance(2))
      take_slopes(p, pick(random, {Alibi::context, Alibi::query, Alibi::sqrt}),
                  chance(2) ? batch : 1);
    if (chance(2)) take_drafts(p, i);
    if (chance(3))
      for (int b = 0; b < batch; ++b) p.causal.push_back(chance(2));
    if (chance(4)) take_documents(p, sweep.seed + i);
    if (chance(4)) take_padding(p, sweep.seed + i);
    if (chance(4)) take_chunks(p, random);
    if (chance(4)) take_ranges(p, sweep.seed + i);
    if (chance(3)) take_prefix(p, random);
    if (chance(2)) {
      const bool fp8_q = chance(2);
      quantise(p, fp8_q ? std::optional(pick(random, {e4m3, e5m2})) : std::nullopt,
               pick(random, {e4m3, e5m2}), chance(2), i);
    }
    if (dtype != fp32 && chance(3)) {
      p.options.dtypes.out = e4m3;
      p.out_scale = 0.04f;
    }
    const int page = pick(random, {0, 1, 8, 16, 64, 544});
    p.cache = {page, page > 0 && chance(2)};
    const bool shards_queries = chance(3);
    p.options.invariant = chance(2) && has_fixed_order(p, sweep);
    p.queries = rule(kRules[below(random, std::size(kRules))]);
    if (!shards_queries) p.queries.reset();
    p.keys = rule({Layout::interleaved, kDeals[below(random, std::size(kDeals))]});
    if (chance(4)) p.keys = rule({Layout::contiguous, kSegment});
    family.problems.push_back(std::move(p));
  }
  return family;
}

/// Query rows at the first positions of their sequences, with all options: fewer rows than keys, as
/// many, and more.
Family upper_left(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 15);
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  for (int i = 0; i < sweep.pick(12, 40, 300); ++i) {
    Shape shape = any_shape(random, kDTypes[i % 3], sweep.pick(1500, 3000, 9000));
    if (chance(3)) shape.kv_lens[0] = below(random, static_cast<int>(shape.q_lens[0]) + 1);
    const int batch = 1 + below(random, 3);
    for (int b = 1; b < batch; ++b) {
      shape.q_lens.push_back(below(random, 60));
      shape.kv_lens.push_back(below(random, chance(2) ? 60 : 700));
    }
    Problem p = make(sweep, shape, 1500 + i);
    p.options.mask.alignment = Alignment::upper_left;
    p.options.mask.causal = !chance(3);
    if (chance(3)) p.options.mask.window = 1 + below(random, 400);
    if (chance(4)) p.options.mask.right = below(random, 100);
    if (chance(3)) p.options.score.softcap = 5.0f;
    if (chance(3)) p.sinks = draw_sinks(p, i);
    if (chance(3)) take_slopes(p, pick(random, {Alibi::context, Alibi::query, Alibi::sqrt}));
    if (chance(3)) take_drafts(p, i);
    if (chance(3) && shape.dim > 1)
      p.options.rope = {.dim = 2 * (1 + below(random, shape.dim / 2))};
    p.options.invariant = chance(2);
    p.keys = rule(kRules[below(random, std::size(kRules))]);
    p.queries = rule(kRules[below(random, std::size(kRules))]);
    if (!chance(3)) p.queries.reset();
    if (chance(3)) p.cache = {16, false};
    family.problems.push_back(std::move(p));
  }
  return family;
}

/// The strategies that give the gradients of a problem; none if no layer does.
std::vector<std::string> that_go_back(const Problem& p, int ranks, Device device) try {
  std::vector<std::string> names;
  const Options options = p.layer_options(ranks);
  // Some strategies take keys by a table in some runs only.
  const bool by_table = p.keys.layout == Layout::ranges || p.keys.layout == Layout::listed;
  const Topology topology{ranks, options.ranks_per_node};
  for (const Forecast& f : forecast(options, topology, p.run_size(ranks), built_in_machine(device)))
    if (f.refusal.empty() && f.strategy->is_for_nodes_of(options.ranks_per_node, ranks) &&
        (f.reservation.empty() || !by_table))
      names.emplace_back(f.strategy->name);
  return names;
} catch (const Unsupported&) {
  return {};
}

/// One sequence or three.
Shape one_or_three(Random& random, DType dtype, int most) {
  Shape shape = any_shape(random, dtype, most);
  const int batch = below(random, 2) == 0 ? 1 : 3;
  for (int b = 1; b < batch; ++b) {
    shape.q_lens.push_back(below(random, 60));
    shape.kv_lens.push_back(below(random, below(random, 2) == 0 ? 60 : 700));
  }
  return shape;
}

/// Draws how keys and query rows are dealt out to the ranks, and the ranks of a node.
void deal_out(Problem& p, Random& random, int ranks) {
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  p.keys = rule(kRules[below(random, std::size(kRules))]);
  p.queries = rule(kRules[below(random, std::size(kRules))]);
  if (chance(3)) p.queries.reset();
  if (p.kv_lens.size() == 1 && chance(4)) {
    p.keys.layout = chance(2) ? Layout::ranges : Layout::listed;
    p.keys.ranges = uneven(random, p.kv_lens[0], ranks);
    p.keys.listed = dealt(random, p.kv_lens[0], ranks);
  }
  if (ranks >= 4 && ranks % 2 == 0 && chance(2)) p.options.ranks_per_node = 2;
}

/// Gives problem `number` one of the strategies that have its gradients, in turn; false if none
/// has.
bool take_strategy(Problem& p, int number, const Sweep& sweep) {
  const Device device = sweep.gpu ? Device::cuda : Device::host;
  std::vector<std::string> names = that_go_back(p, sweep.ranks, device);
  if (names.empty()) {  // a cut without an order
    p.options.invariant = false;
    names = that_go_back(p, sweep.ranks, device);
  }
  if (names.empty()) return false;
  p.options.strategy = names[static_cast<std::size_t>(number) % names.size()];
  return true;
}

/// Gradients with all options, by one strategy after the other.
Family gradients(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 17);
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  for (int i = 0; i < sweep.pick(18, 60, 600); ++i) {
    const DType dtype = kDTypes[i % 3];
    Shape shape = one_or_three(random, dtype, sweep.pick(1500, 3000, 9000));
    const auto batch = static_cast<int>(shape.kv_lens.size());
    Problem p = make(sweep, shape, 1700 + i);
    const std::uint64_t seed = sweep.seed * 1000003 + 1700 + i;
    p.options.gradients = true;
    p.dout = generated(seed, kOfDout, dtype, p.tokens(), p.q.heads, p.value_dim());
    if (chance(2)) p.dlse = generated(seed, kOfDlse, fp32, p.tokens(), p.q.heads, 1);
    p.fp32_gradients = chance(2);
    p.options.mask.causal = chance(2);
    if (chance(3)) p.options.mask.window = 1 + below(random, 400);
    if (chance(4)) p.options.mask.right = below(random, 100);
    if (chance(3)) p.options.mask.alignment = Alignment::upper_left;
    if (chance(4)) take_chunks(p, random);
    if (chance(4)) take_ranges(p, seed);
    if (chance(3)) take_prefix(p, random);
    if (chance(3)) p.options.score.softcap = 5.0f;
    if (chance(3)) p.sinks = draw_sinks(p, seed);
    if (chance(3))
      take_slopes(p, pick(random, {Alibi::context, Alibi::query, Alibi::sqrt}),
                  chance(2) ? batch : 1);
    if (chance(4)) take_drafts(p, seed);
    if (chance(4) && p.options.mask.prefix == 0) take_documents(p, seed);
    if (chance(4)) take_padding(p, seed);
    if (chance(4))
      for (int b = 0; b < batch; ++b) p.causal.push_back(chance(2));
    if (chance(3)) p.capacity = 1 + *std::max_element(shape.kv_lens.begin(), shape.kv_lens.end());
    if (chance(6)) p.q = with_nan(p.q, [](std::int64_t row) { return row == 1; });
    deal_out(p, random, sweep.ranks);
    if (chance(4) && shape.dim > 1)
      p.options.rope = {.dim = 2 * (1 + below(random, shape.dim / 2)),
                        .interleaved = below(random, 2) == 0};
    p.options.invariant = chance(3) && has_fixed_order(p, sweep);
    if (take_strategy(p, i, sweep)) family.problems.push_back(std::move(p));
  }
  return family;
}

/// Dropout with all that training has, each problem by another strategy, with its gradients or
/// without.
Family dropout(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 18);
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  for (int i = 0; i < sweep.pick(14, 40, 300); ++i) {
    const DType dtype = kDTypes[i % 3];
    Shape shape = one_or_three(random, dtype, sweep.pick(1200, 3000, 9000));
    const auto batch = static_cast<int>(shape.kv_lens.size());
    Problem p = make(sweep, shape, 1800 + i);
    const std::uint64_t seed = sweep.seed * 1000003 + 1800 + i;
    p.options.dropout = {.p = pick(random, {0.1, 0.5, 0.9}),
                         .first_head = chance(2) ? 0 : below(random, 100)};
    p.dropout_seed = {static_cast<std::int64_t>(random()), static_cast<std::int64_t>(random())};
    if (chance(2))
      for (int b = 0; b < batch; ++b) p.dropout_sequences.push_back(below(random, 1 << 30));
    p.options.dtypes.bf16_products = dtype == bf16 && chance(2);
    p.options.gradients = !chance(3);
    if (p.goes_back()) {
      p.dout = generated(seed, kOfDout, dtype, p.tokens(), p.q.heads, p.value_dim());
      if (chance(2)) p.dlse = generated(seed, kOfDlse, fp32, p.tokens(), p.q.heads, 1);
      p.fp32_gradients = chance(2);
    }
    p.options.mask.causal = chance(2);
    if (chance(3)) p.options.mask.window = 1 + below(random, 400);
    if (chance(3)) p.options.mask.alignment = Alignment::upper_left;
    if (chance(4)) p.options.score.softcap = 5.0f;
    if (chance(3)) p.sinks = draw_sinks(p, seed);
    if (chance(4)) take_slopes(p, Alibi::query);
    if (chance(4)) take_documents(p, seed);
    if (chance(4)) take_padding(p, seed);
    deal_out(p, random, sweep.ranks);
    p.options.invariant = chance(4);
    if (take_strategy(p, i, sweep)) family.problems.push_back(std::move(p));
  }
  return family;
}

/// Latent keys (MLA), whose first columns are the values: they travel once. Few and many query
/// heads of the one kv head, several new tokens of a sequence in any layout, pages, by every
/// strategy in turn.
Family latent(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 19);
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  const Device device = sweep.gpu ? Device::cuda : Device::host;
  for (int i = 0; i < sweep.pick(14, 40, 300); ++i) {
    const DType dtype = kDTypes[i % 3];
    const auto [dim, value_dim] = pick<std::pair<int, int>>(
        random, {{576, 512}, {320, 256}, {576, 512}, {512, 512}, {40, 24}});
    Shape shape{.dtype = dtype,
                .heads = pick(random, {1, 8, 16, 17, 64, 128}),
                .kv_heads = 1,
                .dim = dim,
                .value_dim = value_dim,
                .q_lens = {pick(random, {1, 1, 2, 4, 9})},
                .kv_lens = {pick(random, {1, 20, 127, 300, 1000})}};
    const int batch = chance(3) ? 3 : 1;
    for (int b = 1; b < batch; ++b) {
      shape.q_lens.push_back(below(random, 5));
      shape.kv_lens.push_back(below(random, chance(3) ? 6 : 500));
    }
    for (int b = 0; b < batch; ++b)  // a row for each of the last keys
      shape.kv_lens[b] = std::max(shape.kv_lens[b], shape.q_lens[b]);
    Problem p = make(sweep, shape, 1900 + i);
    p.options.values_in_keys = true;
    if (chance(4)) {
      quantise(p, std::nullopt, pick(random, {e4m3, e5m2}), false, i);
      p.v_scale = p.k_scale;
    }
    const auto spoiled = [](std::int64_t key) { return key % 900 == 3; };
    const bool is_plain = p.options.dtypes.of_kv() == dtype;
    if (is_plain && dtype != fp16 && value_dim == 512 && !chance(4))
      store_in_rows(
          p, dim == 576 ? pick(random, {DType::latent656, DType::latent656_pow2, DType::latent352})
                        : pick(random, {DType::latent584, DType::latent528}));
    if (is_plain && shape.kv_lens[0] >= 300 && chance(2)) {
      p.options.mask.window = 250 - shape.q_lens[0];  // key 3 lies before all of them
      p.k = with_nan(p.k, spoiled);
      if (p.stored_k) p.stored_k = with_nan(*p.stored_k, spoiled);
    }
    p.v = first_columns(p.k, value_dim);
    p.options.mask.causal = !chance(4);
    if (chance(4)) p.sinks = draw_sinks(p, i);
    if (chance(3)) p.cache = {pick(random, {1, 16, 64}), false};
    p.keys = rule(kRules[below(random, std::size(kRules))]);
    p.queries = rule(kRules[below(random, std::size(kRules))]);
    if (chance(2)) p.queries.reset();
    p.options.invariant = p.keys.layout == Layout::contiguous && chance(2);
    std::vector<std::string> names;
    const Topology topology{sweep.ranks, p.options.ranks_per_node};
    for (const Forecast& f : forecast(p.layer_options(sweep.ranks), topology,
                                      p.run_size(sweep.ranks), built_in_machine(device)))
      if (f.refusal.empty() && f.strategy->is_for_nodes_of(p.options.ranks_per_node, sweep.ranks) &&
          f.reservation.empty())
        names.emplace_back(f.strategy->name);
    if (!names.empty()) p.options.strategy = names[static_cast<std::size_t>(i) % names.size()];
    family.problems.push_back(std::move(p));
  }
  return family;
}

/// Draws the indices of every row: keys at random, at either end of the sequence, twice, or nobody.
void take_indices(Problem& p, Random& random, int columns) {
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  p.options.indices.top_k = columns + below(random, 3);
  p.lists = chance(3) ? p.options.kv_heads : 1;
  const bool has_lengths = chance(2);
  for (int b = 0; b < p.batch(); ++b)
    for (int t = 0; t < p.q_lens[b]; ++t) {
      if (has_lengths) p.index_len.push_back(below(random, columns + 3) - 1);
      for (int list = 0; list < p.lists; ++list) {
        const int kind = below(random, 5), keys = p.kv_lens[b];
        for (int i = 0; i < columns; ++i) {
          int index = keys == 0 ? 0 : below(random, keys);
          if (kind == 0 && keys > 0) index = below(random, std::min(keys, 5));
          if (kind == 1 && chance(2)) index = -1 - below(random, 3);
          if (kind == 2 && chance(2)) index = keys + below(random, 1000);
          if (kind == 3) index = -1;
          p.indices.push_back(index);
        }
      }
    }
}

/// Sparse attention by indices, over latent keys and others, in pages and layouts of peers' tests.
/// Keys that nobody names are NaN.
Family sparse(const Sweep& sweep) {
  Family family;
  Random random(sweep.seed + 20);
  const auto chance = [&](int one_in) { return below(random, one_in) == 0; };
  for (int i = 0; i < sweep.pick(18, 60, 400); ++i) {
    const bool latent = !chance(3);
    Shape shape;
    if (latent) {
      const auto [dim, value_dim] =
          pick<std::pair<int, int>>(random, {{576, 512}, {512, 512}, {96, 64}, {40, 24}});
      shape = {.heads = pick(random, {1, 8, 16, 17, 64, 128}),
               .kv_heads = 1,
               .dim = dim,
               .value_dim = value_dim};
    } else {
      shape = any_shape(random, fp32, 300);
    }
    shape.dtype = kDTypes[i % 3];
    shape.q_lens = {pick(random, {1, 1, 2, 4, 9})};
    shape.kv_lens = {pick(random, {0, 1, 20, 128, 300, 1000})};
    for (int b = chance(2) ? 3 : 0; b > 0; --b) {
      shape.q_lens.push_back(below(random, 5));
      shape.kv_lens.push_back(below(random, 500));
    }
    Problem p = make(sweep, shape, 2000 + i);
    take_indices(p, random, pick(random, {1, 3, 17, 64, 200}));
    p.options.values_in_keys = latent;
    std::vector<bool> spoiled;
    for (int b = 0; b < p.batch(); ++b) {
      std::vector<bool> unseen(static_cast<std::size_t>(p.kv_lens[b]), true);
      for (int t = 0; t < p.q_lens[b]; ++t)
        for (int list = 0; list < p.lists; ++list) {
          const auto times = p.named(b, t, list * (p.options.heads / p.lists));
          for (std::size_t j = 0; j < times.size(); ++j) unseen[j] = unseen[j] && times[j] == 0;
        }
      spoiled.insert(spoiled.end(), unseen.begin(), unseen.end());
    }
    const auto is_spoiled = [spoiled](std::int64_t key) {
      return spoiled[static_cast<std::size_t>(key)];
    };
    p.k = with_nan(p.k, is_spoiled);
    p.v = latent ? first_columns(p.k, p.value_dim()) : with_nan(p.v, is_spoiled);
    if (chance(3)) p.sinks = draw_sinks(p, i);
    if (chance(4)) p.options.score.softcap = 2.0f;
    if (!chance(3)) p.cache = {pick(random, {1, 2, 61, 64, 69, 576}), false};
    p.keys = rule(kRules[below(random, std::size(kRules))]);
    if (chance(3)) p.keys = rule({Layout::interleaved, kDeals[below(random, std::size(kDeals))]});
    p.options.strategy = pick(random, {"auto", "gather-states", "scatter-states"});
    family.problems.push_back(std::move(p));
  }
  return family;
}

constexpr FamilyMaker kMakers[] = {{"shapes", shapes},
                                   {"shards", shards},
                                   {"masks", masks},
                                   {"scores", scores},
                                   {"rope", ropes},
                                   {"batches", batches},
                                   {"queries", sharded_queries},
                                   {"empty", empties},
                                   {"nan", nans},
                                   {"same bits", bits},
                                   {"everything", everything},
                                   {"paged", paged},
                                   {"biases", biases},
                                   {"fp8", fp8},
                                   {"serving", serving},
                                   {"upper left", upper_left},
                                   {"gradients", gradients},
                                   {"dropout", dropout},
                                   {"latent", latent},
                                   {"sparse", sparse}};

}  // namespace

std::span<const FamilyMaker> family_makers() { return kMakers; }

}  // namespace longspan::launcher

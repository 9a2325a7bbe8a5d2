// The merge across ranks on every rank count, whole and scattered: against float64, bit for bit the
// same on all ranks, and scattered heads bit for bit those of the whole. Every rank knows all
// parts, so that each can judge its result. Arguments that differ between ranks are an error on all
// of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/told.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/outputs_case.hpp"

namespace longspan::tests {
namespace {

using ::testing::HasSubstr;
using tests::DeviceArray;
using tests::kInf;
using tests::kNaN;
using tests::OutputsCase;
using tests::OutputsData;

/// All parts, drawn alike on every rank. Of ten sides `empty_in_ten` are empty, with payloads of
/// NaN.
OutputsData draw(const OutputsCase& c, std::uint64_t seed, int empty_in_ten) {
  std::mt19937 random(static_cast<std::uint32_t>(seed ^ seed >> 32));
  std::normal_distribution<float> normal;
  OutputsData data{std::vector<std::byte>(c.part_at(c.parts), std::byte{0xff}),
                   std::vector<float>(c.parts * c.rows())};
  for (int n = 0; n < c.parts; ++n)
    for (std::int64_t token = 0; token < c.tokens; ++token)
      for (int head = 0; head < c.heads; ++head) {
        float& lse = data.lse[n * c.rows() + c.lse_at(token, head)];
        lse = 3 * normal(random);
        const bool empty = static_cast<int>(random() % 10) < empty_in_ten;
        if (empty) lse = random() % 2 == 0 ? kInf : -kInf;
        for (int d = 0; d < c.dim; ++d)
          if (const float value = normal(random); !empty)
            data.set(c, n, c.at(token, head) + d, value);
      }
  return data;
}

/// A rank's layout of its result.
struct Place {
  int gap = 0, offset = 0;  // elements
  bool in_place = false;    // where its part was
  bool wants_lse = true;
};

MergeOptions options_of(const OutputsCase& c, bool scatter, std::int64_t max_tokens) {
  return {.heads = c.heads,
          .value_dim = c.dim,
          .dtype = c.in,
          .out_dtype = c.out,
          .max_tokens = max_tokens,
          .scatter_heads = scatter,
          .nan_is_empty = c.nan_is_empty};
}

/// [tokens, heads, dim] and [tokens, heads], dense; nothing between them.
struct Merged {
  DType dtype = fp32;
  std::vector<std::byte> out;
  std::vector<float> lse;

  /// All NaN have the same bits: which NaN arithmetic makes depends on the CPU.
  std::string bits() const {
    std::string text(reinterpret_cast<const char*>(out.data()), out.size());
    text.append(reinterpret_cast<const char*>(lse.data()), lse.size() * sizeof(float));
    const std::size_t size = size_of(dtype), count = out.size() / size;
    for (std::size_t i = 0; i < count; ++i)
      if (std::isnan(load_element(out.data(), dtype, static_cast<std::int64_t>(i))))
        text.replace(i * size, size, size, '\xff');
    for (std::size_t i = 0; i < lse.size(); ++i)
      if (std::isnan(lse[i])) text.replace(out.size() + 4 * i, 4, 4, '\xff');
    return text;
  }
  bool operator==(const Merged& other) const { return bits() == other.bits(); }
};

/// Heads [first, first + count) of a whole result.
Merged heads_of(const Merged& whole, const OutputsCase& c, int first, int count) {
  const std::size_t row = c.dim * size_of(c.out);
  Merged some{.dtype = c.out};
  for (std::int64_t token = 0; token < c.tokens; ++token)
    for (int head = first; head < first + count; ++head) {
      const auto from =
          whole.out.begin() + static_cast<std::ptrdiff_t>((token * c.heads + head) * row);
      some.out.insert(some.out.end(), from, from + static_cast<std::ptrdiff_t>(row));
      some.lse.push_back(whole.lse[token * c.heads + head]);
    }
  return some;
}

/// This rank's run of `merge`. Results are poisoned first, and the gaps between their rows must
/// still be so afterwards.
Merged run(CrossRankMerge& merge, const OutputsCase& c, const OutputsData& data,
           const Place& place) {
  const Communicator& world = merge.world();
  const Device device = world.device();
  const int rank = world.rank();
  const std::int64_t heads = merge.options().scatter_heads ? c.heads / world.size() : c.heads;
  const std::size_t size = size_of(c.out);

  const DeviceArray<std::byte> part(device,
                                    std::vector<std::byte>(data.out.begin() + c.part_at(rank),
                                                           data.out.begin() + c.part_at(rank + 1)));
  const DeviceArray<float> part_lse(device,
                                    std::vector<float>(data.lse.begin() + rank * c.rows(),
                                                       data.lse.begin() + (rank + 1) * c.rows()));
  const DeviceArray<float> part_scale(device, std::vector<float>{c.part_scale(rank)});
  const DeviceArray<float> out_scale(device, std::vector<float>{c.scale.value_or(1.0f)});
  const auto own_tensor = [&](const DeviceArray<std::byte>& memory) {
    Tensor t(memory.data() + c.offset * size_of(c.in), c.in, {c.tokens, c.heads, c.dim}, device);
    t.stride[0] = c.row_stride();
    t.stride[1] = c.head_stride();
    return t;
  };
  const auto own_lse = [&](const DeviceArray<float>& memory) {
    return c.heads_first
               ? Lse::heads_tokens(Tensor(memory.data(), fp32, {c.heads, c.tokens}, device))
               : Lse::tokens_heads(Tensor(memory.data(), fp32, {c.tokens, c.heads}, device));
  };
  MergeArgs args{.part = own_tensor(part), .part_lse = own_lse(part_lse)};
  if (is_fp8(c.in)) args.part_scale = Tensor(part_scale.data(), {1}, device);
  if (c.scale) args.out_scale = Tensor(out_scale.data(), {1}, device);

  const std::int64_t head_stride = c.dim + place.gap, row_stride = heads * head_stride + place.gap;
  const DeviceArray<std::byte> out(device, (place.offset + c.tokens * row_stride) * size);
  const DeviceArray<float> lse(device, static_cast<std::size_t>(c.tokens * heads));
  if (place.in_place) {
    args.out = args.part;
    args.lse = args.part_lse;
  } else {
    args.out = Tensor(out.data() + place.offset * size, c.out, {c.tokens, heads, c.dim}, device);
    args.out.stride[0] = row_stride;
    args.out.stride[1] = head_stride;
    if (place.wants_lse)
      args.lse = Lse::tokens_heads(Tensor(lse.data(), fp32, {c.tokens, heads}, device));
  }
  merge.run(args);
  merge.wait();

  Merged result{.dtype = c.out};
  std::vector<std::byte> memory = place.in_place ? part.values() : out.values();
  const std::vector<float> logs = place.in_place ? part_lse.values() : lse.values();
  const std::size_t row = c.dim * size;
  for (std::int64_t token = 0; token < c.tokens; ++token)
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t at = place.in_place
                                  ? c.at(token, static_cast<int>(head))
                                  : place.offset + token * row_stride + head * head_stride;
      const auto from = memory.begin() + static_cast<std::ptrdiff_t>(at * size);
      result.out.insert(result.out.end(), from, from + static_cast<std::ptrdiff_t>(row));
      std::fill_n(from, row, std::byte{0xff});
      result.lse.push_back(
          logs[place.in_place ? c.lse_at(token, static_cast<int>(head)) : token * heads + head]);
    }
  EXPECT_EQ(memory, std::vector<std::byte>(memory.size(), std::byte{0xff}))
      << "something between the rows was written";
  return result;
}

/// Heads [first, first + count) against float64.
void expect_right(const OutputsCase& c, const OutputsData& data, const Merged& found, int first,
                  int count, bool wants_lse) {
  for (std::int64_t token = 0; token < c.tokens; ++token)
    for (int h = 0; h < count; ++h) {
      const tests::ExactOutput exact = tests::merge_exactly(c, data, token, first + h);
      const std::int64_t row = token * count + h;
      for (int d = 0; d < c.dim; ++d) {
        const double got = load_element(found.out.data(), c.out, row * c.dim + d);
        double expected = exact.out[d];
        if (is_fp8(c.out))
          expected = std::clamp(expected, -tests::largest(c.out), tests::largest(c.out));
        const double allowed = tests::one_rounding(c.out, expected, exact.size[d]);
        const bool right = std::isnan(expected)    ? std::isnan(got)
                           : std::isinf(exact.lse) ? got == 0
                                                   : std::abs(got - expected) <= allowed;
        ASSERT_TRUE(right) << "token " << token << " head " << first + h << " element " << d
                           << " is " << got << ", not " << expected;
      }
      const float lse = found.lse[row];
      ASSERT_TRUE(!wants_lse              ? std::isnan(lse)
                  : std::isnan(exact.lse) ? std::isnan(lse)
                  : std::isinf(exact.lse)
                      ? lse == exact.lse
                      : std::abs(lse - exact.lse) <= 1e-6 * (1 + std::abs(exact.lse)))
          << "lse of token " << token << " head " << first + h << " is " << lse << ", not "
          << exact.lse;
    }
}

class CrossRankMergeTest : public ::testing::Test {
 protected:
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  std::uint64_t drawn = 0;

  /// As many parts as ranks, and a number of heads that they can share.
  OutputsCase of_ranks(OutputsCase c) const {
    c.parts = world.size();
    c.heads *= world.size();
    // Separate scales; OutputsCase needs both or all.
    if (is_fp8(c.in))
      for (int p = 0; p < std::max(2, c.parts); ++p)
        c.part_scales.push_back(0.4f + 0.3f * static_cast<float>(p));
    return c;
  }

  /// Both kinds of result. Ranks use different layouts.
  void expect_right_both_ways(const OutputsCase& c, const OutputsData& data) {
    std::ostringstream text;
    text << c << " ranks " << world.size() << " seed " << seed;
    SCOPED_TRACE(text.str());
    const int own = c.heads / world.size(), first = world.rank() * own;
    const Place place{.gap = world.rank() % 3, .offset = world.rank() % 2};
    CrossRankMerge whole(world, options_of(c, false, c.tokens + 2), c.base);
    CrossRankMerge scattered(world, options_of(c, true, c.tokens), c.base);
    const Merged all = run(whole, c, data, place);
    expect_right(c, data, all, 0, c.heads, true);
    for (const std::string& theirs : world.gather(all.bits(), "comparison"))
      EXPECT_TRUE(theirs == all.bits()) << "ranks got different bits";
    const Merged mine = run(scattered, c, data, place);
    expect_right(c, data, mine, first, own, true);
    EXPECT_TRUE(mine == heads_of(all, c, first, own)) << "other bits than the whole has";
    EXPECT_TRUE(run(whole, c, data, place) == all) << "other bits in another run";
    EXPECT_TRUE(run(scattered, c, data, place) == mine) << "other bits in another run";
  }
  void expect_right_both_ways(OutputsCase c, int empty_in_ten = 2) {
    c = of_ranks(c);
    expect_right_both_ways(c, draw(c, seed + ++drawn, empty_in_ten));
  }
};

TEST_F(CrossRankMergeTest, PartsAndResultOfAnyType) {
  for (const DType in : {fp32, fp16, bf16, e4m3, e5m2})
    for (const DType out : {fp32, fp16, bf16, e4m3, e5m2})
      for (const int dim : {5, 64}) {
        OutputsCase c{.tokens = 6, .heads = 2, .dim = dim, .in = in, .out = out};
        if (is_fp8(out)) c.scale = 0.05f;
        expect_right_both_ways(c);
      }
}

TEST_F(CrossRankMergeTest, AnySizeAndStrides) {
  for (const DType dtype : {fp32, bf16})
    for (const int dim : {1, 7, 24, 72, 128, 257, 512})
      for (const std::int64_t tokens : {1, 9}) {
        OutputsCase c{.tokens = tokens, .heads = 1, .dim = dim, .in = dtype, .out = dtype};
        c.row_gap = dim % 2 == 0 ? 8 : 3;
        c.head_gap = dim % 3;
        c.offset = dim == 72 ? 8 : dim % 2;
        c.heads_first = tokens > 1;
        c.base = dim % 2 == 0 ? LogBase::two : LogBase::e;
        expect_right_both_ways(c);
      }
}

TEST_F(CrossRankMergeTest, ManyTokens) {
  expect_right_both_ways({.tokens = 300, .heads = 3, .dim = 128, .in = bf16, .out = bf16});
}

TEST_F(CrossRankMergeTest, NoTokens) {
  for (const bool scatter : {false, true})
    for (const DType dtype : {bf16, e4m3}) {
      OutputsCase c = of_ranks({.tokens = 0, .heads = 2, .in = dtype, .out = bf16});
      for (const std::int64_t most : {0, 5}) {
        CrossRankMerge merge(world, options_of(c, scatter, most), c.base);
        EXPECT_TRUE(run(merge, c, draw(c, seed, 0), {}).out.empty());
      }
    }
}

TEST_F(CrossRankMergeTest, EmptyRanks) {
  const OutputsCase c = of_ranks({.tokens = 5, .heads = 2, .in = bf16, .out = bf16});
  for (const int full : {-1, 0, world.size() - 1}) {  // the one rank that has keys, if any has
    OutputsData data = draw(c, seed, 0);
    for (int p = 0; p < c.parts; ++p) {
      if (p == full) continue;
      std::fill_n(data.lse.begin() + p * c.rows(), c.rows(), p % 2 == 0 ? kInf : -kInf);
      std::fill(data.out.begin() + c.part_at(p), data.out.begin() + c.part_at(p + 1),
                std::byte{0xff});
    }
    expect_right_both_ways(c, data);
    CrossRankMerge merge(world, options_of(c, false, 5), c.base);
    const Merged found = run(merge, c, data, {});
    if (full < 0) {
      EXPECT_EQ(found.out, std::vector<std::byte>(found.out.size())) << "+0, all bits";
      EXPECT_EQ(found.lse, std::vector<float>(found.lse.size(), -kInf));
    } else {  // what only one rank has is not changed
      EXPECT_EQ(found.out, std::vector<std::byte>(data.out.begin() + c.part_at(full),
                                                  data.out.begin() + c.part_at(full + 1)));
      EXPECT_EQ(found.lse, std::vector<float>(data.lse.begin() + full * c.rows(),
                                              data.lse.begin() + (full + 1) * c.rows()));
    }
  }
}

TEST_F(CrossRankMergeTest, NanStaysNanUnlessItIsSaidToBeEmpty) {
  for (const bool nan_is_empty : {false, true}) {
    OutputsCase c = of_ranks({.tokens = 20, .heads = 2});
    c.nan_is_empty = nan_is_empty;
    OutputsData data = draw(c, seed, 1);
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    for (float& lse : data.lse)
      if (random() % 6 == 0) lse = kNaN;
    expect_right_both_ways(c, data);
  }
}

/// Bits travel unchanged: an infinity of e5m2 does not become its largest number on the way.
TEST_F(CrossRankMergeTest, InfinitiesTravel) {
  for (const DType in : {e5m2, fp16, fp32}) {
    OutputsCase c = of_ranks({.tokens = 2, .heads = 1, .dim = 16, .in = in, .out = fp32});
    std::fill(c.part_scales.begin(), c.part_scales.end(), 1.0f);
    OutputsData data = draw(c, seed, 0);
    const std::uint32_t infinity = in == e5m2 ? 0x7cu : in == fp16 ? 0x7c00u : 0x7f800000u;
    for (int p = 0; p < c.parts; ++p)
      std::memcpy(data.out.data() + c.part_at(p) + c.at(1, p) * size_of(in), &infinity,
                  size_of(in));
    CrossRankMerge merge(world, options_of(c, true, 2), c.base);
    const Merged found = run(merge, c, data, {});
    for (int d = 0; d < c.dim; ++d) {
      EXPECT_TRUE(std::isfinite(load_element(found.out.data(), fp32, d)));
      EXPECT_EQ(std::isinf(load_element(found.out.data(), fp32, c.dim + d)), d == 0);
    }
  }
}

/// 3e38 and 3e38 have a mean, though no sum.
TEST_F(CrossRankMergeTest, TheMergeOfFiniteValuesIsFinite) {
  OutputsCase c = of_ranks({.tokens = 4, .heads = 2, .dim = 20});
  OutputsData data = draw(c, seed, 0);
  for (int p = 0; p < c.parts; ++p)
    for (std::int64_t token = 0; token < c.tokens; ++token)
      for (int head = 0; head < c.heads; ++head) {
        data.lse[p * c.rows() + c.lse_at(token, head)] = 0.5f;
        for (int d = 0; d < c.dim; d += 2)
          data.set(c, p, c.at(token, head) + d, std::numeric_limits<float>::max());
      }
  expect_right_both_ways(c, data);
}

TEST_F(CrossRankMergeTest, InPlaceGivesTheSameBits) {
  for (const DType dtype : {fp32, bf16})
    for (const bool heads_first : {false, true}) {
      OutputsCase c = of_ranks({.tokens = 7, .heads = 2, .in = dtype, .out = dtype});
      c.row_gap = 8;
      c.heads_first = heads_first;
      const OutputsData data = draw(c, seed, 2);
      CrossRankMerge merge(world, options_of(c, false, 7), c.base);
      const Merged apart = run(merge, c, data, {});
      EXPECT_TRUE(run(merge, c, data, {.in_place = true}) == apart);
    }
}

/// One merge for runs of any size up to its limit: the next run sees nothing of a run.
TEST_F(CrossRankMergeTest, RunsOfManySizes) {
  for (const bool scatter : {false, true}) {
    const OutputsCase most = of_ranks({.tokens = 12, .heads = 2, .in = e4m3, .out = bf16});
    CrossRankMerge merge(world, options_of(most, scatter, 12), most.base);
    for (const std::int64_t tokens : {12, 1, 0, 7, 12, 3}) {
      OutputsCase c = most;
      c.tokens = tokens;
      const OutputsData data = draw(c, seed + static_cast<std::uint64_t>(tokens), 2);
      const int own = scatter ? c.heads / world.size() : c.heads;
      expect_right(c, data, run(merge, c, data, {}), scatter ? world.rank() * own : 0, own, true);
    }
  }
}

TEST_F(CrossRankMergeTest, BatchOfHeadsByTokens) {
  constexpr std::int64_t kBatch = 2, kTokens = 3;
  OutputsCase c = of_ranks({.tokens = kBatch * kTokens, .heads = 2, .dim = 8});
  const OutputsData data = draw(c, seed, 0);
  CrossRankMerge merge(world, options_of(c, false, c.tokens), c.base);
  const Merged flat = run(merge, c, data, {});
  const Device device = world.device();
  const DeviceArray<std::byte> part(
      device, std::vector<std::byte>(data.out.begin() + c.part_at(world.rank()),
                                     data.out.begin() + c.part_at(world.rank() + 1)));
  const DeviceArray<float> lses(
      device, std::vector<float>(data.lse.begin() + world.rank() * c.rows(),
                                 data.lse.begin() + (world.rank() + 1) * c.rows()));
  const DeviceArray<std::byte> out(device, flat.out.size());
  const DeviceArray<float> out_lse(device, flat.lse.size());
  const auto view = [&](std::byte* data_of) {  // [batch, heads, tokens, dim] of the same memory
    Tensor t(data_of, fp32, {kBatch, c.heads, kTokens, c.dim}, device);
    t.stride = {kTokens * c.row_stride(), c.head_stride(), c.row_stride(), 1};
    return t;
  };
  const auto view_lse = [&](float* data_of) {
    return Lse::tokens_heads(Tensor(data_of, fp32, {kBatch, kTokens, c.heads}, device));
  };
  merge.run({.part = view(part.data()),
             .part_lse = view_lse(lses.data()),
             .out = view(out.data()),
             .lse = view_lse(out_lse.data())});
  merge.wait();
  EXPECT_EQ(out.values(), flat.out);
  EXPECT_EQ(out_lse.values(), flat.lse);
}

// ---- what ranks must agree on -----------------------------------------------------------------

TEST(CrossRankMergeAgreement, EveryOptionIsComparedOrMayDiffer) {
  struct Change {
    const char* says;  // empty: it may differ
    std::function<void(MergeOptions&, LogBase&)> change;
  };
  const Change changes[] = {
      {"'heads' differs between ranks", [](MergeOptions& o, LogBase&) { o.heads *= 2; }},
      {"'value_dim' differs between ranks", [](MergeOptions& o, LogBase&) { o.value_dim = 65; }},
      {"'dtype' differs between ranks",
       [](MergeOptions& o, LogBase&) { o.dtype = fp16, o.out_dtype = bf16; }},
      {"'out_dtype' differs between ranks", [](MergeOptions& o, LogBase&) { o.out_dtype = fp32; }},
      {"'base' differs between ranks", [](MergeOptions&, LogBase& base) { base = LogBase::two; }},
      {"'max_tokens' differs between ranks", [](MergeOptions& o, LogBase&) { o.max_tokens = 9; }},
      {"'scatter_heads' differs between ranks",
       [](MergeOptions& o, LogBase&) { o.scatter_heads = true; }},
      {"'nan_is_empty' differs between ranks",
       [](MergeOptions& o, LogBase&) { o.nan_is_empty = true; }},
      {"", [](MergeOptions& o, LogBase&) { o.threads = 3; }},
  };
  for (const Change& one : changes) {
    const Communicator world = test_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    SCOPED_TRACE(one.says);
    MergeOptions options{.heads = world.size()};
    LogBase base = LogBase::e;
    if (world.rank() == world.size() - 1) one.change(options, base);
    const std::string text = told([&] { CrossRankMerge(world, options, base); });
    if (*one.says == '\0')
      EXPECT_EQ(text, "");
    else
      EXPECT_THAT(text, HasSubstr(one.says));
  }
}

/// A valid run, and the memory behind it.
struct OneRun {
  static constexpr std::int64_t kTokens = 4;
  static constexpr int kDim = 16;
  Device device;
  int heads, own_heads;
  DeviceArray<float> part, part_lse, out, lse, scale, other_scale;
  MergeArgs args;

  explicit OneRun(const Communicator& world, bool scatter)
      : device(world.device()),
        heads(2 * world.size()),
        own_heads(scatter ? 2 : heads),
        part(device, std::vector<float>(kTokens * heads * kDim, 0.5f)),
        part_lse(device, std::vector<float>(kTokens * heads, 1.0f)),
        out(device, static_cast<std::size_t>(kTokens * own_heads * kDim)),
        lse(device, static_cast<std::size_t>(kTokens * own_heads)),
        scale(device, std::vector<float>{2.0f}),
        other_scale(device, std::vector<float>{4.0f}) {
    set_tokens(kTokens);
  }
  void set_tokens(std::int64_t tokens) {
    args.part = Tensor(part.data(), {tokens, heads, kDim}, device);
    args.part_lse = Lse::tokens_heads(Tensor(part_lse.data(), {tokens, heads}, device));
    args.out = Tensor(out.data(), {tokens, own_heads, kDim}, device);
    args.lse = Lse::tokens_heads(Tensor(lse.data(), {tokens, own_heads}, device));
  }
  MergeOptions options(bool scatter) const {
    return {.heads = heads,
            .value_dim = kDim,
            .dtype = fp32,
            .max_tokens = kTokens,
            .scatter_heads = scatter};
  }
  bool wrote() const {
    for (const float value : out.values())
      if (!std::isnan(value)) return true;
    return false;
  }
};

TEST(CrossRankMergeAgreement, EveryDifferenceOfARunIsAnErrorThatNamesIt) {
  struct Change {
    const char* says;
    std::function<void(OneRun&)> all, victim;
    bool on_gpus = true;   // otherwise only the contents of an array differ
    bool of_heads = true;  // also with scattered heads
  };
  const auto nothing = [](OneRun&) {};
  const auto scaled = [](OneRun& r) { r.args.out_scale = Tensor(r.scale.data(), {1}, r.device); };
  const Change changes[] = {
      {"'tokens' differs between ranks", nothing, [](OneRun& r) { r.set_tokens(3); }},
      {"'tokens' differs between ranks", nothing, [](OneRun& r) { r.set_tokens(0); }, false},
      {"'out_scale' differs between ranks", nothing, scaled},
      {"'out_scale' differs between ranks", scaled,
       [](OneRun& r) { r.args.out_scale = Tensor(r.other_scale.data(), {1}, r.device); }, false,
       false},
  };
  for (const bool scatter : {false, true})
    for (const Change& one : changes) {
      if (scatter && !one.of_heads) continue;
      const Communicator world = test_world();
      if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
      if (world.device() == Device::cuda && !one.on_gpus) continue;
      SCOPED_TRACE(one.says);
      OneRun first(world, scatter), second(world, scatter);
      one.all(first);
      one.all(second);
      const int victim = world.size() - 1;
      if (world.rank() == victim) one.victim(second);
      CrossRankMerge merge(world, first.options(scatter), LogBase::e);
      const std::string text = told([&] {
        merge.run(first.args);
        EXPECT_TRUE(world.device() == Device::cuda || first.wrote());
        merge.wait();
        merge.run(second.args);
        merge.wait();
      });
      EXPECT_THAT(text, HasSubstr(one.says));
      EXPECT_THAT(text, HasSubstr("rank " + std::to_string(victim) + " has "));
      EXPECT_FALSE(second.wrote()) << "a result of different runs";
      // The communicator has ended with that error, on every rank.
      EXPECT_THAT(told([&] { merge.run(first.args); }),
                  testing::AllOf(HasSubstr("had ended before this call"), HasSubstr(text)));
    }
}

TEST(CrossRankMergeAgreement, RanksThatRunTwoMergesInDifferentOrdersGetNoResult) {
  for (const bool scatter : {false, true}) {
    const Communicator world = test_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    OneRun run(world, scatter);
    MergeOptions other = run.options(scatter);
    other.nan_is_empty = true;
    CrossRankMerge first(world, run.options(scatter), LogBase::e), second(world, other, LogBase::e);
    const std::string text = told_in_different_orders(world, first, second, run.args);
    EXPECT_THAT(text, HasSubstr("'nan_is_empty' differs between ranks"));
    EXPECT_FALSE(run.wrote()) << "a result of different runs";
  }
}

TEST(CrossRankMergeAgreement, WhatMayDifferDoes) {
  for (const bool scatter : {false, true}) {
    const Communicator world = test_world();
    OneRun run(world, scatter);
    CrossRankMerge merge(world, run.options(scatter), LogBase::e);
    if (world.rank() == 0) run.args.lse = {};
    if (scatter)  // every rank scales its own heads
      run.args.out_scale =
          Tensor(world.rank() == 0 ? run.scale.data() : run.other_scale.data(), {1}, run.device);
    for (int turn = 0; turn < 3; ++turn) {
      merge.run(run.args);
      merge.wait();
    }
    const float expected = !scatter ? 0.5f : world.rank() == 0 ? 0.25f : 0.125f;
    for (const float value : run.out.values()) EXPECT_EQ(value, expected);
    for (const float value : run.lse.values()) {
      if (world.rank() == 0)
        EXPECT_TRUE(std::isnan(value));
      else
        EXPECT_NEAR(value, 1 + std::log(static_cast<double>(world.size())), 1e-6);
    }
  }
}

TEST(CrossRankMergeAgreement, HeadsThatRanksCannotShareAreRefused) {
  const Communicator world = test_world();
  const int heads = 2 * world.size() + 1;
  const auto make = [&](bool scatter) {
    CrossRankMerge(world, {.heads = heads, .scatter_heads = scatter}, LogBase::e);
  };
  EXPECT_EQ(told([&] { make(false); }), "");
  const std::string text = told([&] { make(true); });
  if (world.size() == 1)
    EXPECT_EQ(text, "");
  else
    EXPECT_THAT(text, HasSubstr(std::to_string(heads) + " heads cannot be dealt out to " +
                                std::to_string(world.size()) + " ranks"));
}

// ---- refusals -----------------------------------------------------------------------------------

TEST(CrossRankMergeRefusals, OptionsThatMakeNoSense) {
  const Communicator world = test_world();
  const auto refused = [&](MergeOptions options, LogBase base, const char* says) {
    EXPECT_THAT(told([&] { CrossRankMerge(world, options, base); }), HasSubstr(says));
  };
  refused({.heads = 0}, LogBase::e, "heads 0 is below 1");
  refused({.value_dim = 0}, LogBase::e, "value_dim 0 is below 1");
  refused({.max_tokens = -1}, LogBase::e, "max_tokens -1 is not in 0");
  refused({.dtype = DType::int32}, LogBase::e, "dtype is int32; fp32, fp16, bf16 or fp8 is wanted");
  refused({.out_dtype = DType::uint8}, LogBase::e,
          "out_dtype is uint8; fp32, fp16, bf16 or fp8 is wanted");
  refused({.threads = -1}, LogBase::e, "threads -1 is not in 0 to 4096");
  refused({}, static_cast<LogBase>(7), "base of number 7");
  refused({.heads = 1 << 20, .value_dim = 512, .max_tokens = 1 << 30}, LogBase::e,
          "give the most tokens of one run");
}

/// Each before anything is queued, on all ranks alike; then a valid run still works.
TEST(CrossRankMergeRefusals, TensorsThatDoNotFit) {
  const Communicator world = test_world();
  struct Change {
    const char* says;
    std::function<void(OneRun&)> change;
    bool of_whole = true, of_heads = true;
  };
  const Change changes[] = {
      {"part is fp16; fp32 is wanted", [](OneRun& r) { r.args.part.dtype = fp16; }},
      {"out is bf16; fp32 is wanted", [](OneRun& r) { r.args.out.dtype = bf16; }},
      {"part_lse is fp16", [](OneRun& r) { r.args.part_lse.tensor.dtype = fp16; }},
      {"part is [4, ", [](OneRun& r) { r.args.part.shape[1] += 1; }},
      {"part is [5, ", [](OneRun& r) { r.args.part.shape[0] = 5, r.args.part.shape[1] += 1; }},
      {"part has 5 tokens; the merge was made for at most 4",
       [](OneRun& r) { r.args.part.shape[0] = 5; }},
      {"part is [4, ", [](OneRun& r) { r.args.part.shape[2] = 15; }},
      {"part has stride 2 in its last dimension", [](OneRun& r) { r.args.part.stride[2] = 2; }},
      {"has no data", [](OneRun& r) { r.args.part.data = nullptr; }},
      {"part_lse [] has no data", [](OneRun& r) { r.args.part_lse = {}; }},
      {"out is [4, ", [](OneRun& r) { r.args.out.shape[1] += 1; }},
      {"out is [3, ", [](OneRun& r) { r.args.out.shape[0] = 3; }},
      {"is written, and its elements overlap", [](OneRun& r) { r.args.out.stride[0] = 0; }},
      {"lse is [4, ", [](OneRun& r) { r.args.lse.tensor.shape[1] += 1; }},
      {"part_scale is given and part is fp32",
       [](OneRun& r) { r.args.part_scale = Tensor(r.scale.data(), {1}, r.device); }},
      {"out_scale is [2]; [1] is wanted",
       [](OneRun& r) { r.args.out_scale = Tensor(r.part.data(), {2}, r.device); }},
      {"out overlaps part: it must lie apart",
       [](OneRun& r) { r.args.out.data = r.args.part.data; }, false},
      {"out overlaps part: it may be the same tensor",
       [](OneRun& r) {
         r.args.out = r.args.part;
         r.args.out.data = r.part.data() + 1;
       },
       true, false},
      {"out overlaps part_lse", [](OneRun& r) { r.args.part_lse.tensor.data = r.out.data(); }},
      {"lse overlaps out", [](OneRun& r) { r.args.lse.tensor.data = r.out.data(); }},
      {"lse overlaps part: it must lie apart",
       [](OneRun& r) { r.args.lse.tensor.data = r.part.data(); }},
      {"part is on the ", [](OneRun& r) {
         r.args.part.device = r.device == Device::host ? Device::cuda : Device::host;
       }}};
  for (const bool scatter : {false, true}) {
    OneRun good(world, scatter);
    CrossRankMerge merge(world, good.options(scatter), LogBase::e);
    for (const Change& one : changes) {
      if (!(scatter ? one.of_heads : one.of_whole)) continue;
      SCOPED_TRACE(one.says);
      OneRun run(world, scatter);
      one.change(run);
      try {
        merge.run(run.args);
        ADD_FAILURE() << "not refused";
      } catch (const InputError& error) {
        EXPECT_THAT(error.what(), HasSubstr(one.says));
      }
      EXPECT_FALSE(run.wrote());
    }
    merge.run(good.args);
    merge.wait();
    EXPECT_TRUE(good.wrote());
  }
  const OneRun run(world, false);
  MergeOptions quantised = run.options(false);
  quantised.dtype = e4m3;
  quantised.out_dtype = e5m2;
  CrossRankMerge merge(world, quantised, LogBase::e);
  MergeArgs args = run.args;
  args.part.dtype = e4m3;
  args.out.dtype = e5m2;
  const auto refused = [&](const char* says) {
    try {
      merge.run(args);
      ADD_FAILURE() << "not refused";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr(says));
    }
  };
  refused("part is e4m3 and there is no part_scale");
  args.part_scale = Tensor(run.scale.data(), {1}, run.device);
  refused("out is e5m2 and there is no out_scale");
  args.out_scale = Tensor(run.scale.data(), {1}, run.device);
  merge.run(args);
  merge.wait();
}

TEST(CrossRankMergeRefusals, SaysWhatItIs) {
  const Communicator world = test_world();
  const CrossRankMerge merge(world, {.heads = world.size(), .value_dim = 64, .max_tokens = 10},
                             LogBase::two);
  EXPECT_EQ(merge.base(), LogBase::two);
  EXPECT_EQ(merge.options().max_tokens, 10);
  EXPECT_EQ(merge.world().size(), world.size());
  const std::int64_t ranks = world.size(), rows = 10 * ranks;
  const auto round_up = [](std::int64_t bytes, std::int64_t to) {
    return (bytes + to - 1) / to * to;
  };
  const std::int64_t slot = round_up(rows * 64 * 2, 16) + round_up(rows * 4, 16);
  const std::int64_t expected =
      ranks == 1 ? 0 : round_up(ranks * slot, 256) + round_up(ranks * 8, 256);
  EXPECT_EQ(merge.workspace_bytes(), static_cast<std::size_t>(expected));
}

}  // namespace
}  // namespace longspan::tests

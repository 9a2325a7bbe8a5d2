// Products of e4m3 on Hopper against float64 of the stored inputs. Two kinds of inputs: exact ones,
// for which no rounding of the kernel loses anything, so that a wrong place or a wrong key shows;
// and random ones, whose error must be that of rounding the weights to e4m3. Also what the option
// must not change: the path that widens e4m3 keeps its bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/fp8_products.hpp"
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

/// One rank, through the layer: the kernel finishes the rows itself.
ServingResult run_option(const ServingProblem& problem, bool fp8_products) {
  const ServingArrays arrays(Device::cuda, problem, Shard::contiguous(0, 0, 1));
  Options options = options_for(problem);
  options.dtypes.fp8_products = fp8_products;
  Attention layer(self(Device::cuda), options);
  layer.run(arrays.args());
  layer.wait();
  return arrays.result();
}

/// Both ends of the kernel: states, merged, and finished rows. Finished ones have one rank.
void check_exact(const Serving& s, Dealt dealt = {}, std::int64_t sampled = 12) {
  if (is_left_out(4 * kOnHopper * work_of(s, dealt.ranks))) return;
  const std::uint64_t seed = fresh_seed();
  SCOPED_TRACE(trace(s, dealt, seed));
  const ServingProblem problem = exact_problem(s, seed);
  dealt.fp8_products = dealt.on_hopper = true;
  expect_exact(problem, run_dealt(problem, dealt), sampled);
  if (dealt.ranks == 1) expect_exact(problem, run_option(problem, true), sampled);
}

TEST(AttendSm90Fp8, EveryHeadDim) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (int dim = 48; dim <= 256; dim += 16)
      for (const bool causal : {false, true})
        check_exact({.heads = 4,
                     .kv_heads = 2,
                     .dim = dim,
                     .dtype = dtype,
                     .q_lens = {130},
                     .kv_lens = {433},
                     .mask = {.causal = causal}});
}

// Rows come in tiles of 128 and 192, keys in tiles of 128, 160 and 192, of which 32 are a step.
TEST(AttendSm90Fp8, EdgesOfTiles) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256})
    for (const int q_len : {17, 64, 127, 128, 129, 192, 193})
      for (const int kv_len : {1,   2,   16,  17,  31,  32,  33,  127, 128, 129, 159, 160,
                               161, 191, 192, 193, 320, 321, 384, 385, 512, 513, 1100})
        for (const bool causal : {false, true})
          check_exact({.heads = 1,
                       .kv_heads = 1,
                       .dim = dim,
                       .dtype = DType::fp16,
                       .q_lens = {q_len},
                       .kv_lens = {kv_len},
                       .mask = {.causal = causal},
                       .sinks = kv_len % 2 == 0},
                      {}, 8);
}

TEST(AttendSm90Fp8, EveryMaskInUnevenBatches) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256})
    for (const Mask& mask : test::kMasks)
      check_exact({.heads = 6,
                   .kv_heads = 2,
                   .dim = dim,
                   .dtype = DType::fp16,
                   .q_lens = {200, 20, reduced(300, 100), 17, 40, reduced(1000, 100)},
                   .kv_lens = {200, 500, 64, reduced(900, 300), 30, reduced(1000, 100)},
                   .mask = mask,
                   .sinks = true});
}

// Keys that no row may see are NaN, also before a window, where values are cleared.
TEST(AttendSm90Fp8, Shards) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Dealt& cut : {Dealt{.layout = Layout::contiguous}, Dealt{.layout = Layout::ranges},
                           Dealt{.layout = Layout::zigzag}, Dealt{.layout = Layout::striped},
                           Dealt{.layout = Layout::interleaved, .block = 1},
                           Dealt{.layout = Layout::interleaved, .block = 128}})
    for (const int ranks : {1, 2, 3})
      for (const int window : {0, 150})
        for (const int dim : {64, 128, 256}) {
          Dealt dealt = cut;
          dealt.ranks = ranks;
          check_exact({.heads = 6,
                       .kv_heads = 2,
                       .dim = dim,
                       .dtype = DType::bf16,
                       .q_lens = {reduced(300, 60), 40, reduced(170, 130), 20},
                       .kv_lens = {reduced(1000, 400), 130, reduced(170, 130), 20},
                       .mask = {.causal = true, .window = window},
                       .sinks = true},
                      dealt);
        }
}

TEST(AttendSm90Fp8, FlagsAndDocuments) {
  LONGSPAN_NEEDS_HOPPER();
  check_exact({.heads = 2,
               .kv_heads = 1,
               .dim = 128,
               .dtype = DType::fp16,
               .q_lens = {200, 140, 70},
               .kv_lens = {300, 140, 700},
               .causal = {1, 0, 0}});
  for (const bool causal : {false, true}) {
    Serving s{.dim = 64, .dtype = DType::fp16, .q_lens = {700}, .kv_lens = {700}};
    s.mask.causal = causal;
    s.documents = {40, 300, 301, 620, 690};
    check_exact(s);
  }
}

// ---- random inputs ---------------------------------------------------------------------------

/// The error of a result's rows; no element may exceed the bound of the roundings:
///
///     weight   e4m3 has 3 bits behind its leading one: to nearest, 2^-4 of itself; in fixed steps
///              half of 2^-9, where the row's largest weight is 2^8 or more
///     score    a tensor core adds 32 products and the sum so far in one step, and cuts each of the
///              33 at 2^-13 of the largest: at most 33 2^-13 sum_d |q_d k_d| in each of dim / 32
///              steps
///     out      sum_j w_j m_j |v_j - out| from the weights, which are divided by the sum of the
///              rounded ones; and of each sum of at most 192 keys, in its 6 steps, 33 2^-13 of its
///              own sum_j w_j |v_j| and of |out|: together as much of the whole, for any keys
///
/// These are worst cases, far from actual errors; the norm below is near to them.
struct Distances {
  Distance out;
  double lse = 0;  // root of the mean square
};

Distances distances_of(const ServingProblem& problem, const ServingResult& found,
                       std::int64_t sampled) {
  const Serving& s = problem.shape;
  constexpr double kRounding = 0x1p-4, kLost = 0x1p-18, kCut = 33 * 0x1p-13;
  constexpr double kSteps = 192 / 32;
  const double unit = s.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  Distances distances;
  double lse_error = 0;
  std::int64_t rows = 0;
  for_sampled_rows(problem, sampled, [&](const SampledRow& row) {
    const launcher::Exact& exact = row.exact;
    const Interval seen = row.seen;
    const double lse = found.lse[row.at];
    if (std::isinf(exact.lse)) {
      EXPECT_EQ(lse, exact.lse);
      return;
    }
    const double cut_score = kCut * (s.dim + 31) / 32 * s.scale_used();
    double most = 0;
    for (std::int64_t j = seen.begin; j < seen.end; ++j)
      most = std::max(most, std::exp(s.scale_used() * row.keys.row(j).dot(row.q) - exact.lse));
    Eigen::VectorXd moved = Eigen::VectorXd::Zero(s.dim), sizes = moved;
    double moved_score = 0, moved_weight = 0;
    for (std::int64_t j = seen.begin; j < seen.end; ++j) {
      const double weight = std::exp(s.scale_used() * row.keys.row(j).dot(row.q) - exact.lse);
      const double m =
          std::expm1(cut_score * row.keys.row(j).cwiseAbs().dot(row.q.cwiseAbs()) + 0x1p-16);
      const double e = weight * m + std::max(kRounding * weight * (1 + m), kLost * most);
      const Eigen::VectorXd v = row.values.row(j).transpose();
      moved_score += weight * m;
      moved_weight += e;
      moved += e * (v - exact.out).cwiseAbs();
      sizes += weight * v.cwiseAbs();
    }
    EXPECT_LE(std::abs(lse - exact.lse),
              -std::log1p(-std::min(moved_score, 0.99)) + 0x1p-18 * (1 + std::abs(exact.lse)))
        << "lse of row " << row.at;
    lse_error += (lse - exact.lse) * (lse - exact.lse);
    ++rows;
    const double rest = 1 - std::min(moved_weight + kCut * kSteps, 0.99);
    for (int d = 0; d < s.dim; ++d) {
      const double out = launcher::load(found.out.data(), s.of_out(), row.at * s.dim + d);
      const double of_sums = kCut * kSteps * (sizes[d] + std::abs(exact.out[d]));
      const double bound = (moved[d] + of_sums) / rest;
      distances.out.add(out, exact.out[d]);
      EXPECT_LE(std::abs(out - exact.out[d]),
                bound + unit * (std::abs(exact.out[d]) + bound) + 1e-6)
          << "row " << row.at << " dim " << d << ": " << out << ", exactly " << exact.out[d];
    }
  });
  distances.lse = std::sqrt(lse_error / static_cast<double>(std::max<std::int64_t>(rows, 1)));
  return distances;
}

/// Rounding to nearest with 3 bits behind the leading one has the standard deviation 2^-3 /
/// sqrt(12) of the power of two below: on average over numbers, 0.027 of the number. Where values
/// have the mean 0, a sum of that many weighted values and its error grow alike. So by norm a
/// result is off by 0.027, or less where few keys count; twice that is allowed. The lower end is
/// beyond the error of weights of 16 bits.
constexpr double kMostNorm = 2 * 0.027, kLeastNorm = 0.005;

void check_random(const Serving& given, Dealt dealt = {}, std::int64_t sampled = 12) {
  if (is_left_out(4 * kOnHopper * work_of(given, dealt.ranks))) return;
  const Serving s = in_e4m3(given);
  const std::uint64_t seed = fresh_seed();
  SCOPED_TRACE(trace(s, dealt, seed));
  const ServingProblem problem(s, seed);
  dealt.fp8_products = dealt.on_hopper = true;
  std::vector<ServingResult> results{run_dealt(problem, dealt)};
  if (dealt.ranks == 1) results.push_back(run_option(problem, true));
  for (const ServingResult& found : results) {
    const Distances distances = distances_of(problem, found, sampled);
    EXPECT_GT(distances.out.compared, 0);
    EXPECT_LT(distances.out.norm(), kMostNorm);
    EXPECT_GT(distances.out.norm(), kLeastNorm);
    // Scores of order 1 are off by some 2^-9 (a unit of 2^-13 of sums of 16 to 32, several times),
    // and a lse by an average of that.
    EXPECT_LT(distances.lse, 0x1p-8);
  }
}

TEST(AttendSm90Fp8, RandomInputs) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int dim : {64, 80, 128, 256})
      for (const bool causal : {false, true})
        for (const bool per_head : {false, true}) {
          Serving s{.heads = 4,
                    .kv_heads = 2,
                    .dim = dim,
                    .dtype = dtype,
                    .q_lens = {reduced(300, 100), 40, 130},
                    .kv_lens = {333, reduced(1500, 500), reduced(700, 200)}};
          s.mask.causal = causal;
          s.per_head_scales = per_head;
          s.sinks = causal;
          check_random(s);
        }
}

TEST(AttendSm90Fp8, RandomInputsOnRanks) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256})
    for (const int ranks : {2, 3})
      check_random({.dim = dim,
                    .q_lens = {reduced(300, 60), reduced(100, 30)},
                    .kv_lens = {reduced(900, 300), reduced(3000, 600)}},
                   {.layout = Layout::interleaved, .ranks = ranks});
}

// Over 16,384 keys a sum of weights grows until a tensor core cuts most of an addend away: one sum
// for all of them has the norm 0.33. Sums of at most 192 keys have only the error of rounding the
// weights, as for few keys.
TEST(AttendSm90Fp8, ManyKeysAreAsGoodAsFew) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256})
    check_random({.heads = 1,
                  .kv_heads = 1,
                  .dim = dim,
                  .dtype = DType::fp16,
                  .q_lens = {100},
                  .kv_lens = {reduced(16384, 4096)}},
                 {}, 8);
}

// Values of 1 give or take 1/4, with nearly equal weights: the rounding of weights cancels, and the
// cuts of sums remain. The i-th addend of a sum of n is cut at 2^-13 of the sum or lower, by half
// of that on average: n 2^-15 of a sum of n equal ones, less than 2^-7 for 192.
TEST(AttendSm90Fp8, ManyValuesAlike) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256})
    for (const int kv_len : {reduced(4096, 2048), reduced(16384, 4096)}) {
      const Serving s = in_e4m3({.heads = 1,
                                 .kv_heads = 1,
                                 .dim = dim,
                                 .dtype = DType::fp16,
                                 .q_lens = {100},
                                 .kv_lens = {kv_len},
                                 .scale = 0.125f / std::sqrt(static_cast<float>(dim))});
      if (is_left_out(kOnHopper * work_of(s))) continue;
      const std::uint64_t seed = fresh_seed();
      SCOPED_TRACE(trace(s, {}, seed));
      ServingProblem problem(s, seed);
      std::mt19937_64 random(seed);
      std::normal_distribution<float> normal(1.0f, 0.25f);
      for (std::size_t i = 0; i < problem.v.size(); ++i)
        launcher::store(problem.v.data(), DType::e4m3, static_cast<std::int64_t>(i),
                        normal(random));
      EXPECT_LT(distances_of(problem, run_option(problem, true), 8).out.norm(), 0x1p-7);
    }
}

// Large scores: few keys have all the weight, and origins move from tile to tile. Sums of q and k
// reach 64, of which a tensor core cuts 2^-7 from each addend. In 8 steps of 33, in any direction,
// a score of scale 1 is off by 0.1 or less. Where two keys share the weight, the result is off by a
// quarter of that times their values' difference, beside the rounding of the weights.
TEST(AttendSm90Fp8, GrowingScores) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256})
    for (const float scale : {0.3f, 1.0f}) {
      const Serving s = in_e4m3({.heads = 2,
                                 .kv_heads = 1,
                                 .dim = dim,
                                 .q_lens = {150},
                                 .kv_lens = {1500},
                                 .scale = scale});
      if (is_left_out(kOnHopper * work_of(s))) continue;
      const std::uint64_t seed = fresh_seed();
      SCOPED_TRACE(trace(s, {}, seed));
      const ServingProblem problem(s, seed);
      EXPECT_LT(distances_of(problem, run_option(problem, true), 12).out.norm(), 0.1);
    }
}

// The rounding of weights does not affect what values have in common, because O is divided by the
// sum of the rounded ones. With 4 visible keys whose values are 8 give or take 1, the sum of exact
// weights would leave an error of 0.027 / 2.
TEST(AttendSm90Fp8, RoundingCancelsInWhatValuesShare) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256}) {
    Serving s = in_e4m3({.dim = dim, .q_lens = {300}, .kv_lens = {300}});
    s.mask = {.causal = true, .window = 4};
    if (is_left_out(kOnHopper * work_of(s))) continue;
    const std::uint64_t seed = fresh_seed();
    SCOPED_TRACE(trace(s, {}, seed));
    ServingProblem problem(s, seed);
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < problem.v.size(); ++i)
      set(problem.v, i, 7 + static_cast<float>(random() % 3));
    EXPECT_LT(distances_of(problem, run_option(problem, true), 40).out.norm(), 0.006);
  }
}

// A NaN that a row sees stays NaN, and does not affect the other rows.
TEST(AttendSm90Fp8, NanStaysNan) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256}) {
    const Serving s =
        in_e4m3({.heads = 2, .kv_heads = 1, .dim = dim, .q_lens = {200}, .kv_lens = {200}});
    if (is_left_out(4 * kOnHopper * work_of(s))) continue;
    ServingProblem problem(s, fresh_seed());
    const ServingResult clean = run_option(problem, true);
    constexpr std::size_t kBad = 150;
    std::fill_n(problem.k.begin() + kBad * dim, dim, std::byte{0xff});
    const ServingResult found = run_option(problem, true);
    for (std::size_t at = 0; at < found.lse.size(); ++at) {
      if (at / 2 < kBad)
        EXPECT_EQ(found.lse[at], clean.lse[at]) << at;
      else
        EXPECT_TRUE(std::isnan(found.lse[at])) << at;
    }
  }
}

// The order of scores would reverse, so the result is NaN.
TEST(AttendSm90Fp8, ScalesThatAreNotPositiveGiveNan) {
  LONGSPAN_NEEDS_HOPPER();
  for (const float bad : {0.0f, -1.0f}) {
    ServingProblem problem(in_e4m3({.dim = 64, .q_lens = {100}, .kv_lens = {300}}), fresh_seed());
    problem.k_scale.assign(problem.k_scale.size(), bad);
    for (const float lse : run_option(problem, true).lse) EXPECT_TRUE(std::isnan(lse));
  }
}

TEST(AttendSm90Fp8, BitsRepeat) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256}) {
    const ServingProblem problem(in_e4m3({.dim = dim,
                                          .q_lens = {reduced(3000, 200), reduced(300, 40)},
                                          .kv_lens = {reduced(3000, 300), reduced(2000, 500)}}),
                                 fresh_seed());
    const ServingResult first = run_option(problem, true);
    for (int i = 0; i < reduced(5, 1); ++i) expect_same_bits(first, run_option(problem, true));
  }
}

// ---- what the option does not change
// --------------------------------------------------------------

bool same_bits(const ServingResult& a, const ServingResult& b) {
  return a.out == b.out &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

/// Off: the bits of the same numbers widened beforehand, in the kernel that widens. There are few
/// enough keys for one split, and queries at odd addresses, so that 16 bits take that kernel too.
TEST(AttendSm90Fp8, OffIsTheWideningPath) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int dim : {64, 128, 256}) {
      const Serving s =
          in_e4m3({.dim = dim, .dtype = dtype, .q_lens = {100, 40}, .kv_lens = {400, 333}});
      if (is_left_out(3 * work_of(s))) continue;
      const std::uint64_t seed = fresh_seed();
      SCOPED_TRACE(trace(s, {}, seed));
      ServingProblem problem(s, seed);
      for (auto* scales : {&problem.q_scale, &problem.k_scale, &problem.v_scale})
        scales->assign(scales->size(), 1.0f);
      Serving wide = s;
      wide.q_dtype = wide.kv_dtype = {};
      ServingProblem widened(wide, seed);
      const auto widen = [&](std::vector<std::byte>& to, const std::vector<std::byte>& from) {
        ASSERT_EQ(to.size(), 2 * from.size());
        for (std::size_t i = 0; i < from.size(); ++i) {
          const auto at = static_cast<std::int64_t>(i);
          launcher::store(to.data(), dtype, at,
                          static_cast<float>(launcher::load(from.data(), DType::e4m3, at)));
        }
      };
      widen(widened.q, problem.q);
      widen(widened.k, problem.k);
      widen(widened.v, problem.v);
      const ServingResult off = run_dealt(problem, {});
      expect_same_bits(off, run_dealt(widened, {.odd_queries = true}));
      EXPECT_FALSE(same_bits(off, run_dealt(problem, {.fp8_products = true})));
    }
}

/// On, where it does not apply: pages, short queries, ALiBi, qq_bias.
TEST(AttendSm90Fp8, WhatItDoesNotTakeKeepsItsBits) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int dim : {64, 128, 256}) {
    Serving paged = in_e4m3({.dim = dim, .q_lens = {100, 5}, .kv_lens = {400, 333}});
    paged.page = 16;
    const Serving few = in_e4m3({.dim = dim, .q_lens = {16, 1, 5}, .kv_lens = {400, 3000, 333}});
    Serving alibi = in_e4m3({.dim = dim, .q_lens = {100}, .kv_lens = {400}});
    alibi.alibi = Alibi::query;
    Serving drafts = in_e4m3({.dim = dim, .q_lens = {40}, .kv_lens = {400}});
    drafts.qq_bias = true;
    for (const Serving& s : {paged, few, alibi, drafts}) {
      if (is_left_out(4 * kOnHopper * work_of(s))) continue;
      const std::uint64_t seed = fresh_seed();
      SCOPED_TRACE(trace(s, {}, seed));
      const ServingProblem problem(s, seed);
      expect_same_bits(run_option(problem, false), run_option(problem, true));
    }
  }
}

/// In one batch long queries use it and short ones do not.
TEST(AttendSm90Fp8, ShortQueriesAmongLongOnesKeepTheirBits) {
  LONGSPAN_NEEDS_HOPPER();
  const ServingProblem problem(
      in_e4m3({.dim = 128, .q_lens = {5, 100, 1}, .kv_lens = {300, 400, 500}}), fresh_seed());
  const ServingResult off = run_option(problem, false), on = run_option(problem, true);
  const std::size_t row = std::size_t{2} * 128 * static_cast<std::size_t>(problem.shape.heads);
  const auto same = [&](std::size_t from, std::size_t to) {
    return std::equal(off.out.begin() + from * row, off.out.begin() + to * row,
                      on.out.begin() + from * row);
  };
  EXPECT_TRUE(same(0, 5));
  EXPECT_FALSE(same(5, 105));
  EXPECT_TRUE(same(105, 106));
}

}  // namespace
}  // namespace longspan::tests

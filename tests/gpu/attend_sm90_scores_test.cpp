// The transformations of scores in the Hopper kernel, against float64: large scales, softcap in
// each of its forms, and ALiBi. Each test draws fresh inputs.
#include <cmath>
#include <optional>
#include <vector>

#include "tests/gpu/sm90_run.hpp"

namespace longspan::test {
namespace {

const DType kTypes[] = {DType::bf16, DType::fp16};

/// Adds about `by` to every scaled product: one element of each query and key is a constant.
void shift_products(const Case& c, Data& data, float by) {
  const float root = std::sqrt(std::abs(by) / c.scale_used());
  const auto set = [&](std::vector<std::byte>& rows, float value) {
    const auto count = static_cast<std::int64_t>(rows.size() / size_of(c.dtype));
    for (std::int64_t at = 0; at < count; at += c.dim)
      launcher::store(rows.data(), c.dtype, at, value);
  };
  set(data.q, root);
  for (auto& k : data.k) set(k, std::copysign(root, by));
}

/// Query rows of three sizes, in turn.
void mix_rows(const Case& c, Data& data) {
  const std::int64_t row = std::int64_t{c.heads} * c.dim;
  for (std::int64_t at = 0; at < c.tokens() * row; ++at) {
    const double value = launcher::load(data.q.data(), c.dtype, at);
    launcher::store(data.q.data(), c.dtype, at,
                    static_cast<float>(std::ldexp(value, -2 * static_cast<int>(at / row % 3))));
  }
}

/// The largest magnitude of a scaled product of the one sequence.
double largest_product(const Case& c, const Data& data) {
  double largest = 0;
  const int group = c.heads / c.kv_heads;
  for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
    const launcher::RowMajor keys = matrix_of(c, data.k[0], c.dim, c.kv_lens[0], kv_head);
    for (std::int64_t t = 0; t < c.tokens(); ++t)
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        Eigen::VectorXd q(c.dim);
        for (int d = 0; d < c.dim; ++d)
          q[d] = launcher::load(data.q.data(), c.dtype, (t * c.heads + head) * c.dim + d);
        largest = std::max(largest, (keys * q).cwiseAbs().maxCoeff() * c.scale_used());
      }
  }
  return largest;
}

// Scores large enough that rows' origins move again and again.
TEST(AttendSm90Scores, GrowingScores) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (float scale : {0.3f, 2.0f, 20.0f})
      check({.dtype = dtype,
             .heads = 2,
             .kv_heads = 1,
             .dim = 64,
             .q_lens = {150},
             .kv_lens = {1500},
             .scale = scale,
             .seed = fresh_seed()},
            11);
}

// Far from the cap, near it on both sides of the kernel's bound, and far beyond; within a tile too.
TEST(AttendSm90Scores, Softcap) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {64, 72, 96, 128, 192, 256})
      for (float softcap : {0.001f, 0.5f, 2.0f, 5.0f, 50.0f, 3e4f, 1e9f})
        check({.dtype = dtype,
               .heads = 4,
               .kv_heads = 2,
               .dim = dim,
               .q_lens = {130},
               .kv_lens = {433},
               .mask = {.causal = softcap != 2.0f, .window = softcap == 5.0f ? 150 : 0},
               .softcap = softcap,
               .sinks = dim % 64 == 0,
               .seed = fresh_seed()},
              7);
}

// The lse of a row with few keys shows the error of a cap: there is nothing to average.
TEST(AttendSm90Scores, SoftcapOfSmallScores) {
  LONGSPAN_NEEDS_HOPPER();
  for (float scale : {1e-5f, 0.01f, 0.1f})
    for (float softcap : {1.0f, 50.0f, 1000.0f})
      check({.dtype = DType::fp16,
             .heads = 2,
             .kv_heads = 1,
             .dim = 64,
             .q_lens = {150},
             .kv_lens = {150},
             .mask = {.causal = true, .window = 2},
             .softcap = softcap,
             .scale = scale,
             .seed = fresh_seed()});
}

// Each form of the cap on both sides of its limit: 0.1875, 0.6 and 2.5 of the cap. Scores are so
// large that a row's largest has the weight, where a form past its limit is furthest off. Products
// on both sides of 0, all above and all below; rows of the warp alike, and of three sizes.
TEST(AttendSm90Scores, FormsOfTheCap) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {64, 128, 256})
      for (double reach : {0.1, 0.17, 0.2, 0.3, 0.55, 0.65, 1.0, 2.3, 2.7, 5.0, 30.0})
        for (float shift : {0.0f, -60.0f, 60.0f})
          for (const std::optional<Alibi> alibi :
               {std::optional<Alibi>{}, std::optional{Alibi::query}}) {
            const bool mixed = shift == 0.0f;
            Case c{.dtype = dtype,
                   .heads = 2,
                   .kv_heads = 1,
                   .dim = dim,
                   .q_lens = {201},
                   .kv_lens = {650},
                   .mask = {.causal = reach != 0.3},
                   .softcap = 1.0f,
                   .alibi = alibi,
                   .scale = 8.0f / static_cast<float>(dim),
                   .seed = fresh_seed()};
            if (is_left_out(2 * kOnHopper * work_of(c))) continue;
            Data data(c);
            if (shift != 0.0f) shift_products(c, data, shift);
            if (mixed && reach < 1.0) mix_rows(c, data);
            c.softcap = static_cast<float>(largest_product(c, data) / reach);
            check(c, data, 7);
          }
}

// Keys of the warp's other rows, or of rows that do not exist, do not change how a row's own scores
// are capped: items that end inside a warp, followed by large rows of another sequence.
TEST(AttendSm90Scores, FormsOfTheCapBesideOtherRows) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128})
    for (int rows : {1, 5, 8, 9, 70, 77}) {
      Case c{.heads = 1,
             .kv_heads = 1,
             .dim = dim,
             .q_lens = {rows, 90},
             .kv_lens = {400, 400},
             .softcap = 40.0f,
             .seed = fresh_seed()};
      if (is_left_out(4 * kOnHopper * work_of(c))) continue;
      Data data(c);
      const Result small = Sm90Run(c, data).finish();
      const auto from = static_cast<std::int64_t>(rows) * dim;
      for (std::int64_t at = from; at < c.tokens() * dim; ++at)
        launcher::store(data.q.data(), c.dtype, at,
                        static_cast<float>(64 * launcher::load(data.q.data(), c.dtype, at)));
      const Result large = Sm90Run(c, data).finish();
      for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row)
        EXPECT_EQ(small.lse[row], large.lse[row]) << c << " row " << row;
      check(c, data, 3);
    }
}

TEST(AttendSm90Scores, Alibi) {
  LONGSPAN_NEEDS_HOPPER();
  const Mask masks[] = {{}, {.causal = true}, {.causal = true, .window = 100}, {.right = 40}};
  for (const DType dtype : kTypes)
    for (int dim : {64, 80, 96, 128, 192, 256})
      for (const Alibi alibi : {Alibi::context, Alibi::query})
        for (const Mask& mask : masks)
          for (float softcap : {0.0f, 5.0f})
            check({.dtype = dtype,
                   .heads = 6,
                   .kv_heads = 2,
                   .dim = dim,
                   .q_lens = {200, 1, 0, 300, 17, 40},
                   .kv_lens = {200, 500, 30, 64, 900, 0},
                   .mask = mask,
                   .softcap = softcap,
                   .alibi = alibi,
                   .sinks = softcap == 0,
                   .seed = fresh_seed()},
                  23);
}

// Distances so large that only a few keys have weight, from a first query far behind the first key.
TEST(AttendSm90Scores, AlibiOfManyKeys) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Alibi alibi : {Alibi::context, Alibi::query})
    for (bool causal : {false, true})
      check({.heads = 4,
             .kv_heads = 1,
             .dim = 128,
             .q_lens = {reduced(300, 150)},
             .kv_lens = {reduced(9000, 1000)},
             .mask = {.causal = causal},
             .alibi = alibi,
             .seed = fresh_seed()},
            41);
}

// Tiles far from the rows on both sides, and scores of the opposite sign to their bias.
TEST(AttendSm90Scores, AlibiFarFromTheRows) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {64, 80, 128, 256})
      for (const Alibi alibi : {Alibi::context, Alibi::query})
        for (bool causal : {false, true})
          for (float shift : {0.0f, -40.0f, 40.0f}) {
            if (shift != 0.0f && alibi == Alibi::context) continue;  // lse would cancel to nearly 0
            const Case c{.dtype = dtype,
                         .heads = 8,
                         .kv_heads = 1,
                         .dim = dim,
                         .q_lens = {reduced(1300, 130)},
                         .kv_lens = {reduced(1500, 500)},
                         .mask = {.causal = causal},
                         .softcap = shift == 0.0f && !causal ? 30.0f : 0.0f,
                         .alibi = alibi,
                         .seed = fresh_seed()};
            if (is_left_out(2 * kOnHopper * work_of(c))) continue;
            Data data(c);
            if (shift != 0.0f) shift_products(c, data, shift);
            check(c, data, 91);
          }
}

// Shards so small that a rank's first run of positions is one key, and its other is far from it.
TEST(AttendSm90Scores, AlibiOnShardsOfFewKeys) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128, 208})
    for (const Alibi alibi : {Alibi::context, Alibi::query})
      for (const Layout layout : {Layout::zigzag, Layout::striped, Layout::interleaved})
        for (int ranks : {2, 4})
          for (bool causal : {false, true})
            check({.heads = 3,
                   .kv_heads = 1,
                   .dim = dim,
                   .q_lens = {20, 30, 98, 40, 25},
                   .kv_lens = {10, 5, 98, 17, 1},
                   .mask = {.causal = causal},
                   .alibi = alibi,
                   .layout = layout,
                   .ranks = ranks,
                   .seed = fresh_seed()},
                  5);
}

}  // namespace
}  // namespace longspan::test

// The Hopper kernel by itself: both of its epilogues against float64, at the edges of its tiles,
// with NaN in all memory beside the keys, and the same bits from run to run. Each test draws fresh
// inputs. attend_sm90_scores_test tests the transformations of scores.
#include "tests/gpu/serving_ranks.hpp"
#include "tests/gpu/sm90_run.hpp"
#include "tests/support/grids.hpp"

namespace longspan::test {
namespace {

const DType kTypes[] = {DType::bf16, DType::fp16};

TEST(AttendSm90, EveryHeadDim) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {48, 64, 72, 80, 88, 96, 120, 128, 136, 192, 200, 256})
      check({.dtype = dtype,
             .heads = 4,
             .kv_heads = 2,
             .dim = dim,
             .q_lens = {130},
             .kv_lens = {333},
             .mask = {.causal = true},
             .seed = fresh_seed()},
            3);
}

/// Of keys and values. The instances for 192/128 and 128/64 also serve narrower ones; the others
/// have values as wide as keys, and either may be narrower.
struct Widths {
  int keys, values;
};
constexpr Widths kWidths[] = {{192, 128}, {192, 64}, {184, 120}, {136, 8},   {160, 96},
                              {96, 64},   {128, 64}, {128, 88},  {256, 128}, {64, 32},
                              {64, 128},  {48, 80},  {80, 192},  {72, 256}};

TEST(AttendSm90, ValuesOfAnotherWidth) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (const Widths& widths : kWidths) {
      Case c{.dtype = dtype,
             .heads = 4,
             .kv_heads = 2,
             .dim = widths.keys,
             .value_dim = widths.values,
             .q_lens = {200},
             .kv_lens = {333},
             .mask = {.causal = true},
             .sinks = true,
             .seed = fresh_seed()};
      check(c, 3);
      c.softcap = 3;
      check(c, 5);
      c.alibi = Alibi::query;
      check(c, 5);
    }
}

// Rows come in tiles of 128 and 192, keys in tiles of 80, 112, 128 and 160.
TEST(AttendSm90, EdgesOfTiles) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Widths& widths : {Widths{64, 64}, Widths{80, 80}, Widths{96, 64}, Widths{128, 128},
                               Widths{192, 128}, Widths{192, 192}, Widths{256, 256}})
    for (int q_len : {1, 64, 127, 128, 129, 192, 193})
      for (int kv_len : {1, 79, 80, 112, 127, 128, 129, 160, 161, 321})
        for (bool causal : {false, true})
          check({.heads = 1,
                 .kv_heads = 1,
                 .dim = widths.keys,
                 .value_dim = widths.values,
                 .q_lens = {q_len},
                 .kv_lens = {kv_len},
                 .mask = {.causal = causal},
                 .sinks = kv_len % 2 == 0,
                 .seed = fresh_seed()},
                5);
}

TEST(AttendSm90, EveryMaskInUnevenBatches) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Widths& widths :
       {Widths{64, 64}, Widths{80, 80}, Widths{96, 96}, Widths{96, 64}, Widths{128, 128},
        Widths{192, 128}, Widths{192, 192}, Widths{256, 256}})
    for (const Mask& mask : kMasks)
      check({.heads = 3,
             .kv_heads = 1,
             .dim = widths.keys,
             .value_dim = widths.values,
             .q_lens = {200, 1, 0, 300, 17, 40},
             .kv_lens = {200, 500, 30, 64, 900, 0},
             .mask = mask,
             .sinks = true,
             .seed = fresh_seed()},
            7);
}

TEST(AttendSm90, CausalFlags) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128})
    for (const std::optional<Alibi> alibi : {std::optional<Alibi>{}, std::optional{Alibi::query}})
      check({.heads = 2,
             .kv_heads = 1,
             .dim = dim,
             .q_lens = {200, 140, 0, 1, 70},
             .kv_lens = {300, 140, 30, 64, 700},
             .causal = {1, 0, 1, 0, 0},
             .alibi = alibi,
             .seed = fresh_seed()},
            9);
}

// A NaN that a row sees stays NaN, and does not affect the other rows.
TEST(AttendSm90, NanStaysNan) {
  LONGSPAN_NEEDS_HOPPER();
  for (float softcap : {0.0f, 0.5f, 50.0f})
    for (const std::optional<Alibi> alibi : {std::optional<Alibi>{}, std::optional{Alibi::query}})
      expect_nan_stays({.heads = 2,
                        .kv_heads = 1,
                        .dim = 64,
                        .q_lens = {200},
                        .kv_lens = {200},
                        .mask = {.causal = true},
                        .softcap = softcap,
                        .alibi = alibi,
                        .seed = fresh_seed()});
}

// The effects of a rank's shard, a batch and documents; NaN in all places that no row may see.
TEST(AttendSm90, Shards) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Cut& cut :
       {Cut{Layout::contiguous}, Cut{Layout::ranges}, Cut{Layout::zigzag}, Cut{Layout::striped},
        Cut{Layout::interleaved, 1}, Cut{Layout::interleaved, 16}, Cut{Layout::interleaved, 128},
        Cut{Layout::interleaved, 1000}})
    for (const int ranks : {1, 2, 3})
      for (const bool causal : {false, true})
        for (const std::optional<Alibi> alibi :
             {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}}) {
          tests::Serving s{.heads = 6,
                           .dim = ranks == 2   ? 256
                                  : ranks == 3 ? 192
                                               : 128,
                           .value_dim = ranks == 2 ? 256 : 128,
                           .dtype = DType::bf16,
                           .q_lens = {reduced(300, 60), 40, reduced(170, 130), 20},
                           .kv_lens = {reduced(3000, 600), 130, reduced(170, 130), 20},
                           .page = 0};
          s.mask = {.causal = causal, .window = ranks == 3 ? 700 : 0};
          s.alibi = alibi;
          s.softcap = ranks == 2 ? 20.0f : 0.0f;
          s.sinks = true;
          tests::check_dealt(
              s, {.layout = cut.layout, .ranks = ranks, .block = cut.block, .on_hopper = true});
        }
}

TEST(AttendSm90, WhatEachSequenceHides) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {1, 2})
    for (const int what : {0, 1, 2})
      for (const bool causal : {false, true}) {
        tests::Serving s{.dtype = DType::bf16,
                         .q_lens = {150, 40, 300, 70},
                         .kv_lens = {700, 130, 300, 513},
                         .page = 0};
        s.mask = {.causal = causal, .window = what == 1 ? 200 : 0};
        if (what == 2) s.alibi = Alibi::query;
        tests::check_dealt(tests::hidden_in_a_batch(s, what), {.ranks = ranks, .on_hopper = true});
      }
}

TEST(AttendSm90, DocumentsAndLeftOutDecodes) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {1, 2})
    for (const std::optional<Alibi> alibi :
         {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}})
      for (const bool causal : {false, true}) {
        for (const std::vector<std::int64_t>& documents :
             {std::vector<std::int64_t>{0, 300, 301, 620, 700},
              std::vector<std::int64_t>{40, 300, 600, 690}})
          for (const int q_len : {150, 700}) {
            tests::Serving s{.dtype = DType::bf16, .q_lens = {q_len}, .kv_lens = {700}, .page = 0};
            s.mask.causal = causal;
            s.alibi = alibi;
            s.documents = documents;
            tests::check_dealt(s, {.ranks = ranks, .on_hopper = true});
          }
        tests::Serving s{.dtype = DType::bf16,
                         .q_lens = {150, 1, 40, 5, 1},
                         .kv_lens = {700, 130, 333, 20, 41},
                         .causal = {1, 0, 0, 1, 1},
                         .page = 0};
        s.alibi = alibi;
        s.skip_decode = causal;
        tests::check_dealt(s, {.ranks = ranks, .on_hopper = true});
      }
}

TEST(AttendSm90, ChunksRangesAndPrefixes) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {1, 2})
    for (const std::optional<Alibi> alibi : {std::optional<Alibi>{}, std::optional{Alibi::query}})
      for (const Mask& mask :
           {Mask{.causal = true, .chunk = 200}, Mask{.chunk = 100, .lookback = 1},
            Mask{.causal = true, .window = 130, .prefix = 180},
            Mask{.causal = true, .window = 150, .clamp_ranges = true}, Mask{.causal = true}}) {
        tests::Serving s{.dtype = DType::bf16,
                         .q_lens = {150, 40, 300},
                         .kv_lens = {700, 333, 300},
                         .mask = mask,
                         .page = 0};
        s.alibi = alibi;
        if (mask.prefix > 0) s.prefix = {180, 20, 0};
        if (mask.prefix == 0)
          s.bidirectional = {500, 650, 660, 700, 300, 310, 310, 333, 0, 140, 290, 300};
        tests::check_dealt(s, {.ranks = ranks, .on_hopper = true});
      }
}

// Pages are copied together first; then the sequence's context and its new rows are one.
TEST(AttendSm90, ChunkedPrefill) {
  LONGSPAN_NEEDS_HOPPER();
  const ServingOps kernels(Device::cuda);
  for (const DType dtype : kTypes)
    for (const std::optional<Alibi> alibi :
         {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}})
      for (const float softcap : {0.0f, 10.0f})
        for (const bool skip : {false, true}) {
          tests::Serving s{.dim = 96,
                           .dtype = dtype,
                           .q_lens = {65, 1, reduced(330, 133), 4, 0},
                           .kv_lens = {reduced(900, 200), 600, reduced(330, 133), 90, 40},
                           .softcap = softcap,
                           .alibi = alibi,
                           .sinks = true,
                           .skip_decode = skip,
                           .x_packed = skip,
                           .separate_new = true};
          if (softcap != 0) s.causal = {1, 1, 0, 1, 1};
          if (is_left_out(kOnHopper * work_of(s))) continue;
          const unsigned seed = fresh_seed();
          SCOPED_TRACE(tests::describe(s) + " seed " + std::to_string(seed));
          const tests::ServingProblem problem(s, seed);
          tests::expect_right(problem, tests::run_context(kernels, Device::cuda, problem),
                              problem.tolerance(), 12);
        }
}

TEST(AttendSm90, SameBitsFromRunToRun) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128, 256}) {
    const Case c{.heads = 8,
                 .kv_heads = 2,
                 .dim = dim,
                 .q_lens = {reduced(2000, 200), reduced(700, 70)},
                 .kv_lens = {reduced(3000, 300), reduced(700, 70)},
                 .mask = {.causal = true},
                 .seed = fresh_seed()};
    const Data data(c);
    Sm90Run run(c, data);
    const Result first = run.finish();
    run.merge();
    const std::vector<std::byte> state = run.state();
    for (int again = 0; again < reduced(5, 1); ++again) {
      const Result next = run.finish();
      EXPECT_EQ(next.out, first.out) << c;
      EXPECT_EQ(next.lse, first.lse) << c;
      run.merge();
      EXPECT_EQ(run.state(), state) << c;
    }
  }
}

// The length of a sequence chooses the kernel of its rows, so a launch skips the others.
TEST(AttendSm90, ShortSequencesAreNotTouched) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.dim = 64, .q_lens = {3, 50, 16}, .kv_lens = {90, 90, 90}, .seed = fresh_seed()};
  const Data data(c);
  Sm90Run run(c, data);
  kernels::AttendParams p = run.params();
  run.merge();
  OnGpu<std::byte> state(run.state().size());
  p.state.data = state.data();
  kernels::sm90::attend(p, {}, 17, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::byte> all = run.state(), some = state.values(all.size());
  for (std::int64_t row = 0; row < p.state.rows; ++row) {
    const std::int64_t token = row / c.heads;
    const bool taken = token >= 3 && token < 53;
    for (std::int64_t i = 0; i < 8; ++i)
      EXPECT_EQ(some[static_cast<std::size_t>(row * 8 + i)],
                taken ? all[static_cast<std::size_t>(row * 8 + i)] : std::byte{0xff});
  }
}

TEST(AttendSm90, AcceptsByName) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.dim = 64, .q_lens = {20}, .kv_lens = {20}};
  const Data data(c);
  const kernels::AttendParams good = Sm90Run(c, data).params();
  EXPECT_TRUE(is_on_hopper(good));
  const auto refuses = [&](auto change) {
    kernels::AttendParams p = good;
    change(p);
    return !is_on_hopper(p);
  };
  EXPECT_TRUE(refuses([](auto& p) { p.dtype = p.q_dtype = p.kv_dtype = DType::fp32; }));
  EXPECT_TRUE(refuses([](auto& p) { p.head_dim = p.value_dim = 40; }));
  EXPECT_TRUE(refuses([](auto& p) { p.value_dim = 60; }));
  EXPECT_FALSE(refuses([](auto& p) { p.value_dim = 40; }));
  EXPECT_FALSE(refuses([](auto& p) { p.head_dim = 192; }));
  EXPECT_FALSE(refuses([](auto& p) { p.score.softcap = 30; }));
  EXPECT_FALSE(refuses([](auto& p) { p.bias.slopes = Floats(p.q.data, DType::fp32); }));
  EXPECT_TRUE(refuses([](auto& p) { p.bias = {Floats(p.q.data, DType::fp32), Alibi::sqrt}; }));
  EXPECT_TRUE(refuses([](auto& p) { p.score.scale = -1; }));
  EXPECT_TRUE(refuses([](auto& p) { p.shard.layout = Layout::listed; }));
  EXPECT_TRUE(refuses([](auto& p) { p.pages.table = p.batch.kv_len; }));
  EXPECT_TRUE(refuses([](auto& p) { p.kv_dtype = DType::e4m3; }));
  EXPECT_TRUE(refuses([](auto& p) { p.q_dtype = DType::e5m2; }));
  EXPECT_TRUE(refuses([](auto& p) { p.k.dim_stride = 16; }));
  EXPECT_TRUE(refuses([](auto& p) { p.v_scale.data = static_cast<float*>(p.q.data); }));
  EXPECT_TRUE(refuses([](auto& p) { p.bias.qq.values = Floats(p.q.data, DType::fp32); }));
  EXPECT_FALSE(refuses([](auto& p) { p.documents.start = p.batch.key_start; }));
  EXPECT_FALSE(refuses([](auto& p) { p.batch.causal = static_cast<std::uint8_t*>(p.q.data); }));
  EXPECT_FALSE(refuses([](auto& p) { p.batch.skip_decode = true; }));
  EXPECT_FALSE(refuses([](auto& p) { p.shard.layout = Layout::ranges; }));
  EXPECT_TRUE(refuses([](auto& p) { p.parts.count = 4; }));
  EXPECT_TRUE(refuses([](auto& p) { p.q.row_stride += 1; }));
}

}  // namespace
}  // namespace longspan::test

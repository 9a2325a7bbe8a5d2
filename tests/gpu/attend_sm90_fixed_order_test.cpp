// The Hopper kernel in the fixed order: against float64 at the edges of its tiles, with NaN in all
// memory beside the keys. The bits of a row must be the same on any ranks, in any layout, and
// beside any other rows. Each test draws fresh inputs.
#include "tests/gpu/serving_ranks.hpp"
#include "tests/gpu/sm90_run.hpp"
#include "tests/support/grids.hpp"

namespace longspan::test {
namespace {

const DType kTypes[] = {DType::bf16, DType::fp16};

/// Both epilogues against float64, and their bits against each other: a result must equal that of a
/// state and a merge.
void check_in_order(Case c, int stride = 1) {
  c.invariant = true;
  if (is_left_out(2 * kOnHopper * work_of(c))) return;
  const Data data(c);
  Sm90Run run(c, data);
  ASSERT_TRUE(is_on_hopper(run.params())) << c;
  const Result finished = run.finish(), merged = run.merge();
  expect_within_rounding(c, data, finished, stride);
  SCOPED_TRACE(::testing::Message() << c);
  expect_same_bits(finished, merged);
}

TEST(AttendSm90FixedOrder, EveryHeadDim) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {48, 64, 72, 80, 96, 120, 128})
      check_in_order({.dtype = dtype,
                      .heads = 4,
                      .kv_heads = 2,
                      .dim = dim,
                      .q_lens = {130},
                      .kv_lens = {700},
                      .mask = {.causal = true},
                      .seed = fresh_seed()},
                     3);
}

TEST(AttendSm90FixedOrder, EdgesOfTilesAndSegments) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128})
    for (int q_len : {1, 64, 127, 128, 129, 257})
      for (int kv_len : {1, 79, 127, 128, 129, 255, 256, 257, 640, 1111})
        for (bool causal : {false, true})
          check_in_order({.heads = 1,
                          .kv_heads = 1,
                          .dim = dim,
                          .q_lens = {q_len},
                          .kv_lens = {kv_len},
                          .mask = {.causal = causal},
                          .sinks = kv_len % 2 == 0,
                          .seed = fresh_seed()},
                         5);
}

TEST(AttendSm90FixedOrder, EveryMaskInUnevenBatches) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 96, 128})
    for (const Mask& mask : kMasks)
      check_in_order({.heads = 3,
                      .kv_heads = 1,
                      .dim = dim,
                      .q_lens = {200, 1, 0, 300, 17, 40},
                      .kv_lens = {200, 500, 30, 64, 900, 0},
                      .mask = mask,
                      .sinks = true,
                      .seed = fresh_seed()},
                     7);
}

// States wait held, near and far, in trees of many shapes.
TEST(AttendSm90FixedOrder, ManySegments) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128})
    for (int kv_len : {128 * 63, 128 * 64 + 1, 128 * 193, 128 * 300 + 77, 70000})
      check_in_order({.heads = 1,
                      .kv_heads = 1,
                      .dim = dim,
                      .q_lens = {reduced(300, 20)},
                      .kv_lens = {reduced(kv_len, kv_len / 8)},
                      .mask = {.causal = true},
                      .seed = fresh_seed()},
                     31);
}

// ---- on any ranks -------------------------------------------------------------------

/// The bits of one rank, out of one kernel and through a state, on up to 64 ranks.
void expect_same_bits_on_ranks(Case c) {
  c.invariant = true;
  if (is_left_out(6 * kOnHopper * work_of(c))) return;
  const Data data(c);
  c.ranks = 1;
  GpuRun alone(c, data);
  ASSERT_TRUE(is_on_hopper(alone.params(0))) << c;
  const Result one = alone.run();
  expect_within_rounding(c, data, one, 7);
  alone.poison();
  EXPECT_TRUE(alone.queue_finished()) << c;
  expect_same_bits(one, alone.result());
  for (int ranks : {2, 4, 8, 64}) {
    c.ranks = ranks;
    SCOPED_TRACE(::testing::Message() << c);
    expect_same_bits(one, GpuRun(c, data).run());
  }
}

TEST(AttendSm90FixedOrder, BitsOfAnyRanks) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (const Cut& cut : {Cut{Layout::contiguous}, Cut{Layout::interleaved, 128},
                           Cut{Layout::interleaved, 256}, Cut{Layout::interleaved, 640}})
      for (int kv_len : {1, 127, 4097, 8192, 20000, 131073})
        for (std::int64_t window : {0, 3000})
          expect_same_bits_on_ranks({.dtype = dtype,
                                     .heads = 2,
                                     .kv_heads = 1,
                                     .dim = kv_len % 2 == 0 ? 64 : 128,
                                     .q_lens = {70},
                                     .kv_lens = {reduced(kv_len, std::min(kv_len, 3000))},
                                     .mask = {.causal = true, .window = window},
                                     .layout = cut.layout,
                                     .block = cut.block,
                                     .seed = fresh_seed()});
}

TEST(AttendSm90FixedOrder, BitsOfAnyRanksOfBatches) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Cut& cut : {Cut{Layout::contiguous}, Cut{Layout::interleaved, 128}})
    for (const bool causal : {false, true})
      expect_same_bits_on_ranks(
          {.heads = 4,
           .kv_heads = 2,
           .dim = 128,
           .q_lens = {reduced(150, 30), 17, reduced(300, 140), 40},
           .kv_lens = {reduced(5000, 600), 17, reduced(300, 140), reduced(2000, 300)},
           .mask = {.causal = causal},
           .layout = cut.layout,
           .block = cut.block,
           .sinks = true,
           .seed = fresh_seed()});
}

// ---- in any layout of the rows
// ---------------------------------------------------------------------

TEST(AttendSm90FixedOrder, BitsOfAnyStrides) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 80, 128}) {
    Case c{.heads = 4,
           .kv_heads = 2,
           .dim = dim,
           .q_lens = {140, 30},
           .kv_lens = {reduced(1500, 500), 333},
           .mask = {.causal = true},
           .ranks = 2,
           .invariant = true,
           .seed = fresh_seed()};
    if (is_left_out(4 * kOnHopper * work_of(c))) continue;
    const Data data(c);
    const Result plain = GpuRun(c, data).run();
    for (const auto& [q_gap, kv_gap] : {std::pair{8, 0}, {0, 8}, {1, 0}, {0, 1}, {3, 5}}) {
      c.q_gap = q_gap;
      c.kv_gap = kv_gap;
      SCOPED_TRACE(::testing::Message() << c);
      GpuRun run(c, data);
      ASSERT_TRUE(is_on_hopper(run.params(0)));
      expect_same_bits(plain, run.run());
    }
  }
}

TEST(AttendSm90FixedOrder, BitsOfPages) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {1, 2})
    for (int dim : {64, 128}) {
      tests::Serving s{.heads = 4,
                       .dim = dim,
                       .dtype = DType::bf16,
                       .q_lens = {reduced(150, 60), 1, 33},
                       .kv_lens = {reduced(900, 300), 70, 400},
                       .page = 0};
      s.mask.window = dim == 64 ? 0 : 200;
      if (is_left_out(6 * kOnHopper * work_of(s, ranks))) continue;
      const std::uint64_t seed = fresh_seed();
      const tests::Dealt dealt{
          .layout = Layout::interleaved, .ranks = ranks, .invariant = true, .on_hopper = true};
      const tests::ServingResult plain =
          tests::check_dealt(tests::ServingProblem(s, seed), dealt, seed, 9);
      for (const bool x_packed : {false, true})
        for (const int page : {1, 16, 100, 128}) {
          if (x_packed && page % 8 != 0) continue;
          s.page = page;
          s.x_packed = x_packed;
          SCOPED_TRACE(page);
          tests::expect_same_bits(
              plain, tests::check_dealt(tests::ServingProblem(s, seed), dealt, seed, 9));
        }
    }
}

// ---- beside any other rows -------------------------------------------------------------

// Shares of the query rows put other rows beside a row.
TEST(AttendSm90FixedOrder, BitsOfShares) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128}) {
    tests::Serving s{.heads = 2,
                     .dim = dim,
                     .dtype = DType::fp16,
                     .q_lens = {reduced(500, 150)},
                     .kv_lens = {reduced(1100, 400)},
                     .page = 0};
    if (is_left_out(6 * kOnHopper * work_of(s, 1))) continue;
    const std::uint64_t seed = fresh_seed();
    const tests::ServingProblem problem(s, seed);
    tests::Dealt dealt{.invariant = true, .on_hopper = true};
    const tests::ServingResult whole = tests::check_dealt(problem, dealt, seed, 9);
    for (const tests::QueryCut& cut :
         {tests::QueryCut{Layout::zigzag, 2}, tests::QueryCut{Layout::striped, 3},
          tests::QueryCut{Layout::interleaved, 2, 16}}) {
      dealt.queries = cut;
      SCOPED_TRACE(tests::trace(s, dealt, seed));
      tests::expect_same_bits(whole, tests::run_dealt(problem, dealt));
    }
  }
}

// Chunks of a prefill into an interleaved cache have the bits of the whole prefill, for any widths:
// a row's tree does not change when keys follow.
TEST(AttendSm90FixedOrder, BitsOfChunks) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128}) {
    const int kv_len = reduced(3000, 420);
    Case c{.heads = 2,
           .kv_heads = 1,
           .dim = dim,
           .q_lens = {kv_len},
           .kv_lens = {kv_len},
           .mask = {.causal = true},
           .layout = Layout::interleaved,
           .invariant = true,
           .seed = fresh_seed()};
    if (is_left_out(3 * kOnHopper * work_of(c))) continue;
    const Data data(c);
    const Result whole = GpuRun(c, data).run();
    const std::size_t q_row = static_cast<std::size_t>(c.heads * dim) * 2;
    const std::size_t kv_row = static_cast<std::size_t>(c.kv_heads * dim) * 2;
    for (int begin = 0, end; begin < kv_len; begin = end) {
      end = std::min(kv_len, begin + 17 + (begin * 7 + 100) % 300);
      if (end - begin <= 16) break;  // other kernels take short queries
      Case chunk = c;
      chunk.q_lens = {end - begin};
      chunk.kv_lens = {end};
      Data own(chunk);
      own.q.assign(data.q.begin() + static_cast<std::ptrdiff_t>(begin * q_row),
                   data.q.begin() + static_cast<std::ptrdiff_t>(end * q_row));
      own.k[0].assign(data.k[0].begin(),
                      data.k[0].begin() + static_cast<std::ptrdiff_t>(end * kv_row));
      own.v[0].assign(data.v[0].begin(),
                      data.v[0].begin() + static_cast<std::ptrdiff_t>(end * kv_row));
      SCOPED_TRACE(::testing::Message() << chunk << " from row " << begin);
      const auto out = whole.out.begin() + static_cast<std::ptrdiff_t>(begin * q_row);
      const auto lse = whole.lse.begin() + begin * c.heads;
      expect_same_bits({{out, out + static_cast<std::ptrdiff_t>((end - begin) * q_row)},
                        {lse, lse + (end - begin) * c.heads}},
                       GpuRun(chunk, own).run());
    }
  }
}

// A NaN that a row sees stays NaN, and does not affect rows of other tiles.
TEST(AttendSm90FixedOrder, NanStaysNan) {
  LONGSPAN_NEEDS_HOPPER();
  expect_nan_stays({.heads = 2,
                    .kv_heads = 1,
                    .dim = 128,
                    .q_lens = {400},
                    .kv_lens = {400},
                    .mask = {.causal = true},
                    .invariant = true,
                    .seed = fresh_seed()});
}

TEST(AttendSm90FixedOrder, DocumentsAndCausalFlags) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {1, 2})
    for (const bool causal : {false, true}) {
      for (const std::vector<std::int64_t>& documents :
           {std::vector<std::int64_t>{0, 300, 301, 620, 700},
            std::vector<std::int64_t>{40, 300, 600, 690}}) {
        tests::Serving s{.dtype = DType::bf16, .q_lens = {150}, .kv_lens = {700}, .page = 0};
        s.mask.causal = causal;
        s.documents = documents;
        tests::check_dealt(s, {.ranks = ranks, .invariant = true, .on_hopper = true});
      }
      tests::Serving s{.dim = 128,
                       .dtype = DType::bf16,
                       .q_lens = {150, 1, 40, 5, 1},
                       .kv_lens = {700, 130, 333, 20, 41},
                       .causal = {1, 0, 0, 1, 1},
                       .page = 0};
      s.skip_decode = causal;
      tests::check_dealt(s, {.ranks = ranks, .invariant = true, .on_hopper = true});
    }
}

// Layouts whose cuts are not the tree's are exact, too.
TEST(AttendSm90FixedOrder, OtherLayouts) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Cut& cut : {Cut{Layout::ranges}, Cut{Layout::zigzag}, Cut{Layout::striped},
                         Cut{Layout::interleaved, 16}, Cut{Layout::contiguous}})
    for (const int ranks : {2, 3})
      tests::check_dealt({.heads = 4,
                          .dim = 128,
                          .dtype = DType::bf16,
                          .q_lens = {reduced(300, 60), 40, reduced(170, 130), 20},
                          .kv_lens = {reduced(3000, 600), 130, reduced(170, 130), 20},
                          .page = 0},
                         {.layout = cut.layout,
                          .ranks = ranks,
                          .block = cut.block,
                          .invariant = true,
                          .on_hopper = true});
}

// Only the layer decides.
TEST(AttendSm90FixedOrder, AcceptsByTheLayer) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.dim = 64, .q_lens = {20}, .kv_lens = {20}, .invariant = true};
  const Data data(c);
  const kernels::AttendParams good = Sm90Run(c, data).params();
  EXPECT_TRUE(is_on_hopper(good));
  const auto accepts = [&](auto change) {
    kernels::AttendParams p = good;
    change(p);
    return is_on_hopper(p);
  };
  EXPECT_FALSE(accepts([](auto& p) { p.dtype = p.q_dtype = p.kv_dtype = DType::fp32; }));
  EXPECT_FALSE(accepts([](auto& p) { p.head_dim = p.value_dim = 40; }));
  EXPECT_FALSE(accepts([](auto& p) { p.head_dim = p.value_dim = 136; }));
  EXPECT_FALSE(accepts([](auto& p) { p.value_dim = 32; }));
  EXPECT_FALSE(accepts([](auto& p) { p.score.softcap = 30; }));
  EXPECT_FALSE(accepts([](auto& p) { p.score.scale = -1; }));
  EXPECT_FALSE(accepts([](auto& p) { p.bias.slopes = Floats(p.q.data, DType::fp32); }));
  EXPECT_FALSE(accepts([](auto& p) { p.shard.layout = Layout::listed; }));
  EXPECT_FALSE(accepts([](auto& p) { p.kv_dtype = DType::e4m3; }));
  EXPECT_FALSE(accepts([](auto& p) { p.parts.count = 4; }));
  EXPECT_FALSE(accepts([](auto& p) { p.k_scale.data = static_cast<float*>(p.q.data); }));
  EXPECT_TRUE(accepts([](auto& p) { p.resume = true; }));
  EXPECT_TRUE(accepts([](auto& p) { p.pages.table = p.batch.kv_len; }));
  EXPECT_TRUE(accepts([](auto& p) { p.k.dim_stride = 16; }));
  EXPECT_TRUE(accepts([](auto& p) { p.q.row_stride += 1; }));
  EXPECT_TRUE(accepts([](auto& p) { p.v.data = static_cast<std::byte*>(p.v.data) + 2; }));
}

}  // namespace
}  // namespace longspan::test

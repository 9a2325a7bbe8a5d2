// The Hopper kernel over pages, which it reads itself: page sizes, windows and shards that begin
// tiles anywhere in a page, short sequences among long ones, states in and out, against float64.
// Caches hold NaN, and tables -1 or garbage, in all places that no row may see.
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

using test::Cut;

constexpr DType kTypes[] = {DType::bf16, DType::fp16};

/// Rows past a tile's 128 and keys past several tiles; also a short sequence, one of a single
/// query, an empty one, and more queries than keys.
Serving mixed(DType dtype, int dim, int page) {
  Serving s{.dim = dim,
            .dtype = dtype,
            .q_lens = {300, 5, 1, 0, 140, 60},
            .kv_lens = {1500, 130, 333, 20, 141, 40},
            .page = page};
  if (reduction()) {
    s.heads = 4, s.kv_heads = 1;
    s.q_lens[0] = 150, s.kv_lens[0] = 500;
  }
  return s;
}

TEST(AttendSm90Pages, PageSizes) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (const int dim : {88, 96, 112, 128, 136, 192})
      for (const int page : {1, 7, 16, 48, 64, 256, 2000}) {
        Serving s = mixed(dtype, dim, page);
        s.padding = page == 48 ? 24 : 0;
        check_dealt(s, {.on_hopper = true});
      }
}

/// Keys and values of two widths, in the result, in states, and from states.
TEST(AttendSm90Pages, ValuesOfAnotherWidth) {
  LONGSPAN_NEEDS_HOPPER();
  struct Widths {
    int keys, values;
  };
  for (const Widths& widths :
       {Widths{192, 128}, Widths{168, 40}, Widths{96, 64}, Widths{128, 64}, Widths{64, 128}})
    for (const int page : {1, 16, 64})
      for (const float softcap : {0.0f, 3.0f}) {
        Serving s = mixed(page == 1 ? DType::fp16 : DType::bf16, widths.keys, page);
        s.value_dim = widths.values;
        s.softcap = softcap;
        check_dealt(s, {.on_hopper = true});
        s.alibi = Alibi::context;
        check_dealt(s, {.ranks = 3, .on_hopper = true, .chain = true, .finished = softcap == 0.0f});
      }
}

TEST(AttendSm90Pages, Masks) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int page : {16, 24, 128})
    for (const int window : {0, 1, 100, 700})
      for (const bool causal : {true, false}) {
        Serving s = mixed(DType::bf16, 128, page);
        s.mask = {.causal = causal, .window = window};
        check_dealt(s, {.on_hopper = true});
        s.causal = {1, 0, 1, 0, 0, 1};
        s.sinks = true;
        check_dealt(s, {.on_hopper = true});
      }
}

TEST(AttendSm90Pages, Scores) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (const int dim : {96, 128, 192}) {
      Serving s = mixed(dtype, dim, 16);
      s.softcap = 3;
      check_dealt(s, {.on_hopper = true});
      s.alibi = Alibi::context;
      check_dealt(s, {.on_hopper = true});
      s.softcap = 0;
      check_dealt(s, {.layout = Layout::zigzag, .ranks = 3, .on_hopper = true});
    }
}

/// Every rank's pages hold its own share of the keys.
TEST(AttendSm90Pages, Shards) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int page : {16, 40})
    for (const int ranks : {2, 4})
      for (const Cut& cut : {Cut{Layout::contiguous, 128}, Cut{Layout::interleaved, 128},
                             Cut{Layout::interleaved, 16}, Cut{Layout::zigzag, 128},
                             Cut{Layout::striped, 128}, Cut{Layout::ranges, 128}})
        check_dealt(mixed(DType::bf16, 128, page),
                    {.layout = cut.layout, .ranks = ranks, .block = cut.block, .on_hopper = true});
}

/// Each rank's keys continue the state of those before, and the last rank's finish the rows.
TEST(AttendSm90Pages, Chains) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (const int page : {1, 16, 64})
      for (const bool finished : {false, true})
        check_dealt(mixed(dtype, 128, page), {.layout = Layout::contiguous,
                                              .ranks = 3,
                                              .on_hopper = true,
                                              .chain = true,
                                              .empty_first = true,
                                              .finished = finished});
}

/// Documents in one long sequence, skipped decodes, many heads of one key.
TEST(AttendSm90Pages, OtherBatches) {
  LONGSPAN_NEEDS_HOPPER();
  Serving s = mixed(DType::bf16, 128, 16);
  s.skip_decode = true;
  check_dealt(s, {.on_hopper = true});
  s = mixed(DType::bf16, 128, 16);
  s.heads = 24;
  s.kv_heads = 1;
  check_dealt(s, {.on_hopper = true});
  s.q_lens = {700};
  s.kv_lens = {700};
  s.documents = {0, 130, 131, 500, 690};
  check_dealt(s, {.on_hopper = true});
}

TEST(AttendSm90Pages, WhatItDoesNotTake) {
  LONGSPAN_NEEDS_HOPPER();
  kernels::AttendParams p;
  const std::int32_t table = 0;
  p.dtype = p.q_dtype = p.kv_dtype = DType::bf16;
  p.tokens = 100;
  p.heads = p.kv_heads = 2;
  p.head_dim = p.value_dim = 128;
  p.q = {nullptr, 256, 128};
  p.k = p.v = kernels::KvRows(nullptr, 256, 128);
  p.k.page_stride = p.v.page_stride = 16 * 256;
  p.pages.table = &table;
  p.pages.size = 16;
  p.shard.length = 1000;
  const auto taken = [&](auto&& change) {
    kernels::AttendParams other = p;
    change(other);
    return test::is_on_hopper(other);
  };
  using Params = kernels::AttendParams;
  EXPECT_TRUE(taken([](Params&) {}));
  EXPECT_FALSE(taken([](Params& o) { o.head_dim = o.value_dim = 64; }));
  EXPECT_FALSE(taken([](Params& o) { o.head_dim = o.value_dim = 256; }));
  EXPECT_TRUE(taken([](Params& o) { o.head_dim = 192; }));
  EXPECT_FALSE(taken([](Params& o) { o.head_dim = 256; }));
  EXPECT_FALSE(taken([](Params& o) { o.kv_dtype = DType::e4m3; }));
  EXPECT_FALSE(taken([](Params& o) { o.k.page_stride += 4; }));
  EXPECT_FALSE(taken([](Params& o) { o.v.dim_stride = 16; }));  // keys of a column side by side
  EXPECT_FALSE(taken([](Params& o) { o.k.chunk_stride = 16 * 8; }));
}

}  // namespace
}  // namespace longspan::tests

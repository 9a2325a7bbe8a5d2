// Small cases of every attention kernel, a schedule each. They are few enough for hundreds in a
// second or two, and chosen so that every barrier of a kernel matters in one of them.
// tests/simulate.py runs them under many schedules, and tests/simulator/mutation.py under each of
// its mutants.
#include "kernels/cuda/dispatch/attend_finished.hpp"
#include "kernels/simulated/machine.hpp"
#include "tests/gpu/serving_ranks.hpp"
#include "tests/gpu/sm90_run.hpp"

namespace longspan::tests {
namespace {

using test::Case;
using test::Data;
using test::GpuRun;

struct Named {
  const char* name;
  Case c;
};
void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }
struct Served {
  const char* name;
  Serving s;
  Dealt dealt = {};
};
void PrintTo(const Served& served, std::ostream* out) { *out << served.name; }

template <class T>
std::string name_of(const ::testing::TestParamInfo<T>& info) {
  return info.param.name;
}

/// Attend by ranks into slots, then merge.
class Attend : public ::testing::TestWithParam<Named> {};
TEST_P(Attend, AsFloat64) {
  Case c = GetParam().c;
  c.seed = fresh_seed();
  const Data data(c);
  GpuRun run(c, data);
  expect_exact(c, data, run.run());
}

constexpr DType kBf16 = DType::bf16, kFp16 = DType::fp16, kFp32 = DType::fp32;

const Named kDecode[] = {
    {"one_row", {.dtype = kBf16, .heads = 1, .kv_heads = 1, .q_lens = {1}, .kv_lens = {300}}},
    {"two_tokens",
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 1,
      .q_lens = {2},
      .kv_lens = {300},
      .mask = {.causal = true}}},
    {"several_segments",
     {.dtype = kFp16,
      .heads = 4,
      .kv_heads = 2,
      .q_lens = {5},
      .kv_lens = {1111},
      .mask = {.causal = true}}},
    {"window_of_dim_128",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 1,
      .dim = 128,
      .q_lens = {3},
      .kv_lens = {900},
      .mask = {.causal = true, .window = 200}}},
    {"dim_256",
     {.dtype = kBf16, .heads = 2, .kv_heads = 1, .dim = 256, .q_lens = {1}, .kv_lens = {700}}},
    // More sequences than places on the GPU, most of them short, some without a key.
    {"more_pieces_than_places",
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 1,
      .q_lens = {2, 3, 1, 2, 4, 2, 3, 2, 2, 5, 1, 1, 2, 1},
      .kv_lens = {700, 3, 900, 2, 300, 130, 1000, 5, 260, 40, 1, 129, 128, 257},
      .mask = {.causal = true},
      .ranks = 3}},
    {"striped",
     {.dtype = kFp16,
      .heads = 4,
      .kv_heads = 2,
      .q_lens = {4, 1},
      .kv_lens = {513, 200},
      .mask = {.causal = true},
      .layout = Layout::striped,
      .ranks = 2,
      .sinks = true}},
    // Lengths on the device decide how many of the planned splits are taken.
    {"equal_lengths",
     {.dtype = kBf16, .heads = 2, .kv_heads = 1, .q_lens = {1, 1}, .kv_lens = {700, 700}}},
    {"length_on_the_device",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 1,
      .q_lens = {2},
      .kv_lens = {400},
      .mask = {.causal = true},
      .device_lengths = true}},
    // Some ranks have four segments, a leaf each, and others a fifth.
    {"interleaved_with_a_rest",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 1,
      .q_lens = {1},
      .kv_lens = {16 * 4 * 128 + 300},
      .layout = Layout::interleaved,
      .ranks = 16,
      .device_lengths = true}},
};
INSTANTIATE_TEST_SUITE_P(Decode, Attend, ::testing::ValuesIn(kDecode), name_of<Named>);

// In the fixed order, and in a case that Hopper's kernel does not support in that order: a narrow
// head or a cap.
const Named kPortable[] = {
    {"causal",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .dim = 40,
      .q_lens = {32},
      .kv_lens = {300},
      .mask = {.causal = true},
      .invariant = true}},
    {"groups_of_dim_128",
     {.dtype = kFp16,
      .heads = 4,
      .kv_heads = 2,
      .dim = 128,
      .q_lens = {40, 20},
      .kv_lens = {200, 20},
      .mask = {.causal = true},
      .softcap = 30,
      .invariant = true}},
    {"window_of_dim_256",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .dim = 256,
      .q_lens = {70},
      .kv_lens = {300},
      .mask = {.causal = true, .window = 100},
      .invariant = true}},
    {"listed",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 1,
      .q_lens = {33},
      .kv_lens = {260},
      .mask = {.causal = true},
      .layout = Layout::listed,
      .ranks = 2,
      .invariant = true}},
    {"gaps",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 2,
      .dim = 40,
      .q_lens = {20},
      .kv_lens = {150},
      .invariant = true,
      .q_gap = 8,
      .kv_gap = 8}},
    {"alibi",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .q_lens = {40},
      .kv_lens = {300},
      .mask = {.causal = true},
      .alibi = Alibi::query,
      .invariant = true}},
    {"dropout",
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 2,
      .q_lens = {40, 3},
      .kv_lens = {300, 200},
      .mask = {.causal = true},
      .dropout = 0.3}},
    {"dropout_of_striped_keys",
     {.dtype = kFp16,
      .heads = 2,
      .kv_heads = 1,
      .dim = 128,
      .q_lens = {30},
      .kv_lens = {300},
      .layout = Layout::striped,
      .ranks = 3,
      .invariant = true,
      .dropout = 0.5}},
    {"more_pieces_than_places",
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 4,
      .dim = 40,
      .q_lens = {20, 140, 1, 30},
      .kv_lens = {40, 150, 60, 90},
      .mask = {.causal = true},
      .invariant = true}},
};
INSTANTIATE_TEST_SUITE_P(Portable, Attend, ::testing::ValuesIn(kPortable), name_of<Named>);

const Named kSingle[] = {
    {"row", {.dtype = kFp32, .heads = 2, .kv_heads = 1, .q_lens = {1}, .kv_lens = {300}}},
    {"causal_of_dim_128",
     {.dtype = kFp32,
      .heads = 2,
      .kv_heads = 1,
      .dim = 128,
      .q_lens = {24},
      .kv_lens = {300},
      .mask = {.causal = true}}},
    {"zigzag",
     {.dtype = kFp32,
      .heads = 2,
      .kv_heads = 2,
      .q_lens = {20, 3},
      .kv_lens = {280, 100},
      .mask = {.causal = true},
      .layout = Layout::zigzag,
      .ranks = 2}},
    {"dropout",
     {.dtype = kFp32,
      .heads = 4,
      .kv_heads = 2,
      .q_lens = {20, 3},
      .kv_lens = {280, 100},
      .mask = {.causal = true},
      .layout = Layout::zigzag,
      .ranks = 2,
      .dropout = 0.3}},
};
INSTANTIATE_TEST_SUITE_P(Single, Attend, ::testing::ValuesIn(kSingle), name_of<Named>);

/// The kernel for long queries on Hopper, to the result and to a state.
class Hopper : public ::testing::TestWithParam<Named> {};
TEST_P(Hopper, AsFloat64) {
  LONGSPAN_NEEDS_HOPPER();
  Case c = GetParam().c;
  c.seed = fresh_seed();
  test::check(c);
}
const Named kHopper[] = {
    {"causal",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .q_lens = {70},
      .kv_lens = {300},
      .mask = {.causal = true}}},
    {"dim_128",
     {.dtype = kFp16,
      .heads = 2,
      .kv_heads = 1,
      .dim = 128,
      .q_lens = {50, 90},
      .kv_lens = {400, 90},
      .mask = {.causal = true},
      .sinks = true}},
    {"window_of_dim_96",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .dim = 96,
      .q_lens = {140},
      .kv_lens = {500},
      .mask = {.causal = true, .window = 150}}},
    {"narrow_values",  // of the instance's widths, and narrower, in a last panel without values
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .dim = 192,
      .value_dim = 128,
      .q_lens = {140},
      .kv_lens = {400},
      .mask = {.causal = true},
      .sinks = true}},
    {"narrower_values",
     {.dtype = kFp16,
      .heads = 2,
      .kv_heads = 1,
      .dim = 136,
      .value_dim = 56,
      .q_lens = {40, 20},
      .kv_lens = {300, 20},
      .mask = {.causal = true, .window = 150},
      .softcap = 20}},
    {"wide_values",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 2,
      .dim = 56,
      .value_dim = 96,
      .q_lens = {40},
      .kv_lens = {200},
      .mask = {.causal = true},
      .alibi = Alibi::query}},
    {"softcap_of_dim_256",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .dim = 256,
      .q_lens = {30},
      .kv_lens = {330},
      .softcap = 20}},
    {"alibi",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 2,
      .q_lens = {66},
      .kv_lens = {270},
      .mask = {.causal = true},
      .alibi = Alibi::context}},
    {"short_keys",
     {.dtype = kBf16, .heads = 1, .kv_heads = 1, .q_lens = {20, 30, 1}, .kv_lens = {20, 1, 0}}},
    // In the fixed order: tails of segments, states that wait in each of the three ways.
    {"in_order",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .q_lens = {70},
      .kv_lens = {700},
      .mask = {.causal = true},
      .invariant = true}},
    {"in_order_of_dim_128",
     {.dtype = kFp16,
      .heads = 2,
      .kv_heads = 1,
      .dim = 128,
      .q_lens = {50, 130},
      .kv_lens = {400, 130},
      .mask = {.causal = true},
      .invariant = true,
      .sinks = true}},
    {"in_order_of_many_segments",
     {.dtype = kBf16,
      .heads = 1,
      .kv_heads = 1,
      .q_lens = {20},
      .kv_lens = {128 * 70 + 9},
      .mask = {.window = 128 * 40},
      .invariant = true}},
    {"in_order_of_short_keys",
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 1,
      .dim = 72,
      .q_lens = {20, 30, 17, 140},
      .kv_lens = {20, 1, 0, 129},
      .invariant = true}},
    {"no_keys",  // items that nobody works on, one after the other
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 1,
      .q_lens = {20, 30, 9, 70, 40},
      .kv_lens = {0, 30, 0, 0, 0}}},
};
INSTANTIATE_TEST_SUITE_P(All, Hopper, ::testing::ValuesIn(kHopper), name_of<Named>);

/// Pages, fp8, biases, chains.
class Serve : public ::testing::TestWithParam<Served> {};
TEST_P(Serve, AsFloat64) {
  const Served& p = GetParam();
  if (p.dealt.on_hopper || p.dealt.latent || p.dealt.fp8_products) LONGSPAN_NEEDS_HOPPER();
  check_dealt(p.s, p.dealt, 0);
}
const Served kServed[] = {
    {"decode_pages_of_16",
     {.heads = 4, .kv_heads = 2, .dtype = kBf16, .q_lens = {1, 2}, .kv_lens = {300, 140}}},
    {"decode_pages_of_1",
     {.heads = 2, .kv_heads = 1, .dtype = kFp16, .q_lens = {3}, .kv_lens = {260}, .page = 1}},
    {"decode_packed_pages",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {2},
      .kv_lens = {200},
      .x_packed = true}},
    {"decode_e4m3",
     {.heads = 4,
      .kv_heads = 1,
      .dtype = kBf16,
      .kv_dtype = DType::e4m3,
      .q_lens = {1, 4},
      .kv_lens = {600, 130}}},
    {"decode_e5m2_of_dim_128",
     {.heads = 2,
      .kv_heads = 2,
      .dim = 128,
      .dtype = kFp16,
      .kv_dtype = DType::e5m2,
      .q_lens = {2},
      .kv_lens = {300},
      .page = 0}},
    {"decode_draft_tree",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {4, 3},
      .kv_lens = {200, 90},
      .qq_bias = true,
      .sinks = true},
     {Layout::interleaved, 2, 16}},
    // One piece of many segments: rings go round, and states wait on every level.
    {"decode_long_piece",
     {.heads = 2, .kv_heads = 1, .dtype = kBf16, .q_lens = {2}, .kv_lens = {2200}, .page = 0},
     {.parts = {.count = 1}}},
    {"decode_long_piece_of_32_rows",
     {.heads = 16,
      .kv_heads = 1,
      .dim = 256,
      .dtype = kBf16,
      .q_lens = {2},
      .kv_lens = {1200},
      .page = 0},
     {.parts = {.count = 1}}},
    {"decode_long_piece_of_pages",
     {.heads = 2, .kv_heads = 1, .dtype = kBf16, .q_lens = {2}, .kv_lens = {1300}, .page = 1},
     {.parts = {.count = 1}}},
    {"decode_chunks",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {1, 4},
      .kv_lens = {300, 140},
      .mask = {.causal = true, .chunk = 90, .lookback = 1}}},
    {"decode_prefixes",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {1, 4},
      .kv_lens = {300, 140},
      .mask = {.causal = true, .window = 50, .prefix = 70},
      .prefix = {70, 9}},
     {.ranks = 2}},
    {"portable_images",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 40,
      .dtype = kBf16,
      .q_lens = {40, 9},
      .kv_lens = {170, 60},
      .mask = {.causal = true, .window = 30, .clamp_ranges = true},
      .alibi = Alibi::query,
      .bidirectional = {135, 150, 151, 170, 20, 52, 52, 60}}},
    {"portable_prefixes_of_chunks",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 40,
      .dtype = kFp16,
      .q_lens = {40},
      .kv_lens = {170},
      .mask = {.causal = true, .chunk = 25, .prefix = 60},
      .sinks = true},
     {.ranks = 2}},
    {"hopper_images",
     {.heads = 1,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {140, 40},
      .kv_lens = {300, 200},
      .mask = {.causal = true, .window = 90},
      .alibi = Alibi::query,
      .bidirectional = {170, 280, 290, 300, 20, 100, 150, 199},
      .page = 0},
     {.on_hopper = true}},
    {"hopper_prefixes",
     {.heads = 1,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {140, 40},
      .kv_lens = {300, 200},
      .mask = {.causal = true, .chunk = 60, .prefix = 150},
      .prefix = {150, 20},
      .page = 0},
     {.ranks = 2, .on_hopper = true}},
    {"single_prefixes",
     {.heads = 2,
      .kv_heads = 1,
      .q_lens = {20, 2},
      .kv_lens = {150, 40},
      .mask = {.causal = true, .window = 9, .prefix = 30},
      .bidirectional = {135, 145, 38, 40}}},
    {"portable_pages",
     {.heads = 2, .kv_heads = 1, .dim = 40, .dtype = kBf16, .q_lens = {40}, .kv_lens = {170}},
     {.invariant = true}},
    {"portable_e4m3",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .kv_dtype = DType::e4m3,
      .q_lens = {33},
      .kv_lens = {200}},
     {.invariant = true}},
    {"single_pages", {.heads = 2, .kv_heads = 1, .q_lens = {20, 2}, .kv_lens = {150, 40}}},
    {"decode_chain",
     {.heads = 2, .kv_heads = 1, .dtype = kBf16, .q_lens = {3}, .kv_lens = {400}, .page = 0},
     {.ranks = 2, .chain = true}},
    {"hopper_pages",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 96,
      .dtype = kBf16,
      .q_lens = {50, 3},
      .kv_lens = {300, 140}},
     {.on_hopper = true}},
    {"hopper_pages_of_narrow_values",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 192,
      .value_dim = 128,
      .dtype = kBf16,
      .q_lens = {50, 3},
      .kv_lens = {300, 140}},
     {.ranks = 2, .on_hopper = true, .chain = true}},
    {"hopper_in_order_of_pages",
     {.heads = 2, .kv_heads = 1, .dtype = kBf16, .q_lens = {40, 3}, .kv_lens = {300, 140}},
     {.layout = Layout::interleaved, .ranks = 2, .invariant = true, .on_hopper = true}},
    {"hopper_in_order_of_packed_pages_in_a_chain",
     {.heads = 1,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {40},
      .kv_lens = {300},
      .x_packed = true},
     {.ranks = 2, .invariant = true, .odd_queries = true, .on_hopper = true, .chain = true}},
    {"hopper_e4m3",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_dtype = DType::e4m3,
      .kv_dtype = DType::e4m3,
      .q_lens = {40},
      .kv_lens = {300},
      .page = 0},
     {.on_hopper = true, .fp8_products = true}},
    {"hopper_e4m3_of_many_keys",
     {.heads = 1,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_dtype = DType::e4m3,
      .kv_dtype = DType::e4m3,
      .q_lens = {40},
      .kv_lens = {1400},
      .page = 0},
     {.on_hopper = true, .fp8_products = true}},
    // With a dim whose consumers take no turns at the tensor cores; turns would keep warps
    // together.
    {"hopper_alibi_of_interleaved_keys",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 96,
      .dtype = kBf16,
      .q_lens = {70},
      .kv_lens = {700},
      .alibi = Alibi::query,
      .page = 0},
     {.layout = Layout::interleaved, .ranks = 2, .block = 16, .on_hopper = true}},
    {"hopper_alibi_of_sequences",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 64,
      .dtype = kBf16,
      .q_lens = {40, 66},
      .kv_lens = {200, 130},
      .alibi = Alibi::query,
      .slopes_of_sequences = true,
      .page = 0},
     {.on_hopper = true}},
    {"alibi_sqrt_of_sequences",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 64,
      .dtype = kBf16,
      .q_lens = {40, 1, 3},
      .kv_lens = {200, 300, 90},
      .alibi = Alibi::sqrt,
      .slopes_of_sequences = true}},
    {"hopper_values_in_keys",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 96,
      .value_dim = 64,
      .values_in_keys = true,
      .dtype = kBf16,
      .q_lens = {210},
      .kv_lens = {300},
      .page = 0},
     {.on_hopper = true}},
    {"hopper_chain_of_narrow_values",
     {.heads = 1,
      .kv_heads = 1,
      .dim = 192,
      .value_dim = 120,
      .dtype = kBf16,
      .q_lens = {40},
      .kv_lens = {300},
      .page = 0},
     {.ranks = 2, .on_hopper = true, .chain = true, .finished = true}},
    {"hopper_chain",
     {.heads = 1, .kv_heads = 1, .dtype = kBf16, .q_lens = {40}, .kv_lens = {300}, .page = 0},
     {.ranks = 2, .on_hopper = true, .chain = true, .finished = true}},
    // Documents, padding and rows that are not used.
    {"decode_of_what_sequences_hide", hidden_in_a_batch({.heads = 2,
                                                         .kv_heads = 1,
                                                         .dtype = kBf16,
                                                         .q_lens = {1, 4, 3},
                                                         .kv_lens = {300, 40, 200}},
                                                        2)},
    {"portable_of_what_sequences_hide",
     hidden_in_a_batch({.heads = 2,
                        .kv_heads = 1,
                        .dtype = kBf16,
                        .q_lens = {40, 20, 66},
                        .kv_lens = {200, 50, 130},
                        .qq_bias = true},
                       2),
     {.ranks = 2}},
    {"hopper_of_what_sequences_hide",
     hidden_in_a_batch({.heads = 2,
                        .kv_heads = 1,
                        .dtype = kBf16,
                        .q_lens = {40, 20, 66},
                        .kv_lens = {200, 50, 130},
                        .page = 0},
                       2),
     {.on_hopper = true}},
    // Shares of the query rows.
    {"decode_shares_of_rows",
     {.heads = 2, .kv_heads = 1, .dtype = kBf16, .q_lens = {4, 3}, .kv_lens = {20, 7}, .page = 0},
     {.queries = {Layout::zigzag, 3}}},
    {"decode_long_shares_with_biases",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {6},
      .kv_lens = {200},
      .alibi = Alibi::query,
      .qq_bias = true},
     {.ranks = 2, .queries = {Layout::striped, 2}}},
    {"portable_pages_and_shares_of_rows",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {70},
      .kv_lens = {150},
      .alibi = Alibi::context,
      .qq_bias = true},
     {.queries = {Layout::zigzag, 2}}},
    {"single_shares_of_rows",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kFp32,
      .q_lens = {40, 3},
      .kv_lens = {150, 60},
      .alibi = Alibi::query},
     {.queries = {Layout::interleaved, 2, 16}}},
    {"portable_narrow_values",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 40,
      .value_dim = 24,
      .dtype = kBf16,
      .q_lens = {130, 3},
      .kv_lens = {200, 150},
      .page = 0},
     {.ranks = 2}},
    {"portable_wide_values_in_a_chain",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 24,
      .value_dim = 56,
      .dtype = kFp16,
      .q_lens = {40, 2},
      .kv_lens = {150, 200}},
     {.ranks = 2, .chain = true}},
    {"portable_ends_of_rows",
     {.heads = 2,
      .kv_heads = 1,
      .dim = 21,
      .value_dim = 59,
      .dtype = kBf16,
      .q_lens = {130, 3},
      .kv_lens = {200, 150},
      .page = 0},
     {.ranks = 2}},
    {"decode_ends_of_rows",
     {.heads = 4, .kv_heads = 2, .dim = 59, .dtype = kFp16, .q_lens = {1, 2}, .kv_lens = {300, 70}},
     {.ranks = 2}},
    {"decode_e4m3_ends_of_rows",
     {.heads = 4,
      .kv_heads = 2,
      .dim = 59,
      .dtype = kFp16,
      .kv_dtype = DType::e4m3,
      .q_lens = {1, 2},
      .kv_lens = {300, 70}}},
    {"fp32_ends_of_rows",
     {.heads = 2, .kv_heads = 1, .dim = 21, .value_dim = 59, .q_lens = {3}, .kv_lens = {300}}},
    {"fp32_narrow_values",
     {.heads = 2, .kv_heads = 1, .dim = 64, .value_dim = 40, .q_lens = {3}, .kv_lens = {300}}},
    {"fp32_widest_head",
     {.heads = 4,
      .kv_heads = 1,
      .dim = 576,
      .value_dim = 512,
      .dtype = kBf16,
      .q_lens = {1, 2},
      .kv_lens = {300, 70}},
     {.ranks = 2}},
    {"latent_of_few_heads",
     {.heads = 4,
      .kv_heads = 1,
      .dim = 576,
      .value_dim = 512,
      .values_in_keys = true,
      .dtype = kBf16,
      .q_lens = {1, 2},
      .kv_lens = {300, 70},
      .page = 64},
     {.ranks = 2, .latent = true}},
    {"latent_of_few_heads_in_segments",
     {.heads = 6,
      .kv_heads = 2,
      .dim = 576,
      .value_dim = 512,
      .values_in_keys = true,
      .dtype = kFp16,
      .q_lens = {1},
      .kv_lens = {600},
      .page = 0},
     {.latent = true}},
    {"latent_of_many_heads",
     {.heads = 17,
      .kv_heads = 1,
      .dim = 576,
      .value_dim = 512,
      .values_in_keys = true,
      .dtype = kBf16,
      .q_lens = {1, 4},
      .kv_lens = {100, 400},
      .sinks = true,
      .page = 64},
     {.ranks = 2, .latent = true}},
    {"latent_of_many_heads_in_small_pages",
     {.heads = 20,
      .kv_heads = 1,
      .dim = 328,
      .value_dim = 264,
      .values_in_keys = true,
      .dtype = kFp16,
      .q_lens = {2, 1, 0},
      .kv_lens = {260, 0, 9},
      .softcap = 20,
      .page = 3},
     {.latent = true}},
    {"hopper_shares_of_rows",
     {.heads = 2, .kv_heads = 1, .dtype = kBf16, .q_lens = {150}, .kv_lens = {200}, .page = 0},
     {.on_hopper = true, .queries = {Layout::zigzag, 2}}},
    {"hopper_shares_with_alibi",
     {.heads = 2,
      .kv_heads = 1,
      .dtype = kBf16,
      .q_lens = {300},
      .kv_lens = {310},
      .alibi = Alibi::query,
      .page = 0},
     {.on_hopper = true, .queries = {Layout::contiguous, 2}}},
};
INSTANTIATE_TEST_SUITE_P(All, Serve, ::testing::ValuesIn(kServed), name_of<Served>);

/// Calls whose small arrays the kernel right before them writes, as for a growing cache: this lets
/// them start early. Then the call again, with the counter that the first one left.
class Behind : public ::testing::TestWithParam<Named> {};
TEST_P(Behind, AKernelThatWritesWhatIsRead) {
  Case c = GetParam().c;
  c.seed = fresh_seed();
  const int longest = *std::max_element(c.q_lens.begin(), c.q_lens.end());
  if (longest > 16) LONGSPAN_NEEDS_HOPPER();  // the kernels for short queries take no more
  const Data data(c);
  GpuRun run(c, data);
  const auto backend = kernels::cuda_backend();
  kernels::AttendParams p = run.params(0);
  p.max_query_len = longest;

  // Lengths, query starts, the counter: 16 places each, with wrong numbers until they are written.
  constexpr std::size_t kPlaces = 16;
  std::vector<std::int32_t> right(3 * kPlaces, 0);
  std::copy(c.kv_lens.begin(), c.kv_lens.end(), right.begin());
  for (std::size_t b = 0; b < c.q_lens.size(); ++b)
    right[kPlaces + b + 1] = right[kPlaces + b] + c.q_lens[b];
  const test::OnGpu<std::int32_t> from(right), to(std::vector<std::int32_t>(right.size(), 3));
  p.batch.kv_len = to.data();
  if (c.batch() > 1) p.batch.query_start = to.data() + kPlaces;
  p.ticket = to.data() + 2 * kPlaces;
  const test::OnGpu<std::byte> scratch(backend->attend_scratch(p));
  p.scratch = scratch.data();
  p.scratch_bytes = scratch.buffer.bytes();
  run.find_key_starts(0);
  for (const bool again : {false, true}) {
    SCOPED_TRACE(again ? "again" : "behind the kernel");
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run.poison();
    if (!again)
      backend->place_rows({.from = reinterpret_cast<const std::byte*>(from.data()),
                           .to = reinterpret_cast<std::byte*>(to.data()),
                           .count = 12,
                           .row_bytes = 16},
                          {});
    backend->attend(p, {});
    run.queue_merge();
    expect_exact(c, data, run.result());
  }
  EXPECT_EQ(to.values(right.size()), right) << "the counter is not zero between calls";
}
const Named kBehind[] = {
    {"decode_of_one_sequence",
     {.dtype = kBf16, .heads = 2, .kv_heads = 1, .q_lens = {2}, .kv_lens = {700}}},
    // Lengths so uneven that pieces come in their order.
    {"decode_of_uneven_lengths",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 1,
      .q_lens = {1, 1, 1, 1, 1, 1, 1},
      .kv_lens = {1100, 130, 300, 0, 257, 64, 1030}}},
    {"hopper_of_more_items_than_places",
     {.dtype = kBf16,
      .heads = 4,
      .kv_heads = 2,
      .q_lens = {20, 70},
      .kv_lens = {90, 100},
      .mask = {.causal = true}}},
};
INSTANTIATE_TEST_SUITE_P(All, Behind, ::testing::ValuesIn(kBehind), name_of<Named>);

/// Decode that also writes the keys of its own queries into the cache.
TEST(NewKeys, AreInTheCacheAndSeen) {
  // The last stage of one sequence is whole and is copied as a box; that of the other is not.
  Case c{.dtype = kBf16,
         .heads = 4,
         .kv_heads = 2,
         .q_lens = {1, 2},
         .kv_lens = {384, 301},
         .mask = {.causal = true},
         .seed = fresh_seed()};
  const Data data(c);
  GpuRun run(c, data);
  const auto backend = kernels::cuda_backend();
  run.poison();
  run.find_key_starts(0);
  const std::size_t row = static_cast<std::size_t>(c.kv_heads * c.dim) * size_of(c.dtype);
  const kernels::AttendParams old = run.params(0);
  std::vector<std::byte> new_rows[2];  // keys, values
  std::vector<std::byte*> cached[2];   // where each of them belongs
  for (const bool is_value : {false, true}) {
    auto* cache = static_cast<std::byte*>(const_cast<void*>((is_value ? old.v : old.k).data));
    std::size_t first = 0;
    for (std::size_t b = 0; b < c.kv_lens.size(); ++b) {
      const auto length = static_cast<std::size_t>(c.kv_lens[b]);
      const std::vector<std::byte>& from = (is_value ? data.v : data.k)[b];
      for (std::size_t key = length - static_cast<std::size_t>(c.q_lens[b]); key < length; ++key) {
        new_rows[is_value].insert(new_rows[is_value].end(), from.begin() + key * row,
                                  from.begin() + (key + 1) * row);
        cached[is_value].push_back(cache + (first + key) * row);
        EXPECT_EQ(cudaMemset(cached[is_value].back(), 0xff, row), cudaSuccess);
      }
      first += length;
    }
  }
  const test::OnGpu<std::byte> new_k(new_rows[0]), new_v(new_rows[1]);
  kernels::AttendParams p = old;
  p.new_k = {new_k.data(), std::int64_t{c.kv_heads} * c.dim, c.dim};
  p.new_v = {new_v.data(), std::int64_t{c.kv_heads} * c.dim, c.dim};
  ASSERT_TRUE(kernels::cuda::writes_new_keys(p, kernels::cuda::current_gpu()));
  backend->attend(p, {});
  run.queue_merge();
  expect_exact(c, data, run.result());
  for (const bool is_value : {false, true})
    for (std::size_t t = 0; t < cached[is_value].size(); ++t) {
      std::vector<std::byte> found(row);
      EXPECT_EQ(cudaMemcpy(found.data(), cached[is_value][t], row, cudaMemcpyDefault), cudaSuccess);
      EXPECT_TRUE(std::equal(found.begin(), found.end(), new_rows[is_value].begin() + t * row))
          << (is_value ? "value" : "key") << " of row " << t;
    }
}

}  // namespace
}  // namespace longspan::tests

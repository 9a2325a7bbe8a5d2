// Short queries over latent keys (MLA), with few heads in the fixed order and with many in one
// pass, against float64. Caches hold NaN in all places that no row may see, and tables garbage. The
// shapes are those of FlashMLA's tests.
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

Serving latent(int heads, int kv_heads, std::vector<std::int32_t> q_lens,
               std::vector<std::int32_t> kv_lens) {
  return {.heads = heads,
          .kv_heads = kv_heads,
          .dim = 576,
          .value_dim = 512,
          .values_in_keys = true,
          .dtype = DType::bf16,
          .q_lens = std::move(q_lens),
          .kv_lens = std::move(kv_lens),
          .page = 64};
}

constexpr Dealt kLatent{.latent = true};

TEST(Latent, HeadsTokensAndLengths) {
  LONGSPAN_NEEDS_HOPPER();
  for (const auto& [heads, kv_heads] :
       {std::pair{1, 1}, {3, 3}, {9, 3}, {16, 1}, {63, 1}, {64, 2}, {126, 2}, {128, 1}, {128, 8}})
    for (const int tokens : {1, 2, 4})
      for (const int keys : {20, 140, 4096})
        for (const bool causal : {false, true}) {
          Serving s = latent(heads, kv_heads, {tokens, tokens}, {keys, keys / 3});
          s.mask.causal = causal;
          s.dtype = causal ? DType::bf16 : DType::fp16;
          check_dealt(s, kLatent);
        }
  // Lengths that differ, and sequences without keys or queries.
  for (const int heads : {16, 17, 128})
    check_dealt(latent(heads, 1, {1, 1, 0, 3, 1, 2}, {reduced(5000, 300), 0, 9, 130, 1, 2}),
                kLatent);
}

TEST(Latent, PagesAndStrides) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int heads : {4, 20})
    for (const int page : {0, 1, 16, 48, 61, 64, 128, 576})
      for (const int padding : {0, 8}) {
        Serving s = latent(heads, 1, {1, 2}, {reduced(700, 200), 65});
        s.page = page;
        s.padding = page > 0 ? padding : 0;
        check_dealt(s, kLatent);
      }
}

/// Any widths whose rows are whole 16 bytes.
TEST(Latent, Widths) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int heads : {4, 20})
    for (const auto& [dim, value_dim] : {std::pair{264, 256}, {320, 256}, {512, 512}, {328, 8}}) {
      Serving s = latent(heads, 1, {1, 2}, {reduced(700, 200), 65});
      s.dim = dim;
      s.value_dim = value_dim;
      check_dealt(s, kLatent);
    }
}

TEST(Latent, MasksAndScores) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int heads : {4, 20})
    for (const Mask& mask :
         {Mask{.causal = true, .window = 100}, Mask{.window = 30, .right = 17}}) {
      Serving s = latent(heads, 1, {5, 2}, {reduced(700, 200), 65});
      s.mask = mask;
      s.sinks = true;
      check_dealt(s, kLatent);
      s.softcap = 20;
      check_dealt(s, kLatent);
    }
  for (const int what : {0, 1, 2})
    check_dealt(hidden_in_a_batch(latent(20, 1, {3, 2, 4}, {300, 65, 40}), what), kLatent);
}

/// Few heads have the same bits on any number of ranks, many the same result; and every layout.
TEST(Latent, Ranks) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int heads : {4, 20}) {
    const Serving s = latent(heads, 1, {1, 3}, {reduced(5000, 600), 140});
    const std::uint64_t seed = fresh_seed();
    const ServingProblem problem(s, seed);
    ServingResult first;
    for (const int ranks : {1, 2, 4}) {
      const Dealt dealt{.ranks = ranks, .latent = true};
      if (is_left_out(3 * work_of(s, ranks))) continue;
      const ServingResult found = check_dealt(problem, dealt, seed, 12);
      if (heads > 16) continue;
      if (!first.out.empty()) expect_same_bits(first, found);
      first = found;
    }
    for (const Layout layout :
         {Layout::interleaved, Layout::striped, Layout::zigzag, Layout::ranges, Layout::listed})
      for (const std::int64_t block : {std::int64_t{1}, std::int64_t{128}}) {
        if (layout != Layout::interleaved && block > 1) continue;
        check_dealt(latent(heads, 1, {1, 3, 2}, {reduced(1000, 200), 140, 70}),
                    {.layout = layout, .ranks = 3, .block = block, .latent = true});
      }
  }
}

/// Rows that start from a state, and keys in parts.
TEST(Latent, ChainsAndParts) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int heads : {4, 20}) {
    const Serving s = latent(heads, 1, {1, 2}, {reduced(2000, 300), 140});
    check_dealt(s, {.ranks = 3, .latent = true, .chain = true});
    check_dealt(s, {.parts = {.count = 3}, .latent = true});
  }
}

/// What the kernels for latent keys do not take is right elsewhere.
TEST(Latent, OthersServeTheRest) {
  LONGSPAN_NEEDS_GPU();
  Serving s = latent(4, 1, {1}, {200});
  s.alibi = Alibi::context;
  check_dealt(s);
  s = latent(20, 1, {1}, {200});
  check_dealt(s, {.invariant = true});
  check_dealt(s, {.odd_queries = true});
  s.padding = 3;
  check_dealt(s);
}

}  // namespace
}  // namespace longspan::tests

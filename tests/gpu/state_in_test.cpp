// State in: keys in a chain of calls that share a slot, each beginning from the state of those
// before, against float64 and against as many slots and a merge. Payloads of empty states are NaN,
// and so is all unwritten memory. Each test draws fresh inputs.
#include <vector>

#include "longspan/error.hpp"
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

using test::Cut;

/// Kernels that fold as the merge does give its bits. On Hopper a row's weights are relative to the
/// maximum so far, so only the lse, which is not rounded to 16 bits, is the same.
constexpr double kSameLse = 5e-6;

bool on_hopper() {
  cudaDeviceProp gpu;
  EXPECT_EQ(cudaGetDeviceProperties(&gpu, 0), cudaSuccess);
  return gpu.major == 9 && gpu.minor == 0;
}

void expect_same_lse(const ServingResult& a, const ServingResult& b) {
  ASSERT_EQ(a.lse.size(), b.lse.size());
  for (std::size_t i = 0; i < a.lse.size(); ++i) {
    if (std::isnan(a.lse[i]) || std::isinf(a.lse[i])) {
      EXPECT_EQ(std::isnan(a.lse[i]), std::isnan(b.lse[i])) << i;
      EXPECT_EQ(std::isinf(a.lse[i]), std::isinf(b.lse[i])) << i;
      continue;
    }
    EXPECT_NEAR(a.lse[i], b.lse[i], kSameLse * std::max(1.0f, std::abs(a.lse[i]))) << i;
  }
}

/// A chain, from nothing and from empty states, to a state and to the result. With `folds`, of at
/// most two ranks, it must have the bits of a slot each and a merge, unless Hopper's kernel runs.
void check_chain(const Serving& s, Dealt dealt, bool folds = false, std::int64_t sampled = 9) {
  if (is_left_out((dealt.on_hopper ? 6 : 12) * work_of(s, dealt.ranks))) return;
  const std::uint64_t seed = fresh_seed();
  const ServingProblem problem(s, seed);
  dealt.chain = false;
  const bool slot_each = !dealt.parts || dealt.ranks == 1;
  bool hoppers = false;
  const ServingResult merged = slot_each ? run_dealt(problem, dealt, &hoppers) : ServingResult{};
  dealt.chain = true;
  for (const bool empty_first : {false, true})
    for (const bool finished : {false, true}) {
      dealt.empty_first = empty_first;
      dealt.finished = finished && !dealt.parts;
      SCOPED_TRACE(trace(s, dealt, seed));
      const ServingResult chained = check_dealt(problem, dealt, seed, sampled);
      if (folds && !hoppers)
        expect_same_bits(chained, merged);
      else if (slot_each)
        expect_same_lse(chained, merged);
    }
}

const DType kTypes[] = {DType::bf16, DType::fp16};

TEST(StateIn, HopperEveryDim) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int dim : {48, 64, 72, 80, 96, 104, 128, 168, 192, 256})
      for (const bool causal : {false, true}) {
        const int q_len = reduced(210, 70), kv_len = reduced(900, 300);
        Serving s{.heads = 4, .dim = dim, .dtype = dtype, .q_lens = {q_len}, .kv_lens = {kv_len}};
        s.page = 0;
        s.mask = {.causal = causal};
        s.sinks = dim % 64 == 0;
        check_chain(s, {.ranks = 3, .on_hopper = on_hopper()});
      }
}

// Rows that see keys of some ranks only, and of none; sequences short and long, and one with more
// queries than keys, whose first rows see nothing.
TEST(StateIn, HopperEveryMaskAndLayout) {
  LONGSPAN_NEEDS_GPU();
  for (const Cut& cut :
       {Cut{Layout::contiguous}, Cut{Layout::ranges}, Cut{Layout::zigzag}, Cut{Layout::striped},
        Cut{Layout::interleaved, 16}, Cut{Layout::interleaved, 128}})
    for (const Mask& mask : test::kMasks)
      for (const int dim : {64, 128}) {
        Serving s{.heads = 3,
                  .kv_heads = 1,
                  .dim = dim,
                  .dtype = DType::bf16,
                  .q_lens = {reduced(300, 60), 40, 1, reduced(170, 50), 3, reduced(400, 80)},
                  .kv_lens = {reduced(1500, 300), 130, 700, reduced(170, 50), 90, 64}};
        s.page = 0;
        s.mask = mask;
        s.sinks = true;
        check_chain(s, {.layout = cut.layout,
                        .ranks = dim == 64 ? 3 : 2,
                        .block = cut.block,
                        .on_hopper = on_hopper()});
      }
}

TEST(StateIn, HopperScoresAndBatches) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {64, 80, 128, 256})
    for (const std::optional<Alibi> alibi :
         {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}})
      for (const float softcap : {0.0f, 3.0f})
        for (const bool skip : {false, true}) {
          Serving s{.dim = dim,
                    .dtype = DType::fp16,
                    .q_lens = {reduced(250, 35), 1, 0, reduced(140, 40), 17, 1},
                    .kv_lens = {reduced(900, 150), 130, 40, reduced(140, 40), 333, 41},
                    .causal = {1, 0, 1, 0, 1, 1}};
          s.page = 0;
          s.alibi = alibi;
          s.softcap = softcap;
          s.sinks = dim != 80;
          s.skip_decode = skip;
          check_chain(s, {.ranks = 2, .on_hopper = on_hopper()});
        }
}

TEST(StateIn, HopperDocuments) {
  LONGSPAN_NEEDS_GPU();
  for (const std::vector<std::int64_t>& documents :
       {std::vector<std::int64_t>{0, 300, 301, 620, 700},
        std::vector<std::int64_t>{40, 300, 600, 690}}) {
    Serving s{.dim = 128, .dtype = DType::bf16, .q_lens = {reduced(700, 200)}, .kv_lens = {700}};
    if (reduction()) s.heads = s.kv_heads = 1;
    s.page = 0;
    s.documents = documents;
    check_chain(s, {.ranks = 4, .on_hopper = on_hopper()});
  }
}

// Scores so large that earlier keys hardly count, or alone count.
TEST(StateIn, HopperLargeScores) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const float scale : {0.5f, 3.0f}) {
      Serving s{
          .heads = 2, .dim = 64, .dtype = dtype, .q_lens = {150}, .kv_lens = {reduced(1500, 400)}};
      s.page = 0;
      s.scale = scale;
      s.mask = {};
      check_chain(s, {.ranks = 5, .on_hopper = on_hopper()});
    }
}

// The portable kernel stores onto the state; with few rows its keys are split, and a kernel folds.
TEST(StateIn, PortableLongQueries) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int dim : {40, 64, 128, 200, 256})
      for (const bool invariant : {false, true})
        for (const int page : {0, 16}) {
          Serving s{.dim = dim,
                    .dtype = dtype,
                    .q_lens = {reduced(130, 40), 20, 1, reduced(60, 40)},
                    .kv_lens = {reduced(700, 200), reduced(2500, 600), 60, 60}};
          if (reduction()) s.heads = 2, s.kv_heads = 1;
          s.page = page;
          s.sinks = true;
          s.mask = {.causal = true, .window = invariant ? 200 : 0};
          // Another test covers the cases of the Hopper kernel.
          const bool hoppers = page == 0 && dim >= 48 && !invariant && on_hopper();
          if (!hoppers) check_chain(s, {.ranks = 2, .invariant = invariant}, true);
        }
}

TEST(StateIn, PortableEveryInput) {
  LONGSPAN_NEEDS_GPU();
  for (const DType kv : {DType::bf16, DType::e4m3, DType::e5m2})
    for (const bool x_packed : {false, true})
      for (const bool skip : {false, true}) {
        Serving s{.dim = 96,
                  .dtype = DType::bf16,
                  .kv_dtype = kv,
                  .q_lens = {reduced(90, 40), 1, 5, reduced(300, 50)},
                  .kv_lens = {reduced(400, 200), reduced(1300, 300), 170, reduced(320, 70)}};
        s.x_packed = x_packed;
        s.skip_decode = skip;
        s.qq_bias = !skip;
        s.alibi = skip ? std::optional{Alibi::query} : std::nullopt;
        s.per_head_scales = x_packed;
        check_chain(s, {.layout = Layout::striped, .ranks = 2}, true);
      }
}

// Decode: one piece of keys a row, and many; one sequence, and more than fill the GPU.
TEST(StateIn, ShortQueries) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const int page : {0, 16})
      for (const int q_len : {1, 4, 16})
        for (const std::vector<std::int32_t>& kv_lens :
             {std::vector<std::int32_t>{reduced(20000, 2000)}, std::vector<std::int32_t>{100},
              std::vector<std::int32_t>{reduced(3000, 600), 17, 1, reduced(900, 300),
                                        reduced(2100, 400)}}) {
          Serving s{.dim = 128, .dtype = dtype, .kv_lens = kv_lens};
          s.q_lens.assign(kv_lens.size(), q_len);
          s.page = page;
          s.sinks = true;
          s.mask = {.causal = true, .window = q_len == 4 ? 700 : 0};
          check_chain(s, {.layout = Layout::interleaved, .ranks = 2, .block = 128}, true);
        }
  Serving many{.dim = 64, .dtype = DType::bf16};
  many.q_lens.assign(reduced(500, 30), 1);
  many.kv_lens.assign(many.q_lens.size(), 40);
  check_chain(many, {.ranks = 2}, true, 2);
}

TEST(StateIn, Fp32) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {16, 64, 128, 200, 256})
    for (const bool paged : {false, true})
      for (const int ranks : {2, 4}) {
        Serving s{.dim = dim,
                  .q_lens = {reduced(130, 30), 1, 20, 0},
                  .kv_lens = {reduced(300, 150), reduced(3000, 500), reduced(1500, 200), 7}};
        s.page = paged ? 16 : 0;
        s.sinks = paged;
        s.softcap = dim == 64 ? 5.0f : 0.0f;
        check_chain(s, {.layout = Layout::zigzag, .ranks = ranks}, ranks == 2);
      }
}

// Products of tf32 are compared with float64 elsewhere; here the chain has the merge's bits.
TEST(StateIn, Tf32) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {64, 128, 256})
    for (const std::vector<std::int32_t>& q_lens :
         {std::vector<std::int32_t>{130, 1, 20}, std::vector<std::int32_t>{2, 2, 2}}) {
      Serving s{
          .dim = dim, .q_lens = q_lens, .kv_lens = {300, reduced(3000, 700), reduced(1500, 500)}};
      if (is_left_out(3 * work_of(s, 2))) continue;
      const std::uint64_t seed = fresh_seed();
      const ServingProblem problem(s, seed);
      SCOPED_TRACE(describe(s) + " seed " + std::to_string(seed));
      const ServingResult merged = run_dealt(problem, {.ranks = 2, .tf32 = true});
      expect_same_bits(run_dealt(problem, {.ranks = 2, .chain = true, .tf32 = true}), merged);
      const ServingResult exact = run_dealt(problem, {.ranks = 2});
      EXPECT_NE(std::memcmp(exact.out.data(), merged.out.data(), merged.out.size()), 0);
    }
}

// States exported for parts of the keys: each continues in its own slot.
TEST(StateIn, ValuesOfAnotherWidth) {
  LONGSPAN_NEEDS_GPU();
  for (const auto& [dim, value_dim] : {std::pair{64, 40}, {40, 72}, {264, 512}})
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      Serving s{.heads = 4, .kv_heads = 2, .dim = dim, .value_dim = value_dim, .dtype = dtype};
      s.q_lens = {1, 40, 3};
      s.kv_lens = {400, 130, 90};
      check_chain(s, {.ranks = 2});
    }
}

TEST(StateIn, Parts) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const int count : {1, 3, 8})
      for (const int ranks : {1, 2}) {
        const int kv_len = reduced(900, 300);
        const Serving s{.dim = 64, .dtype = dtype, .q_lens = {70, 3}, .kv_lens = {kv_len, 400}};
        check_chain(s, {.ranks = ranks, .parts = {.count = count}}, ranks == 1);
      }
}

TEST(StateIn, TooLittleScratch) {
  LONGSPAN_NEEDS_GPU();
  const Serving s{
      .dim = 128, .dtype = DType::bf16, .q_lens = {1, 1, 1}, .kv_lens = {300, 300, 300}};
  EXPECT_THROW(run_dealt(ServingProblem(s, 7), {.ranks = 2, .chain = true, .narrow = true}),
               InputError);
}

}  // namespace
}  // namespace longspan::tests

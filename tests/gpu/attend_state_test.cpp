// States in and out by ServingOps on a GPU: keys in a chain of calls, each continuing the state of
// those before, against float64. state_in_test.cpp judges the kernels; this tests how a call
// reaches them: shards, starts of keys, workspace.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "longspan/error.hpp"
#include "tests/gpu/gpu_case.hpp"
#include "tests/support/serving_run.hpp"

namespace longspan::tests {
namespace {

/// All shares of the keys in a random order; written memory is NaN first, and a word behind states
/// and workspace must stay so.
void check_chain(const Serving& s, Shard rule) {
  if (is_left_out(8 * work_of(s, rule.ranks))) return;
  const std::uint64_t seed = fresh_seed();
  SCOPED_TRACE(describe(s) + " | " + name(rule.layout) + " of " + std::to_string(rule.ranks) +
               " seed " + std::to_string(seed));
  const ServingProblem problem(s, seed);
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> table;
  if (rule.layout == Layout::ranges) {
    for (const std::int32_t length : s.kv_lens) {
      std::vector<std::int64_t> cuts{0, length};
      for (int r = 1; r < rule.ranks; ++r)
        cuts.push_back(random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % (length + 1)));
      std::sort(cuts.begin(), cuts.end());
      table.insert(table.end(), cuts.begin(), cuts.end());
    }
    rule.table = table.data();
  }
  const ServingOps ops(Device::cuda);
  constexpr std::size_t kTail = 256;
  const std::size_t state_bytes = ops.state_bytes(problem.tokens, s.heads, s.of_value());
  const Buffer state = poisoned(Device::cuda, state_bytes + kTail);
  std::vector<int> order(rule.ranks);
  for (int r = 0; r < rule.ranks; ++r) order[r] = r;
  std::shuffle(order.begin(), order.end(), random);

  const auto expect_tail = [&](const Buffer& memory, std::size_t bytes) {
    const std::vector<std::byte> all = on_host(memory, bytes + kTail);
    EXPECT_EQ(
        std::count(all.begin() + static_cast<std::ptrdiff_t>(bytes), all.end(), std::byte{0xff}),
        static_cast<std::ptrdiff_t>(kTail));
  };
  bool resume = false;
  for (const int rank : order) {
    const ServingArrays arrays(Device::cuda, problem, rule.with_rank(rank), table);
    AttendState a{.state = {state.data(), state_bytes}, .resume = resume};
    a.q = arrays.q_tensor();
    a.k = arrays.k_tensor();
    a.v = arrays.v_tensor();
    a.block_table = arrays.block_table();
    if (s.batch() > 1) {
      a.query_start = arrays.query_starts();
      a.kv_len = arrays.kv_lens();
    } else {
      a.total_keys = s.kv_lens[0];
    }
    if (random() % 2 == 0) {
      a.max_kv_len = problem.max_kv_len();
      a.max_query_len = problem.max_q_len();
    }
    a.keys = rule_of(rule);
    a.rank = rank;
    a.ranks = rule.ranks;
    if (rule.layout == Layout::ranges)
      a.key_table = {arrays.shard.table, {s.batch(), rule.ranks + 1}, Device::cuda};
    a.dtypes.compute = s.dtype;
    a.mask = s.mask;
    a.score = {.softcap = s.softcap, .alibi = s.alibi.value_or(Alibi::context)};
    if (!s.causal.empty()) a.causal = arrays.array<std::uint8_t>(arrays.causal, s.batch());
    a.slopes = arrays.slope_tensor();
    a.qq_bias = arrays.qq_bias();
    a.q_scale = arrays.scales(problem.q_scale, arrays.q_scale);
    a.k_scale = arrays.scales(problem.k_scale, arrays.k_scale);
    a.v_scale = arrays.scales(problem.v_scale, arrays.v_scale);
    const std::size_t bytes = ops.workspace_bytes(a);
    const Buffer workspace = poisoned(Device::cuda, bytes + kTail);
    a.workspace = {workspace.data(), bytes};
    ops.check(a);
    ops.attend_state(a);
    settle(state);
    expect_tail(workspace, bytes);
    resume = true;
  }
  const ServingArrays whole(Device::cuda, problem, Shard::contiguous(s.kv_lens[0], 0, 1));
  FinishState f{.state = {state.data(), state_bytes},
                .out = whole.out_tensor(),
                .lse = Lse::tokens_heads(whole.lse_tensor()),
                .sinks = whole.small(s.sinks, whole.sinks),
                .out_scale = whole.out_scales()};
  if (s.batch() > 1) f.query_start = whole.query_starts();
  ops.finish_state(f);
  settle(state);
  expect_tail(state, state_bytes);
  const ServingResult result = whole.result();
  const Verdict verdict =
      judge(problem, result.out, result.lse, problem.all_rows(), problem.tolerance(), 16);
  EXPECT_TRUE(verdict.right()) << verdict.first << " (worst " << verdict.worst << ", lse "
                               << verdict.worst_lse << ")";
}

TEST(AttendState, ChunksOfShortAndLongQueries) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const int page : {0, 16})
      for (const int ranks : {1, 3}) {
        Serving s{.heads = 4,
                  .dtype = dtype,
                  .q_lens = {1, reduced(150, 40), 3},
                  .kv_lens = {reduced(900, 200), reduced(300, 90), 70},
                  .sinks = true,
                  .page = page};
        check_chain(s, {.layout = Layout::ranges, .ranks = ranks});
        check_chain(s, {.layout = Layout::zigzag, .ranks = ranks});
      }
}

TEST(AttendState, OneSequence) {
  LONGSPAN_NEEDS_GPU();
  for (const int q_len : {1, 40})
    for (const Layout layout : {Layout::contiguous, Layout::striped, Layout::interleaved}) {
      Serving s{.heads = 4,
                .dim = 128,
                .dtype = DType::bf16,
                .q_lens = {q_len},
                .kv_lens = {reduced(700, 200)},
                .page = 0};
      s.mask = {.causal = true, .window = 90};
      check_chain(s, {.layout = layout, .ranks = 4, .length = s.kv_lens[0], .block = 16});
    }
}

TEST(AttendState, FeaturesOfACall) {
  LONGSPAN_NEEDS_GPU();
  for (const std::optional<Alibi> alibi :
       {std::optional{Alibi::context}, std::optional{Alibi::query}})
    for (const bool quantised : {false, true}) {
      Serving s{.heads = 4,
                .dtype = DType::bf16,
                .q_lens = {5, 30},
                .kv_lens = {reduced(400, 150), 80},
                .causal = {0, 1},
                .page = 32};
      s.alibi = alibi;
      s.softcap = quantised ? 5.0f : 0.0f;
      s.qq_bias = !quantised;
      s.x_packed = quantised;
      s.per_head_scales = alibi == Alibi::query;
      if (quantised) s.q_dtype = s.kv_dtype = s.out_dtype = DType::e4m3, s.out_scale = 0.02f;
      check_chain(s, {.layout = Layout::ranges, .ranks = 3});
    }
}

TEST(AttendState, ValuesOfAnotherWidth) {
  LONGSPAN_NEEDS_GPU();
  check_chain({.heads = 2,
               .kv_heads = 1,
               .dim = 192,
               .value_dim = 128,
               .dtype = DType::bf16,
               .q_lens = {6, 1},
               .kv_lens = {150, 60},
               .page = 0},
              {.layout = Layout::ranges, .ranks = 2});
}

/// As one segment, and its result of reduce_segments.
TEST(AttendState, IsHandedOut) {
  LONGSPAN_NEEDS_GPU();
  const Serving s{.heads = 4, .q_lens = {1, 5}, .kv_lens = {200, 60}, .page = 0};
  const ServingProblem problem(s, fresh_seed());
  const ServingArrays arrays(Device::cuda, problem, Shard::contiguous(0, 0, 1));
  const ServingOps ops(Device::cuda);
  const std::size_t bytes = ops.state_bytes(problem.tokens, s.heads, s.dim);
  const Buffer state = poisoned(Device::cuda, bytes);
  AttendState a{.state = {state.data(), bytes}};
  a.q = arrays.q_tensor();
  a.k = arrays.k_tensor();
  a.v = arrays.v_tensor();
  a.query_start = arrays.query_starts();
  a.kv_len = arrays.kv_lens();
  a.mask = s.mask;
  const Buffer workspace(Device::cuda, ops.workspace_bytes(a));
  a.workspace = {workspace.data(), workspace.bytes()};
  ops.attend_state(a);
  const std::int64_t tokens = problem.tokens, padded = s.dim + 8;
  const Buffer output = poisoned(Device::cuda, tokens * s.heads * padded * sizeof(float)),
               max = poisoned(Device::cuda, tokens * s.heads * sizeof(float)),
               sum = poisoned(Device::cuda, tokens * s.heads * sizeof(float));
  const ExportState e{
      .state = a.state,
      .output = Tensor(output.data(), DType::fp32, {tokens, s.heads, 1, padded}, Device::cuda),
      .max = Tensor(max.data(), DType::fp32, {tokens, s.heads, 1}, Device::cuda),
      .expsum = Tensor(sum.data(), DType::fp32, {tokens, s.heads, 1}, Device::cuda),
      .value_dim = s.dim,
      .query_start = a.query_start};
  ops.export_state(e);
  ops.reduce_segments({.segments = {e.output, e.max, e.expsum},
                       .out = arrays.out_tensor(),
                       .lse = Lse::tokens_heads(arrays.lse_tensor()),
                       .query_start = a.query_start,
                       .kv_len = a.kv_len});
  settle(state);
  const ServingResult result = arrays.result();
  const Verdict verdict =
      judge(problem, result.out, result.lse, problem.all_rows(), problem.tolerance());
  EXPECT_TRUE(verdict.right()) << verdict.first;
}

TEST(AttendState, RefusesByName) {
  LONGSPAN_NEEDS_GPU();
  const Serving s{.heads = 4, .q_lens = {1}, .kv_lens = {60}, .page = 0};
  const ServingProblem problem(s, fresh_seed());
  const ServingArrays arrays(Device::cuda, problem, Shard::contiguous(60, 0, 1));
  const ServingOps ops(Device::cuda);
  AttendState a;
  a.q = arrays.q_tensor();
  a.k = arrays.k_tensor();
  a.v = arrays.v_tensor();
  a.total_keys = 61;
  const Buffer state = poisoned(Device::cuda, 1 << 16);
  a.state = {state.data(), state.bytes()};
  const auto refused = [&](const char* says) {
    try {
      ops.attend_state(a);
      ADD_FAILURE() << "not refused";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
    }
  };
  refused("rank 0 holds 61 of 61 keys (contiguous layout); there is room for 60");
  a.total_keys = 60;
  refused("workspace has 0 bytes");
  const std::int32_t wrong = 7;
  Buffer lens(Device::cuda, 4);
  lens.upload(&wrong);
  a.total_keys = 0;
  a.kv_len = {static_cast<const std::int32_t*>(lens.data()), {1}, Device::host};
  refused("kv_len is on the host; the work is done on the cuda");
}

}  // namespace
}  // namespace longspan::tests

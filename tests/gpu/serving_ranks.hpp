// A serving problem through the CUDA kernels themselves: every rank (or every part of the keys)
// attends into its own slot on one GPU, then one merge. All written memory is NaN beforehand.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/gpu_judge.hpp"
#include "tests/gpu/long_queries.hpp"
#include "tests/support/serving_run.hpp"

namespace longspan::tests {

/// The layout of the query rows of each sequence.
struct QueryCut {
  Layout layout = Layout::contiguous;
  int ranks = 1;
  std::int64_t block = kSegment;
};

/// Documents, padding and used rows of each sequence of a batch.
inline Serving hidden_in_a_batch(Serving s, int what) {
  for (int b = 0; b < s.batch(); ++b) {
    const std::int64_t keys = s.kv_lens[b];
    if (what % 2 == 0)
      for (const std::int64_t start : {std::int64_t{b}, keys / 3, keys - keys / 5 * (b % 2), keys})
        s.documents.push_back(start);
    if (what > 0) s.left_padding.push_back(static_cast<std::int32_t>(b == 1 ? keys : keys * b / 4));
    if (what > 0) s.used_rows.push_back(s.q_lens[b] - s.q_lens[b] * b / 3);
  }
  return s;
}

/// The layout of a problem's keys, and other arguments of a kernel.
struct Dealt {
  Layout layout = Layout::contiguous;
  int ranks = 1;
  std::int64_t block = kSegment;
  bool invariant = false;
  kernels::KeyParts parts = {};  // with one rank
  bool odd_queries = false;      // q's rows at odd addresses
  bool bounded = true;           // the longest sequence is known
  bool on_hopper = false;        // the kernel for long queries on Hopper must run
  bool latent = false;           // a kernel for latent keys must run
  bool fp8_products = false;
  bool chain = false;        // one slot: each rank's keys continue the state of those before
  bool empty_first = false;  // chain: the first rank's too, from empty states
  bool finished = false;     // chain: the last rank's finish the rows, where a kernel can (and on
                             // Hopper it must)
  bool narrow = false;       // chain: scratch without room for separate states
  bool tf32 = false;
  QueryCut queries = {};  // each share attends by itself to the keys of all ranks
};

inline std::string trace(const Serving& s, const Dealt& dealt, std::uint64_t seed) {
  return describe(s) + " | " + name(dealt.layout) + " by " + std::to_string(dealt.block) + ", " +
         std::to_string(dealt.ranks) + " ranks, parts " + std::to_string(dealt.parts.count) +
         (dealt.chain ? ", in a chain" : "") + (dealt.empty_first ? " from empty states" : "") +
         (dealt.finished ? " to the result" : "") + (dealt.invariant ? ", invariant" : "") +
         (dealt.queries.ranks > 1 ? std::string(", rows ") + name(dealt.queries.layout) + " by " +
                                        std::to_string(dealt.queries.block) + " on " +
                                        std::to_string(dealt.queries.ranks)
                                  : std::string()) +
         (dealt.odd_queries ? ", odd queries" : "") + (dealt.fp8_products ? ", fp8 products" : "") +
         (s.padding != 0 ? ", padding " + std::to_string(s.padding) : "") + ", seed " +
         std::to_string(seed);
}

/// Keys or values of a cache in the kernels' form.
inline kernels::KvRows rows_of(const Tensor& t, const Serving& s, bool values) {
  if (s.page == 0) return {t.data, t.stride[0], t.stride[1]};
  kernels::KvRows rows(t.data, t.stride[s.x_packed ? 3 : 1], t.stride[s.x_packed ? 1 : 2]);
  rows.page_stride = t.stride[0];
  if (s.x_packed && values) {  // [pages, kv_heads, dim, page]
    rows.dim_stride = t.stride[2];
    rows.chunk_stride = rows.chunk * t.stride[2];
  } else if (s.x_packed) {  // [pages, kv_heads, dim / x, page, x]
    rows.chunk = static_cast<int>(t.shape[4]);
    rows.chunk_stride = t.stride[2];
  }
  return rows;
}

/// Layout::ranges: cuts of every sequence, uneven on purpose; the last rank has all of the third.
template <class Lengths>
std::vector<std::int64_t> uneven_cuts(const Lengths& lengths, int ranks) {
  std::vector<std::int64_t> cuts;
  for (int b = 0; b < static_cast<int>(lengths.size()); ++b)
    for (int r = 0; r <= ranks; ++r)
      cuts.push_back(r == ranks         ? lengths[b]
                     : r == 0 || b == 2 ? 0
                                        : lengths[b] * (2 * r - 1 + b % 2) / (2 * ranks));
  return cuts;
}

/// NaN in unreadable parts: max and o of empty states. With `all`, every state becomes empty.
inline void poison_empty(kernels::StateSlots states, Buffer& memory, bool all = false) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> host(memory.bytes());
  memory.download(host.data());
  states.data = host.data();
  for (int slot = 0; slot < states.slots; ++slot)
    for (std::int64_t row = 0; row < states.rows; ++row) {
      Stats& stats = states.stats(slot)[row];
      if (all) stats.sum = 0.0f;
      if (!is_empty(stats)) continue;
      stats.max = kNan;
      std::fill_n(states.o(slot, row), states.dim, kNan);
    }
  memory.upload(host.data());
}

/// The states of skipped sequences are unchanged.
inline void expect_left_out(const ServingProblem& problem, kernels::StateSlots states,
                            const Buffer& memory, bool were_empty) {
  std::vector<std::byte> host(memory.bytes());
  memory.download(host.data());
  states.data = host.data();
  for (int b = 0; b < problem.shape.batch(); ++b)
    for (int head = 0; problem.skipped(b) && head < problem.shape.heads; ++head) {
      const std::int64_t row = problem.query_start[b] * problem.shape.heads + head;
      const Stats stats = states.stats(0)[row];
      EXPECT_TRUE(std::isnan(stats.max)) << "state of row " << row << " was written";
      EXPECT_TRUE(were_empty ? is_empty(stats) : std::isnan(stats.sum)) << row;
      for (int d = 0; d < states.dim; ++d) EXPECT_TRUE(std::isnan(states.o(0, row)[d])) << row;
    }
}

/// The query rows of one rank: sequence after sequence, in its order.
struct QueryShare {
  Shard shard;
  std::vector<std::int64_t> cuts;   // Layout::ranges
  std::vector<std::int64_t> rows;   // of the whole q
  std::vector<std::int32_t> start;  // [batch + 1] of its own
};

inline QueryShare query_share(const ServingProblem& problem, const QueryCut& cut, int rank) {
  const Serving& s = problem.shape;
  QueryShare share{{cut.layout, rank, cut.ranks, s.q_lens[0], cut.block}, {}, {}, {0}};
  if (cut.layout == Layout::ranges) share.cuts = uneven_cuts(s.q_lens, cut.ranks);
  if (!share.cuts.empty()) share.shard.table = share.cuts.data();
  for (int b = 0; b < s.batch(); ++b) {
    const Shard own = share.shard.for_sequence(b);
    for (std::int64_t t = 0; t < own.local_len(s.q_lens[b]); ++t)
      share.rows.push_back(problem.query_start[b] + own.position(t, s.q_lens[b]));
    share.start.push_back(static_cast<std::int32_t>(share.rows.size()));
  }
  return share;
}

/// The rows of one share of the queries, over the keys of all ranks, in their own order. Results
/// have room for all rows of the problem. `on_hopper`: set where the kernel for long queries on
/// Hopper computes a rank's.
inline ServingResult run_share(const ServingProblem& problem, const Dealt& dealt,
                               const QueryShare& share, bool* on_hopper = nullptr) {
  const Serving& s = problem.shape;
  const auto tokens = static_cast<std::int64_t>(share.rows.size());
  static const std::unique_ptr<kernels::Backend> backend = kernels::cuda_backend();
  const int slots = dealt.parts ? dealt.parts.count : dealt.chain ? 1 : dealt.ranks;
  kernels::StateSlots states{nullptr, tokens * s.heads, s.of_value(), slots};
  Buffer memory = poisoned(Device::cuda, states.slot_bytes() * slots);
  states.data = static_cast<std::byte*>(memory.data());
  if (dealt.empty_first) poison_empty(states, memory, true);
  const std::vector<std::int64_t> cuts = dealt.layout == Layout::ranges
                                             ? uneven_cuts(s.kv_lens, dealt.ranks)
                                             : std::vector<std::int64_t>{};
  const std::int64_t row = std::int64_t{s.heads} * s.dim;
  const std::size_t row_bytes = row * size_of(s.of_q());
  const std::size_t q_step = row_bytes + (dealt.odd_queries ? size_of(s.of_q()) : 0);
  std::vector<std::byte> spread(tokens * q_step + 16, std::byte{0xff});
  for (std::int64_t t = 0; t < tokens; ++t)
    std::memcpy(spread.data() + t * q_step, problem.q.data() + share.rows[t] * row_bytes,
                row_bytes);
  const Buffer q = on_device(Device::cuda, spread), start = on_device(Device::cuda, share.start),
               query_cuts = on_device(Device::cuda, share.cuts);

  std::vector<std::unique_ptr<ServingArrays>> kept;  // until the stream has passed them
  std::vector<Buffer> buffers;
  kernels::AttendParams p;
  for (int rank = 0; rank < dealt.ranks; ++rank) {
    Shard shard{dealt.layout, rank, dealt.ranks, s.kv_lens[0], dealt.block};
    if (!cuts.empty()) shard.table = cuts.data();
    std::vector<std::int64_t> key_start(s.batch());
    for (int b = 1; b < s.batch(); ++b)
      key_start[b] = key_start[b - 1] + shard.for_sequence(b - 1).local_len(s.kv_lens[b - 1]);
    buffers.push_back(on_device(Device::cuda, key_start));
    kept.push_back(std::make_unique<ServingArrays>(Device::cuda, problem, shard, cuts));
    const ServingArrays& a = *kept.back();
    p.dtype = s.dtype;
    p.q_dtype = s.of_q();
    p.kv_dtype = s.of_kv();
    p.tokens = tokens;
    p.heads = s.heads;
    p.kv_heads = s.kv_heads;
    p.head_dim = s.dim;
    p.value_dim = s.of_value();
    p.q = {q.data(), static_cast<std::int64_t>(q_step / size_of(s.of_q())), s.dim};
    p.k = rows_of(a.k_tensor(), s, false);
    p.v = rows_of(a.v_tensor(), s, true);
    p.pages = a.pages();
    a.give_scales(p);
    p.batch.size = s.batch();
    p.batch.query_start = ServingArrays::pointer<std::int32_t>(start);
    if (share.shard.ranks > 1) {
      p.queries = share.shard;
      p.queries.table = ServingArrays::pointer<std::int64_t>(query_cuts);
      p.batch.whole_query_start = ServingArrays::pointer<std::int32_t>(a.query_start);
    }
    p.batch.kv_len = ServingArrays::pointer<std::int32_t>(a.kv_len);
    p.batch.key_start = ServingArrays::pointer<std::int64_t>(buffers.back());
    if (!s.causal.empty()) p.batch.causal = ServingArrays::pointer<std::uint8_t>(a.causal);
    p.batch.skip_decode = s.skip_decode;
    if (!s.documents.empty())
      p.documents = {ServingArrays::pointer<std::int64_t>(a.documents), s.starts_of_one() - 1,
                     s.starts_of_one()};
    if (!s.bidirectional.empty()) {
      const std::int64_t each = std::ssize(s.bidirectional) / s.batch() / 2;
      p.ranges = {ServingArrays::pointer<std::int64_t>(a.bidirectional), each, 2 * each};
    }
    if (!s.prefix.empty()) p.batch.prefix = ServingArrays::pointer<std::int32_t>(a.prefix);
    if (!s.left_padding.empty())
      p.batch.left_padding = ServingArrays::pointer<std::int32_t>(a.left_padding);
    if (!s.used_rows.empty()) p.batch.used_rows = ServingArrays::pointer<std::int32_t>(a.used_rows);
    p.shard = a.shard;
    p.mask = s.mask;
    p.score = {static_cast<float>(s.scale_used()), s.softcap};
    p.bias.slopes = {a.floats(a.slope_tensor()), s.slopes_of_sequences ? s.heads : 0};
    p.bias.alibi = s.alibi.value_or(Alibi::context);
    if (s.qq_bias) p.bias.qq = {a.floats(a.qq_bias()), problem.qq_width, problem.qq_stride};
    p.invariant = dealt.invariant;
    p.fp8_products = dealt.fp8_products;
    p.tf32 = dealt.tf32;
    p.max_kv_len = dealt.bounded ? problem.max_kv_len() : 0;
    p.parts = dealt.parts;
    p.state = states;
    p.slot = dealt.chain ? 0 : rank;
    p.resume = dealt.chain && (rank > 0 || dealt.empty_first);
    if (dealt.on_hopper) {
      EXPECT_TRUE(test::is_on_hopper(p));
    }
    if (dealt.latent) {
      EXPECT_TRUE(test::is_latent(p));
    }
    if (on_hopper != nullptr) *on_hopper |= test::is_on_hopper(p);
    buffers.push_back(poisoned(Device::cuda, backend->attend_scratch(p)));
    p.scratch = static_cast<std::byte*>(buffers.back().data());
    p.scratch_bytes = buffers.back().bytes();
    if (dealt.narrow && p.resume) p.scratch_bytes = states.slot_bytes() - 1;
    if (dealt.chain && dealt.finished && rank + 1 == dealt.ranks) break;  // below
    backend->attend(p, {});
    if (dealt.chain) poison_empty(states, memory);
  }
  const ServingArrays& a = *kept.front();
  kernels::MergeParams m;
  m.states = states;
  m.interleaved = dealt.layout == Layout::interleaved && !dealt.parts;
  m.heads = s.heads;
  m.sinks = a.floats(a.small(s.sinks, a.sinks));
  m.batch = p.batch;
  m.tokens = tokens;
  m.dtype = s.of_out();
  m.out = {a.out.data(), std::int64_t{s.heads} * s.of_value(), s.of_value()};
  m.lse = {static_cast<float*>(a.lse.data()), s.heads, 1};
  if (dealt.chain && dealt.finished) {
    const bool by_one_kernel = backend->attend(p, m, {});
    EXPECT_TRUE(by_one_kernel || !dealt.on_hopper);
  } else {
    backend->merge(m, {});
  }
  if (dealt.chain) expect_left_out(problem, states, memory, dealt.empty_first);
  settle(a.out);
  return a.result();
}

/// Every share of the queries, and their rows brought together.
inline ServingResult run_dealt(const ServingProblem& problem, const Dealt& dealt,
                               bool* on_hopper = nullptr) {
  ServingResult whole;
  for (int rank = 0; rank < dealt.queries.ranks; ++rank) {
    const QueryShare share = query_share(problem, dealt.queries, rank);
    const ServingResult own = run_share(problem, dealt, share, on_hopper);
    if (dealt.queries.ranks == 1) return own;
    if (rank == 0) whole = own;
    const std::size_t out_row = own.out.size() / problem.tokens,
                      lse_row = own.lse.size() / problem.tokens;
    for (std::size_t t = 0; t < share.rows.size(); ++t) {
      const auto to = static_cast<std::size_t>(share.rows[t]);
      std::copy_n(own.out.data() + t * out_row, out_row, whole.out.data() + to * out_row);
      std::copy_n(own.lse.data() + t * lse_row, lse_row, whole.lse.data() + to * lse_row);
    }
  }
  return whole;
}

inline void expect_same_bits(const ServingResult& a, const ServingResult& b) {
  ASSERT_EQ(a.out.size(), b.out.size());
  EXPECT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size()), 0) << "outputs differ";
  EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0)
      << "lse differ";
}

inline ServingResult check_dealt(const ServingProblem& problem, const Dealt& dealt,
                                 std::uint64_t seed, std::int64_t sampled) {
  SCOPED_TRACE(trace(problem.shape, dealt, seed));
  const ServingResult found = run_dealt(problem, dealt);
  const Verdict verdict =
      judge(problem, found.out, found.lse, problem.all_rows(), problem.tolerance(), sampled);
  EXPECT_TRUE(verdict.right()) << verdict.wrong << " of " << verdict.compared
                               << " wrong: " << verdict.first;
  // The known lengths choose the kernel and the cuts, which do not affect short queries, except
  // those of many heads over latent keys.
  constexpr int kShort = 16;
  const bool one_pass = dealt.latent && problem.shape.heads / problem.shape.kv_heads > 16;
  if (dealt.bounded && problem.max_q_len() <= kShort && !one_pass) {
    Dealt unknown = dealt;
    unknown.bounded = false;
    SCOPED_TRACE("the longest sequence is not known");
    expect_same_bits(found, run_dealt(problem, unknown));
  }
  return found;
}

/// Fresh inputs; about `sampled` rows of each sequence are compared with float64.
inline void check_dealt(const Serving& s, const Dealt& dealt = {}, std::int64_t sampled = 12) {
  if (is_left_out((dealt.on_hopper ? kOnHopper : 3) * work_of(s, dealt.ranks))) return;
  const std::uint64_t seed = fresh_seed();
  check_dealt(ServingProblem(s, seed), dealt, seed, sampled);
}

}  // namespace longspan::tests

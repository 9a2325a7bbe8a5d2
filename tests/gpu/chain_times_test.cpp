// The keys of one sequence in parts, as in the steps of a ring: three ways to one result,
//
//     whole    one call over all keys, finished
//     chain    each part begins from the state of those before; the last one is finished
//     merge    each part into a slot of its own, then a merge of the slots
//
// each against float64. LONGSPAN_TIME=1 uses the sizes of a benchmark, times the ways in turns and
// prints a line of JSON for each; bench/chain.py makes records of them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bench/data.hpp"
#include "bench/timing.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

enum class Way { whole, chain, merge };

const char* name(Way way) {
  return way == Way::whole ? "whole" : way == Way::chain ? "chain" : "merge";
}

struct ChainRow {
  std::int64_t tokens, keys;
  int parts;
};

class Chain {
 public:
  static constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;

  explicit Chain(const ChainRow& row)
      : row_(row),
        q_(Device::cuda, {20, DType::bf16}, {row.tokens, kHeads, kDim}),
        k_(Device::cuda, {21, DType::bf16}, {row.keys, kKvHeads, kDim}),
        v_(Device::cuda, {22, DType::bf16}, {row.keys, kKvHeads, kDim}),
        out_(bench::Array::nan(Device::cuda, DType::bf16, {row.tokens, kHeads, kDim})),
        states_{nullptr, row.tokens * kHeads, kDim, row.parts} {
    memory_ = Buffer(Device::cuda, static_cast<std::size_t>(states_.slot_bytes()) * states_.slots);
    states_.data = static_cast<std::byte*>(memory_.data());
    kernels::AttendParams bounds = part(0, row.parts);
    bounds.resume = true;
    scratch_ = Buffer(Device::cuda, backend_->attend_scratch(bounds));
  }

  void operator()(Way way, Stream stream) const {
    if (way == Way::whole) return finish(part(0, 1), stream);
    for (int i = 0; i < row_.parts; ++i) {
      kernels::AttendParams p = part(i, row_.parts);
      if (way == Way::merge) {
        p.slot = i;
        backend_->attend(p, stream);
        continue;
      }
      p.resume = i > 0;
      if (i + 1 == row_.parts) return finish(p, stream);
      backend_->attend(p, stream);
    }
    backend_->merge(result_of(row_.parts), stream);
  }

  double operations() const {
    return 4.0 * kHeads * kDim * static_cast<double>(row_.tokens) * static_cast<double>(row_.keys);
  }

  /// A few rows of the last call's result.
  bench::Judge judge() const {
    const std::vector<std::byte> result = out_.download();
    bench::Judge found;
    for (const std::int64_t token : {std::int64_t{0}, row_.tokens / 2, row_.tokens - 1})
      for (const int head : {0, kHeads / 2 + 1, kHeads - 1}) {
        const std::int64_t row = (token * kHeads + head) * kDim;
        const auto at = [&](std::int64_t j) {
          return (j * kKvHeads + head / (kHeads / kKvHeads)) * kDim;
        };
        const std::vector<double> exact = bench::attend_exactly(
            0, row_.keys, kDim,
            [&](std::int64_t j) {
              double product = 0;
              for (int d = 0; d < kDim; ++d) product += q_.values(row + d) * k_.values(at(j) + d);
              return product / std::sqrt(static_cast<double>(kDim));
            },
            [&](std::int64_t j, int d) { return v_.values(at(j) + d); });
        for (int d = 0; d < kDim; ++d)
          found.compare(longspan::load_element(result.data(), DType::bf16, row + d), exact[d]);
      }
    return found;
  }

 private:
  /// The i-th of `parts` parts of the keys, at their places in the whole.
  kernels::AttendParams part(int i, int parts) const {
    const Shard shard = Shard::contiguous(row_.keys, i, parts);
    const std::int64_t step = std::int64_t{kKvHeads} * kDim,
                       first = shard.position(0, row_.keys) * step;
    kernels::AttendParams p;
    p.dtype = p.q_dtype = p.kv_dtype = DType::bf16;
    p.tokens = row_.tokens;
    p.heads = kHeads;
    p.kv_heads = kKvHeads;
    p.head_dim = p.value_dim = kDim;
    p.q = {q_.view.data, std::int64_t{kHeads} * kDim, kDim};
    p.k = {static_cast<std::uint16_t*>(k_.view.data) + first, step, kDim};
    p.v = {static_cast<std::uint16_t*>(v_.view.data) + first, step, kDim};
    p.shard = shard;
    p.score = {1.0f / std::sqrt(static_cast<float>(kDim)), 0.0f};
    p.max_kv_len = row_.keys;
    p.state = states_;
    p.scratch = static_cast<std::byte*>(scratch_.data());
    p.scratch_bytes = scratch_.bytes();
    return p;
  }

  /// Of the first `slots` slots.
  kernels::MergeParams result_of(int slots) const {
    kernels::MergeParams m;
    m.states = states_;
    m.states.slots = slots;
    m.heads = kHeads;
    m.tokens = row_.tokens;
    m.dtype = DType::bf16;
    m.out = {out_.view.data, std::int64_t{kHeads} * kDim, kDim};
    return m;
  }

  void finish(const kernels::AttendParams& p, Stream stream) const {
    backend_->attend(p, result_of(1), stream);
  }

  ChainRow row_;
  std::unique_ptr<kernels::Backend> backend_ = kernels::cuda_backend();
  bench::Array q_, k_, v_, out_;
  kernels::StateSlots states_;
  Buffer memory_, scratch_;
};

constexpr Way kWays[] = {Way::merge, Way::chain, Way::whole};

TEST(Chain, ThreeWays) {
  LONGSPAN_NEEDS_GPU();
  for (const ChainRow& row :
       {ChainRow{reduced(300, 40), reduced(2000, 500), 4}, ChainRow{reduced(40, 17), 1111, 3},
        ChainRow{reduced(16, 4), reduced(9000, 1500), 4}}) {
    const Chain problem(row);
    for (const Way way : kWays) {
      problem(way, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const bench::Judge judge = problem.judge();
      EXPECT_TRUE(judge.right(DType::bf16))
          << name(way) << " of " << row.tokens << " x " << row.keys << ": " << judge.relative();
    }
  }
}

/// The ways take turns, so that a chip that slows down slows all of them. A way's ratio is the
/// median over the rounds of the merge's time against its own.
void time_ways(const ChainRow& row) {
  constexpr int kRounds = 5;
  const Chain problem(row);
  std::vector<bench::Times> found[3];
  bench::Judge judges[3];
  for (int round = 0; round < kRounds; ++round)
    for (const Way way : kWays) {
      const auto at = static_cast<std::size_t>(way);
      found[at].push_back(
          bench::cuda_times([&](int, Stream stream) { problem(way, stream); }, {.launches = 1}));
      if (round == 0) judges[at] = problem.judge();
    }
  const std::vector<bench::Times>& merges = found[static_cast<std::size_t>(Way::merge)];
  for (const Way way : kWays) {
    std::vector<bench::Times> rounds = found[static_cast<std::size_t>(way)];
    std::vector<double> ratios;
    for (std::size_t i = 0; i < rounds.size(); ++i)
      ratios.push_back(merges[i].median / rounds[i].median);
    std::sort(ratios.begin(), ratios.end());
    std::sort(rounds.begin(), rounds.end(),
              [](const auto& a, const auto& b) { return a.median < b.median; });
    const bench::Judge& judge = judges[static_cast<std::size_t>(way)];
    EXPECT_TRUE(judge.right(DType::bf16)) << name(way) << ": " << judge.relative();
    const double us = rounds[rounds.size() / 2].median;
    fmt::print(
        "{{\"way\": \"{}\", \"heads\": {}, \"kv_heads\": {}, \"dim\": {}, \"dtype\": \"bf16\", "
        "\"tokens\": {}, \"kv_len\": {}, \"parts\": {}, \"us\": {:.1f}, \"tflop_s\": {:.1f}, "
        "\"ratio\": {:.4f}, \"right\": {}}}\n",
        name(way), Chain::kHeads, Chain::kKvHeads, Chain::kDim, row.tokens, row.keys, row.parts, us,
        problem.operations() / us / 1e6, ratios[ratios.size() / 2], judge.right(DType::bf16));
    std::fflush(stdout);
  }
}

TEST(Chain, Times) {
  LONGSPAN_NEEDS_GPU();
  LONGSPAN_NEEDS_MORE_THAN_A_SIMULATOR("its times say nothing of a GPU");
  if (std::getenv("LONGSPAN_TIME") == nullptr) GTEST_SKIP() << "LONGSPAN_TIME is not set";
  for (const ChainRow& row :
       {ChainRow{2048, 4096, 2}, ChainRow{4096, 16384, 4}, ChainRow{4096, 65536, 16},
        ChainRow{16384, 65536, 4}, ChainRow{512, 32768, 2}, ChainRow{512, 32768, 8},
        ChainRow{16, 131072, 4}})
    time_ways(row);
}

}  // namespace
}  // namespace longspan::test

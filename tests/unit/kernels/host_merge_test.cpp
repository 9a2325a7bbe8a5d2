// The host's merge, sinks and row maps against their definitions.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "src/strategy/shared/node_ranks.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class HostMerge : public ::testing::Test {
 protected:
  static constexpr int kHeads = 3, kDim = 24;

  /// States of `tokens` tokens in `slots` slots: random, one in five empty with a NaN payload.
  void make(int slots, std::int64_t tokens) {
    rows_ = tokens * kHeads;
    memory_.assign(kernels::StateSlots::bytes(rows_, kDim) * slots, std::byte{0xff});
    states_ = {memory_.data(), rows_, kDim, slots};
    std::normal_distribution<float> normal;
    for (int s = 0; s < slots; ++s) {
      for (std::int64_t row = 0; row < rows_; ++row) {
        const bool empty = random_() % 5 == 0;
        states_.stats(s)[row] =
            empty ? Stats{kNan, 0.0f} : Stats{5 * normal(random_), 1 + std::abs(normal(random_))};
        for (int c = 0; c < kDim; ++c) states_.o(s, row)[c] = empty ? kNan : normal(random_);
      }
    }
  }

  struct Merged {
    Array out;
    std::vector<float> lse;
  };
  Merged merge(DType dtype, std::int64_t tokens, bool interleaved = false,
               const float* sinks = nullptr, const std::int64_t* rows = nullptr) {
    Merged merged{Array(dtype, tokens * kHeads * kDim), std::vector<float>(tokens * kHeads, kNan)};
    kernels::MergeParams p;
    p.states = states_;
    p.interleaved = interleaved;
    p.heads = kHeads;
    p.sinks = sinks;
    p.rows = rows;
    p.tokens = tokens;
    p.dtype = dtype;
    p.out = {merged.out.data(), kHeads * kDim, kDim};
    p.lse = {merged.lse.data(), kHeads, 1};
    backend_->merge(p, {});
    return merged;
  }

  struct State {
    Stats stats;
    std::array<float, kDim> o;
  };
  State state(int slot, std::int64_t row) const {
    State s{states_.stats(slot)[row], {}};
    std::copy_n(states_.o(slot, row), kDim, s.o.begin());
    return s;
  }
  static State merge(const State& a, const State& b) {
    const Fold f = fold(a.stats, b.stats);
    State s{f.stats, {}};
    for (int c = 0; c < kDim; ++c) s.o[c] = f(a.o[c], b.o[c]);
    return s;
  }
  /// The fold of places [first, first + count), count a power of two, as a tree.
  State tree(int first, int count, bool interleaved, std::int64_t row) const {
    if (count > 1)
      return merge(tree(first, count / 2, interleaved, row),
                   tree(first + count / 2, count / 2, interleaved, row));
    for (int slot = 0; slot < states_.slots; ++slot)
      if (fold_place(slot, states_.slots, interleaved) == first) return state(slot, row);
    return {empty_stats(), {}};
  }

  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);
  std::mt19937 random_{fresh_seed()};
  std::vector<std::byte> memory_;
  kernels::StateSlots states_;
  std::int64_t rows_ = 0;
};

TEST_F(HostMerge, FoldsTheTreeBitForBit) {
  const std::array<float, kHeads> sinks = {-2.0f, 0.5f, 3.0f};
  for (int slots : {1, 2, 3, 4, 5, 7, 8, 13, 64}) {
    for (bool interleaved : {false, true}) {
      for (bool with_sinks : {false, true}) {
        make(slots, 50);
        const Merged merged = merge(fp32, 50, interleaved, with_sinks ? sinks.data() : nullptr);
        for (std::int64_t row = 0; row < rows_; ++row) {
          State expected = tree(0, 1 << log2_ceil(slots), interleaved, row);
          if (with_sinks) expected = merge(expected, {sink_stats(sinks[row % kHeads]), {}});
          const Finish end = finish(expected.stats);
          ASSERT_EQ(merged.lse[row], end.lse) << slots;
          for (int c = 0; c < kDim; ++c)
            ASSERT_EQ(merged.out[row * kDim + c], end(expected.o[c])) << slots;
        }
      }
    }
  }
}

TEST_F(HostMerge, EmptyIsZeroAndMinusInfinityAndTheSinkAlone) {
  make(4, 2);
  for (int s = 0; s < 4; ++s)
    for (std::int64_t row = 0; row < rows_; ++row) states_.stats(s)[row] = {kNan, 0.0f};
  const std::array<float, kHeads> sinks = {-1.0f, 2.0f, 0.0f};
  const Merged bare = merge(bf16, 2), sunk = merge(bf16, 2, false, sinks.data());
  for (std::int64_t row = 0; row < rows_; ++row) {
    EXPECT_EQ(bare.lse[row], -kInfinity);
    EXPECT_NEAR(sunk.lse[row], sinks[row % kHeads], 1e-6);
    for (int c = 0; c < kDim; ++c) {
      EXPECT_EQ(bare.out[row * kDim + c], 0.0);
      EXPECT_EQ(sunk.out[row * kDim + c], 0.0);
    }
  }
}

TEST_F(HostMerge, NanStaysNanInItsRow) {
  make(4, 3);
  states_.stats(2)[4] = {kNan, 1.0f};
  const Merged merged = merge(fp16, 3);
  for (std::int64_t row = 0; row < rows_; ++row)
    for (int c = 0; c < kDim; ++c)
      EXPECT_EQ(std::isnan(merged.out[row * kDim + c]), row == 4) << row;
}

TEST_F(HostMerge, TakesRowsByTheMapAndLeavesTheRest) {
  make(2, 5);
  const Merged whole = merge(fp32, 5);
  const std::array<std::int64_t, 4> rows = {3, -1, 0, 4};
  const Merged mapped = merge(fp32, 4, false, nullptr, rows.data());
  for (std::int64_t i = 0; i < 4 * kHeads * kDim; ++i) {
    const std::int64_t row = rows[i / (kHeads * kDim)];
    if (row < 0)
      EXPECT_TRUE(std::isnan(mapped.out[i]));
    else
      EXPECT_EQ(mapped.out[i], whole.out[row * kHeads * kDim + i % (kHeads * kDim)]);
  }
}

// Against Eigen's conversions, on every kind of number: one slot, sum 1, so that out = o.
TEST_F(HostMerge, RoundsOnceToNearestEven) {
  const std::int64_t tokens = 2000;
  make(1, tokens);
  for (std::int64_t row = 0; row < rows_; ++row) {
    states_.stats(0)[row] = {0.0f, 1.0f};
    for (int c = 0; c < kDim; ++c) {
      // Any bits, exponents of fp16's whole range and beyond, and exact ties.
      std::uint32_t bits = random_();
      if (c % 3 == 1) bits = (bits & 0x807fffffu) | (95u + bits % 60u) << 23;
      if (c % 3 == 2) bits = (bits & 0x807fe000u) | (100u + bits % 50u) << 23 | 0x1000u;
      states_.o(0, row)[c] = std::bit_cast<float>(bits);
    }
  }
  for (DType dtype : {fp16, bf16}) {
    const Merged merged = merge(dtype, tokens);
    Array expected(dtype, 1);
    for (std::int64_t i = 0; i < rows_ * kDim; ++i) {
      const float value = states_.o(0)[i];
      expected.set(0, value);
      if (std::isnan(value))
        ASSERT_TRUE(std::isnan(merged.out[i]));
      else
        ASSERT_EQ(merged.out[i], expected[0]) << name(dtype) << " " << value;
    }
  }
}

TEST_F(HostMerge, MapsPlacesAndStarts) {
  const std::vector<std::int32_t> query_start = {0, 5, 5, 16};
  const int ranks = 3;
  const std::int64_t capacity = 7;
  for (const Shard& shard : {Shard::striped(16, 0, ranks), Shard::zigzag(16, 0, ranks)}) {
    std::vector<std::int64_t> map(ranks * capacity, -7);
    kernels::MapParams p;
    p.shard = shard;
    p.batch = {3, query_start.data(), nullptr, nullptr};
    p.ranks = ranks;
    p.capacity = capacity;
    p.map = map.data();
    backend_->map_rows(p, {});

    // Placed by the map, row i of the whole is found at i.
    std::vector<std::array<std::int32_t, 4>> from(map.size()), to(16, {-1, -1, -1, -1});
    std::vector<int> seen(16, 0);
    for (std::size_t i = 0; i < map.size(); ++i) {
      from[i].fill(static_cast<std::int32_t>(map[i]));
      if (map[i] >= 0) ++seen.at(map[i]);
    }
    EXPECT_EQ(seen, std::vector<int>(16, 1));
    backend_->place_rows(
        {reinterpret_cast<const std::byte*>(from.data()), reinterpret_cast<std::byte*>(to.data()),
         map.data(), static_cast<std::int64_t>(map.size()), 16},
        {});
    for (int row = 0; row < 16; ++row)
      EXPECT_EQ(to[row], (std::array<std::int32_t, 4>{row, row, row, row}));

    // A rank's rows come sequence after sequence, in the shard's order.
    for (int r = 0; r < ranks; ++r) {
      const Shard own = shard.with_rank(r);
      std::int64_t i = r * capacity;
      for (int b = 0; b < 3; ++b)
        for (std::int64_t j = 0; j < own.local_len(query_start[b + 1] - query_start[b]); ++j)
          EXPECT_EQ(map[i++],
                    query_start[b] + own.position(j, query_start[b + 1] - query_start[b]));
      for (; i < (r + 1) * capacity; ++i) EXPECT_EQ(map[i], -1);
    }
  }

  // For the ranks of a node, positions are those within the node's part of each sequence.
  for (const Shard& shard : {Shard::striped(16, 0, 6), Shard::zigzag(16, 0, 6)})
    for (int first = 0; first < 6; first += 2) {
      kernels::MapParams p;
      p.shard = shard;
      p.batch = {3, query_start.data(), nullptr, nullptr};
      p.ranks = 2;
      p.first = first;
      p.part = part_of_node(shard, NodeRanks::of(first, 6, 2));
      std::vector<std::int32_t> part_start(4, -7);
      backend_->row_starts({p.part, query_start.data(), 3, part_start.data()}, {});
      p.part_start = part_start.data();
      std::vector<std::int64_t> map(2 * capacity, -7);
      p.capacity = capacity;
      p.map = map.data();
      backend_->map_rows(p, {});
      std::vector<int> seen(part_start.back(), 0);
      for (int r = 0; r < 2; ++r) {
        const Shard own = shard.with_rank(first + r);
        std::int64_t i = r * capacity;
        for (int b = 0; b < 3; ++b) {
          const std::int64_t length = query_start[b + 1] - query_start[b];
          for (std::int64_t j = 0; j < own.local_len(length); ++j, ++i) {
            ASSERT_GE(map[i], part_start[b]);
            ASSERT_LT(map[i], part_start[b + 1]);
            EXPECT_EQ(p.part.position(map[i] - part_start[b], length), own.position(j, length));
            ++seen.at(map[i]);
          }
        }
        for (; i < (r + 1) * capacity; ++i) EXPECT_EQ(map[i], -1);
      }
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
    }

  const std::vector<std::int32_t> kv_len = {1000, 0, 3, 500};
  std::vector<std::int64_t> start(4, -7);
  const Shard shard = Shard::contiguous(0, 1, 2);
  backend_->key_starts({shard, kv_len.data(), 0, 4, start.data()}, {});
  for (int b = 0; b < 3; ++b) EXPECT_EQ(start[b + 1] - start[b], shard.local_len(kv_len[b]));
  EXPECT_EQ(start[0], 0);
  backend_->key_starts({shard, kv_len.data(), 600, 4, start.data()}, {});
  EXPECT_EQ(start, (std::vector<std::int64_t>{0, 600, 1200, 1800}));
}

}  // namespace
}  // namespace longspan::tests

// merge, map_rows, place_rows and key_starts against the same laws on the host, bit for bit where
// the law fixes the bits; and the refusals of the backend.
#include <cstring>

#include "longspan/error.hpp"
#include "src/strategy/shared/node_ranks.hpp"
#include "tests/gpu/gpu_case.hpp"

namespace longspan::test {
namespace {

std::mt19937& rng() {
  static std::mt19937 generator(fresh_seed());
  return generator;
}

/// The root of the tree over places [first, first + 2^level), in float64.
struct Exact {
  double max, sum, o;
};
Exact merge_exactly(const std::vector<Exact>& parts) {
  Exact all{-std::numeric_limits<double>::infinity(), 0, 0};
  for (const Exact& part : parts)
    if (part.sum != 0) all.max = std::max(all.max, part.max);
  for (const Exact& part : parts) {
    if (part.sum == 0) continue;
    all.sum += part.sum * std::exp2(part.max - all.max);
    all.o += part.o * std::exp2(part.max - all.max);
  }
  return all;
}

TEST(Merge, AnyNumberOfSlotsWithEmptyOnes) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  std::normal_distribution<float> normal;
  for (int slots : {1, 2, 3, 4, 5, 7, 8, 13, 64, 200})
    for (bool interleaved : {false, true})
      for (int dim : {16, 72, 128, 256}) {
        constexpr int kTokens = 5, kHeads = 3;
        kernels::StateSlots states{nullptr, kTokens * kHeads, dim, slots};
        std::vector<std::byte> host(static_cast<std::size_t>(states.slot_bytes() * slots));
        states.data = host.data();
        for (int slot = 0; slot < slots; ++slot)
          for (std::int64_t row = 0; row < states.rows; ++row) {
            const bool empty = rng()() % 3 == 0;
            states.stats(slot)[row] =
                empty ? empty_stats() : Stats{5 * normal(rng()), std::abs(normal(rng())) + 0.1f};
            for (int d = 0; d < dim; ++d)
              states.o(slot, row)[d] =
                  empty ? std::numeric_limits<float>::quiet_NaN() : normal(rng());
          }
        const OnGpu<std::byte> gpu(host);
        kernels::MergeParams p;
        p.states = states;
        p.states.data = gpu.data();
        p.interleaved = interleaved;
        p.heads = kHeads;
        p.tokens = kTokens;
        p.dtype = DType::fp32;
        OnGpu<float> out(static_cast<std::size_t>(states.rows * dim));
        OnGpu<float> lse(static_cast<std::size_t>(states.rows));
        p.out = {out.data(), kHeads * dim, dim};
        p.lse = {lse.data(), kHeads, 1};
        backend->merge(p, {});
        const auto got = out.values(static_cast<std::size_t>(states.rows * dim));
        const auto got_lse = lse.values(static_cast<std::size_t>(states.rows));
        for (std::int64_t row = 0; row < states.rows; ++row)
          for (int d = 0; d < dim; ++d) {
            std::vector<Exact> parts;
            double scale = 1e-30;  // cancellation in o does not count against the merge
            for (int slot = 0; slot < slots; ++slot) {
              const Stats stats = states.stats(slot)[row];
              parts.push_back({stats.max, stats.sum, states.o(slot, row)[d]});
            }
            const Exact all = merge_exactly(parts);
            const double expected = all.sum == 0 ? 0 : all.o / all.sum;
            for (const Exact& part : parts)
              if (part.sum != 0)
                scale += std::abs(part.o) * std::exp2(part.max - all.max) / all.sum;
            EXPECT_NEAR(got[static_cast<std::size_t>(row * dim + d)], expected, 2e-6 * scale);
            const double lse_expected = all.max * std::log(2.0) + std::log(all.sum);
            if (all.sum == 0)
              EXPECT_EQ(got_lse[static_cast<std::size_t>(row)], -infinity());
            else
              EXPECT_NEAR(got_lse[static_cast<std::size_t>(row)], lse_expected,
                          2e-6 * (1 + std::abs(lse_expected)));
          }
      }
}

/// A row map, unaligned strided outputs, and all dtypes: only the mapped rows are written.
TEST(Merge, RowMapAndStrides) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  std::normal_distribution<float> normal;
  constexpr int kHeads = 2, kDim = 40, kTokens = 6;
  kernels::StateSlots states{nullptr, kTokens * kHeads, kDim, 1};
  std::vector<std::byte> host(static_cast<std::size_t>(states.slot_bytes()));
  states.data = host.data();
  for (std::int64_t row = 0; row < states.rows; ++row) {
    states.stats(0)[row] = {0.0f, 2.0f};
    for (int d = 0; d < kDim; ++d) states.o(0, row)[d] = normal(rng());
  }
  const OnGpu<std::byte> gpu(host);
  const OnGpu<std::int64_t> map(std::vector<std::int64_t>{4, -1, 0, 5});
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16})
    for (int pad : {0, 1, 8}) {
      const std::int64_t row_stride = kHeads * kDim + pad;
      OnGpu<std::byte> out(static_cast<std::size_t>(4 * row_stride) * size_of(dtype));
      kernels::MergeParams p;
      p.states = states;
      p.states.data = gpu.data();
      p.heads = kHeads;
      p.rows = map.data();
      p.tokens = 4;
      p.dtype = dtype;
      p.out = {out.data(), row_stride, kDim};
      backend->merge(p, {});
      const auto got = out.values(out.buffer.bytes());
      const std::int64_t from[] = {4, -1, 0, 5};
      for (int token = 0; token < 4; ++token)
        for (int i = 0; i < kHeads * kDim; ++i) {
          const double value = launcher::load(got.data(), dtype, token * row_stride + i);
          if (from[token] < 0) {
            EXPECT_TRUE(std::isnan(value));
            continue;
          }
          std::byte rounded[4];
          launcher::store(rounded, dtype, 0, states.o(0, from[token] * kHeads)[i] / 2);
          EXPECT_EQ(value, launcher::load(rounded, dtype, 0));
        }
    }
}

TEST(Rows, KeyStarts) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  for (int batch : {1, 3, 255, 256, 257, 1000})
    for (const Shard& shard : {Shard::contiguous(0, 1, 3), Shard::striped(0, 2, 4),
                               Shard::interleaved(0, 0, 2, 16), Shard::zigzag(0, 1, 2)}) {
      std::vector<std::int32_t> lengths;
      for (int b = 0; b < batch; ++b) lengths.push_back(static_cast<std::int32_t>(rng()() % 5000));
      const OnGpu<std::int32_t> kv_len(lengths);
      OnGpu<std::int64_t> starts(static_cast<std::size_t>(batch));
      backend->key_starts(
          {.shard = shard, .kv_len = kv_len.data(), .batch = batch, .key_start = starts.data()},
          {});
      const auto got = starts.values(static_cast<std::size_t>(batch));
      std::int64_t expected = 0;
      for (int b = 0; b < batch; ++b) {
        EXPECT_EQ(got[static_cast<std::size_t>(b)], expected);
        expected += shard.local_len(lengths[static_cast<std::size_t>(b)]);
      }
      backend->key_starts({.shard = shard,
                           .kv_len = kv_len.data(),
                           .capacity = 777,
                           .batch = batch,
                           .key_start = starts.data()},
                          {});
      EXPECT_EQ(starts.values(static_cast<std::size_t>(batch)).back(), 777 * (batch - 1));
    }
}

TEST(Rows, MapAndPlace) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  for (int batch : {1, 4, 300})
    for (int ranks : {1, 2, 3})
      for (const Shard& rule : {Shard::contiguous(0, 0, ranks), Shard::striped(0, 0, ranks),
                                Shard::zigzag(0, 0, ranks)}) {
        std::vector<std::int32_t> starts{0};
        for (int b = 0; b < batch; ++b)
          starts.push_back(starts.back() + static_cast<std::int32_t>(rng()() % 400));
        std::vector<std::vector<std::int64_t>> expected(static_cast<std::size_t>(ranks));
        std::int64_t capacity = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          auto& rows = expected[static_cast<std::size_t>(rank)];
          for (int b = 0; b < batch; ++b) {
            const std::int64_t first = starts[static_cast<std::size_t>(b)];
            const std::int64_t len = starts[static_cast<std::size_t>(b) + 1] - first;
            const Shard shard = rule.with_rank(rank);
            for (std::int64_t i = 0; i < shard.local_len(len); ++i)
              rows.push_back(first + shard.position(i, len));
          }
          capacity = std::max(capacity, static_cast<std::int64_t>(rows.size()) + 3);
        }
        const OnGpu<std::int32_t> query_start(starts);
        OnGpu<std::int64_t> map(static_cast<std::size_t>(capacity * ranks));
        kernels::MapParams p;
        p.shard = rule;
        p.batch = {batch, query_start.data(), nullptr, nullptr};
        p.ranks = ranks;
        p.capacity = capacity;
        p.map = map.data();
        backend->map_rows(p, {});
        const auto got = map.values(static_cast<std::size_t>(capacity * ranks));
        for (int rank = 0; rank < ranks; ++rank)
          for (std::int64_t i = 0; i < capacity; ++i) {
            const auto& rows = expected[static_cast<std::size_t>(rank)];
            const std::int64_t row =
                i < static_cast<std::int64_t>(rows.size()) ? rows[static_cast<std::size_t>(i)] : -1;
            ASSERT_EQ(got[static_cast<std::size_t>(rank * capacity + i)], row)
                << name(rule.layout) << " batch " << batch << " rank " << rank << " of " << ranks;
          }

        constexpr std::int64_t kRowBytes = 48;
        std::vector<std::byte> from(static_cast<std::size_t>(capacity * ranks * kRowBytes));
        for (std::byte& byte : from) byte = static_cast<std::byte>(rng()());
        const OnGpu<std::byte> source(from);
        OnGpu<std::byte> to(static_cast<std::size_t>(starts.back()) * kRowBytes);
        backend->place_rows({source.data(), to.data(), map.data(), capacity * ranks, kRowBytes},
                            {});
        const auto placed = to.values(static_cast<std::size_t>(starts.back()) * kRowBytes);
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (got[i] < 0) continue;
          const std::size_t at = static_cast<std::size_t>(got[i]) * kRowBytes;
          ASSERT_EQ(std::memcmp(&placed[at], &from[i * kRowBytes], kRowBytes), 0);
        }
      }
}

TEST(Rows, OfANodeStandWhereTheHostFindsThem) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  const auto host = kernels::host_backend(1);
  for (int batch : {1, 4, 300})
    for (const Shard& rule : {Shard::contiguous(0, 0, 6), Shard::striped(0, 0, 6),
                              Shard::zigzag(0, 0, 6), Shard::interleaved(0, 0, 6, 16)}) {
      std::vector<std::int32_t> starts{0};
      for (int b = 0; b < batch; ++b)
        starts.push_back(starts.back() + static_cast<std::int32_t>(rng()() % 400));
      const NodeRanks node = NodeRanks::of(4, 6, 2);
      const std::int64_t capacity = starts.back() + 3;
      const auto count = static_cast<std::size_t>(capacity * node.count);
      std::vector<std::int32_t> part_start(starts.size());
      std::vector<std::int64_t> expected(count);
      kernels::MapParams p;
      p.shard = rule;
      p.batch = {batch, starts.data(), nullptr, nullptr};
      p.ranks = node.count;
      p.first = node.first;
      p.part = part_of_node(rule, node);
      p.capacity = capacity;
      host->row_starts({p.part, starts.data(), batch, part_start.data()}, {});
      p.part_start = part_start.data();
      p.map = expected.data();
      host->map_rows(p, {});

      const OnGpu<std::int32_t> query_start(starts), parts(part_start);
      OnGpu<std::int64_t> map(count);
      p.batch.query_start = query_start.data();
      p.part_start = parts.data();
      p.map = map.data();
      backend->map_rows(p, {});
      ASSERT_EQ(map.values(count), expected) << name(rule.layout) << " batch " << batch;
    }
}

TEST(Refusals, ByName) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  kernels::AttendParams p;
  p.dtype = DType::bf16;
  for (const auto& [head_dim, value_dim] :
       {std::pair{0, 8}, {577, 512}, {584, 512}, {576, 520}, {8, 0}}) {
    p.head_dim = head_dim;
    p.value_dim = value_dim;
    EXPECT_THROW(backend->check(p), Unsupported) << head_dim << " " << value_dim;
  }
  for (const auto& [head_dim, value_dim] :
       {std::pair{64, 64}, {8, 8}, {192, 128}, {576, 512}, {20, 64}, {64, 20}, {1, 1}}) {
    p.head_dim = head_dim;
    p.value_dim = value_dim;
    EXPECT_NO_THROW(backend->check(p)) << head_dim << " " << value_dim;
  }
}

TEST(Refusals, TooLittleScratch) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  kernels::AttendParams p;
  p.dtype = DType::bf16;
  p.tokens = 1;
  p.head_dim = p.value_dim = 64;
  p.shard.length = 100000;
  EXPECT_THROW(backend->attend(p, {}), InputError);
}

}  // namespace
}  // namespace longspan::test

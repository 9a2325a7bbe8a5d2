// Attention over a sequence sharded across MPI ranks, on CPUs.
//
// Every rank holds its own part of the keys and values and all of the queries. Each gets the whole
// result: bitwise equal on all ranks, and to the result of one process alone.
// [includes]
#include <mpi.h>

#include <cstdint>
#include <vector>

#include <longspan/longspan.hpp>
#include <longspan/mpi.hpp>
// [/includes]

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace {

constexpr int kTokens = 16, kHeads = 8, kKvHeads = 2, kDim = 64;
constexpr std::int64_t kKeys = 5'000;

/// [rows, heads, dim] of order 1, the same on every rank.
std::vector<float> random_rows(std::int64_t rows, int heads, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(rows * heads * kDim);
  for (float& value : values) value = normal(bits);
  return values;
}

/// The rows of `whole` [kKeys, kKvHeads, kDim] that a shard holds.
std::vector<float> cut(const std::vector<float>& whole, const longspan::Shard& shard) {
  constexpr std::int64_t kRow = kKvHeads * kDim;
  const std::int64_t count = shard.local_len(kKeys);
  std::vector<float> own(count * kRow);
  for (std::int64_t i = 0; i < count; ++i)
    std::memcpy(&own[i * kRow], &whole[shard.position(i, kKeys) * kRow], kRow * sizeof(float));
  return own;
}

int run() {
  auto q = random_rows(kTokens, kHeads, 1);
  auto k = random_rows(kKeys, kKvHeads, 2), v = random_rows(kKeys, kKvHeads, 3);
  std::vector<float> out(q.size(), NAN), lse(kTokens * kHeads, NAN), alone(q.size(), NAN);

  // [layer]
  const longspan::Communicator world = longspan::from_mpi(MPI_COMM_WORLD);
  longspan::Attention layer(world, {.heads = kHeads,
                                    .kv_heads = kKvHeads,
                                    .head_dim = kDim,
                                    .dtypes = {.compute = longspan::fp32},
                                    .mask = {.causal = true},
                                    .limits = {.max_tokens = kTokens},
                                    .keys = {longspan::Layout::contiguous}});

  const longspan::Shard shard = layer.shard(kKeys);  // the keys that this rank holds
  const std::int64_t keys = shard.local_len(kKeys);
  std::vector<float> my_k = cut(k, shard), my_v = cut(v, shard);

  layer.run({.q = {q.data(), {kTokens, kHeads, kDim}},
             .k = {my_k.data(), {keys, kKvHeads, kDim}},
             .v = {my_v.data(), {keys, kKvHeads, kDim}},
             .out = {out.data(), {kTokens, kHeads, kDim}},
             .lse = longspan::Lse::tokens_heads({lse.data(), {kTokens, kHeads}}),
             .total_keys = kKeys});
  layer.wait();
  // [/layer]

  // [attend]
  longspan::attend(longspan::self(),
                   {.q = {q.data(), {kTokens, kHeads, kDim}},
                    .k = {k.data(), {kKeys, kKvHeads, kDim}},
                    .v = {v.data(), {kKeys, kKvHeads, kDim}},
                    .out = {alone.data(), {kTokens, kHeads, kDim}},
                    .total_keys = kKeys},
                   {.mask = {.causal = true}});
  // [/attend]

  double worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    worst = std::fmax(worst, std::isnan(out[i]) ? INFINITY : std::fabs(out[i] - alone[i]));
  const bool same_bits = std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0;
  const bool right = shard.keeps_order() ? same_bits : worst < 1e-6;

  for (int rank = 0; rank < world.size(); ++rank) {
    world.barrier("printing in turn");
    if (rank != world.rank()) continue;
    std::printf("rank %d: keys %lld to %lld; out[0] %.6f, lse[0] %.6f; alone: %s bits, %s\n", rank,
                static_cast<long long>(keys ? shard.position(0, kKeys) : 0),
                static_cast<long long>(keys ? shard.position(keys - 1, kKeys) : -1), out[0], lse[0],
                same_bits ? "the same" : "other", right ? "right" : "WRONG");
    std::fflush(stdout);
  }
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;  // longspan computes on its own threads and requires at least this
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  int status = EXIT_FAILURE;
  try {
    status = run();
  } catch (const longspan::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(error.kind()));
  }
  MPI_Finalize();
  return status;
}

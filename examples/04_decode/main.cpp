// A decode loop: one new token a step, attending to a cache that grows and is spread over the
// ranks.
//
// The cache is interleaved: blocks of 128 keys are dealt out in turn, so that it stays even while
// it grows. At each step the rank whose turn it is appends the new key and value; every rank holds
// the query and gets the result. The layer is made once, and running it allocates nothing.
#include <mpi.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include <longspan/longspan.hpp>
#include <longspan/mpi.hpp>

namespace {

using longspan::fp32, longspan::Shard, longspan::Tensor;

constexpr int kHeads = 8, kKvHeads = 2, kDim = 64;
constexpr std::int64_t kPrompt = 1'000, kSteps = 200, kMaxLen = kPrompt + kSteps;
constexpr std::int64_t kRow = kKvHeads * kDim;  // elements of one key

/// What the model would compute for the token at `position`: the same on every rank.
struct Token {
  std::vector<float> q, k, v;

  explicit Token(std::int64_t position) : q(kHeads * kDim), k(kRow), v(kRow) {
    std::mt19937 bits(static_cast<unsigned>(position));
    std::normal_distribution<float> normal;
    for (auto* row : {&q, &k, &v})
      for (float& value : *row) value = normal(bits);
  }
};

/// One rank's part of the cache: [capacity, kv_heads, dim], filled from the front.
class Cache {
 public:
  Cache(int rank, int ranks) : rank_(rank), ranks_(ranks) {
    capacity_ = shard(kMaxLen).max_local_len(kMaxLen);
    k_.resize(capacity_ * kRow, NAN);
    v_.resize(capacity_ * kRow, NAN);
  }

  Shard shard(std::int64_t len) const { return Shard::interleaved(len, rank_, ranks_); }

  /// Appends the key and value of the token at position `len`, if they belong to this rank.
  void append(std::int64_t len, const Token& token) {
    const std::int64_t slot = shard(len).local_len(len);
    if (shard(len + 1).local_len(len + 1) == slot) return;  // another rank's turn
    std::memcpy(&k_[slot * kRow], token.k.data(), kRow * sizeof(float));
    std::memcpy(&v_[slot * kRow], token.v.data(), kRow * sizeof(float));
  }

  Tensor keys() { return Tensor(k_.data(), fp32, {1, capacity_, kKvHeads, kDim}); }
  Tensor values() { return Tensor(v_.data(), fp32, {1, capacity_, kKvHeads, kDim}); }

 private:
  int rank_, ranks_;
  std::int64_t capacity_;
  std::vector<float> k_, v_;
};

/// A communicator, its cache and its layer, which give one step's result.
class Decoder {
 public:
  explicit Decoder(const longspan::Communicator& world)
      : cache_(world.rank(), world.size()),
        layer_(world, {.heads = kHeads,
                       .kv_heads = kKvHeads,
                       .dim = kDim,
                       .dtype = fp32,
                       .mask = {.causal = true},
                       .max_tokens = 1}) {}

  void append(std::int64_t len, const Token& token) { cache_.append(len, token); }

  // [step]
  /// The new token is the last of `len`: it attends to all of them, itself included.
  std::vector<float> step(std::int64_t len, Token& token) {
    std::vector<float> out(kHeads * kDim, NAN);
    layer_.run({.q = Tensor(token.q.data(), fp32, {1, kHeads, kDim}),
                .k = cache_.keys(),
                .v = cache_.values(),
                .shard = cache_.shard(len),
                .out = Tensor(out.data(), fp32, {1, kHeads, kDim})});
    layer_.wait();
    return out;
  }
  // [/step]

 private:
  Cache cache_;
  longspan::Attention layer_;
};

int run() {
  const longspan::Communicator world = longspan::from_mpi(MPI_COMM_WORLD);
  Decoder sharded(world), alone(longspan::self());
  for (std::int64_t i = 0; i < kPrompt; ++i) {
    const Token token(i);
    sharded.append(i, token);
    alone.append(i, token);
  }

  int same = 0;
  double worst = 0;
  for (std::int64_t len = kPrompt; len < kMaxLen; ++len) {
    Token token(len);
    sharded.append(len, token);
    alone.append(len, token);
    const std::vector<float> a = sharded.step(len + 1, token), b = alone.step(len + 1, token);
    same += std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      worst = std::fmax(worst, std::isnan(a[i]) ? INFINITY : std::fabs(a[i] - b[i]));
  }

  const bool keeps = Shard::interleaved(kMaxLen, world.rank(), world.size()).keeps_order();
  const bool right = keeps ? same == kSteps : worst < 1e-6;
  if (world.rank() == 0)
    std::printf(
        "%lld steps on %d ranks from %lld to %lld keys: %d with the bits of one process, "
        "largest difference %.1e, %s\n",
        static_cast<long long>(kSteps), world.size(), static_cast<long long>(kPrompt),
        static_cast<long long>(kMaxLen), same, worst, right ? "right" : "WRONG");
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
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

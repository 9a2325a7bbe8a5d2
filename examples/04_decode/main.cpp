// A decode loop: one new token a step, attending to a cache that grows and is spread over the
// ranks.
//
// The cache is interleaved: blocks of 128 keys are dealt out in turn, so that it stays even while
// it grows. Every rank holds the new query, key and value and gets the result. One rank at a time,
// in turn, writes the key and the value into its part of the cache. The layer is made once, and
// running it allocates nothing.
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

using longspan::fp32, longspan::Tensor;

constexpr int kHeads = 8, kKvHeads = 2, kDim = 64;
constexpr std::int64_t kPrompt = 1'000, kSteps = 200, kMaxLen = kPrompt + kSteps;
constexpr std::int64_t kRow = kKvHeads * kDim;  // elements of one key

/// The model's result for the token at `position`: the same on every rank.
struct Token {
  std::vector<float> q, k, v;

  explicit Token(std::int64_t position) : q(kHeads * kDim), k(kRow), v(kRow) {
    std::mt19937 bits(static_cast<unsigned>(position));
    std::normal_distribution<float> normal;
    for (auto* row : {&q, &k, &v})
      for (float& value : *row) value = normal(bits);
  }
};

Tensor rows(std::vector<float>& data, std::int64_t count, int heads) {
  return Tensor(data.data(), fp32, {count, heads, kDim});
}

/// A communicator, its layer, and its rank's part of the cache, which is filled from the front.
class Decoder {
 public:
  explicit Decoder(const longspan::Communicator& world)
      : layer_(world, {.heads = kHeads,
                       .kv_heads = kKvHeads,
                       .head_dim = kDim,
                       .dtypes = {.compute = fp32},
                       .mask = {.causal = true},
                       .limits = {.max_tokens = 1},
                       .keys = {longspan::Layout::interleaved}}),
        capacity_(shard().max_local_len(kMaxLen)),
        k_(capacity_ * kRow, NAN),
        v_(capacity_ * kRow, NAN) {}

  longspan::Shard shard() const { return layer_.shard(kMaxLen); }

  // [step]
  /// The keys and values of `count` tokens, the first ones of the sequence.
  void fill(std::int64_t count, std::vector<float>& k, std::vector<float>& v) {
    layer_.append({.new_k = rows(k, count, kKvHeads),
                   .new_v = rows(v, count, kKvHeads),
                   .k = rows(k_, capacity_, kKvHeads),
                   .v = rows(v_, capacity_, kKvHeads),
                   .total_keys = count});
    layer_.wait();
  }

  /// The new token is the last of `len`: it attends to all of them, itself included.
  std::vector<float> step(std::int64_t len, Token& token) {
    std::vector<float> out(kHeads * kDim, NAN);
    layer_.run({.q = rows(token.q, 1, kHeads),
                .k = rows(k_, capacity_, kKvHeads),
                .v = rows(v_, capacity_, kKvHeads),
                .out = rows(out, 1, kHeads),
                .total_keys = len,
                .new_k = rows(token.k, 1, kKvHeads),
                .new_v = rows(token.v, 1, kKvHeads)});
    layer_.wait();
    return out;
  }
  // [/step]

 private:
  longspan::Attention layer_;
  std::int64_t capacity_;
  std::vector<float> k_, v_;
};

int run() {
  const longspan::Communicator world = longspan::from_mpi(MPI_COMM_WORLD);
  Decoder sharded(world), alone(longspan::self());
  std::vector<float> k, v;
  for (std::int64_t i = 0; i < kPrompt; ++i) {
    const Token token(i);
    k.insert(k.end(), token.k.begin(), token.k.end());
    v.insert(v.end(), token.v.begin(), token.v.end());
  }
  sharded.fill(kPrompt, k, v);
  alone.fill(kPrompt, k, v);

  int same = 0;
  double worst = 0;
  for (std::int64_t len = kPrompt; len < kMaxLen; ++len) {
    Token token(len);
    const std::vector<float> a = sharded.step(len + 1, token), b = alone.step(len + 1, token);
    same += std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      worst = std::fmax(worst, std::isnan(a[i]) ? INFINITY : std::fabs(a[i] - b[i]));
  }

  const bool keeps = sharded.shard().keeps_order();
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

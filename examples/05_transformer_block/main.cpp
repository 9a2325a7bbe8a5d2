// The attention block of a transformer, sharded over the sequence:
//
//     y = x + attention(rmsnorm(x) Wq, rmsnorm(x) Wk, rmsnorm(x) Wv) Wo
//
// Every rank owns its own rows of x from end to end. Norm and projections (a BLAS) work row by row
// and need no communication. Tokens meet only in the longspan layer, with the queries sharded like
// the keys (Options::queries). The result is compared with the block in one piece.
#include <cblas.h>
#include <mpi.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <longspan/longspan.hpp>
#include <longspan/mpi.hpp>

namespace {

using longspan::Shard;
using Matrix = std::vector<float>;  // row-major

constexpr int kModel = 256, kHeads = 8, kKvHeads = 2, kDim = 32;
constexpr std::int64_t kTokens = 1'500;
constexpr longspan::Sharding kSharding{longspan::Layout::contiguous};

Matrix random_matrix(std::int64_t rows, std::int64_t columns, float deviation, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  Matrix values(rows * columns);
  for (float& value : values) value = normal(bits);
  return values;
}

/// a [rows, inner] * b [inner, columns]
Matrix multiply(const Matrix& a, const Matrix& b, std::int64_t rows, int inner, int columns) {
  Matrix c(rows * columns);
  if (rows > 0)
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows), columns, inner,
                1.0f, a.data(), inner, b.data(), columns, 0.0f, c.data(), columns);
  return c;
}

/// Each row divided by the root of its mean square.
Matrix rms_norm(const Matrix& x, std::int64_t rows) {
  Matrix y(x.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    float squares = 0;
    for (int i = 0; i < kModel; ++i) squares += x[r * kModel + i] * x[r * kModel + i];
    const float scale = 1.0f / std::sqrt(squares / kModel + 1e-6f);
    for (int i = 0; i < kModel; ++i) y[r * kModel + i] = x[r * kModel + i] * scale;
  }
  return y;
}

struct Weights {
  float deviation = 1.0f / std::sqrt(static_cast<float>(kModel));
  Matrix q = random_matrix(kModel, kHeads* kDim, deviation, 1);
  Matrix k = random_matrix(kModel, kKvHeads* kDim, deviation, 2);
  Matrix v = random_matrix(kModel, kKvHeads* kDim, deviation, 3);
  Matrix out = random_matrix(kHeads * kDim, kModel, deviation, 4);
};

/// The rows of a sequence of kTokens that one rank of `world` owns, through the block.
class Block {
 public:
  explicit Block(const longspan::Communicator& world)
      : shard_(kSharding.resolve(kTokens, world.rank(), world.size())),
        layer_(world, {.heads = kHeads,
                       .kv_heads = kKvHeads,
                       .head_dim = kDim,
                       .dtypes = {.compute = longspan::fp32},
                       .mask = {.causal = true},
                       .limits = {.max_tokens = shard_.max_local_len(kTokens)},
                       .keys = kSharding,
                       .queries = kSharding}) {}

  const Shard& shard() const { return shard_; }

  // [block]
  Matrix forward(const Matrix& x, const Weights& w) {
    const std::int64_t rows = shard_.local_len(kTokens);
    const Matrix normed = rms_norm(x, rows);
    Matrix q = multiply(normed, w.q, rows, kModel, kHeads * kDim);
    Matrix k = multiply(normed, w.k, rows, kModel, kKvHeads * kDim);
    Matrix v = multiply(normed, w.v, rows, kModel, kKvHeads * kDim);
    Matrix attended(rows * kHeads * kDim, NAN);

    layer_.run({.q = {q.data(), {rows, kHeads, kDim}},
                .k = {k.data(), {rows, kKvHeads, kDim}},
                .v = {v.data(), {rows, kKvHeads, kDim}},
                .out = {attended.data(), {rows, kHeads, kDim}},
                .total_keys = kTokens,
                .total_tokens = kTokens});
    layer_.wait();

    Matrix y = multiply(attended, w.out, rows, kHeads * kDim, kModel);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += x[i];
    return y;
  }
  // [/block]

 private:
  Shard shard_;
  longspan::Attention layer_;
};

int run() {
  const longspan::Communicator world = longspan::from_mpi(MPI_COMM_WORLD);
  const Weights weights;
  const Matrix x = random_matrix(kTokens, kModel, 1.0f, 5);

  Block sharded(world);
  const std::int64_t rows = sharded.shard().local_len(kTokens);
  const std::int64_t first = rows > 0 ? sharded.shard().position(0, kTokens) : 0;
  const auto own = [&](const Matrix& whole) {
    return Matrix(whole.begin() + first * kModel, whole.begin() + (first + rows) * kModel);
  };
  const Matrix y = sharded.forward(own(x), weights);

  Block alone(longspan::self());
  const Matrix expected = own(alone.forward(x, weights));

  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    difference += std::pow(double{y[i]} - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  const double error = norm > 0 ? std::sqrt(difference / norm) : 0.0;
  const bool right = error < 1e-6;  // fp32 rounding of the projections; false for NaN
  for (int rank = 0; rank < world.size(); ++rank) {
    world.barrier("printing in turn");
    if (rank != world.rank()) continue;
    std::printf("rank %d: rows %lld to %lld of y, error against one piece %.1e by norm, %s\n", rank,
                static_cast<long long>(first), static_cast<long long>(first + rows - 1), error,
                right ? "right" : "WRONG");
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

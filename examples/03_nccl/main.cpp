// Attention over a sequence sharded across GPUs, one process a GPU, over an NCCL communicator that
// the program already has. The run is captured in a CUDA graph, as in a serving engine, and the
// replay is compared with the same attention on one CPU.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <longspan/cuda.hpp>
#include <longspan/longspan.hpp>
#include <longspan/nccl.hpp>

namespace {

using longspan::bf16, longspan::Buffer, longspan::Device, longspan::Shard, longspan::Tensor;
using Values = std::vector<__nv_bfloat16>;

constexpr int kTokens = 4, kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr std::int64_t kKeys = 20'000, kRow = kKvHeads * kDim;
constexpr int kSkipped = 77;  // what ctest takes for "not run here"

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}
void check(ncclResult_t status) {
  if (status != ncclSuccess) throw std::runtime_error(ncclGetErrorString(status));
}

/// [rows, heads, dim] of order 1, the same on every rank.
Values random_rows(std::int64_t rows, int heads, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  Values values(rows * heads * kDim);
  for (auto& value : values) value = __float2bfloat16(normal(bits));
  return values;
}

Values cut(const Values& whole, const Shard& shard) {
  Values own(shard.local_len(kKeys) * kRow);
  for (std::size_t i = 0; i < own.size() / kRow; ++i)
    std::memcpy(&own[i * kRow], &whole[shard.position(static_cast<std::int64_t>(i), kKeys) * kRow],
                kRow * sizeof(__nv_bfloat16));
  return own;
}

Buffer to_gpu(const Values& values) {
  Buffer buffer(Device::cuda, values.size() * sizeof(__nv_bfloat16));
  buffer.upload(values.data());
  return buffer;
}

/// The ranks of MPI_COMM_WORLD, each on its own GPU of this node.
ncclComm_t make_nccl(int rank, int ranks) {
  check(cudaSetDevice(rank));
  ncclUniqueId id;
  if (rank == 0) check(ncclGetUniqueId(&id));
  MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm = nullptr;
  check(ncclCommInitRank(&comm, ranks, id, rank));
  return comm;
}

/// The whole result on this CPU, by the host backend of the same library.
Values attend_on_host(Values q, Values k, Values v) {
  Values out(q.size());
  longspan::attend(longspan::self(),
                   {.q = Tensor(q.data(), bf16, {kTokens, kHeads, kDim}),
                    .k = Tensor(k.data(), bf16, {kKeys, kKvHeads, kDim}),
                    .v = Tensor(v.data(), bf16, {kKeys, kKvHeads, kDim}),
                    .out = Tensor(out.data(), bf16, {kTokens, kHeads, kDim}),
                    .total_keys = kKeys},
                   {.mask = {.causal = true}});
  return out;
}

int run(ncclComm_t nccl) {
  const Values q = random_rows(kTokens, kHeads, 1);
  const Values k = random_rows(kKeys, kKvHeads, 2), v = random_rows(kKeys, kKvHeads, 3);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  // [nccl]
  const longspan::Communicator world = longspan::from_nccl(nccl);
  longspan::Attention layer(world, {.heads = kHeads,
                                    .kv_heads = kKvHeads,
                                    .head_dim = kDim,
                                    .dtypes = {.compute = bf16},
                                    .mask = {.causal = true},
                                    .limits = {.max_tokens = kTokens},
                                    .keys = {longspan::Layout::contiguous}});
  const Shard shard = layer.shard(kKeys);
  const std::int64_t keys = shard.local_len(kKeys);
  const Buffer my_q = to_gpu(q), my_k = to_gpu(cut(k, shard)), my_v = to_gpu(cut(v, shard));
  const Buffer out = to_gpu(Values(q.size(), __float2bfloat16(NAN)));
  const longspan::AttentionArgs args{
      .q = Tensor(my_q.data(), bf16, {kTokens, kHeads, kDim}, Device::cuda),
      .k = Tensor(my_k.data(), bf16, {keys, kKvHeads, kDim}, Device::cuda),
      .v = Tensor(my_v.data(), bf16, {keys, kKvHeads, kDim}, Device::cuda),
      .out = Tensor(out.data(), bf16, {kTokens, kHeads, kDim}, Device::cuda),
      .total_keys = kKeys};

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.run(args, longspan::as_stream(stream));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  check(cudaGraphLaunch(replay, stream));
  layer.wait(longspan::as_stream(stream));
  // [/nccl]

  Values mine(q.size());
  out.download(mine.data());
  const Values expected = attend_on_host(q, k, v);
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const double host = __bfloat162float(expected[i]);
    difference += std::pow(__bfloat162float(mine[i]) - host, 2);
    norm += host * host;
  }
  const double error = std::sqrt(difference / norm);
  const bool right = error < 4e-3;  // one rounding to bf16, 2^-8; false for NaN
  std::printf("rank %d of %d: %lld keys on its GPU, against the CPU %.1e by norm, %s\n",
              world.rank(), world.size(), static_cast<long long>(keys), error,
              right ? "right" : "WRONG");
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1, status = EXIT_FAILURE;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (longspan::gpu_count() < ranks) {
    if (rank == 0)
      std::printf("skipped: %d ranks need %d GPUs, here are %d\n", ranks, ranks,
                  longspan::gpu_count());
    MPI_Finalize();
    return kSkipped;
  }
  try {
    ncclComm_t nccl = make_nccl(rank, ranks);
    status = run(nccl);
    ncclCommDestroy(nccl);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  MPI_Finalize();
  return status;
}

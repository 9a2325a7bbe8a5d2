// Copies rows and an lse, with any strides, to send buffers or to their final place, in the widest
// word that divides all of the rows; and distributes states.
#include <algorithm>

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/combine/run_headers.cuh"
#include "kernels/cuda/common/await_count.cuh"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// Signals to every rank that this one's attention has ended, and waits until theirs have. It is a
/// kernel of one block: blocks have no order, so in a large grid the blocks that wait could keep
/// out the one that signals.
__global__ void meet_kernel(const __grid_constant__ PutRanks putters) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= putters.ranks || rank == putters.rank) return;
  PutFlags& own = *putters.flags[putters.rank];
  arch::count_release(putters.flags[rank]->ended + putters.rank, 1);
  await_count(own, own.ended + rank, own.runs);
}

/// threadIdx.x = words of a row, (blockIdx.x, threadIdx.y) = rows, numbered token * heads + head.
template <class Word>
__global__ __launch_bounds__(kThreads) void pack_outputs_kernel(
    const __grid_constant__ PackOutputsParams p) {
  if (are_of_different_runs(p.headers)) return;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const std::int64_t token = row / p.heads, head = row - token * p.heads;
  if (token >= p.tokens) return;
  const PackOutputsParams::RowMove move = p.move(token);
  if (move.to < 0 || !in_batch(p.batch, move.to)) return;
  const StorageFormat format = storage_of(p.dtype);
  const auto row_at = [&](const TokenRows& rows, std::int64_t at) {
    return rows.address(format, rows.offset(at, head));
  };
  const Word* from = reinterpret_cast<const Word*>(row_at(p.from, move.from));
  Word* to = reinterpret_cast<Word*>(row_at(p.to, move.to));
  const int words =
      static_cast<int>(format.row_bytes(p.dim) / static_cast<std::int64_t>(sizeof(Word)));
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
    to[i] = from[i];
  if (threadIdx.x == 0 && p.to_lse.data != nullptr)
    *p.to_lse.at(move.to, head) = *p.from_lse.at(move.from, head);
}

template <class Word>
void launch(const PackOutputsParams& p, cudaStream_t stream) {
  const std::int64_t words = p.row_bytes() / static_cast<std::int64_t>(sizeof(Word));
  int columns = 1;
  while (columns < 32 && columns < words) columns *= 2;
  const dim3 block(static_cast<unsigned>(columns), static_cast<unsigned>(kThreads / columns));
  const std::int64_t blocks = (p.tokens * p.heads + block.y - 1) / block.y;
  launch_kernel(pack_outputs_kernel<Word>, {static_cast<unsigned>(blocks), block, stream}, p);
}

/// threadIdx.x = four columns of a state, (blockIdx.x, threadIdx.y) = moves.
__global__ __launch_bounds__(kThreads) void pack_states_kernel(
    const __grid_constant__ PackStatesParams p) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= p.moves()) return;
  const PackStatesParams::RowMove move = p.move(i);
  if (move.from < 0) return;
  if (threadIdx.x == 0) p.to.stats(move.part)[move.to] = p.from.stats(p.slot)[move.from];
  const float4* from = reinterpret_cast<const float4*>(p.from.o(p.slot, move.from));
  float4* to = reinterpret_cast<float4*>(p.to.o(move.part, move.to));
  for (int c = static_cast<int>(threadIdx.x); c < p.from.columns() / 4;
       c += static_cast<int>(blockDim.x))
    to[c] = from[c];
}

}  // namespace

void pack_states(const PackStatesParams& p, cudaStream_t stream) {
  if (p.moves() == 0) return;
  const dim3 block(32, kThreads / 32);
  const std::int64_t blocks = (p.moves() + block.y - 1) / block.y;
  launch_kernel(pack_states_kernel, {static_cast<unsigned>(blocks), block, stream}, p);
}

void pack_outputs(const PackOutputsParams& p, cudaStream_t stream) {
  if (p.putters) launch_kernel(meet_kernel, {1, 32, stream}, p.putters);
  if (p.tokens == 0) return;
  switch (p.word()) {
    case 16:
      return launch<uint4>(p, stream);
    case 8:
      return launch<uint2>(p, stream);
    case 4:
      return launch<std::uint32_t>(p, stream);
    case 2:
      return launch<std::uint16_t>(p, stream);
    default:
      return launch<std::uint8_t>(p, stream);
  }
}

}  // namespace longspan::kernels::cuda

// Moves keys and values between two places of any form (kernels/move_keys.hpp). A warp takes a run
// of keys, and its threads the words of a row: as wide as elements are adjacent at both places.
#include "kernels/move_keys.hpp"

#include <algorithm>

#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/combine/run_headers.cuh"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kRuns = 8;  // of a block

/// Moves a part of the keys. threadIdx.y is a run, threadIdx.x the words of its rows.
template <class Word>
__global__ void move_keys_kernel(const __grid_constant__ MoveKeysParams p, KeyPart part) {
  if (are_of_different_runs(p.headers)) return;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kRuns + threadIdx.y;
  if (item >= p.count) return;
  const KeyRun run = p.runs[item];
  const KeyMove move = part_of(p, part);
  const StorageFormat format = storage_of(p.dtype);
  const int at_once = format.elements(static_cast<int>(sizeof(Word)));  // of a word
  const int words = move.dim / at_once;                                 // of a head
  for (std::int64_t i = 0; i < run.count; ++i) {
    const CacheRow source = p.from.row(run.sequence, run.from_key + i);
    const CacheRow target = p.to.row(run.sequence, run.to_key + i);
    if (source.row < 0 || target.row < 0) continue;
    const std::byte* from = move.from.address(format, source.offset(move.from));
    std::byte* to = move.to.address(format, target.offset(move.to));
    for (int w = static_cast<int>(threadIdx.x); w < p.kv_heads * words; w += kWarp) {
      const int head = w / words, column = w % words * at_once;
      const std::int64_t from_at = head * move.from.head_stride + move.from.column(column);
      const std::int64_t to_at = head * move.to.head_stride + move.to.column(column);
      *reinterpret_cast<Word*>(to + format.bytes(to_at)) =
          *reinterpret_cast<const Word*>(from + format.bytes(from_at));
    }
  }
}

void move(const MoveKeysParams& p, KeyPart part, cudaStream_t stream) {
  const KeyMove moved = part_of(p, part);
  if (moved.dim == 0) return;
  const std::int64_t blocks = std::max<std::int64_t>((p.count + kRuns - 1) / kRuns, 1);
  const dim3 grid(static_cast<unsigned>(blocks));
  const LaunchConfig how{grid, dim3(kWarp, kRuns), stream};
  switch (move_word(p, moved)) {
    case 16:
      return launch_kernel(move_keys_kernel<uint4>, how, p, part);
    case 8:
      return launch_kernel(move_keys_kernel<uint2>, how, p, part);
    case 4:
      return launch_kernel(move_keys_kernel<std::uint32_t>, how, p, part);
    case 2:
      return launch_kernel(move_keys_kernel<std::uint16_t>, how, p, part);
    default:
      return launch_kernel(move_keys_kernel<std::uint8_t>, how, p, part);
  }
}

}  // namespace

void move_keys(const MoveKeysParams& p, cudaStream_t stream) {
  if (p.count <= 0 && p.headers.digests == nullptr) return;
  for (const KeyPart part : {KeyPart::keys, KeyPart::values, KeyPart::scales})
    move(p, part, stream);
}

}  // namespace longspan::kernels::cuda

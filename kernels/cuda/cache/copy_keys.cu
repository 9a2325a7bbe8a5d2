// Copies keys and values from a cache of any form to contiguous rows (kernels/copy_keys.hpp). A
// warp takes a key at a time, and its threads the words of that row: as wide as elements are
// adjacent, and single elements if a page stores the keys of one column adjacently.
#include "kernels/copy_keys.hpp"

#include <algorithm>

#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kKeys = 8;               // of a block, at a time
constexpr int kRounds = 4;             // of keys that a block takes one after another
constexpr unsigned kMostRows = 65535;  // of a grid

/// Copies a part of the keys. threadIdx.y is a key, threadIdx.x its words; blockIdx.y is a
/// sequence, and every gridDim.y-th after it.
template <class Word>
__global__ void copy_keys_kernel(const __grid_constant__ CopyKeysParams p, KeyPart part) {
  const Geometry& g = p.geometry;
  const KeyCopy copy = part_of(p, part);
  const StorageFormat format = storage_of(g.kv_dtype);
  const int at_once = format.elements(static_cast<int>(sizeof(Word)));  // of a word
  const int words = copy.dim / at_once;                                 // of a head
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kKeys * kRounds + threadIdx.y;
  for (int b = static_cast<int>(blockIdx.y); b < g.batch.size; b += static_cast<int>(gridDim.y)) {
    const Interval keys = copied_keys(p, b);
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t i = first + round * kKeys;
      if (!keys.contains(i)) continue;
      const KeyPlace place = place_of(p, b, i);
      if (place.to < 0) continue;
      const std::byte* from = copy.from.address(format, place.from.offset(copy.from));
      std::byte* to = copy.to + format.bytes(place.to * g.kv_heads * copy.step);
      for (int w = static_cast<int>(threadIdx.x); w < g.kv_heads * words; w += kWarp) {
        const int head = w / words, column = w % words * at_once;
        const std::int64_t at = head * copy.from.head_stride + copy.from.column(column);
        *reinterpret_cast<Word*>(to + format.bytes(head * std::int64_t{copy.step} + column)) =
            *reinterpret_cast<const Word*>(from + format.bytes(at));
      }
    }
  }
}

void copy(const CopyKeysParams& p, KeyPart part, cudaStream_t stream) {
  const KeyCopy copied = part_of(p, part);
  if (copied.to == nullptr) return;
  const std::int64_t a_block = std::int64_t{kKeys} * kRounds;
  const dim3 grid(static_cast<unsigned>((p.longest + a_block - 1) / a_block),
                  std::min(static_cast<unsigned>(p.geometry.batch.size), kMostRows));
  const LaunchConfig how{grid, dim3(kWarp, kKeys), stream};
  const StorageFormat format = storage_of(p.geometry.kv_dtype);
  switch (copy_word(copied, p.pages, format)) {
    case 16:
      return launch_kernel(copy_keys_kernel<uint4>, how, p, part);
    case 8:
      return launch_kernel(copy_keys_kernel<uint2>, how, p, part);
    case 4:
      return launch_kernel(copy_keys_kernel<std::uint32_t>, how, p, part);
    case 2:
      return launch_kernel(copy_keys_kernel<std::uint16_t>, how, p, part);
    default:
      return launch_kernel(copy_keys_kernel<std::uint8_t>, how, p, part);
  }
}

}  // namespace

void copy_keys(const CopyKeysParams& p, cudaStream_t stream) {
  if (p.longest <= 0 || p.geometry.batch.size == 0) return;
  for (const KeyPart part : {KeyPart::keys, KeyPart::values, KeyPart::scales})
    copy(p, part, stream);
}

}  // namespace longspan::kernels::cuda

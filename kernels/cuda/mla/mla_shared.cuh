// The shared memory of a block of the kernels for latent keys (MLA). A tile of 64 keys is loaded
// once and is both K, with all its columns, and V, with the first ones. It lies in boxes of 64 keys
// x 64 columns, each with a barrier of its own, so that products begin with the first box.
#pragma once

#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/decode/decode_shared.cuh"

namespace longspan::kernels::cuda {

inline constexpr int kLatentTile = 64;                       // keys
inline constexpr int kLatentDim = 576, kLatentValues = 512;  // the most columns of K, and of V
inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxBytes = kLatentTile * kBoxColumns * 2;
inline constexpr int kBoxes = kLatentDim / kBoxColumns;          // of a tile
inline constexpr int kValueBoxes = kLatentValues / kBoxColumns;  // its first ones
inline constexpr int kHalfBoxes = kValueBoxes / 2;

/// The place of a 16-byte chunk in a box, or in a panel of queries: TMA's permutation.
__device__ inline std::uint32_t box_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}

/// Turns products into capped scores. It is rare and large, and no product may be in flight during
/// the call. It changes a copy, so that the original stays in registers.
template <int kCount>
__device__ __noinline__ void cap_products(float (&s)[kCount], Score score) {
#pragma unroll 1
  for (float& one : s) one = score(one);
}

/// A place in the ring of boxes, and the parity of its barriers in this round.
template <class Traits>
struct BoxState {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance(int boxes) {
    stage += boxes;
    if (stage < Traits::kSlots) return;
    stage -= Traits::kSlots;
    parity ^= 1;
  }
};

template <class Traits>
struct alignas(1024) MlaShared {
  static constexpr int kRows = Traits::kRows;
  static constexpr int kPieces = 2, kAhead = 4, kSegments = 8;  // as in DecodeShared
  static constexpr int kPlaces = kSegment;

  std::byte box[Traits::kSlots][kBoxBytes];  // a ring; a segment is two tiles of kBoxes
  std::byte queries[kBoxes][kRows * 128];
  // In order: of a tile. P, and S by quarters of K's columns, are [rows, keys]. The rows of S are
  // so long that lanes' stores of two keys lie in different banks.
  std::byte weights[Traits::kInOrder ? kRows * 128 : 16];
  float products[Traits::kInOrder ? 4 : 1][kRows][Traits::kInOrder ? kLatentTile + 8 : 4];
  Stats stats[kRows];
  float ratios[kRows];

  // One pass: after each tile of a segment.
  float tops[2][kRows];
  float sums[kRows];
  DecodeWorkTile piece[kPieces];
  Interval views[kPieces][kRows];
  arch::Barrier has_queries[kPieces], done[kPieces];
  arch::Barrier queries_free;  // pieces share the queries' memory

  DecodeSegment segments[kSegments];
  int levels[kSegments];
  KeyPlace places[kAhead][kPlaces];
  arch::Barrier known[kAhead], loaded[kAhead];

  arch::Barrier full[Traits::kSlots], free[Traits::kSlots];
  arch::Barrier ready[2];  // one pass: the weights of a tile are in its last box
  SequenceOrder order;     // used only by the scheduler

  __device__ void init() {
    if (threadIdx.x == 0) {
      constexpr int kWarps = Traits::kThreads / 32;
      for (int i = 0; i < kPieces; ++i) {
        has_queries[i].init(1);
        done[i].init(kWarps);
      }
      queries_free.init(kWarps);
      for (int i = 0; i < kAhead; ++i) {
        known[i].init(1);
        loaded[i].init(Traits::kLoaders / 32);
      }
      // In one pass a warpgroup has half of the values, and alone releases their boxes.
      for (int i = 0; i < Traits::kSlots; ++i) {
        full[i].init(1);
        free[i].init(Traits::kInOrder || i % kBoxes == kBoxes - 1 ? kWarps : kWarps / 2);
      }
      for (arch::Barrier& tile : ready) tile.init(4);
      arch::publish_barriers();
    }
  }

  /// Loads the queries of the piece in a slot, by one warp: packed rows in panels of 64 columns.
  /// Rows past the last, and columns past the head's, are zeros.
  __device__ __forceinline__ void load_queries(const AttendParams& p, int slot, int lane) {
    const DecodeWorkTile& own = piece[slot];
    const int rows = own.work.rows, chunk = lane % 8;
    std::byte* const to = queries[0];
#pragma unroll 1
    for (int row = lane / 8; row < kRows; row += 4) {
      const PackedRow at = packed_row(own.work, row < rows ? row : 0);
      const auto* from = static_cast<const std::uint16_t*>(p.q.data) +
                         p.q.offset(own.sequence.first_row + at.token, at.head) + chunk * 8;
      const std::uint32_t place = arch::shared_address(to) + box_offset(row, chunk);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int column = box * kBoxColumns;
        const bool exists = row < rows && column + chunk * 8 < p.head_dim;
        arch::copy_async<16>(place + static_cast<std::uint32_t>(box * kRows * 128),
                             exists ? from + column : p.q.data, exists ? 16 : 0);
      }
    }
    arch::commit_copies();
    arch::wait_copies<0>();
    sm90::fence_shared_stores();
  }
};

}  // namespace longspan::kernels::cuda

// The thread block of the decode kernel: who is in it, and what its warps pass to each other in
// shared memory.
//
//     finder (a warp)      what to do next: piece[], and of each of its nodes segment[] after
//                          segment[] (decode_work.cuh)
//     consumers (4 warps)  segments -> stage[] -> a state for each node (decode_stream.cuh loads,
//                          attend_decode.cuh computes) -> the piece's state (decode_finish.cuh)
//
// A piece is a row tile, a kv head and an aligned part of the fixed order's tree. Its part is cut
// into nodes, and each group of consumers takes two: one from the front and one from the back. A
// length just above a power of two leaves the second half of every subtree nearly empty, and this
// way every group gets as much of the full halves as of the empty ones.
#pragma once

#include "kernels/cuda/arch/copy_engine.cuh"
#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/decode_boxes.hpp"
#include "kernels/cuda/decode_stack.cuh"
#include "kernels/cuda/fold_stack.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

template <class T, int kHeadDim, int kGroupCount, Loader kKeyLoader>
struct DecodeTraits {
  using Element = T;
  static constexpr Loader kLoader = kKeyLoader;
  static constexpr bool kPlain = kLoader == Loader::plain;  // no pages, no scales, no bias
  static constexpr int kDim = kHeadDim;

  static constexpr int kWarps = 4;  // consumers
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kGroups = kGroupCount;      // each reads its own keys: 1, 2 or 4
  static constexpr int kTeam = kWarps / kGroups;   // warps of a group: they share its keys
  static constexpr int kWarpRows = 8;              // packed rows of a warp
  static constexpr int kRows = kWarpRows * kTeam;  // and of a piece
  static constexpr int kNodes = kGroups == 1 ? 1 : kDim <= 128 ? 2 * kGroups : kGroups;
  static constexpr int kGroupNodes = kNodes / kGroups;

  static constexpr int kTile = kBoxKeys;           // keys of a product
  static constexpr int kTiles = kSegment / kTile;  // of a segment
  static constexpr int kTileBytes = kTile * kDim * 2;
  using Layout = Tile<T, kDim, kTile>;  // of each tile of a stage
  static constexpr int kStageTiles = kTeam;
  static constexpr int kStageKeys = kTile * kStageTiles;
  static constexpr int kStageBytes = kStageTiles * kTileBytes;
  static constexpr int kKeyStages = kTiles / kStageTiles;
  static constexpr int kSegmentStages = 2 * kKeyStages;  // keys, then values
  static constexpr int kBlocks = kDim <= 128 ? 2 : 1;    // that share a multiprocessor
  // 128 KB under way in a multiprocessor are enough; more of them made every read slower.
  static constexpr int kFits = 128 * 1024 / kBlocks / kGroups / kStageBytes;
  static constexpr int kStages = kFits < kSegmentStages ? kFits : kSegmentStages;
  static_assert(kSegmentStages % kStages == 0);  // each segment begins with the first stage
  // Stages that a warp waits for at a time: products of two tiles hide each other's latencies.
  static constexpr int kStepStages = kStageTiles == 1 && kStages >= 4 ? 2 : 1;
  static constexpr int kStepTiles = kStageTiles * kStepStages;
  static constexpr int kPair = kStepTiles < 2 ? 1 : 2;  // tiles whose products interleave
  static constexpr int kSteps = kTiles / kStepTiles;    // of the keys, and of the values

  static constexpr int kSlices = kDim / 16;  // of dim, a product each
  static_assert(kDim % 16 == 0 && kTiles % kStepTiles == 0);

  struct RowOf {  // a lane's rows: 2t, 2t + 1
    __device__ static constexpr int row(int, int i) { return i % 2; }
  };
  using State = ThreadState<2, kSlices, RowOf>;
  using Stack = DecodeStack<State, kConsumers>;
};

/// What is known of a piece of work.
struct DecodePiece {
  Work work;     // rows == 0: there is no further piece
  int splits;    // of its row tile: at most Plan::splits
  int arrivals;  // where they are counted, in DecodeEnd::arrivals
  Sequence sequence;
  View view;
  float score_scale, value_scale;  // of the kv head; not set where the loader is plain
};

/// What a group of consumers has to do next.
struct alignas(16) DecodeSegment {
  std::int64_t index;  // local; < 0: the node has none
  std::int32_t row;    // of k and v: that of its first key, where keys are contiguous
  std::int16_t level;  // on which its state waits; DecodeStack::kAll: it is the node's last
  std::int8_t piece;   // its place; < 0: there is nothing further
  bool whole;          // all its keys are wanted, and rows may come in boxes
};

template <class Traits>
struct DecodeShared {
  static constexpr int kSegments = 4;               // of a group, known at a time
  static constexpr int kPieces = kSegments;         // as many may belong to as many pieces
  static constexpr int kStride = Traits::kDim + 4;  // of a row of states: shifts it by four banks

  alignas(1024) std::byte stage[Traits::kGroups][Traits::kStages][Traits::kStageBytes];
  alignas(16) float o[Traits::kNodes * Traits::kRows][kStride];  // states of the nodes
  Stats stats[Traits::kNodes * Traits::kRows];
  static_assert(sizeof(float) * Traits::kWarpRows * kStride >= Traits::Stack::kLowBytes);
  DecodePiece piece[kPieces + 1];  // the last: of the rehearsal, see attend_decode.cuh
  Interval views[kPieces + 1][Traits::kRows];
  PackedRow rows[kPieces + 1][Traits::kPlain ? 1 : Traits::kRows];  // for biases
  DecodeSegment segment[Traits::kGroups][kSegments];
  arch::Barrier stage_full[Traits::kGroups][Traits::kStages];
  arch::Barrier segment_full[Traits::kGroups][kSegments], segment_empty[Traits::kGroups][kSegments];
  arch::Barrier piece_empty[kPieces];
  int is_last;  // of the pieces that fold together

  /// The first of the warp's rows of a node.
  __device__ static int row_of(int node) {
    return node * Traits::kRows +
           static_cast<int>(threadIdx.x) / 32 % Traits::kTeam * Traits::kWarpRows;
  }

  __device__ void init(int thread) {
    if (thread < Traits::kGroups * Traits::kStages) stage_full[0][thread].init(Traits::kTeam);
    if (thread < Traits::kGroups * kSegments) {
      segment_full[0][thread].init(1);
      segment_empty[0][thread].init(Traits::kTeam);
    }
    if (thread < kPieces) piece_empty[thread].init(Traits::kWarps);
    arch::publish_barriers();
    if (thread == 0) {  // the rehearsal's: one row, which sees the first segment
      DecodePiece& none = piece[kPieces];
      none = {};
      none.work.rows = 1;
      none.splits = 1;
      none.view.any = none.view.all = {0, kSegment};
    }
  }
};

/// A place in a ring of kCount, and the parity of its turn.
template <int kCount>
struct Turn {
  int at = 0;
  std::uint32_t parity = 0;

  __device__ void next() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};

/// A barrier of a group.
template <class Traits>
__device__ inline void sync_team() {
  if constexpr (Traits::kTeam == 1)
    __syncwarp();
  else
    arch::named_sync(2 + static_cast<int>(threadIdx.x) / (32 * Traits::kTeam), 32 * Traits::kTeam);
}

/// A barrier of the consumers.
template <class Traits>
__device__ inline void sync_consumers() {
  arch::named_sync(1, Traits::kConsumers);
}

}  // namespace longspan::kernels::cuda

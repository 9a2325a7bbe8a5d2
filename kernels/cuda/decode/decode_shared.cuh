// The shared memory of a block of the decode kernel, which three kinds of warps use: the scheduler
// finds work tiles and announces their segments (decode_scheduler.cuh), the producers load them
// (decode_producer.cuh) and the consumers multiply (attend_decode.cuh). Rings of pieces (work
// tiles), of segments and of stages couple them. Each entry of a ring has a barrier for "may be
// read", and one for "may be filled again".
#pragma once

#include "kernels/cuda/arch/tma.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/fixed_order.cuh"
#include "kernels/cuda/common/pipeline_state.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/decode/decode_operands.cuh"
#include "kernels/cuda/decode/decode_order.cuh"
#include "kernels/cuda/decode/decode_pages.cuh"
#include "kernels/cuda/decode/decode_parts.cuh"

namespace longspan::kernels::cuda {

/// A segment of a work tile.
struct DecodeSegment {
  std::int32_t index;         // local; < 0: no segment is left, and the block is done
  std::int16_t piece;         // slot of its work tile
  std::int8_t apart, aparts;  // the first stage of its keys, and of its values, that TMA does not
                              // load, and the number of such stages

  __device__ explicit operator bool() const { return index >= 0; }
};

/// What the warps share about a work tile.
struct DecodeWorkTile {
  TileCoord work;
  Sequence sequence;
  View view;
  float score_scale, value_scale;  // of the kv head; the plain loader leaves them unset
};

/// The shared memory of a block besides its ring of stages.
template <class Traits>
struct alignas(16) DecodeShared {
  // Work tiles that some warp may read: one whose state is being stored, and those found since.
  static constexpr int kPieces = sizeof(DecodeQueries<Traits>) > 8 * 1024 ? 2 : 3;
  // kAhead counts the segment that is being loaded and those announced ahead of it. The consumers
  // are up to two segments behind it.
  static constexpr int kAhead = 4, kSegments = 8;
  static_assert(Traits::kStages <= 2 * Traits::kSegmentStages && kAhead + 2 < kSegments);
  // Keys of a segment whose places are looked up.
  static constexpr int kPlaces = Traits::kPlain ? Traits::kTiles : kSegment;

  DecodeQueries<Traits> queries[kPieces];
  SegmentParts<Traits> parts;
  DecodeWorkTile piece[kPieces];
  Interval views[kPieces][Traits::kRows];
  QueryRow rows[kPieces][Traits::kPlain ? 1 : Traits::kRows];  // for biases
  arch::Barrier has_queries[kPieces], done[kPieces];

  DecodeSegment segments[kSegments];
  int levels[kSegments];  // the level of DecodeStack on which a segment's state waits; that of a
                          // work tile's first segment is set with its queries
  KeyPlace places[kAhead][kPlaces];
  arch::Barrier known[kAhead], loaded[kAhead];

  arch::Barrier full[Traits::kStages], free[Traits::kStages];
  SequenceOrder order;  // used only by the scheduler

  __device__ void init() {
    if (threadIdx.x < Traits::kStages) {
      full[threadIdx.x].init(1);
      free[threadIdx.x].init(Traits::kWarps);
    }
    if (threadIdx.x < kPieces) {
      has_queries[threadIdx.x].init(1);
      done[threadIdx.x].init(Traits::kWarps);
    }
    if (threadIdx.x < kAhead) {
      known[threadIdx.x].init(1);
      loaded[threadIdx.x].init(Traits::kLoaders / 32);
    }
    arch::publish_barriers();
  }
};

/// A consumer warp's iteration over the ring of stages.
template <class Traits>
class DecodeReader {
 public:
  __device__ DecodeReader(typename Traits::Shared& shared, std::uint32_t ring)
      : shared_(shared), ring_(ring) {}

  /// Waits until the stage is full, and returns its address.
  __device__ __forceinline__ std::uint32_t wait() {
    shared_.full[at_.stage].wait(at_.parity);
    return ring_ + at_.stage * Traits::kStageBytes;
  }
  /// Releases the stage: this warp has read it.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared_.free[at_.stage].arrive();
    at_.advance();
  }

 private:
  typename Traits::Shared& shared_;
  const std::uint32_t ring_;
  PipelineState<Traits::kStages> at_;
};

}  // namespace longspan::kernels::cuda

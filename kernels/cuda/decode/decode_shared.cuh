// What the warps of a block of the decode kernel share: the one that finds work tiles and says
// which segments they have (decode_scheduler.cuh), those that load (decode_producer.cuh) and those
// that multiply (attend_decode.cuh). Each of them goes round rings, of pieces, of segments or of
// stages, and a barrier in each place of one says that the place may be read, or filled again.
#pragma once

#include "kernels/cuda/arch/tma.cuh"
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
  std::int32_t index;         // local; < 0: none, all is done
  std::int16_t piece;         // its slot
  std::int8_t apart, aparts;  // of the stages of its keys, and of its values, the first that does
                              // not come by box, and how many do not

  __device__ explicit operator bool() const { return index >= 0; }
};

/// What is known of a work tile.
struct DecodeWorkTile {
  TileCoord work;
  Sequence sequence;
  View view;
  float score_scale, value_scale;  // of the kv head; not set where the producer is plain
};

/// Shared memory beside the ring.
template <class Traits>
struct alignas(16) DecodeShared {
  // Pieces that somebody may look at: of the one whose state is stored, and those that are found.
  static constexpr int kPieces = sizeof(DecodeQueries<Traits>) > 8 * 1024 ? 2 : 3;
  // Segments ahead of the one in load, and that one; those that are multiplied are up to two
  // behind it.
  static constexpr int kAhead = 4, kSegments = 8;
  static_assert(Traits::kStages <= 2 * Traits::kSegmentStages && kAhead + 2 < kSegments);
  // Of a segment, keys that are looked up.
  static constexpr int kPlaces = Traits::kPlain ? Traits::kTiles : kSegment;

  DecodeQueries<Traits> queries[kPieces];
  SegmentParts<Traits> parts;
  DecodeWorkTile piece[kPieces];
  Interval views[kPieces][Traits::kRows];
  QueryRow rows[kPieces][Traits::kPlain ? 1 : Traits::kRows];  // for biases
  arch::Barrier has_queries[kPieces], done[kPieces];

  DecodeSegment segments[kSegments];
  int levels[kSegments];  // on which their states wait, for DecodeStack; of the first of a piece
                          // there when its queries are
  KeyPlace places[kAhead][kPlaces];
  arch::Barrier known[kAhead], loaded[kAhead];

  arch::Barrier full[Traits::kStages], free[Traits::kStages];
  SequenceOrder order;  // the finding warp's

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

/// The ring of stages, as the warps that multiply go round it.
template <class Traits>
class DecodeReader {
 public:
  __device__ DecodeReader(typename Traits::Shared& shared, std::uint32_t ring)
      : shared_(shared), ring_(ring) {}

  /// Waits for the stage; its address.
  __device__ __forceinline__ std::uint32_t wait() {
    shared_.full[at_.stage].wait(at_.parity);
    return ring_ + at_.stage * Traits::kStageBytes;
  }
  /// The warp has read the stage.
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

// The load side of a consumer of the decode kernel: the stages of its group's ring. A segment's
// stages are its keys, then its values; as soon as one was read, it takes the stage of the ring's
// length later. Segments, nodes and pieces follow each other in the ring without a gap.
//
// Where all keys of a segment are wanted and rows are dense, the copy engine (decode_boxes.hpp)
// brings a tile of 16 keys by one instruction; all else comes by cp.async. A stage's barrier counts
// both. Each warp of a team loads its own part of a stage.
#pragma once

#include "kernels/cuda/decode_block.cuh"
#include "kernels/cuda/loader.cuh"

namespace longspan::kernels::cuda {

/// What loads stage `slot` of a group's ring with the keys from `first` on of the segment at `at`.
template <class Traits>
struct DecodeLoad {
  /// By the copy engine: one lane, the warp's tile of the stage. Not inlined, as it stands behind
  /// every step.
  __device__ __noinline__ static void box(DecodeShared<Traits>& shared, const CUtensorMap* map,
                                          int group, int at, int slot, int first) {
#if __CUDA_ARCH__ >= 900
    const DecodeSegment& segment = shared.segment[group][at];
    arch::Barrier& full = shared.stage_full[group][slot];
    const int warp = static_cast<int>(threadIdx.x) / 32 % Traits::kTeam;
    full.arrive_expecting(Traits::kTileBytes);
    arch::load_box(arch::shared_address(shared.stage[group][slot]) + warp * Traits::kTileBytes, map,
                   0, segment.row + first + warp * Traits::kTile, 0,
                   shared.piece[segment.piece].work.kv_head, 0, &full);
#endif
  }

  /// A stage that is not all wanted, or whose layout is none of the usual ones: by all lanes. Rows
  /// by value, as parameters of a kernel that a function takes by reference are read from memory.
  __device__ __noinline__ static void copies(DecodeShared<Traits>& shared, Rows source, int dim,
                                             int group, int at, int slot, int first) {
    const DecodeSegment& segment = shared.segment[group][at];
    const DecodePiece& piece = shared.piece[segment.piece];
    arch::Barrier& full = shared.stage_full[group][slot];
    load_plain<typename Traits::Element, Traits::kDim, Traits::kStageKeys, 32 * Traits::kTeam,
               Traits::kTile>(arch::shared_address(shared.stage[group][slot]), source, dim,
                              piece.work.kv_head, piece.sequence, piece.view,
                              segment.index * kSegment + first);
    arch::arrive_with_copies(full);
#if __CUDA_ARCH__ >= 900
    arch::fence_shared_stores();  // the copy engine may be the next to write here
#endif
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive();
  }
};

template <class Traits>
class DecodeStream {
  using Shared = DecodeShared<Traits>;
  static constexpr int kStages = Traits::kStages;

 public:
  __device__ __forceinline__ DecodeStream(const AttendParams& p, const KeyBoxes& boxes,
                                          Shared& shared)
      : p_(p),
        boxes_(boxes),
        shared_(shared),
        group_(static_cast<int>(threadIdx.x) / 32 / Traits::kTeam),
        ring_(arch::shared_address(shared.stage[group_])) {}

  /// What to do next. If none of its stages is under way yet, the first ones are queued.
  __device__ __forceinline__ DecodeSegment take() {
    if (ahead_ > 0) {
      --ahead_;
      return shared_.segment[group_][work_.at];
    }
    wait_for(work_);
    open(work_.at);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) load(stage);
    return shared_.segment[group_][work_.at];
  }

  /// The segment's work is done.
  __device__ __forceinline__ void end_segment() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared_.segment_empty[group_][work_.at].arrive();
    work_.next();
  }

  /// Waits for a step's stages, `stage` and what follows, of the segment in work.
  __device__ __forceinline__ void acquire(int stage) {
#pragma unroll
    for (int i = 0; i < Traits::kStepStages; ++i)
      shared_.stage_full[group_][(stage + i) % kStages].wait(parity_ ^ (stage / kStages & 1));
  }
  /// Where tile `i` of a step is.
  __device__ __forceinline__ std::uint32_t tile(int stage, int i) const {
    return ring_ + (stage + i / Traits::kStageTiles) % kStages * Traits::kStageBytes +
           i % Traits::kStageTiles * Traits::kTileBytes;
  }
  /// They were read, and take the next loads.
  __device__ __forceinline__ void release(int stage) {
    sync_team<Traits>();
#pragma unroll
    for (int i = 0; i < Traits::kStepStages; ++i) {
      const int next = stage + i + kStages;
      if (next == Traits::kSegmentStages) look_ahead();
      load(next % Traits::kSegmentStages);
    }
    if (stage + Traits::kStepStages == Traits::kSegmentStages)
      parity_ ^= Traits::kSegmentStages / kStages & 1;
  }

 private:
  __device__ __forceinline__ void wait_for(const Turn<Shared::kSegments>& turn) {
    shared_.segment_full[group_][turn.at].wait(turn.parity);
  }

  /// The next segment that has keys comes into load, if it is known early enough.
  __device__ __forceinline__ void look_ahead() {
    Turn<Shared::kSegments> turn = work_;
    bool found = false, ends = false;
#pragma unroll 1
    for (int i = 1; i < Shared::kSegments && !found && !ends; ++i) {
      turn.next();
      if (i <= ahead_) continue;
      wait_for(turn);
      ahead_ = i;
      found = open(turn.at);
      ends = shared_.segment[group_][turn.at].piece < 0;
    }
    if (!found) exists_ = by_box_k_ = by_box_v_ = false;
  }

  /// Puts a segment into load; false: it has no keys.
  __device__ __forceinline__ bool open(int at) {
    load_ = at;
    const DecodeSegment& segment = shared_.segment[group_][at];
    exists_ = segment.index >= 0;
    by_box_k_ = exists_ && segment.whole && boxes_.k_valid;
    by_box_v_ = exists_ && segment.whole && boxes_.v_valid;
    return exists_;
  }

  /// Queues a stage of the segment in load.
  __device__ __forceinline__ void load(int stage) {
    const bool keys = stage < Traits::kKeyStages;
    const int slot = stage % kStages, first = stage % Traits::kKeyStages * Traits::kStageKeys;
    if (keys ? by_box_k_ : by_box_v_) {
      if (threadIdx.x % 32 == 0)
        DecodeLoad<Traits>::box(shared_, keys ? &boxes_.k : &boxes_.v, group_, load_, slot, first);
    } else if (exists_) {
      DecodeLoad<Traits>::copies(shared_, keys ? p_.k : p_.v, p_.dim, group_, load_, slot, first);
    }
  }

  const AttendParams& p_;
  const KeyBoxes& boxes_;
  Shared& shared_;
  const int group_;
  const std::uint32_t ring_;
  Turn<Shared::kSegments> work_;              // place of what is in work
  int ahead_ = 0;                             // how many places further what is in load stands
  std::uint32_t parity_ = 0;                  // of the first stages of the segment in work
  int load_ = 0;                              // place of what is in load
  bool exists_ = false;                       // it has keys, which are wanted
  bool by_box_k_ = false, by_box_v_ = false;  // the copy engine brings them
};

}  // namespace longspan::kernels::cuda

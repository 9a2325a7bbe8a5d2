// Who finds the work of the decode kernel: a warp of its own, so that consumers never wait for
// lengths, views, divisions or tickets. It takes one piece after the other, while the consumers are
// still busy with those before.
//
// Lane g is the guide of group g: it walks over the group's nodes of each piece, and says segment
// by segment what to do.
#pragma once

#include "kernels/cuda/decode_block.cuh"
#include "kernels/cuda/fixed_order.cuh"

namespace longspan::kernels::cuda {

/// A row's view where it takes more than the sequence's length. Apart, so that it does not stand
/// between the start and the first key of the others.
__device__ __noinline__ inline Interval row_view_apart(const AttendParams& p, Sequence sequence,
                                                       std::int64_t token, int split) {
  return row_view(p, sequence, token, split);
}

template <class Traits>
class DecodeFinder {
  using Shared = DecodeShared<Traits>;
  static constexpr unsigned kRestNs = 400;  // a segment takes some 15 us

 public:
  __device__ __forceinline__ DecodeFinder(const AttendParams& p, const Plan& plan, Shared& shared)
      : p_(p), plan_(plan), shared_(shared) {}

  /// Everything. A turn of the loop does a little of all that can be done, and each part of it
  /// stands once in the code, which comes from memory at the start.
  __device__ __forceinline__ void run() {
    bool guides = lane_ < Traits::kGroups;
    while (__any_sync(~0u, guides)) {
      bool rests = true;  // nothing could be done; a loop that looks all the time is in others' way
      // A piece is taken as soon as a group is in the last one known.
      if (!done_ && __any_sync(~0u, guides && entered_ == taken_) && has_room()) {
        take();
        rests = false;
      }
      __syncwarp();  // the piece is written
      if (guides) {
        if (is_found_ && !is_known_) {
          known_ = walk_.segment;
          known_place_ = walk_.place;
          is_known_ = true;
          is_found_ = rests = false;
        }
        const bool idle = !walks_ && !is_known_ && !is_new_;
        if (idle && (node_ > 0 || entered_ < taken_)) {
          enter();
          rests = false;
        }
        if (walks_ && !is_found_) is_found_ = walks_ = walk_.next();
        // A segment's level is known with the next one. A node may have none; nor the group a node.
        const bool ends = done_ && !is_new_ && node_ == 0 && entered_ == taken_;
        if ((is_known_ ? is_found_ || !walks_ : !walks_ && (is_new_ || ends)) &&
            shared_.segment_empty[lane_][segments_.at].test(segments_.parity ^ 1)) {
          guides = say();
          rests = false;
        }
      }
      if (__all_sync(~0u, rests)) __nanosleep(kRestNs);
    }
  }

 private:
  // ---- pieces ---------------------------------------------------------------------------------

  /// The next piece with rows, written to its place.
  __device__ __forceinline__ void take() {
    DecodePiece& piece = shared_.piece[pieces_.at];
    for (;;) {
      const int index = draw();
      if (index >= plan_.works) {
        done_ = true;
        return;
      }
      const Work work = work_of(p_, plan_, index);
      if (work.rows == 0) continue;
      const Sequence sequence = sequence_of(p_, work.sequence);
      const int splits = splits_of(sequence);
      if (work.split >= splits) continue;
      describe(piece, work, sequence);
      if (lane_ == 0) {
        piece.splits = splits;
        piece.arrivals = (index - work.split * plan_.tiles * p_.kv_heads) * plan_.splits;
      }
      ++taken_;
      pieces_.next();
      return;
    }
  }

  /// Splits of this sequence: no more than give each group a segment.
  __device__ __forceinline__ int splits_of(const Sequence& sequence) const {
    if (p_.parts) return plan_.splits;
    const std::int64_t most = segments_of(sequence.local_len) / Traits::kGroups;
    int splits = plan_.splits;
    while (splits > 1 && splits > most) splits /= 2;
    return splits;
  }

  __device__ __forceinline__ void describe(DecodePiece& piece, const Work& work,
                                           const Sequence& sequence) {
    // One query without a window sees every key, and that need not be worked out.
    const bool sees_all = sequence.q_len == 1 && p_.mask.window == 0 && !p_.documents &&
                          !p_.parts && p_.shard.layout != Layout::listed;
    Interval seen{0, sequence.local_len};
    if (!sees_all) {
      const PackedRow at = packed_row(work, min(lane_, work.rows - 1));
      seen = row_view_apart(p_, sequence, at.token, work.split);
    }
    if (lane_ < Traits::kRows) {
      shared_.views[pieces_.at][lane_] = seen;
      if constexpr (!Traits::kPlain)
        shared_.rows[pieces_.at][lane_] = packed_row(work, min(lane_, work.rows - 1));
    }
    const Interval last{__shfl_sync(~0u, seen.begin, work.rows - 1),
                        __shfl_sync(~0u, seen.end, work.rows - 1)};
    if (lane_ == 0) {
      piece.work = work;
      piece.sequence = sequence;
      piece.view = tile_view(p_, sequence, work.split, seen, last);
      if constexpr (!Traits::kPlain) {
        piece.score_scale = p_.scale(work.kv_head);
        piece.value_scale = p_.v_scale[work.kv_head];
      }
    }
  }

  /// Whether the consumers are done with what stood in the next piece's place.
  __device__ __forceinline__ bool has_room() const {
    return __any_sync(~0u, shared_.piece_empty[pieces_.at].test(pieces_.parity ^ 1));
  }

  /// The block's own first; then whatever comes next for whoever is free. A ticket is drawn one
  /// piece early, so that nobody waits for it.
  __device__ __forceinline__ int draw() {
    const int blocks = static_cast<int>(gridDim.x);
    if (index_ < 0)
      index_ = static_cast<int>(blockIdx.x);
    else if (plan_.ticket == nullptr)
      index_ += blocks;
    else
      index_ = __shfl_sync(~0u, ticket_, 0);
    // Each block draws once for each of its pieces and once for none: after the last draw of all,
    // the counter is zero again.
    if (plan_.ticket != nullptr && lane_ == 0)
      ticket_ =
          blocks + static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(plan_.ticket),
                                              static_cast<unsigned>(plan_.works + blocks - 1)));
    return index_;
  }

  // ---- guides ---------------------------------------------------------------------------------

  /// Goes to the group's next node.
  __device__ __forceinline__ void enter() {
    if (node_ == 0) piece_ = piece_ + 1 < Shared::kPieces ? piece_ + 1 : 0;
    const DecodePiece& piece = shared_.piece[piece_];
    const Work& work = piece.work;
    const TreeCut cut = p_.parts ? TreeCut{0, 1} : TreeCut{work.split, piece.splits};
    // The first of the front half, the last of the back half; see decode_block.cuh.
    const int node = node_ == 0 ? lane_ : Traits::kNodes - 1 - lane_;
    walk_ = SegmentWalk(p_.shard.of(work.sequence).order(piece.sequence.kv_len), piece.view.any,
                        cut.split * Traits::kNodes + node, cut.splits * Traits::kNodes);
    walks_ = is_new_ = true;
    if (++node_ == Traits::kGroupNodes) {
      node_ = 0;
      ++entered_;
    }
  }

  /// The known segment; or that there is none in this node; or, false, that there is nothing
  /// further.
  __device__ __forceinline__ bool say() {
    DecodeSegment segment{-1, 0, Traits::Stack::kAll, static_cast<std::int8_t>(piece_), false};
    if (is_known_) {
      const DecodePiece& piece = shared_.piece[piece_];
      const std::int64_t first = known_ * kSegment;
      segment.index = known_;
      segment.row = static_cast<std::int32_t>(piece.sequence.first_key + first);
      segment.whole = piece.view.table == nullptr && first >= piece.view.any.begin &&
                      first + kSegment <= piece.view.any.end;
      if (is_found_)
        segment.level = static_cast<std::int16_t>(finished_level(known_place_, walk_.place));
    } else if (!is_new_) {
      segment.piece = -1;
    }
    shared_.segment[lane_][segments_.at] = segment;
    shared_.segment_full[lane_][segments_.at].arrive();
    segments_.next();
    is_known_ = is_new_ = false;
    return segment.piece >= 0;
  }

  const AttendParams& p_;
  const Plan& plan_;
  Shared& shared_;
  const int lane_ = static_cast<int>(threadIdx.x) % 32;

  // Of the warp.
  int index_ = -1;                // of the last piece drawn
  int ticket_ = 0;                // of lane 0: the next one
  int taken_ = 0;                 // pieces
  bool done_ = false;             // there is no further piece
  Turn<Shared::kPieces> pieces_;  // the place of the next one

  // Of a guide.
  int entered_ = 0;                  // pieces all of whose nodes were
  int piece_ = Shared::kPieces - 1;  // place of the last that was entered
  int node_ = 0;                     // the next of the group's nodes in it
  SegmentWalk walk_;                 // over the node that was entered last
  bool walks_ = false;               // it has not ended
  bool is_found_ = false;            // it stands on a segment that is not the known one
  bool is_new_ = false;              // nothing was said of the node
  bool is_known_ = false;            // the segment that is said next
  std::int64_t known_ = 0, known_place_ = 0;
  Turn<Shared::kSegments> segments_;
};

}  // namespace longspan::kernels::cuda

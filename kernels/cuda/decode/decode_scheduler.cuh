// The scheduler warp of the decode kernel. It finds one work tile (a piece) after another, loads
// its queries, and announces its segments to the producers, some segments ahead. Finding a piece
// takes long: it reads lengths, and computes what the row tile sees and its part of the fixed
// order's tree. A block is resident about a microsecond before the kernels before it have ended,
// and uses that time. It waits for them only before its first read of memory, which is late if the
// lengths are parameters.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/store_same.cuh"
#include "kernels/cuda/decode/decode_shared.cuh"
#include "kernels/cuda/decode/decode_tensor_maps.hpp"

namespace longspan::kernels::cuda {

/// Stores an empty state for each row of a piece that sees no key.
template <class Traits>
__device__ inline void store_empty(const AttendParams& p, const WorkPlan& plan,
                                   const Sequence& sequence, const TileCoord& work, int thread) {
#pragma unroll 1
  for (int row = 0; row < work.rows; ++row) {
    const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
    if (thread == 0) to.stats() = empty_stats();
#pragma unroll 1
    for (int d = thread; d < to.columns; d += 32) to.o()[d] = 0.0f;
  }
}

/// The number of pieces that have keys; those without come last.
__device__ inline int works_of(const WorkPlan& plan, const SplitsTaken& taken) {
  return taken.turns * static_cast<int>(plan.by_tiles.value * plan.by_kv_heads.value);
}

/// The scheduler warp.
template <class Traits>
class DecodeScheduler {
  using Shared = typename Traits::Shared;

 public:
  __device__ DecodeScheduler(const AttendParams& p, const WorkPlan& plan, const KvTensorMaps& maps,
                             Shared& shared)
      : p_(p), plan_(plan), shared_(shared), works_(plan.works) {
    if (p.batch.query_start != nullptr || plan.numbers.where_uneven || plan.ticket != nullptr)
      arch::wait_for_kernels_before();
    if (plan.numbers.where_uneven) {
      uneven_ = lengths_differ();
      works_ = works_of(plan, plan.numbers.all_of(uneven_));
    }
    if constexpr (!Traits::kLatent)
      all_places_ = (!maps.k_valid && come_by_places<Traits>(p.k, p.pages, p.head_dim)) ||
                    (!maps.v_valid && come_by_places<Traits>(p.v, p.pages, p.head_dim));
    if (thread_ == 0) shared.order.size = 0;
    __syncwarp();
  }

  /// Announces the segments of all pieces, and then the end.
  __device__ __forceinline__ void run() {
    for (PipelineState<Shared::kPieces> to;; to.advance()) {
      shared_.done[to.stage].wait(to.parity ^ 1);
      const bool found = find(to.stage);
      arch::wait_for_kernels_before();
      if (!found) break;
      publish_segments(to.stage);
    }
    publish(0, -1);
  }

 private:
  /// Finds the next piece that has a segment; false if none is left.
  __device__ __forceinline__ bool find(int slot) {
#pragma unroll 1
    for (;;) {
      const int index = draw();
      if (index >= works_) return false;
      if (take(slot, number_of(index))) return true;
    }
  }

  /// Fills the slot with a work tile, and moves the walk to its first segment. Returns false if it
  /// has none. It is inlined although it is large: a function reads kernel parameters that it takes
  /// by reference from memory, one slow load after another, before the first key can be requested.
  __device__ __forceinline__ bool take(int slot, int index) {
    TileCoord work = work_of(p_, plan_, index);
    if (!plan_.known) arch::wait_for_kernels_before();
    const Sequence sequence = sequence_of(p_, work.sequence);  // its lengths are loaded with the
                                                               // query's
    if (work.rows == 0) return false;
    // One query without a window or chunks sees every key, so no view needs to be computed.
    const bool sees_all = sequence.kv_len - sequence.context_len == 1 && p_.mask.window == 0 &&
                          p_.mask.chunk == 0 && !p_.documents && !p_.batch.hides() && !p_.parts &&
                          p_.shard.layout != Layout::listed;
#pragma unroll
    for (int first = 0; first < Traits::kRows; first += 32) {
      const int row = first + thread_;
      if (row >= Traits::kRows) break;
      const PackedRow at = packed_row(work, min(row, work.rows - 1));
      shared_.views[slot][row] =
          sees_all ? Interval{0, sequence.local_len} : row_view(p_, sequence, at.token, work.split);
      if constexpr (Traits::kBiases) shared_.rows[slot][row] = query_row(p_, work.sequence, at);
    }
    __syncwarp();
    view_ = tile_view(p_, sequence, work.split, shared_.views[slot][0],
                      shared_.views[slot][work.rows - 1]);
    const SegmentOrder order = p_.shard.for_sequence(work.sequence).order(sequence.kv_len);
    const SplitNumbers& numbers = plan_.numbers;
    int leaf_splits = numbers.leaf_splits;
    if (numbers.taken != nullptr) {
      const int turn = index / plan_.by_kv_heads / plan_.by_tiles;
      const SplitsTaken taken =
          numbers.where_uneven ? numbers.all_of(uneven_) : splits_taken(order, numbers);
      leaf_splits = taken.leaf_splits;
      works_ = works_of(plan_, taken);
      work.split = numbers.split(turn, leaf_splits);
      if (turn == 0 && work.kv_head == 0 && thread_ == 0) arch::store_same(*numbers.taken, taken);
    }
    const TreeCut cut = tree_cut(p_, plan_, work, leaf_splits);
    walk_ = SegmentWalk(order, view_.any, cut.split, cut.splits);
    sequence_ = sequence.index;
    first_key_ = sequence.first_key;
    first_whole_ = static_cast<int>(segments_of(view_.any.begin));
    last_whole_ = view_.table != nullptr ? 0 : static_cast<int>(view_.any.end / kSegment);
    if (thread_ == 0) {
      DecodeWorkTile& piece = shared_.piece[slot];
      piece.work = work;
      piece.sequence = sequence;
      piece.view = view_;
      if constexpr (!Traits::kPlain) {
        piece.score_scale = p_.scale(work.sequence, work.kv_head);
        piece.value_scale = p_.v_scale.of(work.sequence, work.kv_head);
      }
    }
    __syncwarp();  // all have read the views, which a next piece in the slot would overwrite
    if (index >= works_) return false;
    if (walk_.next()) return true;
    arch::wait_for_kernels_before();
    store_empty<Traits>(p_, plan_, sequence, work, thread_);
    return false;
  }

  /// Announces all segments of the piece in the slot, and loads its queries. The first segment is
  /// announced first, since its keys take longest; its level follows with the queries.
  __device__ __forceinline__ void publish_segments(int slot) {
    const int first = known_.stage;
    std::int64_t place = walk_.place;
    publish(slot, static_cast<int>(walk_.segment));
    bool more;
    if constexpr (Traits::kLatent) {
      more = walk_.next();
      if (thread_ == 0) shared_.levels[first] = level_of(place, more);
      shared_.queries_free.wait(queries_.parity ^ 1);
      queries_.advance();
      shared_.load_queries(p_, slot, thread_);
    } else {
      DecodeQueries<Traits>& queries = shared_.queries[slot];
      const DecodeWorkTile& piece = shared_.piece[slot];
      typename DecodeQueries<Traits>::Words words;
      queries.request(p_, piece, 0, words);
      more = walk_.next();
      if (thread_ == 0) shared_.levels[first] = level_of(place, more);
      queries.put(p_, 0, words);
#pragma unroll 1
      for (int n = 1; n < Traits::kRowTiles; ++n) {
        queries.request(p_, piece, n, words);
        queries.put(p_, n, words);
      }
    }
    __syncwarp();
    if (thread_ == 0) shared_.has_queries[slot].arrive();
#pragma unroll 1
    while (more) {
      const int index = static_cast<int>(walk_.segment);
      place = walk_.place;
      more = walk_.next();
      if (thread_ == 0) shared_.levels[known_.stage] = level_of(place, more);
      publish(slot, index);
    }
  }

  /// The level of the segment at index `place`, once the walk has passed it. `more`: it has not
  /// ended.
  __device__ __forceinline__ int level_of(std::int64_t place, bool more) const {
    return more ? finished_level(place, walk_.place) : Traits::Stack::kAll;
  }

  /// Announces a segment and the places of its keys to the producers; index < 0 announces the end.
  __device__ __forceinline__ void publish(int slot, int index) {
    shared_.loaded[ahead_.stage].wait(ahead_.parity ^ 1);
    DecodeSegment segment{index, static_cast<std::int16_t>(slot), 0, 0};
    if (segment) {
      const std::int64_t first = std::int64_t{index} * kSegment;
      const bool whole = index >= first_whole_ && index < last_whole_;
      look_up(shared_.places[ahead_.stage], first, whole);
      if (!whole) {
        segment.aparts = Traits::kKeyStages;
        if (view_.table == nullptr && first >= view_.any.begin) {
          const int seen = static_cast<int>(min(view_.any.end - first, std::int64_t{kSegment}));
          segment.apart = static_cast<std::int8_t>(seen / Traits::kStageKeys);
          segment.aparts = seen % Traits::kStageKeys > 0;
        }
      }
    }
    if (thread_ == 0) shared_.segments[known_.stage] = segment;
    if (!Traits::kPlain && p_.pages) arch::expect_copies(shared_.known[ahead_.stage]);
    __syncwarp();
    if (thread_ == 0) shared_.known[ahead_.stage].arrive();
    ahead_.advance();
    known_.advance();
  }

  /// Queues the page lookup of the segment that begins at local key `first`: for the keys at which
  /// TMA boxes begin, or for all. `whole`: all of them are wanted.
  __device__ __forceinline__ void look_up(KeyPlace (&places)[Shared::kPlaces], std::int64_t first,
                                          bool whole) {
    if (!Traits::kPlain && p_.pages) {
      const int step = all_places_ ? 1 : Traits::kTile;
#pragma unroll 1
      for (int key = thread_ * step; key < kSegment; key += 32 * step) {
        if (whole || is_wanted(view_, first + key))
          find_place(places[key], p_.pages, plan_.by_page, sequence_, first + key);
        else
          places[key] = {-1, 0};
      }
    } else if (thread_ < Traits::kTiles) {
      const std::int64_t key = first + thread_ * Traits::kTile;
      constexpr int kNowhere = -kSegment;  // TMA fills in zeros
      places[thread_ * Shared::kPlaces / Traits::kTiles] = {
          0, key < view_.any.end ? static_cast<std::int32_t>(first_key_ + key) : kNowhere};
    }
  }

  /// Whether the shortest length is less than seven eighths of the longest.
  __device__ __forceinline__ bool lengths_differ() const {
    int least = kNever, most = 0;
#pragma unroll 1
    for (int b = thread_; b < p_.batch.size; b += 32) {
      const int length = p_.batch.kv_len[b];
      least = min(least, length);
      most = max(most, length);
    }
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    return least < most - most / 8;
  }

  /// The number, for work_of, of the piece with index `index`.
  __device__ __forceinline__ int number_of(int index) {
    if (index < plan_.by_length || (plan_.numbers.where_uneven && !uneven_)) return index;
    if (shared_.order.size == 0)
      sort_sequences(shared_.order, p_.batch.kv_len, p_.batch.size, thread_, 32,
                     [] { __syncwarp(); });
    return sorted_work(plan_, shared_.order, index);
  }

  /// Draws the index of the next piece: first the block's own, then the next free one. A ticket is
  /// drawn one piece early, so that no warp waits for it.
  __device__ __forceinline__ int draw() {
    const int blocks = static_cast<int>(gridDim.x);
    int index;
    if (index_ < 0)
      index = index_ = static_cast<int>(blockIdx.x);
    else if (plan_.ticket == nullptr)
      index = index_ += blocks;
    else
      index = __shfl_sync(~0u, ticket_, 0);
    // Each block draws once for each of its pieces and once without success, so that the counter is
    // zero again after the last draw of all blocks.
    if (plan_.ticket != nullptr && thread_ == 0)
      ticket_ = blocks + static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(plan_.ticket),
                                                    static_cast<unsigned>(works_ + blocks - 1)));
    return index;
  }

  const AttendParams& p_;
  const WorkPlan& plan_;
  Shared& shared_;
  PipelineState<Shared::kAhead> ahead_;     // of the segment announced next, in the producers' ring
  PipelineState<Shared::kSegments> known_;  // the same in the consumers' ring
  SegmentWalk walk_;                        // over the current piece
  View view_;
  int first_whole_ = 0, last_whole_ = 0;  // all keys of segments [first, last) are wanted
  std::int64_t first_key_ = 0;
  int sequence_ = 0;
  int works_;                          // pieces that have keys, if known; otherwise all pieces
  bool uneven_ = false;                // lengths_differ()
  bool all_places_ = Traits::kLatent;  // keys are copied one by one, so each is looked up
  PipelineState<1> queries_;           // of pieces that share the memory of their queries
  const int thread_ = static_cast<int>(threadIdx.x) % 32;
  int index_ = -1;  // of the last piece that was drawn without a ticket
  int ticket_ = 0;  // of thread 0: the ticket of the next piece
};

}  // namespace longspan::kernels::cuda

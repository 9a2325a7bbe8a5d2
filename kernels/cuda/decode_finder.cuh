// The warp of the decode kernel that finds one piece of work after the other, ahead of those that
// load it, and brings its queries. Finding a piece is long: lengths are read, the row tile's view
// is worked out, and the tree's part with it. A block comes to its place about a microsecond before
// the kernels before it have ended, and uses it: it waits for them where it first reads memory,
// which is late where the lengths are parameters.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/decode_shared.cuh"

namespace longspan::kernels::cuda {

/// An empty state for each row of a piece that sees no key.
template <class Traits>
__device__ inline void store_empty(const AttendParams& p, const Plan& plan,
                                   const Sequence& sequence, const Work& work, int thread) {
#pragma unroll 1
  for (int row = 0; row < work.rows; ++row) {
    const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
    if (thread == 0) to.stats() = empty_stats();
#pragma unroll 1
    for (int d = thread; d < p.dim; d += 32) to.o()[d] = 0.0f;
  }
}

/// So many pieces come before those that have no keys.
__device__ inline int works_of(const Plan& plan, const SplitsTaken& taken) {
  return taken.turns * static_cast<int>(plan.by_tiles.value * plan.by_kv_heads.value);
}

/// Fills the slot with a piece of work and its first segment. False: it has none. Inlined, large as
/// it is: parameters of a kernel that a function takes by reference are read from memory, one slow
/// load after the other, before the first key can be asked for.
template <class Traits>
__device__ __forceinline__ bool take_piece(const AttendParams& p, const Plan& plan,
                                           DecodeShared<Traits>& shared, int slot, int index) {
  const int thread = static_cast<int>(threadIdx.x) % 32;
  static_assert(Traits::kRows <= 32);
  const Work work = work_of(p, plan, index);
  if (!plan.known) arch::wait_for_kernels_before();
  const Sequence sequence = sequence_of(p, work.sequence);  // its lengths come with the query's
  if (work.rows == 0) return false;
  // One query without a window sees every key, and that need not be worked out.
  const bool sees_all = sequence.q_len == 1 && p.mask.window == 0 && !p.documents && !p.parts &&
                        p.shard.layout != Layout::listed;
  if (thread < Traits::kRows) {
    const PackedRow at = packed_row(work, min(thread, work.rows - 1));
    shared.views[slot][thread] =
        sees_all ? Interval{0, sequence.local_len} : row_view(p, sequence, at.token, work.split);
    if constexpr (!Traits::kPlain) shared.rows[slot][thread] = at;
  }
  __syncwarp();
  if (thread == 0) {
    DecodePiece& piece = shared.piece[slot];
    piece.work = work;
    piece.sequence = sequence;
    piece.view = tile_view(p, sequence, work.split, shared.views[slot][0],
                           shared.views[slot][work.rows - 1]);
    if constexpr (!Traits::kPlain) {
      piece.score_scale = p.scale(work.kv_head);
      piece.value_scale = p.v_scale[work.kv_head];
    }
    const SegmentOrder order = p.shard.of(work.sequence).order(sequence.kv_len);
    const SplitNumbers& numbers = plan.numbers;
    int leaf_splits = numbers.leaf_splits;
    if (numbers.taken != nullptr) {
      const int turn = index / plan.by_kv_heads / plan.by_tiles;
      const SplitsTaken taken =
          numbers.where_uneven ? numbers.all_of(shared.uneven) : splits_taken(order, numbers);
      leaf_splits = taken.leaf_splits;
      shared.works = works_of(plan, taken);
      piece.work.split = numbers.split(turn, leaf_splits);
      if (turn == 0 && work.kv_head == 0) *numbers.taken = taken;
    }
    const TreeCut cut = tree_cut(p, plan, piece.work, leaf_splits);
    SegmentWalk walk(order, piece.view.any, cut.split, cut.splits);
    const bool found = index < shared.works && walk.next();
    shared.first[slot] = {walk.place, found ? walk.segment : -1};
    shared.walk[slot] = walk;
  }
  __syncwarp();
  if (shared.first[slot]) return true;
  arch::wait_for_kernels_before();
  if (index < shared.works) store_empty<Traits>(p, plan, sequence, shared.piece[slot].work, thread);
  return false;
}

/// The warp that finds pieces of work.
template <class Traits>
class DecodeFinder {
  using Shared = typename Traits::Shared;

 public:
  __device__ DecodeFinder(const AttendParams& p, const Plan& plan, Shared& shared)
      : p_(p), plan_(plan), shared_(shared) {
    if (p.batch.query_start != nullptr || plan.numbers.where_uneven || plan.ticket != nullptr)
      arch::wait_for_kernels_before();
    const bool uneven = plan.numbers.where_uneven && lengths_differ();
    if (thread_ == 0) {
      shared.uneven = uneven;
      shared.works =
          plan.numbers.where_uneven ? works_of(plan, plan.numbers.all_of(uneven)) : plan.works;
      shared.order.size = 0;
    }
    __syncwarp();
  }

  /// Until there is none, which is said too.
  __device__ __forceinline__ void run() {
    for (RingPlace<Shared::kPieces> to;; to.step()) {
      shared_.done[to.slot].wait(to.parity ^ 1);
      const bool found = find(to.slot);
      if (thread_ == 0) {
        if (!found) shared_.first[to.slot] = {};
        shared_.found[to.slot].arrive();
      }
      if (!found) return;
      arch::wait_for_kernels_before();
      shared_.queries[to.slot].load(p_, shared_.piece[to.slot]);
      __syncwarp();
      if (thread_ == 0) shared_.has_queries[to.slot].arrive();
    }
  }

 private:
  /// The next piece that has a segment.
  __device__ __forceinline__ bool find(int slot) {
#pragma unroll 1
    for (;;) {
      const int index = draw();
      if (index >= shared_.works) return false;
      if (take_piece<Traits>(p_, plan_, shared_, slot, number_of(index))) return true;
    }
  }

  /// By more than an eighth.
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

  /// Of the piece that comes `index`th.
  __device__ __forceinline__ int number_of(int index) {
    if (index < plan_.by_length || (plan_.numbers.where_uneven && !shared_.uneven)) return index;
    if (shared_.order.size == 0)
      sort_sequences(shared_.order, p_.batch.kv_len, p_.batch.size, thread_, 32,
                     [] { __syncwarp(); });
    return sorted_work(plan_, shared_.order, index);
  }

  /// The block's own first; then whatever comes next for whoever is free. A ticket is drawn one
  /// piece early, so that nobody waits for it.
  __device__ __forceinline__ int draw() {
    const int blocks = static_cast<int>(gridDim.x);
    int index;
    if (index_ < 0)
      index = index_ = static_cast<int>(blockIdx.x);
    else if (plan_.ticket == nullptr)
      index = index_ += blocks;
    else
      index = __shfl_sync(~0u, ticket_, 0);
    // Each block draws once for each of its pieces and once for none: after the last draw of all,
    // the counter is zero again.
    if (plan_.ticket != nullptr && thread_ == 0)
      ticket_ =
          blocks + static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(plan_.ticket),
                                              static_cast<unsigned>(shared_.works + blocks - 1)));
    return index;
  }

  const AttendParams& p_;
  const Plan& plan_;
  Shared& shared_;
  const int thread_ = static_cast<int>(threadIdx.x) % 32;
  int index_ = -1;  // of the last piece that was not drawn
  int ticket_ = 0;  // of thread 0: the next one that was
};

}  // namespace longspan::kernels::cuda

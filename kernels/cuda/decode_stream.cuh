// The load side of the decode kernel: a team of warps takes one piece of work after the other, and
// the keys and values of all of them stream through the team's own ring of stages. Pieces follow
// each other without a gap: the ring does not know where one ends.
//
// Three segments are known at a time, so that nothing is waited for where it is needed:
//
//     in work    the kernel multiplies it, stage by stage
//     in load    its keys and values are being queued; the one in work, or the next
//     ahead      found; if it is paged, its entries of the block table are on their way
//
// Stages of a segment: its keys, then its values, as they are stored. Where all keys of a stage
// are wanted, or none, and rows are dense, the copy engine (decode_boxes.hpp) brings one or two
// tiles of 16 keys by one instruction; all else comes by cp.async, or through registers. A stage's
// barrier counts both, and an arrival of each warp. The team's threads meet once a stage; where a
// team is a warp, that is no barrier.
#pragma once

#include "kernels/cuda/arch/copy_engine.cuh"
#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/decode_boxes.hpp"
#include "kernels/cuda/decode_bytes.cuh"
#include "kernels/cuda/decode_order.cuh"
#include "kernels/cuda/decode_pages.cuh"
#include "kernels/cuda/fixed_order.cuh"
#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

/// A segment of a piece of work.
struct DecodeSegment {
  std::int64_t place = 0;   // in the tree
  std::int64_t index = -1;  // local; < 0: none
  int piece = 0;            // slot in TeamShared::piece

  __device__ explicit operator bool() const { return index >= 0; }
};

/// What is known of a piece of work.
struct DecodePiece {
  Work work;
  Sequence sequence;
  View view;
  float score_scale, value_scale;  // of the kv head; not set where the loader is plain
};

/// Shared memory of a team, beside its ring.
template <class Traits>
struct alignas(16) TeamShared {
  static constexpr int kPieces = 3;  // as many segments are known at a time
  float4 passage[Traits::kTeam][Traits::kTiles * Traits::kRowTiles][32];  // see Passage
  DecodePiece piece[kPieces];
  Interval views[kPieces][Traits::kRows];
  PackedRow rows[kPieces][Traits::kPlain ? 1 : Traits::kRows];  // for biases
  KeyPlace places[!Traits::kPlain ? kSegment : 1];              // of the segment in load
  arch::Barrier ready[Traits::kStages];
  SegmentWalk walk;     // of the piece ahead; thread 0's
  DecodeSegment ahead;  // where it stands
  int works;            // so many have keys, where that is known; else all
  int ticket;
  SequenceOrder order;
};

/// A barrier of the team.
template <class Traits>
__device__ inline void sync_team() {
  if constexpr (Traits::kTeam == 1)
    __syncwarp();
  else if constexpr (Traits::kTeams == 1)
    __syncthreads();
  else
    arch::named_sync(1 + static_cast<int>(threadIdx.x) / Traits::kTeamThreads,
                     Traits::kTeamThreads);
}

/// A stage that is not all wanted, or whose layout is none of the usual ones. Not inlined, as it is
/// rare; the plain loader's by value, as parameters of a kernel that a function takes by reference
/// are read from memory.
template <class Traits>
__device__ __noinline__ void load_plain_apart(std::uint32_t tile, Rows source, int dim,
                                              const DecodePiece& piece, std::int64_t first) {
  load_plain<typename Traits::Element, Traits::kDim, Traits::kStageKeys, Traits::kTeamThreads,
             Traits::kTile>(tile, source, dim, piece.work.kv_head, piece.sequence, piece.view,
                            first);
}
template <class Traits>
__device__ __noinline__ void load_any_apart(std::uint32_t tile, const KvRows& source,
                                            const AttendParams& p, const DecodePiece& piece,
                                            std::int64_t first, int thread) {
  if constexpr (Traits::kFp8)
    load_bytes<Traits>(tile, source, p, piece.work.kv_head, piece.sequence, piece.view, first,
                       thread);
  else
    load_keys<typename Traits::Element, Traits::kDim, Traits::kStageKeys, Traits::kTeamThreads,
              Loader::any16, Traits::kTile>(tile, source, p, piece.work.kv_head, piece.sequence,
                                            piece.view, first);
}

/// Whether keys of pages can be copied from where they were found, 16 bytes at a time.
template <class Traits>
__device__ inline bool come_by_places(const KvRows& source, const Pages& pages) {
  if (!pages) return false;
  return Traits::kFp8 ? in_sixteens(source, pages) : access_of(source, pages, 2) == Access::chunks;
}

template <class Traits>
__device__ __noinline__ void load_places_apart(std::uint32_t tile, const KvRows& source, int dim,
                                               int kv_head, int thread, const KeyPlace* places) {
  load_places<Traits>(tile, source, dim, kv_head, thread, places);
}

/// New keys of a segment, which begins at local key `first`, and their values into the cache. Every
/// piece of work over these keys writes them ahead of its own reads, and all write the same.
template <class Traits>
__device__ __noinline__ void write_new_keys(const AttendParams& p, const DecodePiece& piece,
                                            std::int64_t first, int thread) {
  using Element = typename Traits::Element;
  constexpr int kVector = 8;
  const Sequence& sequence = piece.sequence;
  const Shard shard = p.shard.of(sequence.index);
  const int head = piece.work.kv_head;
  const std::int64_t end = min(first + kSegment, sequence.local_len);
  for (std::int64_t key = max(first, sequence.local_len - sequence.q_len); key < end; ++key) {
    const std::int64_t token =
        shard.position(key, sequence.kv_len) - (sequence.kv_len - sequence.q_len);
    if (token < 0) continue;
    const std::int64_t from = sequence.first_row + token, to = sequence.first_key + key;
    const auto copy = [&](const Rows& rows, const KvRows& cache, int d) {
      *reinterpret_cast<uint4*>(cache.at<Element>(to, head) + d) =
          *reinterpret_cast<const uint4*>(rows.at<const Element>(from, head) + d);
    };
    for (int d = thread * kVector; d < p.dim; d += Traits::kTeamThreads * kVector) {
      copy(p.new_k, p.k, d);
      copy(p.new_v, p.v, d);
    }
  }
  arch::publish_to_copy_engine();
  sync_team<Traits>();
}

/// An empty state for each row of a piece that sees no key.
template <class Traits>
__device__ inline void store_empty(const AttendParams& p, const Plan& plan,
                                   const Sequence& sequence, const Work& work, int thread) {
#pragma unroll 1
  for (int row = 0; row < work.rows; ++row) {
    const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
    if (thread == 0) to.stats() = empty_stats();
#pragma unroll 1
    for (int d = thread; d < p.dim; d += Traits::kTeamThreads) to.o()[d] = 0.0f;
  }
}

/// Fills the slot with a piece of work and puts shared.ahead on its first segment. False: it has
/// none. Inlined, large as it is: parameters of a kernel that a function takes by reference are
/// read from memory, one slow load after the other, before the first key can be asked for.
template <class Traits>
__device__ __forceinline__ bool take_piece(const AttendParams& p, const Plan& plan,
                                           TeamShared<Traits>& shared, int slot, int index) {
  const int thread = static_cast<int>(threadIdx.x) % Traits::kTeamThreads;
  const Work work = work_of(p, plan, index);
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
  sync_team<Traits>();
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
      const SplitsTaken taken = splits_taken(order, numbers);
      leaf_splits = taken.leaf_splits;
      shared.works = taken.turns * static_cast<int>(plan.by_tiles.value * plan.by_kv_heads.value);
      piece.work.split = numbers.split(turn, leaf_splits);
      if (turn == 0 && work.kv_head == 0) *numbers.taken = taken;
    }
    const TreeCut cut = tree_cut(p, plan, piece.work, leaf_splits);
    SegmentWalk walk(order, piece.view.any, cut.split, cut.splits);
    const bool found = index < shared.works && walk.next();
    shared.ahead = {walk.place, found ? walk.segment : -1, slot};
    shared.walk = walk;
  }
  sync_team<Traits>();
  if (shared.ahead) return true;
  if (index < shared.works) store_empty<Traits>(p, plan, sequence, shared.piece[slot].work, thread);
  return false;
}

template <class Traits>
class DecodeStream {
  using T = typename Traits::Element;
  using Layout = typename Traits::Layout;
  using Shared = TeamShared<Traits>;
  static constexpr int kAhead = Traits::kStages - 1;             // stages under way
  static constexpr int kTurn = Traits::kSegmentStages - kAhead;  // loads reach the next segment
  // Places of keys take a read of memory, and are asked for half a segment before they are needed.
  static constexpr bool kFindsBetween = kTurn < Traits::kKeyStages;
  static constexpr int kKeysOfThread = kSegment / Traits::kTeamThreads;
  static_assert(kAhead >= 1 && kAhead <= Traits::kSegmentStages);

 public:
  __device__ DecodeStream(const AttendParams& p, const Plan& plan, const KeyBoxes& boxes,
                          Shared& shared, std::uint32_t ring)
      : p_(p), plan_(plan), boxes_(boxes), shared_(shared), ring_(ring) {
    thread_ = static_cast<int>(threadIdx.x) % Traits::kTeamThreads;
    if (thread_ < Traits::kStages) shared.ready[thread_].init(Traits::kTeam);
    arch::publish_barriers();
    if (thread_ == 0) {
      shared.ahead.index = -1;
      shared.works = plan.works;
      shared.order.size = 0;
    }
    sync_team<Traits>();
    if constexpr (!Traits::kPlain) {
      by_place_k_ = !boxes.k_valid && come_by_places<Traits>(p.k, p.pages);
      by_place_v_ = !boxes.v_valid && come_by_places<Traits>(p.v, p.pages);
    }
    box_lanes_ = Traits::kWarpTiles * kBoxKeys / boxes.keys;
    free_ = kAhead;
  }

  /// The next segment's work begins; false: there is none. Finding a segment is long code, which
  /// costs most when it is fetched: it stands once, for the first call too, unless kFindsBetween.
  __device__ __forceinline__ bool begin() {
    if (!kFindsBetween || !started_) {
#pragma unroll 1
      for (;;) {
        find_next();
        if (started_) break;
        started_ = true;
        sync_team<Traits>();  // everyone has read where the first one is
        take_over();
#pragma unroll 1
        for (int stage = 0; stage < kAhead; ++stage) load(stage, stage);
      }
    }
    return static_cast<bool>(load_);
  }
  /// Comes between a segment's keys and its values.
  __device__ __forceinline__ void pass_middle() {
    if constexpr (kFindsBetween) find_next();
  }

  /// Before a segment's stages: the one in work. After them: the next one.
  __device__ const DecodeSegment& segment() const { return load_; }
  /// Between the keys and the values of the one in work: the next one.
  __device__ const DecodeSegment& next_segment() const { return kFindsBetween ? load_ : ahead_; }

  /// Waits for a stage (one of [kFirst, kEnd)) of the segment in work and gives its tile. The stage
  /// before it is free now and takes the next load.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ std::uint32_t advance(int stage) {
    const int slot = free_ + 1 < Traits::kStages ? free_ + 1 : 0;
    shared_.ready[slot].wait(phase_);
    sync_team<Traits>();
    constexpr bool kTurns = kTurn >= kFirst && kTurn < kEnd;
    if (kTurns && stage == kTurn) take_over();
    load(stage < kTurn ? stage + kAhead : stage - kTurn, free_);
    free_ = slot;
    if (slot + 1 == Traits::kStages) phase_ ^= 1;
    return ring_ + slot * Traits::kStageBytes;
  }

 private:
  /// The segment ahead comes into load.
  __device__ __forceinline__ void take_over() {
    load_ = ahead_;
    box_row_ = box_row_ahead_;
    box_page_ = box_page_ahead_;
    if constexpr (!Traits::kPlain) {
      if (by_place_k_ || by_place_v_) {
#pragma unroll
        for (int i = 0; i < kKeysOfThread; ++i)
          shared_.places[i * Traits::kTeamThreads + thread_] = place_[i];
        sync_team<Traits>();
      }
    }
    exists_ = static_cast<bool>(load_);
    if (exists_) {
      const DecodePiece& piece = shared_.piece[load_.piece];
      const std::int64_t first = load_.index * kSegment;
      const Interval wanted = piece.view.any;
      if constexpr (Traits::kPlain) {
        const Sequence& sequence = piece.sequence;
        if (p_.new_k.data != nullptr && first + kSegment > sequence.local_len - sequence.q_len)
          write_new_keys<Traits>(p_, piece, first, thread_);
      }
      apart_ = 0;
      aparts_ = Traits::kKeyStages;
      if (piece.view.table == nullptr && first >= wanted.begin) {
        const int seen = static_cast<int>(min(wanted.end - first, std::int64_t{kSegment}));
        apart_ = seen / Traits::kStageKeys;
        aparts_ = seen % Traits::kStageKeys > 0;
      }
    }
  }

  /// Another segment is found: of the same piece, or the first of another.
  __device__ __forceinline__ void find_next() {
    if (thread_ == 0 && shared_.ahead) {
      SegmentWalk& walk = shared_.walk;
      const bool found = walk.next();
      shared_.ahead.place = walk.place;
      shared_.ahead.index = found ? walk.segment : -1;
    }
    sync_team<Traits>();
    if (!shared_.ahead && !done_) {
      const int slot = slot_ + 1 < Shared::kPieces ? slot_ + 1 : 0;
      bool found = false;
      while (!found && !done_) {
        const int index = draw();
        done_ = index >= shared_.works;
        if (!done_) found = take_piece<Traits>(p_, plan_, shared_, slot, number_of(index));
      }
      slot_ = slot;
    }
    ahead_ = shared_.ahead;
    if (ahead_) look_up();
  }

  /// Of the piece that comes `index`th.
  __device__ __forceinline__ int number_of(int index) {
    if (index < plan_.by_length) return index;
    if (shared_.order.size == 0)
      sort_sequences(shared_.order, p_.batch.kv_len, p_.batch.size, thread_, Traits::kTeamThreads,
                     [] { sync_team<Traits>(); });
    return sorted_work(plan_, shared_.order, index);
  }

  /// Where the keys of the segment ahead are.
  __device__ __forceinline__ void look_up() {
    const DecodePiece& piece = shared_.piece[ahead_.piece];
    const int tile = static_cast<int>(threadIdx.x) % Traits::kTiles;
    if (!Traits::kPlain && p_.pages) {
      if (boxes_.k_valid || boxes_.v_valid) {
        const KeyPlace place =
            find_place(p_, piece.sequence, piece.view, ahead_.index, tile * Traits::kTile);
        box_row_ahead_ = place.row;
        box_page_ahead_ = place.page;
      }
      if (by_place_k_ || by_place_v_)
#pragma unroll
        for (int i = 0; i < kKeysOfThread; ++i)
          place_[i] = find_place(p_, piece.sequence, piece.view, ahead_.index,
                                 i * Traits::kTeamThreads + thread_);
    } else {
      const std::int64_t key = ahead_.index * kSegment + tile * Traits::kTile;
      constexpr int kNowhere = -2 * kBoxKeys;  // the copy engine fills in zeros
      box_row_ahead_ = key < piece.view.any.end
                           ? static_cast<std::int32_t>(piece.sequence.first_key + key)
                           : kNowhere;
      box_page_ahead_ = 0;
    }
  }

  /// The team's own first; then whatever comes next for whoever is free. A ticket is drawn one
  /// piece early, so that nobody waits for it.
  __device__ __forceinline__ int draw() {
    const int teams = static_cast<int>(gridDim.x) * Traits::kTeams;
    int index;
    if (index_ < 0) {
      index_ = static_cast<int>(threadIdx.x) / Traits::kTeamThreads * static_cast<int>(gridDim.x) +
               static_cast<int>(blockIdx.x);
      index = index_;
    } else if (plan_.ticket == nullptr) {
      index = index_ += teams;
    } else if constexpr (Traits::kTeam == 1) {
      index = __shfl_sync(~0u, ticket_, 0);
    } else {
      sync_team<Traits>();  // the last ticket was read
      if (thread_ == 0) shared_.ticket = ticket_;
      sync_team<Traits>();
      index = shared_.ticket;
    }
    // Each team draws once for each of its pieces and once for none: after the last draw of all,
    // the counter is zero again.
    if (plan_.ticket != nullptr && thread_ == 0)
      ticket_ = teams + static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(plan_.ticket),
                                                   static_cast<unsigned>(plan_.works + teams - 1)));
    return index;
  }

  /// Queues a stage of the segment in load into a slot of the ring.
  __device__ __forceinline__ void load(int stage, int slot) {
    if (!exists_) return;
    arch::Barrier& ready = shared_.ready[slot];
    const std::uint32_t tile = ring_ + slot * Traits::kStageBytes;
    const bool keys = stage < Traits::kKeyStages;
    stage %= Traits::kKeyStages;
    if ((keys ? boxes_.k_valid : boxes_.v_valid) &&
        static_cast<unsigned>(stage - apart_) >= static_cast<unsigned>(aparts_))
      return load_box(tile, keys ? &boxes_.k : &boxes_.v, stage, ready);
    const DecodePiece& piece = shared_.piece[load_.piece];
    const KvRows& source = keys ? p_.k : p_.v;
    const int first = stage * Traits::kStageKeys;
    if constexpr (Traits::kPlain)
      load_plain_apart<Traits>(tile, source, p_.dim, piece, load_.index * kSegment + first);
    else if (keys ? by_place_k_ : by_place_v_)
      load_places_apart<Traits>(tile, source, p_.dim, piece.work.kv_head, thread_,
                                shared_.places + first);
    else
      load_any_apart<Traits>(tile, source, p_, piece, load_.index * kSegment + first, thread_);
    arch::expect_copies(ready);
    __syncwarp();  // the phase is open until all copies are announced
    if (thread_ % 32 == 0) ready.arrive();
  }

  /// By the copy engine: each warp asks for its own tiles of the stage, by the lanes whose numbers
  /// are the tiles' in the segment. Boxes of two tiles bring them at once.
  __device__ __forceinline__ void load_box(std::uint32_t tile, const CUtensorMap* map, int stage,
                                           arch::Barrier& ready) {
#if __CUDA_ARCH__ >= 900
    const int warp = thread_ / 32, lane = thread_ % 32;
    const int first = warp * Traits::kWarpTiles, mine = lane - stage * Traits::kStageTiles - first;
    if (mine < 0 || mine >= box_lanes_) return;
    if (mine == 0) ready.arrive_expecting(Traits::kWarpTiles * Traits::kTileBytes);
    arch::load_box(tile + (first + mine) * Traits::kTileBytes, map, 0, box_row_, 0,
                   shared_.piece[load_.piece].work.kv_head, box_page_, &ready);
#endif
  }

  const AttendParams& p_;
  const Plan& plan_;
  const KeyBoxes& boxes_;
  Shared& shared_;
  const std::uint32_t ring_;
  int thread_;  // of the team
  int free_;    // slot of the ring that is filled next; the one before the next in work
  std::uint32_t phase_ = 0;  // of the barrier of the next in work
  int index_ = -1;           // of the last piece that was not drawn
  int ticket_ = 0;           // of thread 0: the next one that was
  int slot_ = 0;             // in TeamShared::piece of the piece ahead
  bool done_ = false;        // no piece is left
  bool started_ = false;     // the first loads are under way
  DecodeSegment load_, ahead_;
  bool exists_ = false;                           // the segment in load does
  int apart_ = 0, aparts_ = 0;                    // its first stage not by box, and how many
  int box_lanes_;                                 // of a warp, that ask for a stage
  bool by_place_k_ = false, by_place_v_ = false;  // else they come by the places of their keys
  std::int32_t box_row_ = 0, box_page_ = 0;       // lane i: of tile i of the segment in load
  std::int32_t box_row_ahead_ = 0, box_page_ahead_ = 0;
  KeyPlace place_[!Traits::kPlain ? kKeysOfThread : 1];  // of the segment ahead
};

}  // namespace longspan::kernels::cuda

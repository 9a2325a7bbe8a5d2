// The load side of the decode kernel. A warp of its own finds one piece of work after the other;
// others send the keys and values of all of them through a ring of stages to the warps that
// multiply. Pieces follow each other without a gap: finding one is long, but it is ahead, and the
// ring does not know where a piece ends.
//
// Stages of a segment: its keys, then its values, as they are stored. Where all keys of a stage
// are wanted, or none, and rows are dense, the copy engine (decode_boxes.hpp) brings tiles of 16
// keys, or several, by one instruction; all else comes by cp.async, or through registers. A stage's
// barrier `full` counts both; on `free` each warp that multiplies says that it has read it.
//
// Under full load a read from memory takes as long as the copies that are queued before it. So the
// entries of the block table of the segment after the one in load are on their way while that one's
// values are queued.
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

  __device__ explicit operator bool() const { return index >= 0; }
};

/// What is known of a piece of work.
struct DecodePiece {
  Work work;
  Sequence sequence;
  View view;
  float score_scale, value_scale;  // of the kv head; not set where the loader is plain
};

/// Shared memory beside the ring.
template <class Traits>
struct alignas(16) DecodeShared {
  // Pieces that somebody may look at: of the one whose state is stored, and those that are found.
  static constexpr int kPieces = sizeof(DecodeQueries<Traits>) > 8 * 1024 ? 2 : 3;
  // Segments: of the one whose state is stored, of up to two in the ring, of the one ahead.
  static constexpr int kSegments = 4;
  static_assert(Traits::kStages <= 2 * Traits::kSegmentStages);

  DecodeQueries<Traits> queries[kPieces];
  SegmentParts<Traits> parts;
  DecodePiece piece[kPieces];
  Interval views[kPieces][Traits::kRows];
  PackedRow rows[kPieces][Traits::kPlain ? 1 : Traits::kRows];  // for biases
  SegmentWalk walk[kPieces];                                    // from its first segment on
  DecodeSegment first[kPieces];                                 // that segment; none: all is done
  arch::Barrier found[kPieces], has_queries[kPieces], done[kPieces];

  arch::Barrier full[Traits::kStages], free[Traits::kStages];
  DecodeSegment segments[kSegments];  // there when the first stage of its keys is
  int levels[kSegments];              // where its state waits, for DecodeStack; with its values

  KeyPlace places[!Traits::kPlain ? kSegment : 1];  // the loading warps': of the segment in load
  DecodeSegment ahead;
  SequenceOrder order;  // the finding warp's
  bool uneven;          // lengths differ
  int works;            // so many have keys, where that is known; else all

  __device__ void init() {
    if (threadIdx.x < Traits::kStages) {
      full[threadIdx.x].init(1);
      free[threadIdx.x].init(Traits::kWarps);
    }
    if (threadIdx.x < kPieces) {
      found[threadIdx.x].init(1);
      has_queries[threadIdx.x].init(1);
      done[threadIdx.x].init(Traits::kWarps);
    }
    arch::publish_barriers();
  }
};

/// A place in a ring of kSlots, and the parity of its barriers in this round.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void step() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
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
    shared_.full[at_.slot].wait(at_.parity);
    return ring_ + at_.slot * Traits::kStageBytes;
  }
  /// The warp has read the stage.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared_.free[at_.slot].arrive();
    at_.step();
  }

 private:
  typename Traits::Shared& shared_;
  const std::uint32_t ring_;
  RingPlace<Traits::kStages> at_;
};

/// A barrier of the warps that load.
template <class Traits>
__device__ __forceinline__ void sync_loaders() {
  if constexpr (Traits::kLoaders == 32)
    __syncwarp();
  else
    arch::named_sync(2, Traits::kLoaders);
}

/// A stage that is not all wanted, or whose layout is none of the usual ones. Not inlined, as it is
/// rare; the plain loader's by value, as parameters of a kernel that a function takes by reference
/// are read from memory.
template <class Traits>
__device__ __noinline__ void load_plain_apart(std::uint32_t tile, Rows source, int dim,
                                              const DecodePiece& piece, std::int64_t first) {
  load_plain<typename Traits::Element, Traits::kDim, Traits::kStageKeys, Traits::kLoaders,
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
    load_keys<typename Traits::Element, Traits::kDim, Traits::kStageKeys, Traits::kLoaders,
              Loader::any16, Traits::kTile>(tile, source, p, piece.work.kv_head, piece.sequence,
                                            piece.view, first);
}

/// Whether keys of pages can be copied from where they were found, 16 bytes at a time.
template <class Traits>
__device__ inline bool come_by_places(const KvRows& source, const Pages& pages) {
  constexpr int kBytes = Traits::kFp8 ? 1 : 2;
  if (!pages || ((source.page_stride | source.row_stride) * kBytes) >> 32 != 0) return false;
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
    for (int d = thread * kVector; d < p.dim; d += Traits::kLoaders * kVector) {
      copy(p.new_k, p.k, d);
      copy(p.new_v, p.v, d);
    }
  }
  arch::publish_to_copy_engine();
  sync_loaders<Traits>();
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
    bool found = true;
    for (RingPlace<Shared::kPieces> to; found; to.step()) {
      shared_.done[to.slot].wait(to.parity ^ 1);
      found = find(to.slot);
      if (thread_ == 0) {
        if (!found) shared_.first[to.slot] = {};
        shared_.found[to.slot].arrive();
      }
      if (!found) return;
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

/// The warps that load.
template <class Traits>
class DecodeLoader {
  using Shared = typename Traits::Shared;
  static constexpr int kKeysOfThread = kSegment / Traits::kLoaders;

 public:
  __device__ DecodeLoader(const AttendParams& p, const KeyBoxes& boxes, Shared& shared,
                          std::uint32_t ring)
      : p_(p), boxes_(boxes), shared_(shared), ring_(ring) {
    if constexpr (!Traits::kPlain) {
      by_place_k_ = !boxes.k_valid && come_by_places<Traits>(p.k, p.pages);
      by_place_v_ = !boxes.v_valid && come_by_places<Traits>(p.v, p.pages);
    }
  }

  /// All segments of all pieces. Each part stands once in the code, for the first segment too: code
  /// costs most when it is fetched.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      const bool ends = !load_ || !step();
      if (load_) {
        if (thread_ == 0)
          shared_.levels[known_] =
              ends ? Traits::Stack::kAll : finished_level(load_.place, ahead_.place);
        known_ = known_ + 1 < Shared::kSegments ? known_ + 1 : 0;
        queue(Traits::kKeyStages);
      }
      if (ends && !take_piece_found()) break;
      take_over();
      queue(0);
    }
    // A stage without keys, of no segment, ends it.
    if (thread_ == 0) shared_.segments[known_] = {};
    sync_loaders<Traits>();
    wait_free();
    if (thread_ == 0) shared_.full[at_.slot].arrive();
  }

 private:
  /// The segment ahead comes into load.
  __device__ __forceinline__ void take_over() {
    load_ = ahead_;
    box_row_ = box_row_ahead_;
    box_page_ = box_page_ahead_;
    if (thread_ == 0) shared_.segments[known_] = load_;
    if constexpr (!Traits::kPlain) {
      if (by_place_k_ || by_place_v_) {
#pragma unroll
        for (int i = 0; i < kKeysOfThread; ++i)
          shared_.places[i * Traits::kLoaders + thread_] = place_[i];
      }
    }
    sync_loaders<Traits>();
    const DecodePiece& piece = shared_.piece[pieces_.slot];
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

  /// Ahead comes the next segment of the piece; false: it has no more.
  __device__ __forceinline__ bool step() {
    if (thread_ == 0) {
      SegmentWalk& walk = shared_.walk[pieces_.slot];
      const bool found = walk.next();
      shared_.ahead = {walk.place, found ? walk.segment : -1};
    }
    sync_loaders<Traits>();
    ahead_ = shared_.ahead;
    if (ahead_) look_up();
    return static_cast<bool>(ahead_);
  }

  /// Ahead comes the first segment of the next piece; false: there is none.
  __device__ __forceinline__ bool take_piece_found() {
    if (load_) pieces_.step();
    shared_.found[pieces_.slot].wait(pieces_.parity);
    ahead_ = shared_.first[pieces_.slot];
    if (ahead_) look_up();
    return static_cast<bool>(ahead_);
  }

  /// Where the keys of the segment ahead are.
  __device__ __forceinline__ void look_up() {
    const DecodePiece& piece = shared_.piece[pieces_.slot];
    const int tile = thread_ % Traits::kTiles;
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
                                 i * Traits::kLoaders + thread_);
    } else {
      const std::int64_t key = ahead_.index * kSegment + tile * Traits::kTile;
      constexpr int kNowhere = -8 * kBoxKeys;  // the copy engine fills in zeros
      box_row_ahead_ = key < piece.view.any.end
                           ? static_cast<std::int32_t>(piece.sequence.first_key + key)
                           : kNowhere;
      box_page_ahead_ = 0;
    }
  }

  /// Queues the stages of keys (first = 0) or of values of the segment in load.
  __device__ __forceinline__ void queue(int first) {
#pragma unroll 1
    for (int stage = 0; stage < Traits::kKeyStages; ++stage, at_.step()) load(stage, first == 0);
  }
  __device__ __forceinline__ void wait_free() { shared_.free[at_.slot].wait(at_.parity ^ 1); }

  /// A stage of the segment's keys or values into the slot.
  __device__ __forceinline__ void load(int stage, bool keys) {
    arch::Barrier& full = shared_.full[at_.slot];
    const std::uint32_t tile = ring_ + at_.slot * Traits::kStageBytes;
    if ((keys ? boxes_.k_valid : boxes_.v_valid) &&
        static_cast<unsigned>(stage - apart_) >= static_cast<unsigned>(aparts_))
      return load_box(tile, keys ? &boxes_.k : &boxes_.v, stage, full);
    wait_free();
    const DecodePiece& piece = shared_.piece[pieces_.slot];
    const KvRows& source = keys ? p_.k : p_.v;
    const int first = stage * Traits::kStageKeys;
    if constexpr (Traits::kPlain)
      load_plain_apart<Traits>(tile, source, p_.dim, piece, load_.index * kSegment + first);
    else if (keys ? by_place_k_ : by_place_v_)
      load_places_apart<Traits>(tile, source, p_.dim, piece.work.kv_head, thread_,
                                shared_.places + first);
    else
      load_any_apart<Traits>(tile, source, p_, piece, load_.index * kSegment + first, thread_);
    arch::expect_copies(full);
    sync_loaders<Traits>();  // the phase is open until all copies are announced
    if (thread_ == 0) full.arrive();
  }

  /// By the copy engine: boxes are asked for by the lanes whose numbers are those of their first
  /// tiles in the segment. Other warps do not wait: the stage may be full and free again before a
  /// late one looks.
  __device__ __forceinline__ void load_box(std::uint32_t tile, const CUtensorMap* map, int stage,
                                           arch::Barrier& full) {
#if __CUDA_ARCH__ >= 900
    if (thread_ >= 32) return;
    wait_free();
    if (thread_ == 0) full.arrive_expecting(Traits::kStageBytes);
    __syncwarp();
    const int of_stage = thread_ - stage * Traits::kStageTiles;
    if (static_cast<unsigned>(of_stage) >= Traits::kStageTiles ||
        of_stage * kBoxKeys % boxes_.keys != 0)
      return;
    arch::load_box(tile + of_stage * Traits::kTileBytes, map, 0, box_row_, 0,
                   shared_.piece[pieces_.slot].work.kv_head, box_page_, &full);
#endif
  }

  const AttendParams& p_;
  const KeyBoxes& boxes_;
  Shared& shared_;
  const std::uint32_t ring_;
  const int thread_ = static_cast<int>(threadIdx.x) - Traits::kThreads;
  RingPlace<Traits::kStages> at_;      // the stage that is filled next
  RingPlace<Shared::kPieces> pieces_;  // the piece of the segment ahead
  int known_ = 0;                      // in DecodeShared::segments: the one in load
  DecodeSegment load_, ahead_;
  int apart_ = 0, aparts_ = 0;                    // its first stage not by box, and how many
  bool by_place_k_ = false, by_place_v_ = false;  // else they come by the places of their keys
  std::int32_t box_row_ = 0, box_page_ = 0;       // lane i: of tile i of the segment in load
  std::int32_t box_row_ahead_ = 0, box_page_ahead_ = 0;
  KeyPlace place_[!Traits::kPlain ? kKeysOfThread : 1];  // of the segment ahead
};

}  // namespace longspan::kernels::cuda

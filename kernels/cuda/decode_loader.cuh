// The warps of the decode kernel that load. The keys and values of all pieces of work stream
// through a ring of stages to the warps that multiply. Pieces follow each other without a gap: the
// ring does not know where one ends.
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

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/decode_boxes.hpp"
#include "kernels/cuda/decode_bytes.cuh"
#include "kernels/cuda/decode_shared.cuh"
#include "kernels/cuda/loader.cuh"

namespace longspan::kernels::cuda {

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
#if __CUDA_ARCH__ >= 900
    if (thread_ == 0 && boxes.k_valid) arch::prefetch_map(&boxes.k);
    if (thread_ == 0 && boxes.v_valid) arch::prefetch_map(&boxes.v);
#endif
  }

  /// All segments of all pieces. Each part stands once in the code, for the first segment too: code
  /// costs most when it is fetched.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      const bool ends = !load_ || !step();
      if (load_) {
        if (thread_ == 0)
          shared_.levels[known_.slot] =
              ends ? Traits::Stack::kAll : finished_level(load_.place, ahead_.place);
        known_.step();
        queue(false);
      }
      if (ends && !next_piece()) break;
      take_over();
      queue(true);
    }
    // A stage without keys, of no segment, ends it.
    if (thread_ == 0) shared_.segments[known_.slot] = {};
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
    if (thread_ == 0) shared_.segments[known_.slot] = load_;
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
  __device__ __forceinline__ bool next_piece() {
    if (load_) pieces_.step();
    shared_.found[pieces_.slot].wait(pieces_.parity);
    arch::wait_for_kernels_before();
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
      constexpr int kNowhere = -kSegment;  // the copy engine fills in zeros
      box_row_ahead_ = key < piece.view.any.end
                           ? static_cast<std::int32_t>(piece.sequence.first_key + key)
                           : kNowhere;
      box_page_ahead_ = 0;
    }
  }

  /// Queues the stages of the keys, or of the values, of the segment in load.
  __device__ __forceinline__ void queue(bool keys) {
#pragma unroll 1
    for (int stage = 0; stage < Traits::kKeyStages; ++stage, at_.step()) load(stage, keys);
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
  RingPlace<Traits::kStages> at_;       // the stage that is filled next
  RingPlace<Shared::kPieces> pieces_;   // the piece of the segment ahead
  RingPlace<Shared::kSegments> known_;  // in DecodeShared::segments: the one in load
  DecodeSegment load_, ahead_;
  int apart_ = 0, aparts_ = 0;                    // its first stage not by box, and how many
  bool by_place_k_ = false, by_place_v_ = false;  // else they come by the places of their keys
  std::int32_t box_row_ = 0, box_page_ = 0;       // lane i: of tile i of the segment in load
  std::int32_t box_row_ahead_ = 0, box_page_ahead_ = 0;
  KeyPlace place_[!Traits::kPlain ? kKeysOfThread : 1];  // of the segment ahead
};

}  // namespace longspan::kernels::cuda

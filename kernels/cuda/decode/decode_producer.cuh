// The producer warps of the decode kernel. The keys and values of all segments that the scheduler
// announces stream through a ring of stages to the consumers. Work tiles follow each other without
// a gap: the ring does not know where one ends.
//
// A segment takes stages for its keys, then for its values, as stored. If all keys of a stage are
// wanted, or none, and rows are dense, TMA (decode_tensor_maps.hpp) loads one or several tiles of
// 16 keys with one instruction. Everything else is copied by cp.async, or through registers. A
// stage's barrier `full` counts both kinds; each consumer warp arrives at `free` when it has read
// the stage.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/store_same.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/decode/decode_bytes.cuh"
#include "kernels/cuda/decode/decode_shared.cuh"
#include "kernels/cuda/decode/decode_tensor_maps.hpp"

namespace longspan::kernels::cuda {

/// Synchronises the producer warps.
template <class Traits>
__device__ __forceinline__ void sync_loaders() {
  if constexpr (Traits::kLoaders == 32)
    __syncwarp();
  else
    arch::named_sync(2, Traits::kLoaders);
}

/// Load a stage of which some keys are not wanted, or whose layout is unusual. They are not
/// inlined, because such stages are rare. The plain one takes its source by value: a function reads
/// kernel parameters that it takes by reference from memory.
template <class Traits>
__device__ __noinline__ void load_plain_apart(std::uint32_t tile, Rows source, int dim,
                                              const DecodeWorkTile& piece, std::int64_t first) {
  load_plain<typename Traits::Element, Traits::kDim, Traits::kStageKeys, Traits::kLoaders,
             Traits::kTile>(tile, source, dim, piece.work.kv_head, piece.sequence, piece.view,
                            first);
}
template <class Traits>
__device__ __noinline__ void load_any_apart(std::uint32_t tile, const KvRows& source,
                                            const AttendParams& p, const DecodeWorkTile& piece,
                                            std::int64_t first, int thread) {
  if constexpr (Traits::kFp8)
    load_bytes<Traits>(tile, source, p, piece.work.kv_head, piece.sequence, piece.view, first,
                       thread);
  else
    load_keys<typename Traits::Element, Traits::kDim, Traits::kStageKeys, Traits::kLoaders,
              Loader::any16, Traits::kTile>(tile, source, p.head_dim, p, piece.work.kv_head,
                                            piece.sequence, piece.view, first);
}

template <class Traits>
__device__ __noinline__ void load_places_apart(std::uint32_t tile, const KvRows& source, int dim,
                                               int kv_head, int thread, const KeyPlace* places) {
  load_places<Traits>(tile, source, dim, kv_head, thread, places);
}

/// New keys are this rank's last ones: none of them is before this local key.
__device__ inline std::int64_t first_new_key(const Sequence& sequence) {
  return sequence.local_len - (sequence.kv_len - sequence.context_len);
}

/// Writes the new keys of the segment that begins at local key `first`, and their values, into the
/// cache. Every work tile over these keys does so before its own reads, and all write the same.
template <class Traits>
__device__ __noinline__ void write_new_keys(const AttendParams& p, const DecodeWorkTile& piece,
                                            std::int64_t first, int thread) {
  using Element = typename Traits::Element;
  constexpr int kVector = 8;
  const Sequence& sequence = piece.sequence;
  const Shard shard = p.shard.for_sequence(sequence.index);
  const int head = piece.work.kv_head;
  const std::int64_t end = min(first + kSegment, sequence.local_len);
  for (std::int64_t key = max(first, first_new_key(sequence)); key < end; ++key) {
    const std::int64_t token = shard.position(key, sequence.kv_len) - sequence.context_len;
    if (token < 0) continue;
    const std::int64_t from = sequence.first_row + token, to = sequence.first_key + key;
    const auto copy = [&](const Rows& rows, const KvRows& cache, int d) {
      arch::store_same(*reinterpret_cast<uint4*>(cache.at<Element>(to, head) + d),
                       *reinterpret_cast<const uint4*>(rows.at<const Element>(from, head) + d));
    };
    for (int d = thread * kVector; d < p.head_dim; d += Traits::kLoaders * kVector) {
      copy(p.new_k, p.k, d);
      copy(p.new_v, p.v, d);
    }
  }
  arch::publish_to_tma();
  sync_loaders<Traits>();
}

/// The producer warps.
template <class Traits>
class DecodeProducer {
  using Shared = typename Traits::Shared;

 public:
  __device__ DecodeProducer(const AttendParams& p, const KvTensorMaps& maps, Shared& shared,
                            std::uint32_t ring)
      : p_(p), maps_(maps), shared_(shared), ring_(ring) {
    if constexpr (!Traits::kPlain) {
      by_place_k_ = !maps.k_valid && come_by_places<Traits>(p.k, p.pages, p.head_dim);
      by_place_v_ = !maps.v_valid && come_by_places<Traits>(p.v, p.pages, p.head_dim);
    }
    if constexpr (arch::kTarget >= 900) {
      if (thread_ == 0 && maps.k_valid) arch::prefetch_map(&maps.k);
      if (thread_ == 0 && maps.v_valid) arch::prefetch_map(&maps.v);
    }
    arch::wait_for_kernels_before();
  }

  /// Loads all segments of all pieces.
  __device__ __forceinline__ void run() {
    PipelineState<Shared::kAhead> ahead;
#pragma unroll 1
    for (PipelineState<Shared::kSegments> known;; known.advance(), ahead.advance()) {
      shared_.known[ahead.stage].wait(ahead.parity);
      load_ = shared_.segments[known.stage];
      sync_loaders<Traits>();
      if (!load_) break;
      places_ = shared_.places[ahead.stage];
      const KeyPlace first = places_[thread_ % Traits::kTiles * Shared::kPlaces / Traits::kTiles];
      box_row_ = first.row;
      box_page_ = first.page;
      write_new();
      queue(true);
      sync_loaders<Traits>();  // no thread gets a round of the ring ahead of the others
      queue(false);
      __syncwarp();
      if (thread_ % 32 == 0) shared_.loaded[ahead.stage].arrive();
    }
    // A stage without a segment tells the consumers to end.
    wait_free();
    if (thread_ == 0) shared_.full[at_.stage].arrive();
  }

 private:
  __device__ __forceinline__ void write_new() {
    if constexpr (Traits::kPlain) {
      if (p_.new_k.data == nullptr) return;
      const DecodeWorkTile& piece = shared_.piece[load_.piece];
      const Sequence& sequence = piece.sequence;
      const std::int64_t first = std::int64_t{load_.index} * kSegment;
      if (first + kSegment > first_new_key(sequence))
        write_new_keys<Traits>(p_, piece, first, thread_);
    }
  }

  /// Queues the stages of the keys, or of the values, of the segment in load_.
  __device__ __forceinline__ void queue(bool keys) {
#pragma unroll 1
    for (int stage = 0; stage < Traits::kKeyStages; ++stage, at_.advance()) load(stage, keys);
  }
  __device__ __forceinline__ void wait_free() { shared_.free[at_.stage].wait(at_.parity ^ 1); }

  /// Loads one stage of the segment's keys or values.
  __device__ __forceinline__ void load(int stage, bool keys) {
    arch::Barrier& full = shared_.full[at_.stage];
    const std::uint32_t tile = ring_ + at_.stage * Traits::kStageBytes;
    if ((keys ? maps_.k_valid : maps_.v_valid) &&
        static_cast<unsigned>(stage - load_.apart) >= static_cast<unsigned>(load_.aparts))
      return load_box(tile, keys ? &maps_.k : &maps_.v, stage, full);
    wait_free();
    const DecodeWorkTile& piece = shared_.piece[load_.piece];
    const KvRows& source = keys ? p_.k : p_.v;
    const int first = stage * Traits::kStageKeys;
    const std::int64_t key = std::int64_t{load_.index} * kSegment + first;
    if constexpr (Traits::kPlain)
      load_plain_apart<Traits>(tile, source, p_.head_dim, piece, key);
    else if (keys ? by_place_k_ : by_place_v_)
      load_places_apart<Traits>(tile, source, p_.head_dim, piece.work.kv_head, thread_,
                                places_ + first);
    else
      load_any_apart<Traits>(tile, source, p_, piece, key, thread_);
    arch::expect_copies(full);
    sync_loaders<Traits>();  // the phase is open until all copies are announced
    if (thread_ == 0) full.arrive();
  }

  /// Loads a stage by TMA. The lane whose index is that of the box's first tile in the segment
  /// issues the box. Other warps do not wait: the stage may be full and free again before a late
  /// one looks.
  __device__ __forceinline__ void load_box(std::uint32_t tile, const CUtensorMap* map, int stage,
                                           arch::Barrier& full) {
    if constexpr (arch::kTarget >= 900) {
      if (thread_ >= 32) return;
      wait_free();
      if (thread_ == 0) full.arrive_expecting(Traits::kStageBytes);
      __syncwarp();
      const int of_stage = thread_ - stage * Traits::kStageTiles;
      if (static_cast<unsigned>(of_stage) >= Traits::kStageTiles ||
          of_stage * kBoxKeys % maps_.keys != 0)
        return;
      arch::load_box(tile + of_stage * Traits::kTileBytes, map, 0, box_row_, 0,
                     shared_.piece[load_.piece].work.kv_head, box_page_, &full);
    }
  }

  const AttendParams& p_;
  const KvTensorMaps& maps_;
  Shared& shared_;
  const std::uint32_t ring_;
  const int thread_ = static_cast<int>(threadIdx.x) - Traits::kThreads;
  PipelineState<Traits::kStages> at_;             // the stage to fill next
  DecodeSegment load_;                            // the segment being loaded
  const KeyPlace* places_;                        // places of its keys
  bool by_place_k_ = false, by_place_v_ = false;  // keys, values are copied from these places
  std::int32_t box_row_, box_page_;               // in lane i: the place of tile i
};

}  // namespace longspan::kernels::cuda

// The producer warps of the kernels for latent keys. They load the tiles of the segments that the
// scheduler announces (decode_scheduler.cuh). TMA loads the boxes of tiles of which all keys are
// wanted, or none. Other tiles, and pages that no box fits, are copied 16 bytes at a time, with
// zeros for keys that no row sees.
#pragma once

#include "kernels/cuda/mla/mla_shared.cuh"
#include "kernels/cuda/mla/mla_tensor_map.hpp"

namespace longspan::kernels::cuda {

template <class Traits>
class MlaProducer {
  using Shared = typename Traits::Shared;

 public:
  __device__ MlaProducer(const AttendParams& p, const KvTensorMaps& maps, Shared& shared)
      : p_(p), maps_(maps), shared_(shared) {
    if (thread_ == 0 && maps.k_valid) arch::prefetch_map(&maps.k);
    arch::wait_for_kernels_before();
  }

  /// Loads all segments of all pieces.
  __device__ __forceinline__ void run() {
    PipelineState<Shared::kAhead> ahead;
#pragma unroll 1
    for (PipelineState<Shared::kSegments> known;; known.advance(), ahead.advance()) {
      shared_.known[ahead.stage].wait(ahead.parity);
      load_ = shared_.segments[known.stage];
      sync();
      if (!load_) break;
      places_ = shared_.places[ahead.stage];
#pragma unroll 1
      for (int tile = 0; tile < 2; ++tile) load(tile);
      sync();  // no thread gets a segment ahead of the others
      __syncwarp();
      if (thread_ % 32 == 0) shared_.loaded[ahead.stage].arrive();
    }
    // Tiles without a segment tell the consumers to end.
    for (int tile = 0; tile < 2; ++tile) {
      wait_free();
      if (thread_ == 0) shared_.full[at_.stage].arrive();
      at_.advance(kBoxes);
    }
  }

 private:
  __device__ __forceinline__ static void sync() { arch::named_sync(2, Traits::kLoaders); }
  __device__ __forceinline__ void wait_free() { shared_.free[at_.stage].wait(at_.parity ^ 1); }

  __device__ __forceinline__ void load(int tile) {
    if (maps_.k_valid &&
        static_cast<unsigned>(tile - load_.apart) >= static_cast<unsigned>(load_.aparts)) {
      if (thread_ < 32)
        load_boxes(tile);
      else
        at_.advance(kBoxes);
    } else {
      copy(tile);
    }
  }

  /// Lane i brings the keys from maps.keys * i on.
  __device__ __forceinline__ void load_boxes(int tile) {
    const int keys = maps_.keys, count = kLatentTile / keys;
    const int own = min(thread_, count - 1) * keys;
    const KeyPlace place = places_[tile * kLatentTile + own];
    const int head = shared_.piece[load_.piece].work.kv_head;
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box, at_.advance(1)) {
      wait_free();
      arch::Barrier& full = shared_.full[at_.stage];
      if (thread_ == 0) full.arrive_expecting(kBoxBytes);
      __syncwarp();
      if (thread_ < count)
        arch::load_box(arch::shared_address(shared_.box[at_.stage]) + own * 128, &maps_.k,
                       box * kBoxColumns, place.row, head, place.page, 0, &full);
    }
  }

  /// Copies a tile, and hands it over when it has arrived: the tensor cores read it only after a
  /// fence by the copying threads.
  __device__ __noinline__ void copy(int tile) {
    BoxState<Traits> to = at_;
    std::uint32_t address[kBoxes];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box, to.advance(1)) {
      shared_.free[to.stage].wait(to.parity ^ 1);
      address[box] = arch::shared_address(shared_.box[to.stage]);
    }
    const DecodeWorkTile& piece = shared_.piece[load_.piece];
    const std::int64_t first = std::int64_t{load_.index} * kSegment + tile * kLatentTile;
    const int chunk = thread_ % 8;
    const auto* base = static_cast<const std::uint16_t*>(p_.k.data) +
                       piece.work.kv_head * p_.k.head_stride + chunk * 8;
#pragma unroll 1
    for (int row = thread_ / 8; row < kLatentTile; row += Traits::kLoaders / 8) {
      bool wanted;
      const std::uint16_t* from = base;
      if (p_.pages) {
        const KeyPlace place = places_[tile * kLatentTile + row];
        wanted = place.page >= 0;
        if (wanted) from += place.page * p_.k.page_stride + place.row * p_.k.row_stride;
      } else {
        wanted = is_wanted(piece.view, first + row);
        if (wanted) from += (piece.sequence.first_key + first + row) * p_.k.row_stride;
      }
      const std::uint32_t place = box_offset(row, chunk);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int column = box * kBoxColumns;
        const bool exists = wanted && column + chunk * 8 < p_.head_dim;
        arch::copy_async<16>(address[box] + place, exists ? from + column : p_.k.data,
                             exists ? 16 : 0);
      }
    }
    arch::commit_copies();
    arch::wait_copies<0>();
    sm90::fence_shared_stores();
    sync();
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box, at_.advance(1))
      if (thread_ == 0) shared_.full[at_.stage].arrive();
  }

  const AttendParams& p_;
  const KvTensorMaps& maps_;
  Shared& shared_;
  const int thread_ = static_cast<int>(threadIdx.x) - Traits::kThreads;
  BoxState<Traits> at_;     // the box to fill next
  DecodeSegment load_;      // the segment being loaded
  const KeyPlace* places_;  // of its keys
};

}  // namespace longspan::kernels::cuda

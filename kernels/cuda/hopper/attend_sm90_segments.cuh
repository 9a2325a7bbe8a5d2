// The producer warp of the Hopper kernel in the fixed order: it walks over the segments of a work
// tile in the order of the tree, plans what happens to each one's state, and loads its keys and
// values.
//
// A key's index in a tile is its index in its segment. TMA loads segments that are full of visible
// keys. Memory beyond those keys may hold anything, or not exist, so the warp itself copies
// segments at the ends and fills up with zeros. It also copies all rows that TMA cannot load: those
// in pages, and those that are not at multiples of 16 bytes, element by element. Every way gives
// the same bits, so the kernel accepts a layer's calls whatever the layout of their arrays.
#pragma once

#include "kernels/cuda/hopper/attend_sm90_producer.cuh"

namespace longspan::kernels::sm90 {

/// One warp copies rows of 16-bit elements to the places where TMA would put them.
template <class T>
class RowCopier {
  static constexpr int kChunks = T::kDim / 8;     // 16 bytes each, of a row
  static constexpr int kStepRows = 32 / kChunks;  // that the warp's lanes copy at a time
  static_assert(32 % kChunks == 0 && T::kKeys % 32 == 0);
  using Bits = std::uint16_t;

 public:
  __device__ RowCopier(const Bits* data, Brings how, bool has_columns)
      : data_(data), in_chunks_(how != Brings::elements), has_columns_(has_columns) {}

  /// Copies kRows rows to `tile`, the panels of which are `panel_bytes` apart. `offset(row)` is
  /// that of a row in elements, or negative if it is filled with zeros; `column(i)` that of the
  /// lane's element i in its row.
  template <int kRows, class Offset, class Column>
  __device__ __forceinline__ void copy(const void* tile, int panel_bytes, const Offset& offset,
                                       const Column& column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kChunks;
    const std::uint32_t to = shared_address(tile) + chunk / 8 * panel_bytes;
#pragma unroll 1
    for (int group = 0; group < kRows; group += 32) {
      const std::int64_t own = offset(group + lane);  // of one row, which others copy too
#pragma unroll 1
      for (int step = 0; step < 32; step += kStepRows) {
        const int row = step + lane / kChunks;
        const std::int64_t from = __shfl_sync(0xffffffff, own, row);
        const bool wanted = from >= 0 && has_columns_;
        const std::uint32_t place = to + (group + row) * 128 + ((chunk ^ row) & 7) * 16;
        if (in_chunks_) {
          copy_async(place, data_ + (wanted ? from + column(0) : 0), wanted);
          continue;
        }
        std::uint32_t words[4] = {};
        if (wanted) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            words[i] = data_[from + column(2 * i)] |
                       static_cast<std::uint32_t>(data_[from + column(2 * i + 1)]) << 16;
        }
        store_shared(place, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
    commit_copies();
  }

 private:
  const Bits* data_;
  bool in_chunks_, has_columns_;
};

template <class T>
class SegmentProducer {
 public:
  __device__ __forceinline__ SegmentProducer(const KernelParams& call, Shared<T>& shared)
      : call_(call), shared_(shared), lane_(threadIdx.x % 32), column_(lane_ % (T::kDim / 8) * 8) {}

  __device__ __forceinline__ void run() {
    for (PipelineState<2> work;; work.advance()) {
      shared_.work_full[work.stage].wait(work.parity);
      tile_ = &shared_.work[work.stage];
      const int tiles = tile_->tiles;
      if (tiles == 0) return;
      if (lane_ == 0)
        shared_.waiting.walk = cuda::PlannedWalk(shared_.waiting.order[work.stage],
                                                 {tile_->some.begin, tile_->some.end});
      const int wanted = max(tiles - kWantedEarly, 0);
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        if (i == wanted && lane_ == 0) shared_.work_wanted.arrive();
        load_segment(i == 0);
      }
      // The consumers need the work tile for longer.
      __syncwarp();
      if (lane_ == 0) shared_.work_empty[work.stage].arrive();
    }
  }

 private:
  /// Steps the walk. Returns the local key at which the next segment begins.
  __device__ __forceinline__ int next_segment() {
    int first = 0;
    if (lane_ == 0) {
      cuda::PlannedWalk& walk = shared_.waiting.walk;
      walk.next();
      first = walk.segment * T::kKeys;
      shared_.k_empty[stage_.stage].wait(stage_.parity ^ 1);
      shared_.waiting.segments[stage_.stage] = {first, walk.step};
    }
    __syncwarp();  // the stage is empty
    return __shfl_sync(0xffffffff, first, 0);
  }

  /// Loads the keys and values of the next segment; between them the queries, if it is the first of
  /// the work tile.
  __device__ __forceinline__ void load_segment(bool begins) {
    const int first = next_segment(), stage = stage_.stage;
    const bool whole = first >= tile_->some.begin && first + T::kKeys <= tile_->some.end;
    const bool copies_k = !whole || call_.sources.k != Brings::boxes;
    bring(copies_k, shared_.k[stage], call_.k, call_.params.k, call_.sources.k,
          shared_.k_full[stage], first);
    if (begins) bring_queries();
    // The values before the last ones need nothing of this segment, so the wait for their stage may
    // be between the copies of its keys and their announcement.
    if (lane_ == 0) shared_.v_empty[stage].wait(stage_.parity ^ 1);
    __syncwarp();
    const bool copies_v = !whole || call_.sources.v != Brings::boxes;
    bring(copies_v, shared_.v[stage], call_.v, call_.params.v, call_.sources.v,
          shared_.v_full[stage], first);
    if (!whole || call_.sources.k != Brings::boxes || call_.sources.v != Brings::boxes) {
      wait_copies<0>();
      fence_shared_stores();
      __syncwarp();
      if (lane_ == 0 && copies_k) shared_.k_full[stage].arrive();
      if (lane_ == 0 && copies_v) shared_.v_full[stage].arrive();
    }
    stage_.advance();
  }

  template <class Buffer>
  __device__ __forceinline__ void bring(bool copies, Buffer& tile, const CUtensorMap& map,
                                        const KvRows& source, Brings how, Barrier& full,
                                        int first) {
    if (copies) return copy(tile, source, how, first);
    if (lane_ == 0) {
      constexpr int kTileBytes = T::kPanels * T::kPanelBytes;
      const std::uint64_t keys_again = cache_policy<Keep::last_to_go>();
      full.arrive_expecting(kTileBytes);
#pragma unroll
      for (int panel = 0; panel < T::kPanels; ++panel)
        load_box(tile[panel], &map, panel * T::kPanelElements, tile_->first_key + first,
                 tile_->kv_head, &full, keys_again);
    }
    __syncwarp();
  }

  /// Copies the keys of a segment that some row sees, and zeros for the others.
  template <class Buffer>
  __device__ __forceinline__ void copy(Buffer& tile, const KvRows& source, Brings how, int first) {
    const Pages& pages = call_.params.pages;
    const auto offset = [&](int row) -> std::int64_t {
      const int key = first + row;
      if (key < tile_->some.begin || key >= tile_->some.end) return -1;
      const std::int64_t head = tile_->kv_head * source.head_stride;
      if (!pages)
        return head + static_cast<std::int64_t>(tile_->first_key + key) * source.row_stride;
      const std::int64_t page = pages.table[tile_->sequence * pages.row_stride +
                                            key / call_.by_page * pages.column_stride];
      return head + page * source.page_stride +
             static_cast<std::int64_t>(key % call_.by_page) * source.row_stride;
    };
    copier(static_cast<const std::uint16_t*>(source.data), how)
        .template copy<T::kKeys>(&tile, T::kPanelBytes, offset,
                                 [&](int i) { return source.column(column_ + i); });
  }

  /// Loads the queries, as soon as the consumers are done with those before.
  __device__ __forceinline__ void bring_queries() {
    if (call_.sources.q == Brings::boxes) {
      if (lane_ == 0) load_queries(call_, shared_, tile_->query_row, tile_->query_head, q_parity_);
      __syncwarp();
    } else {
      const TokenRows& q = call_.params.q;
#pragma unroll 1
      for (int c = 0; c < T::kConsumers; ++c) {
        shared_.q_empty[c].wait(q_parity_ ^ 1);
        const auto offset = [&](int row) -> std::int64_t {
          row += 64 * c;
          return row < tile_->rows ? q.offset(tile_->first_row + row, tile_->head) : -1;
        };
        copier(static_cast<const std::uint16_t*>(q.data), call_.sources.q)
            .template copy<64>(&shared_.q[c], 64 * 128, offset, [&](int i) { return column_ + i; });
        wait_copies<0>();
        fence_shared_stores();
        __syncwarp();
        if (lane_ == 0) shared_.q_full[c].arrive();
      }
    }
    q_parity_ ^= 1;
  }

  __device__ __forceinline__ RowCopier<T> copier(const std::uint16_t* data, Brings how) const {
    return {data, how, column_ < call_.params.head_dim};
  }

  const KernelParams& call_;
  Shared<T>& shared_;
  const int lane_;
  const int column_;  // the first of those that the lane copies
  PipelineState<T::kStages> stage_;
  std::uint32_t q_parity_ = 0;
  const WorkTile* tile_ = nullptr;  // in shared memory, as the warp has few registers
};

}  // namespace longspan::kernels::sm90

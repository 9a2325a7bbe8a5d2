// The producer warps of the Hopper kernel that load keys and values from pages. Rows of a tile are
// anywhere, and tiles begin anywhere in a page, so no TMA tensor map describes them. Two warps look
// the rows up in the block table and copy them by cp.async, 16 bytes a lane, to the places where
// TMA would put them, in the order of the other producer (attend_sm90_producer.cuh). A lane looks
// up a row for the whole warp, and one tile ahead, so that nothing waits for the table.
//
// Data written by cp.async has to be fenced before the tensor cores read it, and only once it has
// arrived. A third warp waits for that, so that the copying warps do not, and announces the tile.
#pragma once

#include "kernels/cuda/hopper/attend_sm90_producer.cuh"

namespace longspan::kernels::sm90 {

inline constexpr int kHandOverWarp = 3;  // the first and the third warp copy

template <class T>
class PageLoader {
  static constexpr int kRowLanes = 8;  // 128 bytes, a panel's share of a row
  static constexpr int kStepRows = 32 / kRowLanes;
  static constexpr int kGroups = (T::kKeys + 32 * kPageWarps - 1) / (32 * kPageWarps);
  static_assert(T::kKeys % kStepRows == 0);
  using Element = typename T::Element;

 public:
  /// The entries of the block table for a lane's rows of a tile.
  struct Entries {
    std::int32_t page[kGroups];
  };

  __device__ explicit PageLoader(const KernelParams& call) : call_(call) {}

  /// The next tiles are of this work tile's sequence and head.
  __device__ void begin(const WorkTile& work) {
    sequence_ = work.sequence;
    kv_head_ = work.kv_head;
    begin_ = work.some.begin;
    end_ = work.some.end;
  }

  /// Looks up the tile that begins at local key `first`. It reads no entry that no visible key
  /// needs.
  __device__ Entries look_up(int first) const {
    Entries entries;
    const Pages& pages = call_.params.pages;
    const std::int32_t* table = pages.table + sequence_ * pages.row_stride;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int key = first + row_of(g) + lane();
      const bool wanted = key >= begin_ && key < end_ && row_of(g) + lane() < T::kKeys;
      entries.page[g] = wanted ? table[key / call_.by_page * pages.column_stride] : 0;
    }
    return entries;
  }

  /// Queues the copies of a tile of rows of `dim` elements; each warp arrives at `landed` when its
  /// own have completed.
  template <int kPanels>
  __device__ void load(Element (&tile)[kPanels][T::kKeys][T::kPanelElements], Barrier& landed,
                       const KvRows& source, int dim, int first, const Entries& entries) {
    const Element* base = static_cast<const Element*>(source.data) + kv_head_ * source.head_stride;
    const int chunk = lane() % kRowLanes * 8;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (row_of(g) >= T::kKeys) break;
      const int key = first + row_of(g) + lane();
      const Element* own = base;  // of the lane's row; not read below begin_
      if (key >= begin_)
        own = base + entries.page[g] * source.page_stride + key % call_.by_page * source.row_stride;
      const auto address = reinterpret_cast<std::uint64_t>(own);
      const std::uint32_t to = shared_address(tile[0][row_of(g)]);
      constexpr int kSteps = 32 / kStepRows;
#pragma unroll 4
      for (int step = 0; step < kSteps; ++step) {
        if (T::kKeys % 32 != 0 && row_of(g) + step * kStepRows >= T::kKeys) break;
        const int row = step * kStepRows + lane() / kRowLanes;  // of the group
        const auto* from = reinterpret_cast<const Element*>(__shfl_sync(~0u, address, row)) + chunk;
        const bool seen = first + row_of(g) + row >= begin_;
        const std::uint32_t place = to + row * 128 + ((lane() ^ row) & 7) * 16;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          const int column = panel * T::kPanelElements;
          copy_async<16>(place + panel * T::kPanelBytes, from + column,
                         seen && column + chunk < dim ? 16 : 0);
        }
      }
    }
    expect_copies(landed);
    __syncwarp();  // the phase is open until all copies are announced
    if (lane() == 0) landed.arrive();
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  /// The first row of the warp's gth group of 32.
  __device__ static int row_of(int g) {
    return (g * kPageWarps + static_cast<int>(threadIdx.x) / 64) * 32;
  }

  const KernelParams& call_;
  int sequence_, kv_head_, begin_, end_;
};

/// The producer for pages. All warps of the first warpgroup except the second take part.
template <class T>
class PageProducer {
 public:
  __device__ __forceinline__ PageProducer(const KernelParams& call, Shared<T>& shared)
      : call_(call), shared_(shared), loader_(call), leads_(threadIdx.x == 0) {}

  __device__ __forceinline__ void run() {
    const bool copies = threadIdx.x / 32 != kHandOverWarp;
    for (PipelineState<2> work;; work.advance()) {
      shared_.work_full[work.stage].wait(work.parity);
      const WorkTile& tile = shared_.work[work.stage];
      const int tiles = tile.tiles, row = tile.query_row, head = tile.query_head;
      const int end = tile.some.end;
      loader_.begin(tile);
      __syncwarp();  // every lane has read the work tile
      if (threadIdx.x % 32 == 0) shared_.work_empty[work.stage].arrive();
      if (tiles == 0) return;
      if (leads_ && tiles < kWantedEarly) shared_.work_wanted.arrive();

      if (copies)
        copy_tiles(tiles, row, head, end);
      else
        hand_over_tiles(tiles);
      done_ += tiles;
    }
  }

 private:
  __device__ static int stage_of(int tile) { return tile % T::kStages; }
  __device__ static std::uint32_t parity_of(int tile) {
    return static_cast<std::uint32_t>(tile / T::kStages) & 1;
  }

  /// Copies the keys of each tile, then the values of the one before it. `key`: one past the last.
  __device__ __forceinline__ void copy_tiles(int tiles, int row, int head, int key) {
    const AttendParams& params = call_.params;
    typename PageLoader<T>::Entries entries, next = loader_.look_up(key - T::kKeys);
#pragma unroll 1
    for (int tile = 0; tile <= tiles; ++tile) {
      if (leads_ && tile > 0 && tile == tiles + 1 - kWantedEarly) shared_.work_wanted.arrive();
      if (tile < tiles) {
        const int stage = stage_of(done_ + tile);
        shared_.k_empty[stage].wait(parity_of(done_ + tile) ^ 1);
        loader_.load(shared_.k[stage], shared_.landed.k[stage], params.k, params.head_dim,
                     key - T::kKeys, next);
      }
      const auto ahead = loader_.look_up(key - 2 * T::kKeys);
      if (tile == 0) {
        if (leads_) load_queries(call_, shared_, row, head, q_parity_);
        __syncwarp();
      } else {
        const int stage = stage_of(done_ + tile - 1);
        shared_.v_empty[stage].wait(parity_of(done_ + tile - 1) ^ 1);
        loader_.load(shared_.v[stage], shared_.landed.v[stage], params.v, params.value_dim, key,
                     entries);
      }
      key -= T::kKeys;
      entries = next;
      next = ahead;
    }
    q_parity_ ^= 1;
  }

  /// One lane passes the same tiles to the consumers, in the same order.
  __device__ __forceinline__ void hand_over_tiles(int tiles) {
    for (int tile = 0; tile <= tiles && threadIdx.x % 32 == 0; ++tile) {
      const int k = done_ + tile, v = done_ + tile - 1;
      if (tile < tiles) hand_over(shared_.landed.k, shared_.k_full, k);
      if (tile > 0) hand_over(shared_.landed.v, shared_.v_full, v);
    }
    __syncwarp();
  }

  __device__ __forceinline__ static void hand_over(Barrier (&landed)[T::kStages],
                                                   Barrier (&full)[T::kStages], int tile) {
    landed[stage_of(tile)].wait(parity_of(tile));
    fence_shared_stores();
    full[stage_of(tile)].arrive();
  }

  const KernelParams& call_;
  Shared<T>& shared_;
  PageLoader<T> loader_;
  const bool leads_;
  int done_ = 0;  // tiles of keys, and as many of values; each uses the stages in turn
  std::uint32_t q_parity_ = 0;
};

}  // namespace longspan::kernels::sm90

// The warps of the Hopper kernel that load keys and values out of pages. Rows of a tile lie
// anywhere, and tiles begin anywhere in a page, so the copy engine has no box for them: two warps
// find the rows by the block table and copy them by cp.async, 16 bytes a lane, to the places where
// the copy engine would put them, in the order of its loader (load in attend_sm90.cuh). A lane
// finds a row for the whole warp, and one tile ahead, so that nothing waits for the table.
//
// What cp.async has written has to be fenced before the tensor cores read it, and that only once it
// is there. A third warp waits for that, so that those that copy do not, and announces the tile.
#pragma once

#include "kernels/cuda/hopper/attend_sm90_block.cuh"

namespace longspan::kernels::sm90 {

inline constexpr int kPageWarps = 2;  // that copy: the first and the third
inline constexpr int kHandOverWarp = 3;

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

  __device__ explicit PageLoader(const Call& call) : call_(call) {}

  /// The sequence and head that the next tiles are of.
  __device__ void begin(const Item& item) {
    sequence_ = item.sequence;
    kv_head_ = item.kv_head;
    begin_ = item.some.begin;
    end_ = item.some.end;
  }

  /// For the tile that begins at local key `first`. Entries that no visible key needs are not read.
  __device__ Entries find(int first) const {
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

  /// Queues the copies of a tile; each warp arrives at `landed` when its own are there.
  __device__ void load(Element (&tile)[T::kPanels][T::kKeys][T::kPanelElements], Barrier& landed,
                       const KvRows& source, int first, const Entries& entries) {
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
        for (int panel = 0; panel < T::kPanels; ++panel) {
          const int column = panel * T::kPanelElements;
          copy_async<16>(place + panel * T::kPanelBytes, from + column,
                         seen && column + chunk < call_.params.head_dim ? 16 : 0);
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

  const Call& call_;
  int sequence_, kv_head_, begin_, end_;
};

/// A copied tile's way to the consumers. By one thread.
__device__ inline void hand_over(Barrier& landed, Barrier& full, std::uint32_t parity) {
  landed.wait(parity);
  fence_shared_stores();
  full.arrive();
}

/// What `load` does, out of pages. By all warps of the first warpgroup but the second.
template <class T>
__device__ void load_pages(const Call& call, Shared<T>& shared) {
  const AttendParams& params = call.params;
  const bool leads = threadIdx.x == 0, copies = threadIdx.x / 32 != kHandOverWarp;
  PageLoader<T> loader(call);
  PipelineState<2> announced;
  int done = 0;  // tiles of keys, and as many of values; each takes the stages in turn
  const auto stage_of = [](int tile) { return tile % T::kStages; };
  const auto parity_of = [](int tile) { return static_cast<std::uint32_t>(tile / T::kStages) & 1; };
  std::uint32_t q_parity = 0;

  for (;; announced.advance()) {
    shared.item_full[announced.stage].wait(announced.parity);
    const Item& item = shared.items[announced.stage];
    const int tiles = item.tiles, head = item.head, first_row = item.first_row;
    int key = item.some.end;
    loader.begin(item);
    __syncwarp();  // every lane has read it
    if (threadIdx.x % 32 == 0) shared.item_empty[announced.stage].arrive();
    if (tiles == 0) return;
    if (leads && tiles < kWantedEarly) shared.item_wanted.arrive();

    // Keys of a tile, then values of the one before it.
    if (!copies) {
      for (int tile = 0; tile <= tiles && threadIdx.x % 32 == 0; ++tile) {
        const int k = stage_of(done + tile), v = stage_of(done + tile - 1);
        if (tile < tiles) hand_over(shared.landed.k[k], shared.k_full[k], parity_of(done + tile));
        if (tile > 0) hand_over(shared.landed.v[v], shared.v_full[v], parity_of(done + tile - 1));
      }
      __syncwarp();
      done += tiles;
      continue;
    }
    typename PageLoader<T>::Entries entries, next = loader.find(key - T::kKeys);
#pragma unroll 1
    for (int tile = 0; tile <= tiles; ++tile) {
      if (leads && tile > 0 && tile == tiles + 1 - kWantedEarly) shared.item_wanted.arrive();
      if (tile < tiles) {
        const int stage = stage_of(done + tile);
        shared.k_empty[stage].wait(parity_of(done + tile) ^ 1);
        loader.load(shared.k[stage], shared.landed.k[stage], params.k, key - T::kKeys, next);
      }
      const auto ahead = loader.find(key - 2 * T::kKeys);
      if (tile == 0) {
        if (leads) load_queries(call, shared, first_row, head, q_parity);
        __syncwarp();
      } else {
        const int stage = stage_of(done + tile - 1);
        shared.v_empty[stage].wait(parity_of(done + tile - 1) ^ 1);
        loader.load(shared.v[stage], shared.landed.v[stage], params.v, key, entries);
      }
      key -= T::kKeys;
      entries = next;
      next = ahead;
    }
    done += tiles;
    q_parity ^= 1;
  }
}

}  // namespace longspan::kernels::sm90

// The producer warp of the Hopper kernel: one thread keeps the pipelines of queries, keys and
// values filled by TMA. Keys and values in pages have their own producer warps
// (attend_sm90_pages.cuh).
#pragma once

#include "kernels/cuda/hopper/attend_sm90_block.cuh"

namespace longspan::kernels::sm90 {

/// The producer requests the next work tile this many key tiles before the end of the current one.
inline constexpr int kWantedEarly = 8;

/// One thread loads the work tile's queries, as soon as its consumers are done with those before.
template <class T>
__device__ void load_queries(const KernelParams& call, Shared<T>& shared, int row, int head,
                             std::uint32_t parity) {
  constexpr int kBytes = 64 * T::kPanels * 128;
  const std::uint64_t once = cache_policy<Keep::first_to_go>();
#pragma unroll
  for (int c = 0; c < T::kConsumers; ++c) {
    shared.q_empty[c].wait(parity ^ 1);
    shared.q_full[c].arrive_expecting(kBytes);
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel)
      load_box(shared.q[c][panel], &call.q, panel * T::kPanelElements, row + 64 * c, head,
               &shared.q_full[c], once);
  }
}

/// One thread is the producer. It loads in the order in which consumers need tiles: values lag one
/// tile behind keys.
template <class T>
class Producer {
 public:
  __device__ __forceinline__ Producer(const KernelParams& call, Shared<T>& shared)
      : call_(call),
        shared_(shared),
        keys_again_(cache_policy<Keep::last_to_go>()),
        before_(here_before(call.arrivals)) {}

  __device__ __forceinline__ void run() {
    std::uint32_t q_parity = 0;
    for (PipelineState<2> work;; work.advance()) {
      shared_.work_full[work.stage].wait(work.parity);
      const WorkTile& tile = shared_.work[work.stage];
      const int tiles = tile.tiles, row = tile.query_row, head = tile.query_head, rows = tile.rows;
      kv_head_ = tile.kv_head;
      count_ = call_.arrivals.count_of(tile.head);
      first_seen_ = tile.first_key + tile.some.begin;
      portion_ = 0;
      int key = tile.first_key + tile.some.end;
      shared_.work_empty[work.stage].arrive();
      if (tiles == 0) return;
      if (tiles < kWantedEarly) shared_.work_wanted.arrive();

      KeyTile keys = find(key -= T::kKeys);
      load_k(keys);
      await_queries(row, rows);
      load_queries(call_, shared_, row, head, q_parity);
      q_parity ^= 1;
      for (int i = 1; i < tiles; ++i) {
        if (i == tiles + 1 - kWantedEarly) shared_.work_wanted.arrive();
        const KeyTile next = find(key -= T::kKeys);
        load_k(next);
        load_v(keys);
        keys = next;
      }
      load_v(keys);
    }
  }

 private:
  /// The source of a tile of keys: a row of k and v, or of the own ones.
  struct KeyTile {
    int row;
    bool own;
  };

  __device__ __forceinline__ void load_k(KeyTile keys) {
    const CUtensorMap* const map = keys.own ? &call_.own_k : &call_.k;
    load(shared_.k[k_.stage], map, shared_.k_full[k_.stage], shared_.k_empty[k_.stage], k_,
         keys.row);
  }

  /// Values of e4m3 go to the warps that transpose them.
  __device__ __forceinline__ void load_v(KeyTile keys) {
    const CUtensorMap* const map = keys.own ? &call_.own_v : &call_.v;
    if constexpr (T::kEightBits)
      load(shared_.stored.v, map, shared_.stored.full, shared_.stored.empty, v_, keys.row);
    else
      load(shared_.v[v_.stage], map, shared_.v_full[v_.stage], shared_.v_empty[v_.stage], v_,
           keys.row);
  }

  /// Finds the tile of keys from `key` on, and returns when it has arrived. A tile of own keys only
  /// is read in place; all others are read among the received keys, once the portions that some row
  /// sees have arrived. A work tile requests its last tile of keys first, and then leftwards.
  __device__ __forceinline__ KeyTile find(int key) {
    const KeyArrivals& arrivals = call_.arrivals;
    if (!arrivals) return {key, false};
    const int seen = max(key, first_seen_), end = key + T::kKeys;
    while (arrivals.portion[portion_].begin >= end) ++portion_;
    const KeyArrivals::Portion last = arrivals.portion[portion_];
    if (last.is_own() && last.begin <= seen) return {last.place + key - last.begin, true};
    await_from(arrivals.portion + portion_, seen);
    return {key, false};
  }

  /// Waits for the queries of a work tile.
  __device__ __forceinline__ void await_queries(int row, int rows) {
    const KeyArrivals& arrivals = call_.arrivals;
    if (arrivals.query_portions == 0) return;
    const KeyArrivals::Portion* portion = arrivals.query_portion;
    while (portion->begin >= row + rows) ++portion;
    await_from(portion, row);
  }

  /// Waits for a portion and those after it that reach down to `first`.
  __device__ __forceinline__ void await_from(const KeyArrivals::Portion* portion, int first) {
    await_portion(*portion);
    while (portion->begin > first) await_portion(*++portion);
  }

  __device__ __forceinline__ void await_portion(const KeyArrivals::Portion& portion) {
    static_assert(KeyArrivals::kMostPieces + 1 < 16);
    const int rank = portion.is_own() ? call_.arrivals.rank : portion.rank(), at = 4 * rank;
    if (count_ <= static_cast<int>(arrived_ >> at & 15)) return;
    await_rank(call_.arrivals, rank, before_ + static_cast<unsigned>(count_));
    arrived_ = (arrived_ & ~(15u << at)) | static_cast<unsigned>(count_) << at;
  }

  template <class Buffer, class State>
  __device__ __forceinline__ void load(Buffer& tile, const CUtensorMap* map, Barrier& full,
                                       Barrier& empty, State& state, int key) {
    constexpr int kTileBytes = sizeof(Buffer), kPanels = std::extent_v<Buffer>;
    empty.wait(state.parity ^ 1);
    full.arrive_expecting(kTileBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      load_box(tile[panel], map, panel * T::kPanelElements, key, kv_head_, &full, keys_again_);
    state.advance();
  }

  const KernelParams& call_;
  Shared<T>& shared_;
  const std::uint64_t keys_again_;
  const std::uint64_t before_;  // counts are relative to this
  PipelineState<T::kStages> k_;
  PipelineState<T::kEightBits ? 1 : T::kStages> v_;
  int kv_head_;
  int first_seen_;        // of the keys, by some row of the work tile
  int count_;             // of a rank, once its part of the work tile's head has arrived
  int portion_ = 0;       // of KeyArrivals, with the last key of the last found tile
  unsigned arrived_ = 0;  // four bits for each rank: the last observed count
};

}  // namespace longspan::kernels::sm90

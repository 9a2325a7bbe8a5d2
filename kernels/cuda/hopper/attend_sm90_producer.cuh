// The producer warp of the Hopper kernel: one thread keeps the pipelines of queries, keys and
// values filled by TMA. Keys and values out of pages have producer warps of their own
// (attend_sm90_pages.cuh).
#pragma once

#include "kernels/cuda/hopper/attend_sm90_block.cuh"

namespace longspan::kernels::sm90 {

/// The producer asks for the next work tile so many key tiles before the end of this one.
inline constexpr int kWantedEarly = 8;

/// One thread loads the work tile's queries, as soon as its consumers are done with those before.
template <class T>
__device__ void load_queries(const Call& call, Shared<T>& shared, int row, int head,
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
  __device__ __forceinline__ Producer(const Call& call, Shared<T>& shared)
      : call_(call), shared_(shared), keys_again_(cache_policy<Keep::last_to_go>()) {}

  __device__ __forceinline__ void run() {
    std::uint32_t q_parity = 0;
    for (PipelineState<2> work;; work.advance()) {
      shared_.work_full[work.stage].wait(work.parity);
      const WorkTile& tile = shared_.work[work.stage];
      const int tiles = tile.tiles, row = tile.query_row, head = tile.query_head;
      kv_head_ = tile.kv_head;
      first_seen_ = tile.first_key + tile.some.begin;
      int key = tile.first_key + tile.some.end;
      shared_.work_empty[work.stage].arrive();
      if (tiles == 0) return;
      if (tiles < kWantedEarly) shared_.work_wanted.arrive();

      load_k(key -= T::kKeys);
      load_queries(call_, shared_, row, head, q_parity);
      q_parity ^= 1;
      for (int i = 1; i < tiles; ++i) {
        if (i == tiles + 1 - kWantedEarly) shared_.work_wanted.arrive();
        load_k(key - T::kKeys);
        load_v(key);
        key -= T::kKeys;
      }
      load_v(key);
    }
  }

 private:
  __device__ __forceinline__ void load_k(int key) {
    const CUtensorMap* const map = finds_own(key) ? &call_.own_k : &call_.k;
    load(shared_.k[k_.stage], map, shared_.k_full[k_.stage], shared_.k_empty[k_.stage], k_, key);
  }

  /// Values of e4m3 go to the warps that transpose them.
  __device__ __forceinline__ void load_v(int key) {
    const CUtensorMap* const map = finds_own(key) ? &call_.own_v : &call_.v;
    if constexpr (T::kEightBits)
      load(shared_.stored.v, map, shared_.stored.full, shared_.stored.empty, v_, key);
    else
      load(shared_.v[v_.stage], map, shared_.v_full[v_.stage], shared_.v_empty[v_.stage], v_, key);
  }

  /// Whether all keys of a tile that some row sees are this rank's own, beside those of others that
  /// still come; `key` then becomes their row. Else the keys of others are there on return.
  __device__ __forceinline__ bool finds_own(int& key) {
    const KeyArrivals& arrivals = call_.arrivals;
    if (!arrivals) return false;
    const int seen = max(key, first_seen_), end = key + T::kKeys;
#pragma unroll 1
    for (int i = 0; i < arrivals.stretches; ++i) {
      const KeyArrivals::Stretch& own = arrivals.own[i];
      if (seen < own.position || end > own.position + own.count) continue;
      key += own.first - own.position;
      return true;
    }
    const int piece = kv_head_ / arrivals.heads;
    if ((arrived_ >> piece & 1) == 0) {
      await_arrival(arrivals, 1 + piece);
      arrived_ |= 1u << piece;
    }
    return false;
  }

  template <class Buffer, class State>
  __device__ __forceinline__ void load(Buffer& tile, const CUtensorMap* map, Barrier& full,
                                       Barrier& empty, State& state, int key) {
    constexpr int kTileBytes = T::kPanels * T::kPanelBytes;
    empty.wait(state.parity ^ 1);
    full.arrive_expecting(kTileBytes);
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel)
      load_box(tile[panel], map, panel * T::kPanelElements, key, kv_head_, &full, keys_again_);
    state.advance();
  }

  const Call& call_;
  Shared<T>& shared_;
  const std::uint64_t keys_again_;
  PipelineState<T::kStages> k_;
  PipelineState<T::kEightBits ? 1 : T::kStages> v_;
  int kv_head_;
  int first_seen_;        // of the keys, by some row of the work tile
  unsigned arrived_ = 0;  // a bit for each piece of KeyArrivals
};

}  // namespace longspan::kernels::sm90

// Attention forward on Hopper, out of three engines that run at once: the copy engine brings tiles
// of keys and values, the tensor cores multiply, the arithmetic units do the softmax.
//
//     S = Q K^T     P = exp2(c S - m)     O = O ratio + P V          (c = scale log2 e)
//
// Softcap and ALiBi change S on its way to P (attend_sm90_scores.cuh), in instances of their own.
// So are products of e4m3 (attend_sm90_fp8.cuh), in which two warps more turn the values over and
// consumers take other steps.
//
// A block is a warp that finds the work, a warp that loads (three where keys lie in pages:
// attend_sm90_pages.cuh), and two or three consumer warpgroups of 64 query rows each. Q, K and V
// stand in shared memory (K and V in a ring of stages); S, P and O stay in registers. A consumer
// asks for the scores of the next tile together with the product of this one's weights and values,
// so that its softmax runs beside its own products and beside those of the other consumers. Blocks
// stay and take one piece of work after the other.
//
// Key tiles are walked from the last visible key leftwards, each ending where the one before began:
// no tile reaches past the keys, and under a causal mask only the first tile is cut by the mask.
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/hopper/attend_sm90_block.cuh"
#include "kernels/cuda/hopper/attend_sm90_fp8.cuh"
#include "kernels/cuda/hopper/attend_sm90_items.cuh"
#include "kernels/cuda/hopper/attend_sm90_pages.cuh"
#include "kernels/cuda/hopper/attend_sm90_rows.cuh"
#include "kernels/cuda/hopper/attend_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

// ---- the loader ------------------------------------------------------------------------------

/// One thread: keeps the ring of keys and values filled. Values lag one tile behind keys, as in the
/// consumers.
template <class T>
__device__ void load(const Call& call, Shared<T>& shared) {
  constexpr int kTileBytes = T::kPanels * T::kPanelBytes;
  const std::uint64_t keys_again = cache_policy<Keep::last_to_go>();
  PipelineState<2> announced;
  PipelineState<T::kStages> k;
  PipelineState<T::kEightBits ? 1 : T::kStages> v;
  std::uint32_t q_parity = 0;
  const auto load_tile = [&](auto& tile, const CUtensorMap* map, Barrier& full, Barrier& empty,
                             auto& turn, int key, int kv_head) {
    empty.wait(turn.parity ^ 1);
    full.arrive_expecting(kTileBytes);
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel)
      load_box(tile[panel], map, panel * T::kPanelElements, key, kv_head, &full, keys_again);
    turn.advance();
  };

  for (;; announced.advance()) {
    shared.item_full[announced.stage].wait(announced.parity);
    const Item& item = shared.items[announced.stage];
    const int tiles = item.tiles, head = item.head, kv_head = item.kv_head;
    const int first_row = item.first_row;
    int key = item.first_key + item.some.end;
    shared.item_empty[announced.stage].arrive();
    if (tiles == 0) return;
    if (tiles < kWantedEarly) shared.item_wanted.arrive();

    const auto load_k = [&](int at) {
      load_tile(shared.k[k.stage], &call.k, shared.k_full[k.stage], shared.k_empty[k.stage], k, at,
                kv_head);
    };
    const auto load_v = [&](int at) {
      if constexpr (T::kEightBits)
        load_tile(shared.stored.v, &call.v, shared.stored.full, shared.stored.empty, v, at,
                  kv_head);
      else
        load_tile(shared.v[v.stage], &call.v, shared.v_full[v.stage], shared.v_empty[v.stage], v,
                  at, kv_head);
    };
    load_k(key -= T::kKeys);
    load_queries(call, shared, first_row, head, q_parity);
    q_parity ^= 1;
    for (int tile = 1; tile < tiles; ++tile) {
      if (tile == tiles + 1 - kWantedEarly) shared.item_wanted.arrive();
      load_k(key - T::kKeys);
      load_v(key);
      key -= T::kKeys;
    }
    load_v(key);
  }
}

// ---- the consumers' steps --------------------------------------------------------------------

/// O += P V, asynchronously.
template <class T>
__device__ void multiply_pv(float (&o)[T::kDim / 2], const std::uint32_t (&p)[T::kKeys / 16][4],
                            const void* v) {
  const std::uint64_t b = operand(v, T::kPanelBytes);
#pragma unroll
  for (int step = 0; step < T::kKeys / 16; ++step)
    Product<T::kDim>::template registers<typename T::Element, true>(
        o, p[step], advance(b, step * 16 * 128), true);
}

// ---- a consumer ------------------------------------------------------------------------------

template <class T>
__device__ void consume(const Call& call, Shared<T>& shared, int group) {
  using Element = typename T::Element;
  constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + T::kConsumers;
  const int lane = threadIdx.x % 32;
  const int row = 64 * group + 16 * (threadIdx.x / 32 % 4) + lane / 4;  // and row + 8
  const float c = score_factor<T>(call);

  float s[T::kKeys / 2], o[T::kDim / 2], ratio[2];
  std::uint32_t p[T::kKeys / T::kStep][4];
  Rowwise<T> rows;
  RowKeys whole{};             // keys that every row of the tile sees
  int clear = 0;               // keys of the values below this one are cleared
  int first = 0;               // local key at which the tile of s begins
  PipelineState<2> announced;  // the item
  PipelineState<T::kStages> k, v;
  std::uint32_t q_parity = 0;

  const auto release = [&](Barrier& empty) {
    if (lane == 0) empty.arrive();
  };
  const auto wait_turn = [&] {
    if (T::kTurns) named_sync(kTurnBarrier + group, 256);
  };
  const auto pass_turn = [&] {
    if (T::kTurns) named_arrive(kTurnBarrier + (group + 1) % T::kConsumers, 256);
  };
  if (group == T::kConsumers - 1) pass_turn();  // the first consumer begins

  const auto wait_keys = [&] { shared.k_full[k.stage].wait(k.parity); };
  const auto begin_scores = [&] {  // S = Q K^T
    wgmma_begin();
    multiply_qk<T>(s, shared.q[group], shared.k[k.stage]);
    wgmma_commit();
  };
  const auto begin_values = [&] {  // O += P V
    shared.v_full[v.stage].wait(v.parity);
    if (first < clear)  // every consumer writes the same zeros
      clear_keys<T, 128>(shared.v[v.stage], clear - first, kGroupBarrier + group);
    wgmma_begin();
    multiply_pv<T>(o, p, shared.v[v.stage]);
    wgmma_commit();
  };
  const auto end_scores = [&](bool last) {  // last: of its item
    pin(s);
    release(shared.k_empty[k.stage]);
    k.advance();
    if (last) release(shared.q_empty[group]);
  };
  const auto end_values = [&] {
    pin(o);
    release(shared.v_empty[v.stage]);
    v.advance();
  };
  const auto is_cut = [&] { return first < whole.begin || first + T::kKeys > whole.end; };
  const auto hide_as = [&](float value) {
    if (is_cut()) hide(s, value, first, shared.rows[announced.stage], row);
  };
  const auto cap_in_place = [&](int existing) {
    hide_as(0.0f);
    cap_scores(s, call.softcap, existing);
  };
  [[maybe_unused]] AlibiTile bias{};
  const auto find_bias = [&] {  // of the next tile, while its products are on their way
    if constexpr (T::kScores == Scores::any)
      bias = find_tile<T>(shared.alibi.items[announced.stage], first - T::kKeys, 64 * group);
  };
  const auto softmax = [&] {
    first -= T::kKeys;
    if constexpr (T::kScores == Scores::plain) {
      hide_as(-INFINITY);
      rows.softmax(s, c, ratio);
    } else {
      const Softcap& cap = call.softcap;
      const int existing = shared.items[announced.stage].rows - row;
      if constexpr (T::kScores == Scores::softcap) {
        float top[2];
        const unsigned most = uniform(is_cut()) ? UINT_MAX : find_most(s, existing, top);
        if (reaches(cap, 0, most))
          return rows.softmax_below(s, top, Polynomial<3>{cap.third}, ratio);
        if (reaches(cap, 1, most))
          return rows.softmax_below(s, top, Polynomial<5>{cap.fifth}, ratio);
        if (reaches(cap, 2, most)) return rows.softmax_below(s, top, Quotient{cap}, ratio);
        cap_in_place(existing);
        hide_as(-INFINITY);
        rows.softmax(s, c, ratio);
      } else {
        float factor = c;
        if (is_capped<T>(call)) {
          const unsigned most = uniform(is_cut()) ? UINT_MAX : find_most(s, existing);
          if (reaches(cap, 2, most)) factor = 1.0f;
          if (reaches(cap, 0, most))
            scale_by(s, Polynomial<3>{cap.third});
          else if (reaches(cap, 1, most))
            scale_by(s, Polynomial<5>{cap.fifth});
          else if (reaches(cap, 2, most))
            scale_by(s, Quotient{cap});
          else
            cap_in_place(existing);
        }
        float less = 0;
        add_alibi<T>(s, factor, shared.alibi.items[announced.stage], bias,
                     shared.alibi.positions[group], first, row, kGroupBarrier + group, less);
        hide_as(-INFINITY);
        rows.softmax_less(s, less, bias.below, ratio);
      }
    }
  };
  const auto next_weights = [&] {
    round_to<Element>(p, s);
    if (__any_sync(0xffffffff, ratio[0] != 1.0f || ratio[1] != 1.0f)) shrink(o, ratio);
  };
  const auto write = [&](int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (call.finished.out.data)
        write_finished<T>(call, shared, stage, row + 8 * h, rows, h, o);
      else
        write_state<T>(call, shared, stage, row + 8 * h, rows, h, o);
    }
    shared.item_empty[stage].arrive();
  };
  const auto begin_item = [&] {
    const Item& item = shared.items[announced.stage];
    first = item.some.end;
    whole = item.whole;
    clear = item.clear;
    rows = {};
#pragma unroll
    for (int i = 0; i < T::kDim / 2; ++i) o[i] = 0;
    if (call.params.resume) {  // its loads are on their way during the first softmax
#pragma unroll
      for (int h = 0; h < 2; ++h)
        read_state<T>(call, shared, announced.stage, row + 8 * h, rows, h, o);
      __syncwarp();  // rows part ways at an empty state
    }
  };
  const auto wait_item = [&] {  // gives its tiles
    shared.item_full[announced.stage].wait(announced.parity);
    return shared.items[announced.stage].tiles;
  };

  int tiles = wait_item();
  if (tiles == 0) return;
  shared.q_full[group].wait(q_parity);
  wait_keys();
  begin_scores();
  wgmma_wait<0>();
  for (;;) {
    end_scores(tiles == 1);
    begin_item();
    find_bias();
    softmax();
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
      // The wait for P V stands here and not after the softmax: ptxas moves a wait up to the head
      // of its basic block, and so P V runs beside the softmax, which lies in the block before.
      wgmma_wait<0>();
      if (tile > 1) end_values();
      next_weights();
      wait_keys();
      wait_turn();
      begin_scores();
      begin_values();
      pass_turn();
      find_bias();
      wgmma_wait<1>();
      end_scores(tile + 1 == tiles);
      softmax();
    }
    wgmma_wait<0>();
    if (tiles > 1) end_values();
    next_weights();

    // The last values of this item and the first scores of the next run together. After the last
    // item the scores are of no use, but ptxas wants no branch around them.
    const int done = announced.stage;
    announced.advance();
    begin_values();
    tiles = wait_item();
    if (tiles > 0) {
      q_parity ^= 1;
      shared.q_full[group].wait(q_parity);
      wait_keys();
    }
    begin_scores();
    wgmma_wait<0>();
    end_values();
    write(done);
    if (tiles == 0) return;
  }
}

// ---- the kernel ------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) attend_kernel(const __grid_constant__ Call call) {
  // Builds for other GPUs hold an empty kernel that nobody launches.
  if constexpr (kHasWgmma) {
    std::byte* const memory = shared_by_1024;
    Shared<T>& shared = *reinterpret_cast<Shared<T>*>(memory);

    if (threadIdx.x == 0) {
      constexpr int kConsumerWarps = 4 * T::kConsumers;
      prefetch_map(&call.q);
      if (!has_pages<T>(call)) {
        prefetch_map(&call.k);
        prefetch_map(&call.v);
      }
      for (int i = 0; i < 2; ++i) {
        shared.item_full[i].init(32);
        const int loaders = has_pages<T>(call) ? kPageWarps + 1 : 1;
        shared.item_empty[i].init(128 * T::kConsumers + loaders + T::kTransposers);
      }
      shared.item_wanted.init(1);
      for (int i = 0; i < T::kConsumers; ++i) {
        shared.q_full[i].init(1);
        shared.q_empty[i].init(4);
      }
      for (int i = 0; i < T::kStages; ++i) {
        shared.k_full[i].init(1);
        shared.k_empty[i].init(kConsumerWarps);
        shared.v_full[i].init(T::kEightBits ? T::kTransposers / 32 : 1);
        shared.v_empty[i].init(kConsumerWarps);
        if constexpr (T::kPages) {
          shared.landed.k[i].init(kPageWarps);
          shared.landed.v[i].init(kPageWarps);
        }
      }
      if constexpr (T::kEightBits) {
        shared.stored.full.init(1);
        shared.stored.empty.init(T::kTransposers / 32);
      }
      publish_barriers();
    }
    __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
      give_registers<T::kProducerRegisters>();
      if (threadIdx.x / 32 == 1)
        schedule<T>(call, shared);
      else if (threadIdx.x == 0 && !has_pages<T>(call))
        load<T>(call, shared);
      if constexpr (T::kPages)
        if (threadIdx.x / 32 != 1 && has_pages<T>(call)) load_pages<T>(call, shared);
      if constexpr (T::kEightBits)
        if (threadIdx.x >= 128 - T::kTransposers) transpose<T>(shared);
    } else {
      take_registers<T::kConsumerRegisters>();
      if constexpr (T::kEightBits)
        consume_e4m3<T>(call, shared, warpgroup - 1);
      else
        consume<T>(call, shared, warpgroup - 1);
    }
  }
}

}  // namespace longspan::kernels::sm90

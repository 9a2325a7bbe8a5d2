// What the Hopper kernel does besides where q, k and v are e4m3 and are multiplied as they are
// (AttendParams::fp8_products): twice the speed of the tensor cores.
//
// Values. The tensor cores take 8-bit operands only with the summed index innermost, so P V wants
// the keys of a column of V side by side. Two warps of the loader's warpgroup transpose each tile
// between the copy engine and the consumers, in pieces of 32 keys x 16 columns: ldmatrix transposes
// pairs of bytes, a byte permutation takes the pairs apart, stmatrix stores.
//
// Order of keys. A consumer's thread holds of 16 scores of a row those of keys 2t, 2t + 1, 8 + 2t,
// 8 + 2t + 1, where the product wants 4t ... 4t + 3 of its operand P. So P's keys are renamed
// rather than moved: the transposed values have their keys in the same order, which is the one that
// the permutation of bytes gives by itself.
//
// Weights. e4m3 has 3 bits behind its leading one, from 2^-6 to 448, and fixed steps of 2^-9 below.
// Origins lie 2^8 below a maximum (Tile::kLift), so that a weight of 2^-14 of a row's largest still
// has its 3 bits, and what is below 2^-18 is lost. The row's sum, hence its lse, is of weights as
// they were before rounding. O is divided by the sum of rounded ones: where few keys have all the
// weight, or all values have something in common, the rounding cancels. That sum is a column more
// of O, made by the same product from a column of ones.
//
// Sums. Of what a tensor core adds to a sum it cuts what lies 13 bits below the sum's leading one.
// A sum of weights grows with the number of keys, one of weighted values of either sign with its
// root; so over many keys all lose, and the column of ones most: over 16,384 keys a quarter. So
// sums begin anew every 512 keys or sooner, and what they had come to is added to O in fp32.
// O takes as many registers as the sums. Where there are not enough for both and for the scores,
// sums take the scores' registers, in pieces of O's columns; then no product runs beside a
// consumer's own softmax, only beside the other's.
#pragma once

#include <utility>

#include "kernels/cuda/attend_sm90_rows.cuh"

namespace longspan::kernels::sm90 {

/// A thread's scores are what it must hold of P as the next product's operand, but for the order of
/// keys: see above.
template <int kCount>
__device__ void round_to_e4m3(std::uint32_t (&p)[kCount / 16][4], const float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 8)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      p[i / 16][i / 8 % 2 * 2 + h] =
          pack_e4m3(s[i + 2 * h], s[i + 2 * h + 1], s[i + 4 + 2 * h], s[i + 4 + 2 * h + 1]);
}

/// sum (+)= P V, asynchronously, of kCount columns from kFrom on; v transposed. afresh: `sum` is
/// overwritten.
template <class T, int kFrom, int kCount>
__device__ void multiply_transposed(float (&sum)[kCount / 2],
                                    const std::uint32_t (&p)[T::kKeys / 32][4], const void* v,
                                    bool afresh) {
  constexpr int kPanelBytes = T::kColumns * 128;
  const std::uint64_t b = advance(operand(v, kPanelBytes), kFrom * 128);
#pragma unroll
  for (int step = 0; step < T::kKeys / 32; ++step)
    Product<kCount>::template registers<typename T::Element, false>(
        sum, p[step], advance(b, step / 4 * kPanelBytes + step % 4 * 32), step > 0 || !afresh);
}

/// Two warps: the tile `from` [panels of 128 columns][kKeys][128] -> `to` [panels of 128 keys]
/// [kColumns][128], both in the swizzle. Of each 16 keys those of a thread's scores lie together.
template <class T>
__device__ void transpose_tile(const void* from, void* to) {
  constexpr int kChunks = T::kDim / 16;  // of 16 columns
  // Chunks under way in a warp, as registers allow.
  constexpr int kBatch = kChunks / 2 < 4 || T::kProducerRegisters < 56 ? 2 : 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 2;

  // After ldmatrix, lane 4 g + t has columns 2 g and 2 g + 1 of keys 2t and 2t + 1 in one word. The
  // rows of a matrix to store come from the 8 groups g. They are even columns of the lower groups
  // and odd ones of the upper, or the reverse: then they lie in 8 different places of the swizzle.
  const bool upper = lane >= 16;
  const unsigned first = upper ? 0x7531 : 0x6420, second = upper ? 0x6420 : 0x7531;
  // Lane l addresses row l % 8 of matrix l / 8: matrices (first, second) of 16 keys, then of 16
  // more.
  const int matrix = lane / 8, row = 2 * (lane % 8) + (matrix % 2 ^ lane % 8 / 4);
  const std::uint32_t load = shared_address(from) + lane * 128;
  const std::uint32_t store = shared_address(to) + row * 128;

#pragma unroll 1
  for (int keys = 0; keys < T::kKeys / 32; ++keys) {
    const std::uint32_t load_keys = load + keys * 32 * 128;
    const std::uint32_t store_keys =
        store + keys / 4 * T::kColumns * 128 + ((keys % 4 * 2 + matrix / 2) ^ row % 8) * 16;
#pragma unroll 1
    for (int chunk = kBatch * warp; chunk < kChunks; chunk += 2 * kBatch) {
      std::uint32_t pairs[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        load_matrices_transposed(pairs[i], load_keys + (chunk + i) / 8 * T::kPanelBytes +
                                               (((chunk + i) % 8) ^ lane % 8) * 16);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint32_t(&pair)[4] = pairs[i];
        const std::uint32_t columns[4] = {
            __byte_perm(pair[0], pair[1], first), __byte_perm(pair[0], pair[1], second),
            __byte_perm(pair[2], pair[3], first), __byte_perm(pair[2], pair[3], second)};
        store_matrices(store_keys + (chunk + i) * 16 * 128, columns);
      }
    }
  }
}

/// The transposing warps: follow the loader from item to item and tile to tile.
template <class T>
__device__ void transpose(Shared<T>& shared) {
  constexpr int kBarrier = 1 + 2 * T::kConsumers;  // behind the consumers'
  constexpr unsigned kOnes = 0x38383838;           // of e4m3
  StoredValues<T>& stored = shared.stored;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < T::kStages * T::kValuePanels; ++i) {
    auto& panel = shared.v[i / T::kValuePanels][i % T::kValuePanels];
    reinterpret_cast<uint4*>(panel[T::kDim])[threadIdx.x % T::kTransposers] =
        uint4{kOnes, kOnes, kOnes, kOnes};
  }

  Turn<2> announced;
  Turn<T::kStages> at;  // of both rings: a tile has the same stage in each
  for (;; announced.next()) {
    shared.item_full[announced.stage].wait(announced.parity);
    const Item& item = shared.items[announced.stage];
    const int tiles = item.tiles, clear = item.clear;
    int first = item.some.end;
    shared.item_empty[announced.stage].arrive();
    if (tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      first -= T::kKeys;
      stored.full[at.stage].wait(at.parity);
      if (first < clear)
        clear_keys<T, T::kTransposers>(stored.v[at.stage], clear - first, kBarrier);
      shared.v_empty[at.stage].wait(at.parity ^ 1);
      transpose_tile<T>(stored.v[at.stage], shared.v[at.stage]);
      fence_shared_stores();
      __syncwarp();
      if (lane == 0) {
        stored.empty[at.stage].arrive();
        shared.v_full[at.stage].arrive();
      }
      at.next();
    }
  }
}

// ---- a consumer ------------------------------------------------------------------------------

/// As `consume` for 16 bits, of plain scores, but for where products of values go.
template <class T>
__device__ void consume_e4m3(const Call& call, Shared<T>& shared, int group) {
  constexpr int kTurnBarrier = 1;
  const int lane = threadIdx.x % 32;
  const int row = 64 * group + 16 * (threadIdx.x / 32 % 4) + lane / 4;  // and row + 8
  float c = 0;

  // The scores, and behind them or in their place the sums.
  constexpr int kScores = T::kKeys / 2, kSums = T::kSumColumns / 2;
  static_assert(kSums <= kScores || T::kSumsApart);
  float room[kScores + (T::kSumsApart ? kSums : 0)];
  float(&s)[kScores] = reinterpret_cast<float(&)[kScores]>(room);
  float(&sums)[kSums] = reinterpret_cast<float(&)[kSums]>(room[T::kSumsApart ? kScores : 0]);
  float o[T::kColumns / 2], ratio[2];
  [[maybe_unused]] int summed = 0;  // tiles in sums of their own registers
  std::uint32_t p[T::kKeys / T::kStep][4];
  Rowwise<T> rows;
  RowKeys whole{};    // keys that every row of the tile sees
  int first = 0;      // local key at which the tile of s begins
  Turn<2> announced;  // the item
  Turn<T::kStages> k, v;
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
  const auto wait_values = [&] { shared.v_full[v.stage].wait(v.parity); };
  const auto begin_scores = [&] {  // S = Q K^T
    wgmma_begin();
    multiply_qk<T>(s, shared.q[group], shared.k[k.stage]);
    wgmma_commit();
  };
  const auto end_scores = [&](bool last) {  // last: of its item
    pin(s);
    release(shared.k_empty[k.stage]);
    k.next();
    if (last) release(shared.q_empty[group]);
  };
  const auto release_values = [&] {
    release(shared.v_empty[v.stage]);
    v.next();
  };
  const auto softmax = [&] {
    first -= T::kKeys;
    if (first < whole.begin || first + T::kKeys > whole.end)
      hide(s, -INFINITY, first, shared.rows[announced.stage], row);
    rows.softmax(s, c, ratio);
  };

  const auto begin_sums = [&]<int kFrom>(bool afresh) {  // sums (+)= P V, columns from kFrom on
    wgmma_begin();
    multiply_transposed<T, kFrom, T::kSumColumns>(sums, p, shared.v[v.stage], afresh);
    wgmma_commit();
  };

  // With registers of their own, sums run on under one origin. When it moves, or enough tiles are
  // in them, O takes them in.
  const auto add_sums = [&] {
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] += sums[i];
    summed = 0;
  };
  const auto next_weights = [&] {
    round_to_e4m3(p, s);
    const bool moved = __any_sync(0xffffffff, ratio[0] != 1.0f || ratio[1] != 1.0f);
    if (moved || summed == T::kSumTiles) {
      add_sums();
      if (moved) shrink(o, ratio);
    }
  };
  const auto begin_values = [&] {
    wait_values();
    begin_sums.template operator()<0>(summed == 0);
    ++summed;
  };
  const auto end_values = [&] {
    pin(sums);
    release_values();
  };

  // In the scores' place they are of one tile, and of some columns.
  const auto add_columns = [&]<int kFrom>() {
    begin_sums.template operator()<kFrom>(true);
    wgmma_wait<0>();
    pin(sums);
    if (kFrom + T::kSumColumns == T::kColumns) release_values();
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      o[kFrom / 2 + i] = fmaf(o[kFrom / 2 + i], ratio[i / 2 % 2], sums[i]);
  };
  const auto add_values = [&] {  // O = O ratio + P V
    round_to_e4m3(p, s);
    wait_values();
    [&]<int... kPieces>(std::integer_sequence<int, kPieces...>) {
      (add_columns.template operator()<kPieces * T::kSumColumns>(), ...);
    }
    (std::make_integer_sequence<int, T::kColumns / T::kSumColumns>{});
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
    rows = {};
    c = shared.stored.score_factor[announced.stage];
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) o[i] = 0;
    if constexpr (T::kSumsApart) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = 0;
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
    softmax();
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
      if constexpr (T::kSumsApart) {
        wgmma_wait<0>();  // here and not after the softmax: see `consume`
        if (tile > 1) end_values();
        next_weights();
        wait_keys();
        wait_turn();
        begin_scores();
        begin_values();
        pass_turn();
        wgmma_wait<1>();
      } else {
        add_values();
        wait_keys();
        begin_scores();
        wgmma_wait<0>();
      }
      end_scores(tile + 1 == tiles);
      softmax();
    }
    if constexpr (T::kSumsApart) {
      wgmma_wait<0>();
      if (tiles > 1) end_values();
      next_weights();
      begin_values();
    } else {
      add_values();
    }

    // The first scores of the next item run beside the last values of this one or its end. After
    // the last item they are of no use, but ptxas wants no branch around them.
    const int done = announced.stage;
    announced.next();
    tiles = wait_item();
    if (tiles > 0) {
      q_parity ^= 1;
      shared.q_full[group].wait(q_parity);
      wait_keys();
    }
    begin_scores();
    if constexpr (T::kSumsApart) {
      wgmma_wait<0>();
      end_values();
      add_sums();
    }
    write(done);
    if constexpr (!T::kSumsApart) wgmma_wait<0>();
    if (tiles == 0) return;
  }
}

}  // namespace longspan::kernels::sm90

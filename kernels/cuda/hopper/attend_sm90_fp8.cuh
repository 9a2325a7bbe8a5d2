// What the Hopper kernel does in addition if q, k and v are e4m3 and are multiplied without
// conversion (AttendParams::fp8_products), at twice the speed of the tensor cores.
//
// Values. The tensor cores take 8-bit operands only with the summed index innermost, so P V needs
// the keys of a column of V adjacent. Two warps of the producer's warpgroup transpose each tile
// between TMA and the consumers, in pieces of 32 keys x 16 columns: ldmatrix transposes pairs of
// bytes, a byte permutation separates the pairs, stmatrix stores.
//
// Order of keys. Of 16 scores of a row, a consumer's thread holds those of keys 2t, 2t + 1, 8 + 2t,
// 8 + 2t + 1, but the product needs 4t ... 4t + 3 of its operand P. So P's keys are renamed rather
// than moved: the transposed values have their keys in the same order, which is the one that the
// byte permutation gives by itself.
//
// Weights. e4m3 has 3 bits after its leading one, from 2^-6 to 448, and fixed steps of 2^-9 below.
// Origins are 2^8 below a maximum (Tile::kLift), so that a weight of 2^-14 of a row's largest still
// has its 3 bits, and anything below 2^-18 is lost. The row's sum, hence its lse, is over weights
// before rounding. O is divided by the sum of rounded ones: if few keys have all the weight, or all
// values have something in common, the rounding cancels. That sum is one more column of O, computed
// by the same product from a column of ones.
//
// Sums. When a tensor core adds to a sum, it truncates what is 13 bits below the sum's leading one.
// A sum of weights grows with the number of keys, one of weighted values of either sign with its
// root. Over many keys all lose accuracy, and the column of ones most: over 16,384 keys a quarter.
// So each tile has its own sums, which are added to O in fp32 with the multiply-add that rescales
// it.
//
// Registers. Sums reuse those of the scores, which are weights by then; if O has more columns than
// a tile has keys, in pieces of columns. So products run beside the softmax of the other consumers,
// never beside a consumer's own.
//
// Turns. Consumers wait for the same tiles, which brings them to the same step, and products would
// then overlap no softmax. So they take turns at the tensor cores (Tile::kPingPong): a turn is a
// tile's sums and the next tile's scores. All work that needs no tensor core, including the
// rounding of weights, is outside of it.
#pragma once

#include <utility>

#include "kernels/cuda/hopper/attend_sm90_consumer.cuh"

namespace longspan::kernels::sm90 {

/// Rounds weights. A thread's scores are the elements that it must hold of P as the next product's
/// operand, except for the order of keys: see above.
template <int kCount>
__device__ void round_to_e4m3(std::uint32_t (&p)[kCount / 16][4], const float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 8)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      p[i / 16][i / 8 % 2 * 2 + h] =
          pack_e4m3(s[i + 2 * h], s[i + 2 * h + 1], s[i + 4 + 2 * h], s[i + 4 + 2 * h + 1]);
}

/// sums = P V, asynchronously, of kCount columns from kFrom on; v transposed.
template <class T, int kFrom, int kCount>
__device__ void multiply_transposed(float (&sums)[kCount / 2],
                                    const std::uint32_t (&p)[T::kKeys / 32][4], const void* v) {
  constexpr int kPanelBytes = T::kColumns * 128;
  const std::uint64_t b = advance(operand(v, kPanelBytes), kFrom * 128);
#pragma unroll
  for (int step = 0; step < T::kKeys / 32; ++step)
    Product<kCount>::template registers<typename T::Element, false>(
        sums, p[step], advance(b, step / 4 * kPanelBytes + step % 4 * 32), step > 0);
}

/// Two warps transpose the tile `from` [panels of 128 columns][kKeys][128] into `to` [panels of 128
/// keys][kColumns][128], both in the swizzle. Of each 16 keys those of a thread's scores are
/// adjacent.
template <class T>
__device__ void transpose_tile(const void* from, void* to) {
  constexpr int kChunks = T::kDim / 16;            // of 16 columns
  constexpr int kBatch = kChunks / 2 < 4 ? 2 : 4;  // chunks in flight in a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 2;

  // After ldmatrix, lane 4 g + t has columns 2 g and 2 g + 1 of keys 2t and 2t + 1 in one word. The
  // rows of a matrix to store come from the 8 groups g. They are even columns of the lower groups
  // and odd ones of the upper, or the reverse: they then fall into 8 different places of the
  // swizzle.
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

/// The transposing warps follow the producer from work tile to work tile and tile to tile.
template <class T>
__device__ void transpose(Shared<T>& shared) {
  constexpr int kBarrier = 1 + 2 * T::kConsumers;  // after the consumers'
  constexpr unsigned kOnes = 0x38383838;           // of e4m3
  StoredValues<T>& stored = shared.stored;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < T::kStages * T::kValuePanels; ++i) {
    auto& panel = shared.v[i / T::kValuePanels][i % T::kValuePanels];
    reinterpret_cast<uint4*>(panel[T::kDim])[threadIdx.x % T::kTransposers] =
        uint4{kOnes, kOnes, kOnes, kOnes};
  }

  PipelineState<2> work;
  PipelineState<T::kStages> at;
  std::uint32_t stored_parity = 0;
  for (;; work.advance()) {
    shared.work_full[work.stage].wait(work.parity);
    const WorkTile& tile = shared.work[work.stage];
    const int tiles = tile.tiles, clear = tile.clear;
    int first = tile.some.end;
    shared.work_empty[work.stage].arrive();
    if (tiles == 0) return;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      first -= T::kKeys;
      stored.full.wait(stored_parity);
      stored_parity ^= 1;
      if (first < clear) clear_keys<T, T::kTransposers>(stored.v, clear - first, kBarrier);
      shared.v_empty[at.stage].wait(at.parity ^ 1);
      transpose_tile<T>(stored.v, shared.v[at.stage]);
      fence_shared_stores();
      __syncwarp();
      if (lane == 0) {
        stored.empty.arrive();
        shared.v_full[at.stage].arrive();
      }
      at.advance();
    }
  }
}

// ---- a consumer ------------------------------------------------------------------------------

/// The main loop for e4m3 and plain scores takes one step after the other: the softmax of a tile,
/// its sums, the next tile's scores.
template <class T>
class ConsumerE4m3 : Consumer<T> {
  static_assert(T::kPingPong);
  static constexpr int kPieces = (T::kColumns + T::kKeys - 1) / T::kKeys;
  static constexpr int kPieceColumns = T::kColumns / kPieces, kSums = kPieceColumns / 2;
  static_assert(kPieceColumns * kPieces == T::kColumns && kPieceColumns % 8 == 0);

  using Base = Consumer<T>;
  using Base::begin_scores, Base::end_scores, Base::mask, Base::release_values;
  using Base::call, Base::shared, Base::group, Base::work, Base::v;
  using Base::s, Base::p, Base::o, Base::ratio, Base::softmax, Base::first_key;
  using Base::wait_turn, Base::wait_work, Base::wait_queries, Base::wait_keys, Base::wait_values;

 public:
  __device__ __forceinline__ ConsumerE4m3(const Fragments<T>& fragments, const KernelParams& call,
                                          Shared<T>& shared, int group)
      : Base(fragments, call, shared, group), next_turn_(opaque(Base::turn_barrier_of_next())) {}

  __device__ __forceinline__ void run() {
    if (group == T::kConsumers - 1) pass_turn();  // the first consumer begins
    int tiles = wait_work();
    if (tiles == 0) return;
    wait_queries();
    wait_keys();
    begin_scores();
    wgmma_wait<0>();
    for (;;) {
      end_scores(tiles == 1);
      begin_work();
      make_weights();
#pragma unroll 1
      for (int tile = 1; tile < tiles; ++tile) {
        wait_turn();
        add_values();
        wait_keys();
        begin_scores();
        pass_turn();
        wgmma_wait<0>();
        end_scores(tile + 1 == tiles);
        make_weights();
      }
      add_values();

      // The first scores of the next work tile run beside the epilogue of this one. After the last
      // work tile they are unused, but ptxas wants no branch around them.
      const int done = work.stage;
      work.advance();
      tiles = this->wait_next_work();
      begin_scores();
      this->epilogue(done);
      wgmma_wait<0>();
      if (tiles == 0) return;
    }
  }

 private:
  __device__ __forceinline__ void pass_turn() { Base::pass_turn(next_turn_); }

  __device__ __forceinline__ void begin_work() {
    Base::begin_work();
    factor_ = shared.stored.score_factor[work.stage];
  }

  /// Maxima are computed on integers, three scores at a time: few rows have all their scores below
  /// 0. Weights are rounded as they are computed, so that conversions run beside exponentials.
  __device__ __forceinline__ void make_weights() {
    first_key -= T::kKeys;
    mask(-INFINITY);
    float top[2];
    find_tops(s, false, top);
    softmax.update_below(s, top, Constant{factor_}, ratio);
    round_to_e4m3(p, s);
  }

  __device__ __forceinline__ void add_values() {  // O = O ratio + P V
    wait_values();
    add_pieces(std::make_integer_sequence<int, kPieces>{});
  }
  template <int... kPiece>
  __device__ __forceinline__ void add_pieces(std::integer_sequence<int, kPiece...>) {
    (add_piece<kPiece * kPieceColumns>(), ...);
  }
  /// Adds the columns from kFrom on. Their sums reuse the registers of the scores.
  template <int kFrom>
  __device__ __forceinline__ void add_piece() {
    float(&sums)[kSums] = reinterpret_cast<float(&)[kSums]>(s);
    wgmma_begin();
    multiply_transposed<T, kFrom, kPieceColumns>(sums, p, shared.v[v.stage]);
    wgmma_commit();
    wgmma_wait<0>();
    pin(sums);
    if (kFrom + kPieceColumns == T::kColumns) release_values();
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      o[kFrom / 2 + i] = fmaf(o[kFrom / 2 + i], ratio[i / 2 % 2], sums[i]);
  }

  // If ptxas knows how the barrier's number is computed, it serialises products (C7511) for some
  // forms of it, others for each tile.
  const int next_turn_;
  float factor_ = 0;  // base 2, from a product to a score
};

}  // namespace longspan::kernels::sm90

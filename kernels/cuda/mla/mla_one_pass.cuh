// The consumers of many heads over latent keys, which are bound by products: 64 packed rows, and
// O [64, 512] in the registers of two warpgroups, 256 columns each.
//
//     group 0    S0 = Q K0^T   softmax   O += P0 V0               O += P1 V1
//     group 1    S1 = Q K1^T             O += P0 V0   softmax     O += P1 V1
//
// A segment is two tiles, and each group makes the scores of one. Its weights go from registers
// into its own half of O, and through shared memory, in the last box of the tile, which no value
// needs, to the other group. One group's softmax thus runs beside the other's products. (FlashMLA
// found this division, which it calls a seesaw.) Tiles fold one after the other, in the order of
// the walk over segments: one pass, and the same bits from run to run.
#pragma once

#include "kernels/cuda/mla/mla_shared.cuh"

namespace longspan::kernels::cuda {

template <class T>
struct MlaOnePassTraits {
  using Element = T;
  static constexpr bool kInOrder = false, kLatent = true;
  static constexpr int kThreads = 256;  // consumers
  static constexpr int kGroups = 2;     // warpgroups of them
  static constexpr int kLoaders = 96;
  static constexpr int kBlockThreads = kThreads + kLoaders + 32;  // and the scheduler warp
  static constexpr int kRows = 64;
  static constexpr int kSlots = 2 * kBoxes;  // a segment
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;

  static constexpr bool kPlain = false, kBiases = false;
  static constexpr int kTile = kBoxKeys, kTiles = kSegment / kTile;
  static constexpr int kStageKeys = kLatentTile, kKeyStages = kSegment / kLatentTile;

  struct Stack {  // none: only the end of a piece matters
    static constexpr int kAll = 32;
  };
  using Shared = MlaShared<MlaOnePassTraits>;
};

/// The consumers of group kGroup. The groups' code differs, so the number is a constant.
template <class Traits, int kGroup>
class MlaOnePass {
  using Shared = typename Traits::Shared;
  using Element = typename Traits::Element;
  using Products = sm90::Product<256>;
  static constexpr int kAllBarrier = 1, kGroupBarrier = 3;  // the producers have 2

 public:
  __device__ MlaOnePass(const AttendParams& p, const WorkPlan& plan, Shared& shared)
      : p_(p), plan_(plan), shared_(shared) {}

  __device__ __forceinline__ void run() {
    PipelineState<Shared::kPieces> pieces;
    first_ = true;
#pragma unroll 1
    for (PipelineState<Shared::kSegments> known;; known.advance(), round_ ^= 1) {
      shared_.full[kGroup * kBoxes].wait(round_);
      const DecodeSegment segment = shared_.segments[known.stage];
      if (!segment) break;
      slot_ = pieces.stage;
      if (first_) {
        shared_.has_queries[slot_].wait(pieces.parity);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          top_[h] = -infinity();
          sum_[h] = 0.0f;
        }
      }
      const bool last = shared_.levels[known.stage] == Traits::Stack::kAll;
      first_key_ = std::int64_t{segment.index} * kSegment + kGroup * kLatentTile;
      multiply_keys();
      score_keys();
      if (last) arrive(shared_.queries_free);
      if constexpr (kGroup == 0)
        take_even();
      else
        take_odd();
      first_ = last;
      if (!last) continue;
      store(shared_.piece[slot_]);
      arrive(shared_.done[slot_]);
      pieces.advance();
    }
  }

 private:
  __device__ __forceinline__ void arrive(arch::Barrier& barrier) const {
    __syncwarp();
    if (lane_ == 0) barrier.arrive();
  }
  /// The packed row of h, the first or second of this thread's.
  __device__ __forceinline__ int row_of(int h) const { return warp_ * 16 + h * 8 + lane_ / 4; }

  __device__ __forceinline__ void take_even() {
    weigh();
    publish();
    rescale();
    begin_own_values();
    sm90::wgmma_wait<0>();
    end_values(0);
    meet_other();
    rescale();
    begin_other_values();
    sm90::wgmma_wait<0>();
    end_values(1);
  }
  __device__ __forceinline__ void take_odd() {
    meet_other();
    rescale();
    begin_other_values();
    weigh();  // beside the products
    publish();
    sm90::wgmma_wait<0>();
    end_values(0);
    rescale();
    begin_own_values();
    sm90::wgmma_wait<0>();
    end_values(1);
  }

  /// S = Q K^T of the group's own tile.
  __device__ __forceinline__ void multiply_keys() {
    const std::uint64_t queries = operand_of(shared_.queries[0]);
    const std::uint64_t keys = operand_of(shared_.box[kGroup * kBoxes]);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box > 0) shared_.full[kGroup * kBoxes + box].wait(round_);
      sm90::wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int from = box * kBoxBytes + step * 32;
        sm90::Product<64>::template shared<Element, false>(
            s_, sm90::advance(queries, from), sm90::advance(keys, from), box + step > 0);
      }
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::pin(s_);
  }

  /// An operand of boxes, 64 rows each, as are the panels of queries.
  __device__ __forceinline__ static std::uint64_t operand_of(const void* box) {
    return sm90::opaque(sm90::operand(box, kBoxBytes));
  }

  /// Products become scores in base 2, -inf where a row does not see the key.
  __device__ __forceinline__ void score_keys() {
    const DecodeWorkTile& piece = shared_.piece[slot_];
    const Score score{piece.score_scale, p_.score.softcap};
    if (score.softcap == 0.0f) {
      const float factor = score.scale * kLog2E;
#pragma unroll
      for (float& one : s_) one *= factor;
    } else {
      float copy[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) copy[i] = s_[i];
      cap_products(copy, score);
#pragma unroll
      for (int i = 0; i < 32; ++i) s_[i] = copy[i];
    }
    if (!piece.view.full(first_key_, kLatentTile)) mask(piece.view);
  }

  /// Scores become weights, from the rows' maxima over all tiles up to this one.
  __device__ __forceinline__ void weigh() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -infinity();
#pragma unroll
      for (int j = 0; j < 8; ++j)
        most = fmaxf(most, fmaxf(s_[4 * j + 2 * h], s_[4 * j + 2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      raise(h, fmaxf(top_[h], most));
      const float from = top_[h] == -infinity() ? 0.0f : top_[h];  // nothing visible: P = 0
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& one = s_[4 * j + 2 * h + e];
          one = arch::exp2_fast(__fadd_rn(one, -from));
          sum = __fadd_rn(sum, one);
        }
      sum_[h] = __fadd_rn(sum_[h], sum);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights_[step][i] = arch::pack<Element>(s_[8 * step + 2 * i], s_[8 * step + 2 * i + 1]);
  }

  __device__ __forceinline__ void mask(const View& view) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Interval row = shared_.views[slot_][row_of(h)];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!sees(view, row, first_key_ + 8 * j + lane_ % 4 * 2 + e))
            s_[4 * j + 2 * h + e] = -infinity();
    }
  }

  /// The maximum of row h becomes `top`, and the sums so far change with it.
  __device__ __forceinline__ void raise(int h, float top) {
    ratio_[h] = top_[h] == top ? 1.0f : arch::exp2_fast(__fadd_rn(top_[h], -top));
    sum_[h] = __fmul_rn(sum_[h], ratio_[h]);
    top_[h] = top;
  }

  /// Passes the weights and the maxima to the other group. The keys' last box becomes free for them
  /// when the products of all warps have read it.
  __device__ __forceinline__ void publish() {
    arch::named_sync(kGroupBarrier + kGroup, 128);
    const std::uint32_t to = arch::shared_address(shared_.box[kGroup * kBoxes + kBoxes - 1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(h);
      if (lane_ % 4 == 0) shared_.tops[kGroup][row] = top_[h];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        arch::store_shared(to + box_offset(row, j) + lane_ % 4 * 4, weights_[j / 2][j % 2 * 2 + h]);
    }
    sm90::fence_shared_stores();
    arrive(shared_.ready[kGroup]);
  }

  /// Takes the maxima up to the other group's tile, once its weights are there.
  __device__ __forceinline__ void meet_other() {
    shared_.ready[1 - kGroup].wait(round_);
#pragma unroll
    for (int h = 0; h < 2; ++h) raise(h, shared_.tops[1 - kGroup][row_of(h)]);
  }

  __device__ __forceinline__ void rescale() {
    if (__all_sync(~0u, ratio_[0] == 1.0f && ratio_[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) o_[i] = __fmul_rn(o_[i], ratio_[i / 2 % 2]);
  }

  /// The half of a tile's values that belongs to this group.
  __device__ __forceinline__ std::uint64_t values(int tile) const {
    return operand_of(shared_.box[tile * kBoxes + kGroup * kHalfBoxes]);
  }
  __device__ __forceinline__ void begin_own_values() {
    const std::uint64_t own = values(kGroup);
    sm90::wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Products::template registers<Element, true>(
          o_, weights_[step], sm90::advance(own, step * 16 * 128), !overwrites(0) || step > 0);
    sm90::wgmma_commit();
  }
  __device__ __forceinline__ void begin_other_values() {
    const std::uint64_t other = values(1 - kGroup);
    const std::uint64_t weights = operand_of(shared_.box[(1 - kGroup) * kBoxes + kBoxes - 1]);
    sm90::wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Products::template shared<Element, true>(o_, sm90::advance(weights, step * 32),
                                               sm90::advance(other, step * 16 * 128),
                                               !overwrites(1) || step > 0);
    sm90::wgmma_commit();
  }
  /// Whether the product with the weights of group `of` is the first of a piece.
  __device__ __forceinline__ bool overwrites(int which) const { return first_ && kGroup == which; }

  __device__ __forceinline__ void end_values(int tile) {
    sm90::pin(o_);
    __syncwarp();
    if (lane_ <= kHalfBoxes)  // its values' boxes, and the last one
      shared_.free[tile * kBoxes + (lane_ < kHalfBoxes ? kGroup * kHalfBoxes + lane_ : kBoxes - 1)]
          .arrive();
  }

  /// The epilogue of a piece: both groups store their columns, and the first the sums of both.
  __device__ __forceinline__ void store(const DecodeWorkTile& piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] = __fadd_rn(sum_[h], __shfl_xor_sync(~0u, sum_[h], 1));
      sum_[h] = __fadd_rn(sum_[h], __shfl_xor_sync(~0u, sum_[h], 2));
      if (kGroup == 1 && lane_ % 4 == 0) shared_.sums[row_of(h)] = sum_[h];
    }
    arch::named_sync(kAllBarrier, Traits::kThreads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(h);
      if (row >= piece.work.rows) continue;
      const Target to =
          target_of(p_, plan_, piece.sequence, piece.work, packed_row(piece.work, row));
      if (kGroup == 0 && lane_ % 4 == 0)
        to.stats() = {top_[h], __fadd_rn(sum_[h], shared_.sums[row])};
      const int first = kGroup * kHalfBoxes * kBoxColumns + lane_ % 4 * 2;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (first + 8 * j < to.columns)
          *reinterpret_cast<float2*>(to.o() + first + 8 * j) =
              make_float2(o_[4 * j + 2 * h], o_[4 * j + 2 * h + 1]);
    }
  }

  const AttendParams& p_;
  const WorkPlan& plan_;
  Shared& shared_;
  const int warp_ = static_cast<int>(threadIdx.x) % 128 / 32,
            lane_ = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t round_ = 0;  // parity of the segment's number
  bool first_;               // segment of the piece
  int slot_;                 // of the piece
  std::int64_t first_key_;   // of the group's tile
  float s_[32], o_[128];
  float top_[2], sum_[2], ratio_[2];  // of two rows; sums are of the thread's and the group's keys
  std::uint32_t weights_[4][4];
};

}  // namespace longspan::kernels::cuda

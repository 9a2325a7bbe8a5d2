// The consumer of few heads over latent keys, which is bound by reading them. Keys are the long
// side of both products, so that 16 rows are not padded to the 64 of wgmma:
//
//     S^T = K Q^T       64 keys x 16 rows, in registers
//     O^T += V^T P^T    512 columns x 16 rows, in registers; V is K's tile again, transposed
//
// A segment is two tiles, which fold one after the other, so its state has one shape; segments fold
// in the fixed order (decode_stack.cuh). Two warpgroups make the same scores, and then each half of
// the columns of values: what is between the products takes longer than they do.
#pragma once

#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/decode/decode_stack.cuh"
#include "kernels/cuda/mla/mla_shared.cuh"

namespace longspan::kernels::cuda {

template <class T>
struct MlaInOrderTraits {
  using Element = T;
  static constexpr bool kInOrder = true, kLatent = true;
  static constexpr int kThreads = 256;  // consumers
  static constexpr int kLoaders = 96;
  static constexpr int kBlockThreads = kThreads + kLoaders + 32;  // and the scheduler warp
  static constexpr int kRows = 16;
  static constexpr int kConsumerRegisters = 200, kProducerRegisters = 104;
  static constexpr int kSlots = 24;  // boxes: what is left of the memory

  // What the scheduler asks for: TMA's smallest boxes, and tiles.
  static constexpr bool kPlain = false, kBiases = false;
  static constexpr int kTile = kBoxKeys, kTiles = kSegment / kTile;
  static constexpr int kStageKeys = kLatentTile, kKeyStages = kSegment / kLatentTile;

  struct RowOf {  // quad = 2 * block of 64 columns + eight rows; rows 2t, 2t + 1 of each eight
    __device__ static constexpr int row(int quad, int i) { return quad % 2 * 2 + i % 2; }
  };
  using State = ThreadState<4, 2 * kHalfBoxes, RowOf>;
  using Stack = DecodeStack<State, kThreads, 2>;

  using Shared = MlaShared<MlaInOrderTraits>;
};

template <class Traits>
class MlaInOrder {
  using Shared = typename Traits::Shared;
  using Element = typename Traits::Element;
  using State = typename Traits::State;
  static constexpr int kMeet = 3;  // the barriers of the groups; the producers have 2

 public:
  __device__ MlaInOrder(const AttendParams& p, const WorkPlan& plan, Shared& shared,
                        typename Traits::Stack& stack)
      : p_(p), plan_(plan), shared_(shared), stack_(stack) {}

  __device__ __forceinline__ void run() {
    PipelineState<Shared::kPieces> pieces;
    bool first = true;  // segment of the piece
#pragma unroll 1
    for (PipelineState<Shared::kSegments> known;; known.advance()) {
      shared_.full[at_.stage].wait(at_.parity);
      const DecodeSegment segment = shared_.segments[known.stage];
      if (!segment) break;
      if (first) shared_.has_queries[pieces.stage].wait(pieces.parity);
      const int level = shared_.levels[known.stage];
      State state;
      attend(state, pieces.stage, std::int64_t{segment.index} * kSegment,
             level == Traits::Stack::kAll);
      stack_.fold(state, level);
      first = level == Traits::Stack::kAll;
      if (!first) continue;
      store(shared_.piece[pieces.stage], state);
      __syncwarp();
      if (lane_ == 0) shared_.done[pieces.stage].arrive();
      pieces.advance();
    }
  }

 private:
  /// Synchronises the group.
  __device__ __forceinline__ void meet() const { arch::named_sync(kMeet + group_, 128); }

  /// Row i of the four whose scores and values this thread has.
  __device__ __forceinline__ int row_of(int i) const { return i / 2 * 8 + lane_ % 4 * 2 + i % 2; }

  /// Computes the state of a segment, whose first local key is `first`.
  __device__ __forceinline__ void attend(State& state, int slot, std::int64_t first, bool last) {
    float o[kHalfBoxes][8], top[4], sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = -infinity();
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile) {
      float s[8], ratio[4];
      multiply_keys(s);
      if (last && tile == 1) {
        __syncwarp();
        if (lane_ == 0) shared_.queries_free.arrive();
      }
      score(s, slot, first + tile * kLatentTile);
      weigh(s, top, sum, ratio);
      if (tile > 0) rescale(o, ratio);
      multiply_values(o, tile);
      __syncwarp();
      if (lane_ < kBoxes) {
        BoxState<Traits> own = at_;
        own.advance(lane_);
        shared_.free[own.stage].arrive();
      }
      at_.advance(kBoxes);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) state.stats[i] = {top[i], sum[i]};
#pragma unroll
    for (int q = 0; q < State::kQuads; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[q][i] = o[q / 2][q % 2 * 4 + i];
  }

  /// Narrow products take longer than they keep the tensor cores busy. So a sum is made in four
  /// chains, and the sums of all columns of values in turn.
  __device__ __forceinline__ void multiply_keys(float (&s)[8]) {
    constexpr int kRowBytes = Traits::kRows * 128;  // of a panel of queries
    const std::uint64_t queries = sm90::opaque(sm90::operand(shared_.queries[0], kRowBytes));
    float chain[4][8];
    BoxState<Traits> at = at_;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box, at.advance(1)) {
      shared_.full[at.stage].wait(at.parity);
      const std::uint64_t keys = sm90::operand(shared_.box[at.stage], kBoxBytes);
      sm90::wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        sm90::multiply_16<Element, false>(chain[step], sm90::advance(keys, step * 32),
                                          sm90::advance(queries, box * kRowBytes + step * 32),
                                          box > 0);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
#pragma unroll
    for (auto& one : chain) sm90::pin(one);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      s[i] = __fadd_rn(__fadd_rn(chain[0][i], chain[1][i]), __fadd_rn(chain[2][i], chain[3][i]));
  }

  /// Products become scores in base 2, -inf where a row does not see the key.
  __device__ __forceinline__ void score(float (&s)[8], int slot, std::int64_t first) const {
    const DecodeWorkTile& piece = shared_.piece[slot];
    const Score score{piece.score_scale, p_.score.softcap};
    if (score.softcap == 0.0f) {
      const float factor = score.scale * kLog2E;
#pragma unroll
      for (float& one : s) one *= factor;
    } else {
      float copy[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) copy[i] = s[i];
      cap_products(copy, score);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i] = copy[i];
    }
    if (piece.view.full(first, kLatentTile)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Interval row = shared_.views[slot][row_of(i)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t key = first + warp_ % 4 * 16 + half * 8 + lane_ / 4;
        if (!sees(piece.view, row, key)) s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
      }
    }
  }

  /// Scores become weights, which go to shared memory as [rows, keys]. They are reduced in one
  /// order: over a lane's keys, over the lanes, over the warps, over the tiles.
  __device__ __forceinline__ void weigh(float (&s)[8], float (&top)[4], float (&sum)[4],
                                        float (&ratio)[4]) {
    const auto at = [&](int i, int half) -> float& { return s[i / 2 * 4 + half * 2 + i % 2]; };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float most = fmaxf(at(i, 0), at(i, 1));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      if (lane_ < 4) shared_.tops[warp_][row_of(i)] = most;
    }
    meet();
    const auto* tops = &shared_.tops[group_ * 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(i);
      const float most =
          fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
      const float before = top[i];
      top[i] = fmaxf(before, most);
      ratio[i] = before == top[i] ? 1.0f : arch::exp2_fast(__fadd_rn(before, -top[i]));
      const float from = top[i] == -infinity() ? 0.0f : top[i];  // nothing visible: P = 0
#pragma unroll
      for (int half = 0; half < 2; ++half)
        at(i, half) = arch::exp2_fast(__fadd_rn(at(i, half), -from));
      float own = __fadd_rn(at(i, 0), at(i, 1));
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        own = __fadd_rn(own, __shfl_xor_sync(~0u, own, step));
      if (lane_ < 4) shared_.sums[warp_][row] = own;
    }
    const std::uint32_t weights = arch::shared_address(shared_.weights[group_]);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t word = arch::transpose_matrix(
            arch::pack<Element>(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
        arch::store_shared(
            weights + box_offset(8 * j + lane_ / 4, 2 * (warp_ % 4) + half) + lane_ % 4 * 4, word);
      }
    sm90::fence_shared_stores();
    meet();
    const auto* sums = &shared_.sums[group_ * 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(i);
      const float tile =
          __fadd_rn(__fadd_rn(sums[0][row], sums[1][row]), __fadd_rn(sums[2][row], sums[3][row]));
      sum[i] = __fmaf_rn(sum[i], ratio[i], tile);
    }
  }

  __device__ __forceinline__ static void rescale(float (&o)[kHalfBoxes][8],
                                                 const float (&ratio)[4]) {
    const bool same = ratio[0] == 1.0f && ratio[1] == 1.0f && ratio[2] == 1.0f && ratio[3] == 1.0f;
    if (__all_sync(~0u, same)) return;
#pragma unroll
    for (auto& box : o)
#pragma unroll
      for (int i = 0; i < 8; ++i) box[i] = __fmul_rn(box[i], ratio[i / 4 * 2 + i % 2]);
  }

  __device__ __forceinline__ void multiply_values(float (&o)[kHalfBoxes][8], int tile) {
    const std::uint64_t weights =
        sm90::opaque(sm90::operand(shared_.weights[group_], Traits::kRows * 128));
    std::uint64_t values[kHalfBoxes];
    BoxState<Traits> at = at_;
    at.advance(group_ * kHalfBoxes);
#pragma unroll
    for (int box = 0; box < kHalfBoxes; ++box, at.advance(1))
      values[box] = sm90::operand(shared_.box[at.stage], kBoxBytes);
    sm90::wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int box = 0; box < kHalfBoxes; ++box)
        sm90::multiply_16<Element, true>(o[box], sm90::advance(values[box], step * 16 * 128),
                                         sm90::advance(weights, step * 32), tile + step > 0);
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
#pragma unroll
    for (auto& box : o) sm90::pin(box);
  }

  __device__ __forceinline__ void store(const DecodeWorkTile& piece, const State& state) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(i);
      if (row >= piece.work.rows) continue;
      const Target to =
          target_of(p_, plan_, piece.sequence, piece.work, packed_row(piece.work, row));
      if (threadIdx.x < 4) to.stats() = state.stats[i];
      float* o = to.o();
#pragma unroll
      for (int box = 0; box < kHalfBoxes; ++box)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d =
              (group_ * kHalfBoxes + box) * kBoxColumns + warp_ % 4 * 16 + half * 8 + lane_ / 4;
          if (d < to.columns) o[d] = state.o[2 * box + i / 2][half * 2 + i % 2];
        }
    }
  }

  const AttendParams& p_;
  const WorkPlan& plan_;
  Shared& shared_;
  typename Traits::Stack& stack_;
  const int warp_ = static_cast<int>(threadIdx.x) / 32, lane_ = static_cast<int>(threadIdx.x) % 32;
  const int group_ = warp_ / 4;
  BoxState<Traits> at_;  // the first box of the tile
};

}  // namespace longspan::kernels::cuda

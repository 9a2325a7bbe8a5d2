// The consumer of few heads over latent keys, which is bound by reading them. It multiplies by
// mma.sync, whose long side is 16: no row is padded, and a warp waits for no other's products, as
// it would with wgmma. All eight warps share each tile:
//
//     S = Q K^T         warp w has 32 keys and a quarter of the columns, for which it holds Q
//     P = exp2(S - m)   warp w adds the quarters of rows 2w and 2w + 1, and weighs their keys
//     O^T += V^T P^T    warp w has 64 columns of values: box w of K's tile, transposed
//
// A segment is two tiles, which fold one after the other, so its state has one shape; segments fold
// in the fixed order (decode_stack.cuh).
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
  static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88;
  // Boxes: two tiles. More keys in flight would not come sooner, and reads of states would wait for
  // them. The memory that is left holds the states of one level of the stack.
  static constexpr int kSlots = 2 * kBoxes, kNearLevels = 1;

  // What the scheduler asks for: TMA's smallest boxes, and tiles.
  static constexpr bool kPlain = false, kBiases = false;
  static constexpr int kTile = kBoxKeys, kTiles = kSegment / kTile;
  static constexpr int kStageKeys = kLatentTile, kKeyStages = kSegment / kLatentTile;

  struct RowOf {  // quad = 2 * 16 columns + eight rows; rows 2t, 2t + 1 of each eight
    __device__ static constexpr int row(int quad, int i) { return quad % 2 * 2 + i % 2; }
  };
  using State = ThreadState<4, 8, RowOf>;
  using Stack = DecodeStack<State, kThreads, 2, true>;

  using Shared = MlaShared<MlaInOrderTraits>;
};

template <class Traits>
class MlaInOrder {
  using Shared = typename Traits::Shared;
  using Element = typename Traits::Element;
  using State = typename Traits::State;
  static constexpr int kMeet = 1;          // the barrier of the consumers; the producers have 2
  static constexpr int kQuarterSteps = 9;  // of 16 columns, in a quarter of K's

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
      if (first) {
        shared_.has_queries[pieces.stage].wait(pieces.parity);
        hold_queries();
      }
      const int level = shared_.levels[known.stage];
      State state;
      attend(state, pieces.stage, std::int64_t{segment.index} * kSegment);
      stack_.fold(state, level);
      first = level == Traits::Stack::kAll;
      if (!first) continue;
      store(shared_.piece[pieces.stage], state);
      arrive(shared_.done[pieces.stage]);
      pieces.advance();
    }
  }

 private:
  __device__ __forceinline__ static void meet() { arch::named_sync(kMeet, Traits::kThreads); }
  __device__ __forceinline__ void arrive(arch::Barrier& barrier) const {
    __syncwarp();
    if (lane_ == 0) barrier.arrive();
  }

  /// Row i of the four whose values this thread has.
  __device__ __forceinline__ int row_of(int i) const { return i / 2 * 8 + lane_ % 4 * 2 + i % 2; }

  /// The address of box `box` of the tile.
  __device__ __forceinline__ std::uint32_t box_of(int box) const {
    const int stage = at_.stage + box;
    return arch::shared_address(
        shared_.box[stage < Traits::kSlots ? stage : stage - Traits::kSlots]);
  }
  __device__ __forceinline__ void await(int box) {
    BoxState<Traits> at = at_;
    at.advance(box);
    shared_.full[at.stage].wait(at.parity);
  }

  // Operands are 16 x 16 elements. Lane l brings a row of one of their four matrices of 8 x 8. Of
  // the second factor of a product, matrices follow each other along its rows; of the first factor
  // along its columns, as do those of one that is transposed.

  /// The row that a lane brings of a second factor, or of a transposed first one.
  __device__ __forceinline__ int operand_row() const { return lane_ / 16 * 8 + lane_ % 8; }
  /// The place of chunk `step` * 2, or the next one, in that row.
  __device__ __forceinline__ std::uint32_t operand_offset(int row, int step) const {
    return box_offset(row, step * 2 + lane_ / 8 % 2);
  }

  /// Loads the warp's quarter of the queries into registers, and frees their memory.
  __device__ __forceinline__ void hold_queries() {
#pragma unroll
    for (int i = 0; i < kQuarterSteps; ++i) {
      const int step = quarter_ * kQuarterSteps + i;
      arch::load_matrices(q_[i], arch::shared_address(shared_.queries[step / 4]) +
                                     box_offset(lane_ % 16, step % 4 * 2 + lane_ / 16));
    }
    arrive(shared_.queries_free);
  }

  /// Computes the state of a segment, whose first local key is `first`.
  __device__ __forceinline__ void attend(State& state, int slot, std::int64_t first) {
#pragma unroll
    for (auto& quad : state.o)
#pragma unroll
      for (float& one : quad) one = 0.0f;
    float top = -infinity(), sum = 0.0f;  // of the row that this lane weighs
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile) {
      multiply_keys();
      const DecodeWorkTile& piece = shared_.piece[slot];
      const Score score{piece.score_scale, p_.score.softcap};
      const bool full = piece.view.full(first + tile * kLatentTile, kLatentTile);
      meet();
      weigh(score, full ? nullptr : &piece, slot, first + tile * kLatentTile, top, sum, tile);
      meet();
      if (tile > 0) rescale(state);
      multiply_values(state);
      __syncwarp();
      if (lane_ < kBoxes) {
        BoxState<Traits> own = at_;
        own.advance(lane_);
        shared_.free[own.stage].arrive();
      }
      at_.advance(kBoxes);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) state.stats[i] = shared_.stats[row_of(i)];
  }

  /// Multiplies the warp's quarter of the columns: box 2 * quarter and the next two.
  __device__ __forceinline__ void multiply_keys() {
    std::uint32_t box[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      await(2 * quarter_ + i);
      box[i] = box_of(2 * quarter_ + i);
    }
    float s[4][4];  // [8 keys, elements]
#pragma unroll
    for (auto& eight : s)
#pragma unroll
      for (float& one : eight) one = 0.0f;
    const int row = first_key_ + operand_row();
#pragma unroll
    for (int i = 0; i < kQuarterSteps; ++i) {
      const int step = quarter_ + i;  // from the first box on
      const std::uint32_t keys = (step < 4   ? box[0]
                                  : step < 8 ? box[1]
                                             : box[2]) +
                                 operand_offset(row, step % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t k[4];
        arch::load_matrices(k, keys + half * 16 * 128);
        arch::mma<Element>(s[2 * half], q_[i], k[0], k[1]);
        arch::mma<Element>(s[2 * half + 1], q_[i], k[2], k[3]);
      }
    }
#pragma unroll
    for (int eight = 0; eight < 4; ++eight)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(&shared_.products[quarter_][h * 8 + lane_ / 4]
                                                    [first_key_ + eight * 8 + lane_ % 4 * 2]) =
            make_float2(s[eight][2 * h], s[eight][2 * h + 1]);
  }

  /// Products become weights of the lane's row and four keys, which go to shared memory as
  /// [rows, keys]. Everything is reduced in one order: over the quarters of columns, over a lane's
  /// keys, over the tiles, over the lanes. `masked`: the piece, if some row does not see some key.
  __device__ __forceinline__ void weigh(const Score& score, const DecodeWorkTile* masked, int slot,
                                        std::int64_t first, float& top, float& sum, int tile) {
    const int row = warp_ * 2 + lane_ / 16, key = lane_ % 16 * 4;
    float s[4];
    add_quarters(s, row, key);
    cap(s, score);
    if (masked != nullptr) mask(s, masked->view, shared_.views[slot][row], first + key);
    float most = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
#pragma unroll
    for (int step = 1; step < 16; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float before = top;
    top = fmaxf(before, most);
    const float ratio = before == top ? 1.0f : arch::exp2_fast(__fadd_rn(before, -top));
    const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
#pragma unroll
    for (float& one : s) one = arch::exp2_fast(__fadd_rn(one, -from));
    *reinterpret_cast<uint2*>(&shared_.weights[box_offset(row, key / 8) + key % 8 * 2]) =
        make_uint2(arch::pack<Element>(s[0], s[1]), arch::pack<Element>(s[2], s[3]));
    sum = __fmaf_rn(sum, ratio, __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])));
    if (tile == 0) return;
    float all = sum;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) all = __fadd_rn(all, __shfl_xor_sync(~0u, all, step));
    if (key > 0) return;
    shared_.ratios[row] = ratio;
    shared_.stats[row] = {top, all};
  }

  __device__ __forceinline__ void add_quarters(float (&s)[4], int row, int key) const {
    float4 part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      part[i] = *reinterpret_cast<const float4*>(&shared_.products[i][row][key]);
    const auto whole = [](float a, float b, float c, float d) {
      return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
    };
    s[0] = whole(part[0].x, part[1].x, part[2].x, part[3].x);
    s[1] = whole(part[0].y, part[1].y, part[2].y, part[3].y);
    s[2] = whole(part[0].z, part[1].z, part[2].z, part[3].z);
    s[3] = whole(part[0].w, part[1].w, part[2].w, part[3].w);
  }

  /// Products become scores in base 2.
  __device__ __forceinline__ static void cap(float (&s)[4], const Score& score) {
    if (score.softcap == 0.0f) {
      const float factor = score.scale * kLog2E;
#pragma unroll
      for (float& one : s) one *= factor;
    } else {
      float copy[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) copy[i] = s[i];
      cap_products(copy, score);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = copy[i];
    }
  }

  /// Scores of keys from `key` on become -inf where the row does not see them.
  __device__ __forceinline__ static void mask(float (&s)[4], const View& view, const Interval& row,
                                              std::int64_t key) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!sees(view, row, key + i)) s[i] = -infinity();
  }

  __device__ __forceinline__ void rescale(State& state) const {
    float ratio[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ratio[i] = shared_.ratios[row_of(i)];
    const bool same = ratio[0] == 1.0f && ratio[1] == 1.0f && ratio[2] == 1.0f && ratio[3] == 1.0f;
    if (__all_sync(~0u, same)) return;
#pragma unroll
    for (int q = 0; q < State::kQuads; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state.o[q][i] = __fmul_rn(state.o[q][i], ratio[Traits::RowOf::row(q, i)]);
  }

  __device__ __forceinline__ void multiply_values(State& state) {
    const std::uint32_t values = box_of(warp_);
    const std::uint32_t weights = arch::shared_address(shared_.weights);
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 16 keys
      std::uint32_t p[4];
      arch::load_matrices(p, weights + operand_offset(operand_row(), step));
#pragma unroll
      for (int m = 0; m < 4; ++m) {  // of 16 columns
        std::uint32_t v[4];
        arch::load_matrices_transposed(v, values + operand_offset(step * 16 + operand_row(), m));
        arch::mma<Element>(state.o[2 * m], v, p[0], p[1]);
        arch::mma<Element>(state.o[2 * m + 1], v, p[2], p[3]);
      }
    }
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
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = warp_ * kBoxColumns + m * 16 + half * 8 + lane_ / 4;
          if (d < to.columns) o[d] = state.o[2 * m + i / 2][half * 2 + i % 2];
        }
    }
  }

  const AttendParams& p_;
  const WorkPlan& plan_;
  Shared& shared_;
  typename Traits::Stack& stack_;
  const int warp_ = static_cast<int>(threadIdx.x) / 32, lane_ = static_cast<int>(threadIdx.x) % 32;
  const int quarter_ = warp_ % 4, first_key_ = warp_ / 4 * 32;  // of its part of S
  std::uint32_t q_[kQuarterSteps][4];
  BoxState<Traits> at_;  // the first box of the tile
};

}  // namespace longspan::kernels::cuda

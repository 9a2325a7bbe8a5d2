// What the products of backward by mma share: each has its results in the same
// layout, whatever the type. A warp owns 16 rows or keys; lane 4 g + t has
// elements for those at g and at g + 8, each for the pairs 2 t, 2 t + 1 of
// every eight that stream by, or of every eight columns.
#pragma once

#include <type_traits>

#include "kernels/cuda/gradients/operands.cuh"

namespace longspan::kernels::cuda {

template <bool kOfRows, int kDimOfInstance, int kStreamCount>
class MmaGradients : protected GradientOperands<GradientWork<kOfRows, 64, kStreamCount>, kOfRows> {
  using Operands = GradientOperands<GradientWork<kOfRows, 64, kStreamCount>, kOfRows>;

 public:
  using Work = GradientWork<kOfRows, 64, kStreamCount>;
  static constexpr bool kRowsOwn = kOfRows;
  static constexpr int kOwn = 64, kStream = kStreamCount, kThreads = 128;
  static constexpr int kDim = kDimOfInstance;
  static constexpr int kColumns = kDim;     // of a panel: there is one
  static constexpr int kFloats = kDim / 2;  // sums of a thread

  __device__ __forceinline__ MmaGradients(const GradientParams& p, const GradientPlan& plan,
                                          const Work& work)
      : Operands(p, plan, work), rule_(p) {}

  __device__ __forceinline__ void store(const float (&sums)[kFloats]) {
    const GradientSums& to = this->target();
    const int columns = GradientSums::padded(to.dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = own_of(half);
      if (own >= work_.count) continue;
      float* const row = to.at(work_.kv_head, this->first_sum() + own);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        if (n * 8 >= columns) break;
        float2 sum = make_float2(sums[n * 4 + 2 * half], sums[n * 4 + 2 * half + 1]);
        float2& at = *reinterpret_cast<float2*>(row + n * 8 + lane() % 4 * 2);
        if (this->resumes()) {
          const float2 before = at;
          sum = make_float2(before.x + sum.x, before.y + sum.y);
        }
        at = sum;
      }
    }
    if (this->wants_slopes()) store_slopes();
  }

 protected:
  using Operands::p_, Operands::work_;
  using Scores = float[kStream / 8][4];  // of the warp
  static constexpr float kLargest = 3.402823466e38f;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  /// The owned one of a thread's elements 2 half and 2 half + 1.
  __device__ static int own_of(int half) { return warp() * 16 + half * 8 + lane() / 4; }

  __device__ __forceinline__ void clear_slopes() { slopes_[0] = slopes_[1] = 0.0; }

  /// S and dP become W, in s. Returns whether X has infinity or NaN that some
  /// of the warp's owned ones have no weight for: add_seen is then to add up.
  __device__ __forceinline__ bool weigh_all(Scores& s, const Scores& g, const StreamTile& tile,
                                            int slot, bool of_values) {
    const bool full = work_.full(tile, slot);
    if (!rule_.plain()) return weigh_by(rule_, s, g, tile, slot, of_values, full);
    ScoreRule plain = rule_;  // whose branches the compiler leaves out
    plain.to_cap = 0.0f;
    plain.biased = plain.drops = false;
    if (full) return weigh_by(plain, s, g, tile, slot, of_values, std::true_type{});
    return weigh_by(plain, s, g, tile, slot, of_values, std::false_type{});
  }

  /// The same by a rule. Where `full` is known, all have weights for all.
  template <class Full>
  __device__ __forceinline__ bool weigh_by(const ScoreRule& rule, Scores& s, const Scores& g,
                                           const StreamTile& tile, int slot, bool of_values,
                                           Full full) {
    const auto& rows = work_.rows(slot);
    const auto& keys = work_.keys(slot);
    const bool listed = work_.view.table != nullptr;
    const std::int64_t first_key = kRowsOwn ? tile.first : work_.first;
    float slopes[2] = {};
    bool skips = false;
    // Rows are outermost, so that what is known of a row is read once.
    const auto weigh_one = [&](int row, const SeenKeys& range, int key, float& score,
                               float of_value, int half) {
      bool seen = full;
      if (!full) seen = listed ? rows.view[row].contains(keys.place[key]) : range.contains(key);
      const float bias = rule.biased ? bias_of(p_, work_.sequence.index, rows.index[row],
                                               rows.head[row], keys.column[key])
                                     : 0.0f;
      const float kept = rule.drops ? kept_of(p_, rule, work_.sequence, rows.index[row],
                                              rows.head[row], keys.column[key])
                                    : 1.0f;
      const Weighed found = weigh(rule, score, of_value, bias, kept, seen, rows.lse[row],
                                  rows.lse_low[row], rows.d[row], arch::exp2_fast);
      if constexpr (!std::is_same_v<Full, std::true_type>) {
        // A row that is not finite has such a D, and what is multiplied by it
        // such products.
        const float of_x = of_values ? rows.d[row] : score;
        if (found.p == 0.0f && !(fabsf(of_x) <= kLargest)) skips = true;
      }
      score = of_values ? found.p : found.dx;
      if (rule.biased && this->wants_slopes())
        slopes[half] =
            fmaf(found.ds, alibi_distance(p_.bias.alibi, rows.index[row], keys.column[key], 0),
                 slopes[half]);
    };
    constexpr int kKeys = kRowsOwn ? kStream : kOwn;
    if constexpr (kRowsOwn) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own_of(half);
        const SeenKeys range(rows.view[row], first_key, kKeys);
#pragma unroll
        for (int n = 0; n < kStream / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            weigh_one(row, range, n * 8 + lane() % 4 * 2 + j, s[n][2 * half + j],
                      g[n][2 * half + j], half);
      }
      slopes_[0] += double{slopes[0]};
      slopes_[1] += double{slopes[1]};
    } else {
#pragma unroll
      for (int n = 0; n < kStream / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = n * 8 + lane() % 4 * 2 + j;
          const SeenKeys range(rows.view[row], first_key, kKeys);
#pragma unroll
          for (int half = 0; half < 2; ++half)
            weigh_one(row, range, own_of(half), s[n][2 * half + j], g[n][2 * half + j], half);
        }
    }
    if constexpr (std::is_same_v<Full, std::true_type>) return false;
    return __any_sync(~0u, skips) != 0;
  }

  /// Sums += W X without what has no weight. `pair_at(j, n)`: the thread's two
  /// elements of the j-th row of X, of its n-th eight columns.
  template <class PairAt>
  __device__ __forceinline__ static void add_seen(float (&sums)[kFloats], const Scores& weights,
                                                  const PairAt& pair_at) {
#pragma unroll 1
    for (int j = 0; j < kStream; ++j) {
      float weight[2] = {};
#pragma unroll
      for (int n = 0; n < kStream / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (n == j / 8)
            weight[half] = j % 2 == 0 ? weights[n][2 * half] : weights[n][2 * half + 1];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weight[half] = __shfl_sync(~0u, weight[half], lane() / 4 * 4 + j % 8 / 2);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float2 pair = pair_at(j, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (weight[half] == 0.0f) continue;
          float* const sum = sums + n * 4 + 2 * half;
          sum[0] = fmaf(weight[half], pair.x, sum[0]);
          sum[1] = fmaf(weight[half], pair.y, sum[1]);
        }
      }
    }
  }

 private:
  /// Adds up what the four lanes of a row have.
  __device__ __forceinline__ void store_slopes() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      double sum = slopes_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int own = own_of(half);
      if (lane() % 4 == 0 && own < work_.count) this->slope_of(own) = sum;
    }
  }

  const ScoreRule rule_;
  double slopes_[2];  // of the thread's rows: dS times distances
};

}  // namespace longspan::kernels::cuda

// The scores of backward: a product q.k and a product dout.v become the weight of a row and a key,
// and the gradients of their score. Every family calls this.
#pragma once

#include "kernels/cuda/gradients/tiles.cuh"
#include "kernels/dropout.hpp"
#include "longspan/score.hpp"

namespace longspan::kernels::cuda {

/// How products become scores.
struct ScoreRule {
  float scale;   // of the products
  float factor;  // from a product, or from its tanh, to base 2
  float to_cap;  // 0: no softcap
  bool biased;
  bool drops;
  PhiloxKey dropout_key;

  __device__ explicit ScoreRule(const GradientParams& p)
      : scale(p.score.scale),
        factor((p.score.softcap != 0.0f ? p.score.softcap : p.score.scale) * kLog2E),
        to_cap(p.score.softcap != 0.0f ? p.score.scale / p.score.softcap : 0.0f),
        biased(p.bias),
        drops(p.dropout),
        dropout_key(drops ? p.dropout.key() : PhiloxKey()) {}
  /// Whether a score is a product times a factor, and no weight is dropped.
  __device__ bool plain() const { return to_cap == 0.0f && !biased && !drops; }
};

struct Weighed {
  float p;   // the weight of dv
  float ds;  // the gradient of the score
  float dx;  // that of the product q.k
};

/// A key that the row does not see gives zeros, whatever the products are. `kept` is the factor of
/// dropout: of the weight of dv, and of dout.v.
template <class Exp2>
__device__ __forceinline__ Weighed weigh(const ScoreRule& rule, float product, float of_value,
                                         float bias, float kept, bool seen, float lse,
                                         float lse_low, float d, const Exp2& exp2_of) {
  float slope = rule.scale, x;
  if (rule.to_cap != 0.0f) {
    const float t = ::tanhf(product * rule.to_cap);
    slope = __fmul_rn(slope, fmaf(-t, t, 1.0f));
    x = __fadd_rn(__fadd_rn(__fmul_rn(t, rule.factor), bias), -lse);
  } else if (rule.biased) {
    x = __fadd_rn(__fadd_rn(__fmul_rn(product, rule.factor), bias), -lse);
  } else {
    x = fmaf(product, rule.factor, -lse);
  }
  x = __fadd_rn(x, -lse_low);
  if (x > 126.0f) x = 126.0f;  // an lse that does not belong to the scores
  const float p = seen && bias != -infinity() ? exp2_of(x) : 0.0f;
  const float of_weight = kept == 0.0f ? 0.0f : kept * of_value;
  const float ds = p == 0.0f ? 0.0f : __fmul_rn(p, __fadd_rn(of_weight, -d));
  return {kept * p, ds, p == 0.0f ? 0.0f : __fmul_rn(ds, slope)};
}

/// The keys [begin, end) of a tile, whose first one is at the place `first`, that a row sees.
struct SeenKeys {
  int begin, end;

  __device__ SeenKeys(const Interval& view, std::int64_t first, int count)
      : begin(static_cast<int>(min(max(view.begin - first, std::int64_t{0}), std::int64_t{count}))),
        end(static_cast<int>(min(max(view.end - first, std::int64_t{0}), std::int64_t{count}))) {}
  __device__ bool contains(int key) const { return key >= begin && key < end; }
};

/// The factor of dropout of a row and a key.
__device__ inline float kept_of(const GradientParams& p, const ScoreRule& rule,
                                const Sequence& sequence, int index, int head, int column) {
  const DropoutRow row =
      p.dropout.row(rule.dropout_key, sequence.index, head, sequence.context_len + index);
  return p.dropout.factor(row.one(sequence.context_len + column));
}

/// The bias of a row and a key, in base 2.
__device__ inline float bias_of(const GradientParams& p, int sequence, int index, int head,
                                int column) {
  const RowBias bias(p.bias, {index, head, sequence});
  return bias.alibi(column) + bias.qq(column);
}

}  // namespace longspan::kernels::cuda

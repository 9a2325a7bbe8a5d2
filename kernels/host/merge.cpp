// Folds the states of a row, one slot per rank, neighbours first; then come the sink, the division,
// the output's scale, and the one rounding to its type.
//
//     out = o / l (/ scale),   lse = m + ln l
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/merge.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/batch_rows.hpp"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/host.hpp"
#include "kernels/host/simd-inl.hpp"
#include "longspan/limits.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

constexpr int kLevels = 32;  // of the stack: 2^31 slots

struct RowState {
  Stats stats[kLevels];
  HWY_ALIGN float o[kLevels][kMaxValueDim];
};

/// Leaves the fold of the row's states in level 0.
void fold_slots(const MergeParams& p, std::int64_t row, RowState& state) {
  const int dim = p.states.columns();
  const auto merge = [&](int a, int b) {
    const Fold f = fold(state.stats[a], state.stats[b]);
    state.stats[a] = f.stats;
    fold_row(f, state.o[a], state.o[b], dim);
  };
  FoldStack stack;
  const int places = 1 << log2_ceil(p.states.slots);
  for (int place = 0; place < places; ++place) {
    // fold_place reverses bits or does nothing, so it is its own inverse.
    const int slot = fold_place(place, p.states.slots, p.interleaved);
    if (slot >= p.states.slots) continue;
    const int level = stack.push(place, merge);
    state.stats[level] = p.states.stats(slot)[row];
    std::copy_n(p.states.o(slot, row), dim, state.o[level]);
  }
  stack.finish(merge);
}

template <class T>
void store_row(const MergeParams& p, std::int64_t token, int head, const float* values) {
  T* out = p.out.at<T>(token, head);
  for (int c = 0; c < p.states.dim; ++c) out[c] = from_float(values[c], out);
}

void finish_row(const MergeParams& p, std::int64_t token, int head, RowState& state) {
  static constexpr float zeros[kMaxValueDim] = {};
  const int dim = p.states.dim;
  if (p.sinks) {
    const Fold f = fold(state.stats[0], sink_stats(p.sinks[head]));
    state.stats[0] = f.stats;
    fold_row(f, state.o[0], zeros, p.states.columns());
  }
  const Finish result = finish(state.stats[0]);
  float* o = state.o[0];
  for (int c = 0; c < dim; ++c) o[c] = result(o[c]);
  if (p.out_scale.data != nullptr)
    for (int c = 0; c < dim; ++c) o[c] = p.out_scale(o[c]);
  switch (p.dtype) {
    case DType::fp32:
      store_row<float>(p, token, head, o);
      break;
    case DType::fp16:
      store_row<Half>(p, token, head, o);
      break;
    case DType::bf16:
      store_row<Bfloat16>(p, token, head, o);
      break;
    default:  // fp8
      for (int c = 0; c < dim; ++c)
        store_element(p.out.at<std::uint8_t>(token, head), p.dtype, c, o[c]);
  }
  if (p.lse.data != nullptr) *p.lse.at(token, head) = result.lse;
}

/// Merges rows [begin, end) of the result, numbered token * heads + head.
void merge_rows(const MergeParams& p, std::int64_t begin, std::int64_t end) {
  RowState state;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t token = i / p.heads;
    const int head = static_cast<int>(i % p.heads);
    if (p.rows != nullptr ? p.rows[token] < 0 : !in_batch(p.batch, token)) continue;
    fold_slots(p, p.state_row(token, head), state);
    finish_row(p, token, head, state);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(merge_rows);

void merge(const MergeParams& p, ThreadPool& pool) {
  pool.run_stretches(p.tokens * p.heads, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(merge_rows)(p, begin, end);
  });
}

}  // namespace longspan::kernels::host
#endif

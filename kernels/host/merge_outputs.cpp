// Merges finished results over disjoint keys, each an out with its lse, into one. Such a pair is
// the state (lse, 1, out), in the base of its lse: the states fold, neighbours first, and finish
// like any other. Columns are processed in blocks that fit the stack, so any dim works and nothing
// is allocated.
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/merge_outputs.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/host.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/merge_scaled.hpp"
#include "longspan/element.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

constexpr int kBlock = 256;  // columns
constexpr int kLevels = 32;  // of the stack: 2^31 parts

struct PartStack {
  Stats stats[kLevels];
  HWY_ALIGN float o[kLevels][kBlock];
};

template <class T>
void widen(const void* row, int first, int n, float* to, DType dtype) {
  const T* from = static_cast<const T*>(row) + first;
  const Lanes8 d;
  int c = 0;
  for (; c + kLanes8 <= n; c += kLanes8) hn::StoreU(load(d, from + c), d, to + c);
  for (; c < n; ++c) to[c] = load_element(from, dtype, c);
}

/// Loads columns [first, first + n) of a row as fp32, times `factor`, then zeros up to a multiple
/// of 8.
void load_columns(const void* row, DType dtype, int first, int n, float factor, float* to) {
  switch (dtype) {
    case DType::fp32:
      widen<float>(row, first, n, to, dtype);
      break;
    case DType::fp16:
      widen<Half>(row, first, n, to, dtype);
      break;
    case DType::bf16:
      widen<Bfloat16>(row, first, n, to, dtype);
      break;
    case DType::e4m3:
      widen<E4m3>(row, first, n, to, dtype);
      break;
    default:
      widen<E5m2>(row, first, n, to, dtype);
  }
  if (factor != 1.0f)
    for (int c = 0; c < n; ++c) to[c] *= factor;
  for (int c = n; c % 8 != 0; ++c) to[c] = 0.0f;
}

template <class T>
void narrow(const float* values, int n, T* to) {
  for (int c = 0; c < n; ++c) to[c] = from_float(values[c], to);
}

void store_columns(const MergeOutputsParams& p, std::int64_t token, int head, int first,
                   const float* values, int n) {
  switch (p.dtype) {
    case DType::fp32:
      return narrow(values, n, p.out.at<float>(token, head) + first);
    case DType::fp16:
      return narrow(values, n, p.out.at<Half>(token, head) + first);
    case DType::bf16:
      return narrow(values, n, p.out.at<Bfloat16>(token, head) + first);
    case DType::e4m3:
      return narrow(values, n, p.out.at<E4m3>(token, head) + first);
    default:
      return narrow(values, n, p.out.at<E5m2>(token, head) + first);
  }
}

/// Leaves the fold of the parts that are not empty in level 0; `only` is the lse of the last of
/// them. Returns their number.
int fold_parts(const MergeOutputsParams& p, std::int64_t token, int head, int first, int columns,
               PartStack& state, float& only) {
  const int padded = (columns + 7) / 8 * 8;
  const auto merge = [&](int a, int b) {
    const Fold f = fold(state.stats[a], state.stats[b], p.base);
    state.stats[a] = f.stats;
    fold_row(f, state.o[a], state.o[b], padded);
  };
  FoldStack stack;
  int filled = 0;
  for (int part = 0; part < p.parts; ++part) {
    if (!p.is_there(part, token)) continue;
    const float lse = p.lse_of(part, token, head);
    const Stats stats = p.stats_of(lse, token);
    if (is_empty(stats)) continue;
    const int level = stack.push(static_cast<std::uint64_t>(part), merge);
    state.stats[level] = stats;
    load_columns(p.row_of(part, token, head), p.dtype_of(part), first, columns, p.scale_of(part),
                 state.o[level]);
    only = lse;
    ++filled;
  }
  if (!stack.finish(merge)) {
    state.stats[0] = empty_stats();
    std::fill_n(state.o[0], padded, 0.0f);
  }
  return filled;
}

bool all_finite(const float* values, int n) {
  float sum = 0.0f;  // becomes NaN as soon as one value is not finite
  for (int c = 0; c < n; ++c) sum += values[c] * 0.0f;
  return sum == 0.0f;
}

void merge_row(const MergeOutputsParams& p, std::int64_t token, int head, PartStack& state) {
  float lse = 0.0f, only = 0.0f;
  for (int first = 0; first < p.dim; first += kBlock) {
    const int columns = std::min(kBlock, p.dim - first);
    const int filled = fold_parts(p, token, head, first, columns, state, only);
    const Finish result = finish(state.stats[0]);
    // A single part passes on its lse unchanged.
    lse = filled == 1 ? only : part_lse(state.stats[0], p.base);
    float* o = state.o[0];
    for (int c = 0; c < columns; ++c) o[c] = result(o[c]);
    if (!all_finite(o, columns))
      for (int c = 0; c < columns; ++c)
        if (!std::isfinite(o[c])) o[c] = merge_scaled(p, token, head, first + c);
    if (p.out_scale.data != nullptr)
      for (int c = 0; c < columns; ++c) o[c] = p.out_scale(o[c]);
    store_columns(p, token, head, first, o, columns);
  }
  // Last, because it may overwrite the prefix's lse, which is read before.
  if (p.lse.data != nullptr) *p.lse.at(token, head) = lse;
}

/// Merges rows [begin, end) of the result, numbered token * heads + head.
void merge_output_rows(const MergeOutputsParams& p, std::int64_t begin, std::int64_t end) {
  PartStack state;
  for (std::int64_t i = begin; i < end; ++i)
    merge_row(p, i / p.heads, static_cast<int>(i % p.heads), state);
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(merge_output_rows);

void merge_outputs(const MergeOutputsParams& p, ThreadPool& pool) {
  pool.run_stretches(p.tokens * p.heads, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(merge_output_rows)(p, begin, end);
  });
}

}  // namespace longspan::kernels::host
#endif

// Finished results over disjoint keys, each out with its lse, become one. Such a pair is the state
// (lse, 1, out): the states fold, neighbours first, and finish as any other. Columns go in blocks
// that fit the stack, so any dim is taken and nothing is allocated.
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/merge_outputs.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/host.hpp"
#include "kernels/host/simd-inl.hpp"
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

float lse_of(const MergeOutputsParams& p, int part, std::int64_t token, int head) {
  return p.parts == 2 ? *p.in_lse[part].at(token, head)
                      : p.in_lse[0].at(token, head)[part * p.lse_part_stride];
}

template <class T>
const T* row_of(const MergeOutputsParams& p, int part, std::int64_t token, int head) {
  return p.parts == 2 ? p.in[part].at<const T>(token, head)
                      : p.in[0].at<const T>(token, head) + part * p.part_stride;
}

/// Columns [first, first + n) of a row as fp32, then zeros up to a multiple of 8.
template <class T>
void load_columns(const T* from, int n, float* to) {
  constexpr DType dtype = sizeof(T) == 4            ? DType::fp32
                          : std::is_same_v<T, Half> ? DType::fp16
                                                    : DType::bf16;
  const Lanes8 d;
  int c = 0;
  for (; c + kLanes8 <= n; c += kLanes8) hn::StoreU(load(d, from + c), d, to + c);
  for (; c < n; ++c) to[c] = load_element(from, dtype, c);
  for (; c % 8 != 0; ++c) to[c] = 0.0f;
}

/// Leaves the fold of the parts that are not empty in level 0; `only` is the lse of the last of
/// them. Returns how many they are.
template <class T>
int fold_parts(const MergeOutputsParams& p, std::int64_t token, int head, int first, int columns,
               PartStack& state, float& only) {
  const int padded = (columns + 7) / 8 * 8;
  const auto merge = [&](int a, int b) {
    const Fold f = fold(state.stats[a], state.stats[b]);
    state.stats[a] = f.stats;
    fold_row(f, state.o[a], state.o[b], padded);
  };
  const bool skips_prefix = p.parts == 2 && p.with_prefix >= 0 && token >= p.with_prefix;
  FoldStack stack;
  int filled = 0;
  for (int part = skips_prefix ? 1 : 0; part < p.parts; ++part) {
    const float lse = lse_of(p, part, token, head);
    const Stats stats = import_lse(lse, p.base, p.nan_is_empty);
    if (is_empty(stats)) continue;
    const int level = stack.push(static_cast<std::uint64_t>(part), merge);
    state.stats[level] = stats;
    load_columns(row_of<T>(p, part, token, head) + first, columns, state.o[level]);
    only = lse;
    ++filled;
  }
  if (!stack.finish(merge)) {
    state.stats[0] = empty_stats();
    std::fill_n(state.o[0], padded, 0.0f);
  }
  return filled;
}

template <class T>
void merge_row(const MergeOutputsParams& p, std::int64_t token, int head, PartStack& state) {
  float lse = 0.0f, only = 0.0f;
  for (int first = 0; first < p.dim; first += kBlock) {
    const int columns = std::min(kBlock, p.dim - first);
    const int filled = fold_parts<T>(p, token, head, first, columns, state, only);
    const Finish result = finish(state.stats[0]);
    float* o = state.o[0];
    for (int c = 0; c < columns; ++c) o[c] = result(o[c]);
    if (p.out_scale.data != nullptr)
      for (int c = 0; c < columns; ++c) o[c] = p.out_scale(o[c]);
    if (is_fp8(p.dtype)) {
      std::uint8_t* out = p.out.at<std::uint8_t>(token, head) + first;
      for (int c = 0; c < columns; ++c) store_element(out, p.dtype, c, o[c]);
    } else {
      T* out = p.out.at<T>(token, head) + first;
      for (int c = 0; c < columns; ++c) out[c] = from_float(o[c], out);
    }
    // One part alone hands on its lse as it came.
    lse = filled == 1 ? only : export_lse(state.stats[0], p.base);
  }
  // Last, since it may lie where the prefix's was read.
  if (p.lse.data != nullptr) *p.lse.at(token, head) = lse;
}

/// Rows [begin, end) of the result, numbered token * heads + head.
void merge_output_rows(const MergeOutputsParams& p, std::int64_t begin, std::int64_t end) {
  PartStack state;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t token = i / p.heads;
    const int head = static_cast<int>(i % p.heads);
    switch (p.in_dtype) {
      case DType::fp32:
        merge_row<float>(p, token, head, state);
        break;
      case DType::fp16:
        merge_row<Half>(p, token, head, state);
        break;
      default:
        merge_row<Bfloat16>(p, token, head, state);
    }
  }
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

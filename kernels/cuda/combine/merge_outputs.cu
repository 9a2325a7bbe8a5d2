// Merges finished results over disjoint keys, each an out with its lse, into one. Such a pair is
// the state (lse, 1, out) in the base of its lse, so that
//
//     out = (high + low r) / (1 + r),   r = base^(lse_low - lse_high)
//
// for two of them. The kernel for two is bound by memory: a thread takes 16 bytes of a row once or
// twice, issues every load of both sides before it uses one, and writes them once. Rows that do not
// divide into 16 bytes (any dim, any stride) and any other number of parts use the tree of states,
// further below. So do parts of different types, of fp8, or of another type than the result, with
// instances that get the types at run time.
//
// If a sum of finite terms exceeds fp32, it is recomputed with its terms scaled (merge_scaled).
// That is rare, so the common case only pays for the detection.
#include <algorithm>
#include <string>
#include <type_traits>

#include "kernels/cuda/combine/fold_tree.cuh"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/combine/run_headers.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/merge_scaled.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // most of a block

template <int kCount>
__device__ bool all_finite(const float (&values)[kCount]) {
  float check = 0.0f;  // becomes NaN as soon as one value is not finite
#pragma unroll
  for (const float value : values) check = fmaf(value, 0.0f, check);
  return check == 0.0f;
}

/// Recomputes the elements that are not finite. That is rare, hence a loop that is not unrolled,
/// over a copy, so that the values themselves stay in registers. It is not a call, because around a
/// call a kernel would have fewer registers for its loads.
template <bool kByInverse, int kCount>
__device__ __forceinline__ void mend_overflow(const MergeOutputsParams& p, std::int64_t token,
                                              int head, int column, float (&values)[kCount]) {
  float mended[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c) mended[c] = values[c];
#pragma unroll 1
  for (int c = 0; c < kCount; ++c)
    if (!isfinite(mended[c])) mended[c] = merge_scaled(p, token, head, column + c, kByInverse);
#pragma unroll
  for (int c = 0; c < kCount; ++c) values[c] = mended[c];
}

/// The bits of two zeros -0, or of one, in a word of an input type.
template <class T>
constexpr std::uint32_t kMinusZero = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

/// Whether the sum of two elements may exceed fp32. fp16 has no elements that large.
template <class T>
constexpr bool kCanOverflow = !std::is_same_v<T, __half>;

/// 16 bytes of a row.
template <class T>
struct alignas(16) Words {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  std::uint32_t words[4];

  __device__ void get(float (&values)[kCount]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (std::is_same_v<T, float>) {
        values[w] = __uint_as_float(words[w]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
        values[2 * w] = pair.x;
        values[2 * w + 1] = pair.y;
      } else {
        values[2 * w] = __uint_as_float(words[w] << 16);
        values[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
      }
    }
  }
};

/// Loads 16 bytes. Every byte of the inputs is read once, so it need not stay in a cache. The loads
/// do not use the read-only path, since the result may overwrite the prefix.
template <class T>
__device__ Words<T> load_words(const T* from) {
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from));
  return {{bits.x, bits.y, bits.z, bits.w}};
}

struct RowIndex {
  std::int64_t token;
  int head;
};

/// Finds the token and head of a row, in 32 bits, since a launch has fewer than 2^31 rows.
__device__ RowIndex row_index(unsigned row, int heads) {
  const unsigned token = row / static_cast<unsigned>(heads);
  return {token, static_cast<int>(row - token * static_cast<unsigned>(heads))};
}

// ---- two parts: threadIdx.x, in kVectors steps of the block = 16 bytes of a row; (blockIdx.x,
// threadIdx.y) = rows ----------------------------------------------------------------------------

/// The factors of a row's elements from its two lse values.
struct RowMerge {
  Fold fold;
  float inverse;  // 1 / sum; 0 if both sides are empty
  bool suffix_leads;
  bool one_side;  // at most one side counts: the lower side does not
  bool empty;

  __device__ RowMerge(Stats prefix, Stats suffix, LogBase base)
      : fold(longspan::fold(prefix, suffix, base)),
        suffix_leads(fold.take == Fold::second || fold.take == Fold::second_high),
        one_side(fold.take == Fold::first || fold.take == Fold::second),
        empty(is_empty(fold.stats)) {
    inverse = empty ? 0.0f : 1.0f / finish(fold.stats).sum;  // NaN if an lse is NaN
  }

  /// Merges. A side that does not count becomes -0, which changes no sum, or 0 if both are empty.
  template <class T>
  __device__ void apply(const Words<T>& prefix, const Words<T>& suffix,
                        float (&values)[Words<T>::kCount]) const {
    Words<T> high = suffix_leads ? suffix : prefix, low = suffix_leads ? prefix : suffix;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      high.words[w] = empty ? 0u : high.words[w];
      low.words[w] = empty ? 0u : one_side ? kMinusZero<T> : low.words[w];
    }
    float lower[Words<T>::kCount];
    high.get(values);
    low.get(lower);
#pragma unroll
    for (int c = 0; c < Words<T>::kCount; ++c)
      values[c] = fmaf(lower[c], fold.ratio, values[c]) * inverse;
  }
};

/// The same as mend_overflow, for 16 bytes of a row that has two sides, as a call with copies of
/// its inputs. Registers are scarce here, and rare code must not use any.
template <class T>
__device__ __noinline__ void mend_apart(RowMerge merge, const T* prefix, const T* suffix,
                                        float* values) {
  for (int c = 0; c < Words<T>::kCount; ++c) {
    if (isfinite(values[c])) continue;
    const float first = static_cast<float>(prefix[c]), second = static_cast<float>(suffix[c]);
    const float high = merge.suffix_leads ? second : first;
    const float low = merge.suffix_leads ? first : second;
    values[c] = from_merge_unit(fmaf(low * kMergeUnit, merge.fold.ratio, high * kMergeUnit) *
                                merge.inverse);
  }
}

template <class T, int kVectors>
__global__ __launch_bounds__(kThreads, kVectors == 1 ? 8 : 6) void merge_two_kernel(
    const __grid_constant__ MergeOutputsParams p, bool writes_read_lse) {
  constexpr int kCount = Words<T>::kCount;
  if (are_of_different_runs(p.headers)) return;
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool live = row < static_cast<unsigned>(p.tokens) * static_cast<unsigned>(p.heads);
  const auto [token, head] = row_index(row, p.heads);
  const int column = static_cast<int>(threadIdx.x) * kCount;
  const int step = static_cast<int>(blockDim.x) * kCount;
  const LoadedScale scale(p.out_scale);
  float prefix_lse = -infinity(), suffix_lse = -infinity();
  Words<T> prefix[kVectors], suffix[kVectors];
  if (live) {
    suffix_lse = *p.in_lse[1].at(token, head);
    const T* from = p.in[1].at<const T>(token, head) + column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) suffix[i] = load_words(from + i * step);
  }
  if (live && !p.copies_suffix(token)) {
    prefix_lse = *p.in_lse[0].at(token, head);
    const T* from = p.in[0].at<const T>(token, head) + column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) prefix[i] = load_words(from + i * step);
  }
  // The threads of a row, in one block, have all read its lse before one of them writes there.
  if (writes_read_lse) __syncthreads();
  if (!live) return;
  const RowMerge merge(part_stats(prefix_lse, p.nan_is_empty), p.stats_of(suffix_lse, token),
                       p.base);
  const std::int64_t at = token * p.out.row_stride + head * p.out.head_stride + column;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float values[kCount];
    merge.apply(prefix[i], suffix[i], values);
    if (kCanOverflow<T> && !merge.one_side && !all_finite(values)) {
      float mended[kCount];
#pragma unroll
      for (int c = 0; c < kCount; ++c) mended[c] = values[c];
      mend_apart(merge, p.in[0].at<const T>(token, head) + column + i * step,
                 p.in[1].at<const T>(token, head) + column + i * step, mended);
#pragma unroll
      for (int c = 0; c < kCount; ++c) values[c] = mended[c];
    }
    scale.apply(values);
    if (is_fp8(p.dtype))
      store_as_fp8(static_cast<std::uint8_t*>(p.out.data) + at + i * step, values, p.dtype);
    else
      store_as(static_cast<T*>(p.out.data) + at + i * step, values);
  }
  if (p.lse.data != nullptr && threadIdx.x == 0) {
    // A single part passes on its lse unchanged.
    *p.lse.at(token, head) = merge.empty || !merge.one_side ? part_lse(merge.fold.stats, p.base)
                             : merge.suffix_leads           ? suffix_lse
                                                            : prefix_lse;
  }
}

// ---- any: threadIdx.x, in steps of the block = columns; (blockIdx.x, threadIdx.y) = rows --------

/// Stands for element types that are known only at run time.
struct AnyType {};

/// Loads kColumns elements from `from` on, which is aligned to access_bytes.
template <class T, int kColumns>
__device__ void load_as(const void* from, float (&values)[kColumns]) {
  union {
    T elements[kColumns];
    Chunk<static_cast<int>(sizeof(T)) * kColumns> chunk;
  } loaded;
  loaded.chunk = *static_cast<const decltype(loaded.chunk)*>(from);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) values[c] = static_cast<float>(loaded.elements[c]);
}
template <int kColumns>
__device__ void load_any(const void* from, DType dtype, float (&values)[kColumns]) {
  switch (dtype) {
    case DType::fp32:
      return load_as<float>(from, values);
    case DType::fp16:
      return load_as<__half>(from, values);
    case DType::bf16:
      return load_as<__nv_bfloat16>(from, values);
    case DType::e4m3:
      return load_as<__nv_fp8_e4m3>(from, values);
    default:
      return load_as<__nv_fp8_e5m2>(from, values);
  }
}

/// Loads kColumns columns of each part of a row.
template <class T, int kColumns>
struct PartColumns {
  const MergeOutputsParams& p;
  std::int64_t token;
  int head;
  int column;

  __device__ Stats stats(int part) const {
    return p.is_there(part, token) ? p.stats_of(p.lse_of(part, token, head), token) : empty_stats();
  }

  __device__ StateColumns<kColumns> operator()(int part) const {
    StateColumns<kColumns> piece{stats(part), {}};
    // An empty part is loaded with the others, but not used.
    if (!p.is_there(part, token)) return piece;
    if constexpr (std::is_same_v<T, AnyType>) {
      const DType dtype = p.dtype_of(part);
      load_any(p.row_of(part, token, head) + column * static_cast<int>(size_of(dtype)), dtype,
               piece.o);
      const float factor = p.scale_of(part);
#pragma unroll
      for (float& o : piece.o) o *= factor;
      return piece;
    } else {
      const T* from = (p.parts == 2 ? p.in[part].at<const T>(token, head)
                                    : p.in[0].at<const T>(token, head) + part * p.part_stride) +
                      column;
      if constexpr (kColumns == 1) {
        piece.o[0] = static_cast<float>(*from);
      } else {
        constexpr int kCount = Words<T>::kCount;
#pragma unroll
        for (int first = 0; first < kColumns; first += kCount) {
          float values[kCount];
          load_words(from + first).get(values);
#pragma unroll
          for (int c = 0; c < kCount; ++c) piece.o[first + c] = values[c];
        }
      }
      return piece;
    }
  }
};

template <class T, int kColumns, int kLevels>
__global__ __launch_bounds__(kThreads) void merge_parts_kernel(
    const __grid_constant__ MergeOutputsParams p, bool writes_read_lse) {
  if (are_of_different_runs(p.headers)) return;
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool live = row < static_cast<unsigned>(p.tokens) * static_cast<unsigned>(p.heads);
  const auto [token, head] = row_index(row, p.heads);
  const LoadedScale scale(p.out_scale);
  float lse = 0.0f;
  const int step = static_cast<int>(blockDim.x) * kColumns;
  for (int column = static_cast<int>(threadIdx.x) * kColumns; live && column < p.dim;
       column += step) {
    const PartColumns<T, kColumns> parts{p, token, head, column};
    int levels = log2_ceil(p.parts);
    if (std::is_same_v<T, AnyType> && kLevels > kGroupLevels) levels = max(levels, kGroupLevels);
    StateColumns<kColumns> piece = fold_tree<kLevels>(parts, levels, p.base);
    const Finish finished = finish(piece.stats);
    if constexpr (kLevels == 1) {
      // This rounds as merge_two_kernel does, so that neither the type of a part nor the address of
      // the result changes a bit: ranks that merge the same two parts get the same result.
      const float inverse = 1.0f / finished.sum;
#pragma unroll
      for (float& o : piece.o) o = finished.sum == 0.0f ? 0.0f : o * inverse;
    } else {
#pragma unroll
      for (float& o : piece.o) o = finished(o);
    }
    if (kCanOverflow<T> && !all_finite(piece.o))
      mend_overflow<kLevels == 1>(p, token, head, column, piece.o);
    scale.apply(piece.o);
    const std::int64_t at = token * p.out.row_stride + head * p.out.head_stride + column;
    if constexpr (std::is_same_v<T, AnyType>)
      store_elements(p.out.data, p.dtype, at, piece.o);
    else if (is_fp8(p.dtype))
      store_as_fp8(static_cast<std::uint8_t*>(p.out.data) + at, piece.o, p.dtype);
    else
      store_as(static_cast<T*>(p.out.data) + at, piece.o);
    if (column == 0) {
      lse = part_lse(piece.stats, p.base);
      // A single part passes on its lse unchanged.
      int filled = 0, last = 0;
      for (int part = 0; part < p.parts; ++part) {
        if (is_empty(parts.stats(part))) continue;
        ++filled;
        last = part;
      }
      if (filled == 1) lse = p.lse_of(last, token, head);
    }
  }
  if (writes_read_lse) __syncthreads();
  if (live && threadIdx.x == 0 && p.lse.data != nullptr) *p.lse.at(token, head) = lse;
}

// ---- launch ------------------------------------------------------------------------------------

template <class Use>
void for_type(DType dtype, bool plain, const Use& use) {
  if (!plain)
    use(AnyType());
  else if (dtype == DType::fp32)
    use(float());
  else if (dtype == DType::fp16)
    use(__half());
  else
    use(__nv_bfloat16());
}

/// Whether all parts, and the result unless it is fp8, have one type with its own instances,
/// without scales.
bool is_plain(const MergeOutputsParams& p) {
  const DType dtype = p.in_dtype[0];
  return !is_fp8(dtype) && p.in_scale[0] == nullptr && p.in_scale[1] == nullptr &&
         (p.parts != 2 || p.in_dtype[1] == dtype) && (p.dtype == dtype || is_fp8(p.dtype));
}

template <int kColumns>
bool fits(const MergeOutputsParams& p) {
  const std::int64_t vector =
      access_bytes<kColumns>(p.in_dtype[0]) / static_cast<std::int64_t>(size_of(p.in_dtype[0]));
  return p.dim % kColumns == 0 && p.dim / kColumns <= kThreads &&
         is_aligned<kColumns>(p.in[0], p.in_dtype[0]) && is_aligned<kColumns>(p.out, p.dtype) &&
         (p.parts == 2 ? is_aligned<kColumns>(p.in[1], p.in_dtype[1])
                       : p.part_stride % vector == 0);
}

unsigned blocks_for(std::int64_t rows, std::int64_t a_block) {
  return static_cast<unsigned>((rows + a_block - 1) / a_block);
}

/// Launches for two parts whose rows are whole vectors of 16 bytes; returns false for others.
template <class T>
bool launch_two(const MergeOutputsParams& p, std::int64_t rows, bool writes_read_lse,
                cudaStream_t stream) {
  constexpr int kCount = Words<T>::kCount;
  if (p.parts != 2 || !fits<kCount>(p)) return false;
  const int vectors = p.dim / kCount;
  // Two vectors of a thread share the work per row, and keep more loads in flight; but they pay off
  // only if there is enough work to fill the GPU.
  const bool two = vectors % 2 == 0 && rows * vectors >= std::int64_t{1} << 19;
  const int columns = two ? vectors / 2 : vectors;
  const dim3 block(columns, kThreads / columns);
  const unsigned blocks = blocks_for(rows, block.y);
  if (two)
    launch_kernel(merge_two_kernel<T, 2>, {blocks, block, stream}, p, writes_read_lse);
  else
    launch_kernel(merge_two_kernel<T, 1>, {blocks, block, stream}, p, writes_read_lse);
  return true;
}

/// Calls use(std::integral_constant) with the levels of an instance that takes `levels`. Types with
/// their own instances have one for each number of levels up to kGroupLevels if rows are whole
/// vectors, fewer otherwise. AnyType has one for two parts and one for all others.
template <class T, int kColumns, class Use>
void for_tree(int levels, const Use& use) {
  if constexpr (std::is_same_v<T, AnyType>) {
    if (levels == 1)
      use(std::integral_constant<int, 1>());
    else
      use(std::integral_constant<int, kGroupLevels + 1>());
  } else if constexpr (kColumns > 1) {
    for_levels<kGroupLevels + 1>(levels, use);
  } else if (levels == 1) {
    use(std::integral_constant<int, 1>());
  } else if (levels <= kGroupLevels) {
    use(std::integral_constant<int, kGroupLevels>());
  } else {
    use(std::integral_constant<int, kGroupLevels + 1>());
  }
}

template <class T>
void launch_parts(const MergeOutputsParams& p, std::int64_t rows, bool writes_read_lse,
                  cudaStream_t stream) {
  const int levels = log2_ceil(p.parts);
  const bool wide = fits<8>(p);
  const int columns = wide ? p.dim / 8 : std::min(p.dim, kThreads);
  const dim3 block(columns, kThreads / columns);
  const unsigned blocks = blocks_for(rows, block.y);
  if (wide)
    for_tree<T, 8>(levels, [&](auto tree) {
      launch_kernel(merge_parts_kernel<T, 8, decltype(tree)::value>, {blocks, block, stream}, p,
                    writes_read_lse);
    });
  else
    for_tree<T, 1>(levels, [&](auto tree) {
      launch_kernel(merge_parts_kernel<T, 1, decltype(tree)::value>, {blocks, block, stream}, p,
                    writes_read_lse);
    });
}

/// Launches the merge of fewer than 2^31 rows.
void launch(const MergeOutputsParams& p, cudaStream_t stream) {
  const std::int64_t rows = p.tokens * p.heads;
  const bool writes_read_lse =
      p.lse.data != nullptr && (p.lse.data == p.in_lse[0].data || p.lse.data == p.in_lse[1].data);
  for_type(p.in_dtype[0], is_plain(p), [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, AnyType>) {
      if (launch_two<T>(p, rows, writes_read_lse, stream)) return;
    }
    launch_parts<T>(p, rows, writes_read_lse, stream);
  });
}

void skip_tokens(Rows& rows, DType dtype, std::int64_t tokens) {
  rows.data = static_cast<std::byte*>(rows.data) +
              tokens * rows.row_stride * static_cast<std::int64_t>(size_of(dtype));
}

}  // namespace

void merge_outputs(const MergeOutputsParams& whole, cudaStream_t stream) {
  if (whole.parts > 1 << kMostLevels)
    throw Unsupported("merge of " + std::to_string(whole.parts) + " results: at most " +
                      std::to_string(1 << kMostLevels) +
                      " in one call on CUDA; merge them in groups");
  // Rows are counted in 32 bits, so each launch has fewer than 2^30 rows; usually one launch
  // suffices.
  const std::int64_t most = std::max<std::int64_t>((std::int64_t{1} << 30) / whole.heads, 1);
  for (std::int64_t first = 0; first < whole.tokens; first += most) {
    MergeOutputsParams p = whole;
    p.tokens = std::min(most, whole.tokens - first);
    skip_tokens(p.out, p.dtype, first);
    if (p.lse.data != nullptr) p.lse.data += first * p.lse.row_stride;
    for (int side = 0; side < (p.parts == 2 ? 2 : 1); ++side) {
      skip_tokens(p.in[side], p.in_dtype[side], first);
      p.in_lse[side].data += first * p.in_lse[side].row_stride;
    }
    if (p.with_prefix >= 0) p.with_prefix = std::max<std::int64_t>(p.with_prefix - first, 0);
    launch(p, stream);
  }
}

}  // namespace longspan::kernels::cuda

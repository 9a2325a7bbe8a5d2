// The operands of the decode kernel's products, and the products.
//
// 16-bit keys and values go from shared memory into fragments as they are. fp8 ones become fp16
// there, and no shuffle puts them in place: four bytes that a lane gets are four columns of a key,
// of which the first two stand where a fragment has its columns 2t and 2t + 1, the others where it
// has 2t + 8 and 2t + 9. So a product's 16 columns are in another order, and the queries are loaded
// in that order too (slice_column). For values two bytes are two columns of a key: rows g and g + 8
// of the product's result are columns 2g and 2g + 1 (result_column).
#pragma once

#include <type_traits>

#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

/// Of the two columns that word `half` of a lane's queries holds, the first, in its slice.
template <class Traits>
__device__ inline int slice_column(int half) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  return Traits::kFp8 ? t * 4 + half * 2 : half * 8 + t * 2;
}

/// The column, in its slice, of the result's elements 2 half and 2 half + 1 of a lane.
template <class Traits>
__device__ inline int result_column(int half) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  return Traits::kFp8 ? g * 2 + half : half * 8 + g;
}

/// The rows of a warp as the products' second factor: for each 16 columns two registers.
template <class Traits>
struct DecodeQueries {
  std::uint32_t word[Traits::kRowTiles][Traits::kSlices][2];
  // fp8: the queries are fp16, each row times a power of two that brings its largest element close
  // to the largest fp16. So bf16's range loses nothing that fp32 sums would have kept. This undoes
  // it, for rows 2t and 2t + 1 of each row tile.
  float undo[Traits::kRowTiles][2];

  __device__ void load(const AttendParams& p, const Sequence& sequence, const Work& work,
                       int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      const int row = first_row + n * 8 + lane / 4;
      const bool valid = row < work.rows;
      const PackedRow at = packed_row(work, valid ? row : 0);
      const std::int64_t from = (sequence.first_row + at.token) * p.q.row_stride +
                                static_cast<std::int64_t>(at.head) * p.q.head_stride;
      if constexpr (Traits::kFp8)
        load_scaled(p, n, from, valid);
      else
        load_16(p, n, from, valid);
    }
  }

 private:
  __device__ void load_16(const AttendParams& p, int n, std::int64_t from, bool valid) {
    using T = typename Traits::Element;
    constexpr Loader kLoader = Traits::kPlain ? Loader::plain : Loader::any16;
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = slice * 16 + slice_column<Traits>(half);
        word[n][slice][half] = valid && d < p.dim ? load_query_pair<T, kLoader>(p, from + d) : 0u;
      }
  }

  __device__ void load_scaled(const AttendParams& p, int n, std::int64_t from, bool valid) {
    float values[Traits::kSlices][2][2], largest = 0.0f;
    const auto all = [&](const auto& of) {
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            of(values[slice][half][i], slice * 16 + slice_column<Traits>(half) + i);
    };
    const bool is_bf16 = p.q_dtype == DType::bf16, is_e5m2 = p.q_dtype == DType::e5m2;
    if (is_fp8(p.q_dtype)) {
      const std::uint8_t* data = static_cast<const std::uint8_t*>(p.q.data) + from;
      all([&](float& value, int d) {
        const std::uint32_t half =
            valid && d < p.dim ? widen_two<__half>(data[d], is_e5m2) & 0xffff : 0u;
        value = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
      });
    } else {
      const unsigned short* data = static_cast<const unsigned short*>(p.q.data) + from;
      all([&](float& value, int d) {
        const unsigned short bits = valid && d < p.dim ? data[d] : 0;
        value = is_bf16 ? __uint_as_float(std::uint32_t{bits} << 16)
                        : __half2float(__ushort_as_half(bits));
      });
    }
    all([&](float value, int) { largest = fmaxf(largest, fabsf(value)); });
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    constexpr int kLargest = 14, kSmallest = -100;  // exponents: of fp16; of what has both factors
    int exponent = (__float_as_int(largest) >> 23) - 127;
    if (exponent > 127 || largest == 0.0f) exponent = kLargest;  // infinite, or all zeros
    exponent = max(exponent, kSmallest);
    const float factor = __int_as_float((kLargest - exponent + 127) << 23);
    const float back = __int_as_float((exponent - kLargest + 127) << 23);
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        word[n][slice][half] =
            arch::pack<__half>(values[slice][half][0] * factor, values[slice][half][1] * factor);
#pragma unroll
    for (int j = 0; j < 2; ++j)  // of a row's four lanes, to the eight of its column of scores
      undo[n][j] = __shfl_sync(~0u, back, (threadIdx.x % 4 * 2 + j) * 4);
  }
};

/// Offsets of the 16-byte columns that a lane gives to ldmatrix. All of a tile's rows lie a
/// multiple of 16 rows into their stage, so the offsets inside a tile depend on the lane alone;
/// they repeat after kPeriod loads, a panel.
template <class Traits>
struct DecodeOffsets {
  using Layout = typename Traits::Layout;
  static constexpr int kPeriod = Layout::kPeriod / 2;
  std::uint32_t column[kPeriod];

  __device__ DecodeOffsets(int row, int half) {
#pragma unroll
    for (int i = 0; i < kPeriod; ++i)
      column[i] = static_cast<std::uint32_t>(Layout::offset(row, 2 * i + half));
  }
  /// Of load `i`, of 32 bytes of each key.
  __device__ std::uint32_t operator()(int i) const {
    return column[i % kPeriod] + i / kPeriod * Layout::kPanelBytes;
  }
  /// Of matrices: keys 0 to 7, keys 8 to 15, the same of the next 16 bytes.
  __device__ static DecodeOffsets keys_first() {
    const int lane = threadIdx.x % 32;
    return {lane % 16, lane / 16};
  }
  /// Of matrices: keys 0 to 7, their next 16 bytes, the same of keys 8 to 15.
  __device__ static DecodeOffsets columns_first() {
    const int lane = threadIdx.x % 32;
    return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
  }
};

/// The four fp8 numbers of a register as fp16: the first two, the other two.
template <class Traits>
__device__ __forceinline__ void widen(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  arch::widen_fp8<Traits::kE5M2>(four, low, high);
#else
  low = widen_two<__half>(four & 0xffff, Traits::kE5M2);
  high = widen_two<__half>(four >> 16, Traits::kE5M2);
#endif
}

/// s = K Q^T for 16 keys and the warp's rows: of even and of odd slices a sum each, as products
/// wait for the sum that they add to.
template <class Traits>
__device__ __forceinline__ void multiply_keys(float (&s)[Traits::kRowTiles][4], std::uint32_t keys,
                                              const DecodeOffsets<Traits>& offset,
                                              const DecodeQueries<Traits>& queries) {
  using T = typename Traits::Element;
  float sums[2][Traits::kRowTiles][4] = {};
  const auto multiply = [&](int slice, const std::uint32_t(&a)[4]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::mma<T>(sums[slice % 2][n], a, queries.word[n][slice][0], queries.word[n][slice][1]);
  };
#pragma unroll
  for (int load = 0; load < Traits::kRowBytes / 32; ++load) {
    std::uint32_t a[4];
    arch::load_matrices(a, keys + offset(load));
    if constexpr (!Traits::kFp8) {
      multiply(load, a);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t wide[4];
        widen<Traits>(a[2 * i], wide[0], wide[2]);
        widen<Traits>(a[2 * i + 1], wide[1], wide[3]);
        multiply(2 * load + i, wide);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = __fadd_rn(sums[0][n][i], sums[1][n][i]);
}

/// O^T += V^T P^T for 16 keys.
template <class Traits>
__device__ __forceinline__ void multiply_values(
    typename Traits::State& state, std::uint32_t values, const DecodeOffsets<Traits>& offset,
    const std::uint32_t (&weights)[Traits::kRowTiles][2]) {
  using T = typename Traits::Element;
  const auto multiply = [&](int slice, const std::uint32_t(&a)[4]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::mma<T>(state.o[slice * Traits::kRowTiles + n], a, weights[n][0], weights[n][1]);
  };
#pragma unroll
  for (int load = 0; load < Traits::kRowBytes / 32; ++load) {
    std::uint32_t a[4];
    arch::load_matrices_transposed(a, values + offset(load));
    if constexpr (!Traits::kFp8) {
      multiply(load, a);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t wide[4];  // a lane's bytes: columns 2g, 2g + 1 of one key, then of the next
        widen<Traits>(__byte_perm(a[2 * i], 0, 0x3120), wide[0], wide[1]);
        widen<Traits>(__byte_perm(a[2 * i + 1], 0, 0x3120), wide[2], wide[3]);
        multiply(2 * load + i, wide);
      }
    }
  }
}

}  // namespace longspan::kernels::cuda

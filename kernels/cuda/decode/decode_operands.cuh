// The operands of the decode kernel's products, and the products.
//
// 16-bit keys and values go from shared memory into fragments unchanged. fp8 ones become fp16
// there, without shuffles: four bytes of a lane are four columns of a key. The first two take the
// place of columns 2t and 2t + 1 of a fragment, the others that of 2t + 8 and 2t + 9. A product's
// 16 columns are therefore in another order, and the queries are loaded in that order too
// (slice_column). For values two bytes are two columns of a key: rows g and g + 8 of the product's
// result are columns 2g and 2g + 1 (result_column).
#pragma once

#include <type_traits>

#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// The first of the two columns, in their slice, that word `half` of a lane's queries holds.
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

/// The slice of dim that is number `own` of this warp's values.
template <class Traits>
__device__ inline int own_slice(int own) {
  const int load = own / Traits::kLoadSlices * Traits::kWarps + static_cast<int>(threadIdx.x) / 32;
  return load * Traits::kLoadSlices + own % Traits::kLoadSlices;
}

/// The query rows as the products' second factor, in shared memory: two registers of a lane for
/// each 16 columns.
template <class Traits>
struct DecodeQueries {
  uint2 word[Traits::kSlices][Traits::kRowTiles][32];
  // With fp8 keys the queries become fp16. Each row is multiplied by a power of two that brings its
  // largest element close to the largest fp16. bf16's range then loses nothing that fp32 sums would
  // have kept. `undo` is the inverse factor.
  float undo[Traits::kFp8 ? Traits::kRows : 1];

  using Words = std::uint32_t[Traits::kSlices][2];  // a lane's part of a row tile, as stored

  /// Reads row tile n of a work tile, by one warp.
  template <class Piece>
  __device__ __forceinline__ static void request(const AttendParams& p, const Piece& piece, int n,
                                                 Words& words) {
    const TileCoord& work = piece.work;
    const int row = n * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
    const bool valid = row < work.rows;
    const PackedRow at = packed_row(work, valid ? row : 0);
    const std::int64_t from = p.q.offset(piece.sequence.first_row + at.token, at.head);
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = slice * 16 + slice_column<Traits>(half);
        words[slice][half] = valid && d < p.head_dim ? two_of(p, from + d, d + 1 < p.head_dim) : 0u;
      }
  }

  /// Turns the words that `request` has read into the products' factor.
  __device__ __forceinline__ void put(const AttendParams& p, int n, const Words& words) {
    using T = typename Traits::Element;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (Traits::kFp8) {
      put_scaled(p, n, words);
    } else {
      const bool widens = !Traits::kPlain && is_fp8(p.q_dtype), e5m2 = p.q_dtype == DType::e5m2;
      const auto two = [&](std::uint32_t bits) { return widens ? widen_two<T>(bits, e5m2) : bits; };
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
        word[slice][n][lane] = make_uint2(two(words[slice][0]), two(words[slice][1]));
    }
  }

 private:
  /// Reads two elements of the queries, as stored; without the second, which is then 0, if a row
  /// ends before it.
  __device__ __forceinline__ static std::uint32_t two_of(const AttendParams& p, std::int64_t at,
                                                         bool both) {
    if constexpr (Traits::kPlain) {
      return *reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(p.q.data) +
                                                     at);
    } else if (!is_fp8(p.q_dtype)) {
      const std::uint16_t* halves = static_cast<const std::uint16_t*>(p.q.data) + at;
      return halves[0] | (both ? static_cast<std::uint32_t>(halves[1]) << 16 : 0u);
    } else {
      const std::uint8_t* bytes = static_cast<const std::uint8_t*>(p.q.data) + at;
      return bytes[0] | (both ? static_cast<std::uint32_t>(bytes[1]) << 8 : 0u);
    }
  }

  __device__ __forceinline__ void put_scaled(const AttendParams& p, int n, const Words& words) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool is_bf16 = p.q_dtype == DType::bf16, is_e5m2 = p.q_dtype == DType::e5m2;
    const auto one = [&](std::uint32_t bits) {
      return is_bf16 ? __uint_as_float(bits << 16)
                     : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    };
    float values[Traits::kSlices][2][2], largest = 0.0f;
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t bits = words[slice][half];
        if (is_fp8(p.q_dtype)) bits = widen_two<__half>(bits, is_e5m2);
        values[slice][half][0] = one(bits & 0xffff);
        values[slice][half][1] = one(bits >> 16);
        largest =
            fmaxf(largest, fmaxf(fabsf(values[slice][half][0]), fabsf(values[slice][half][1])));
      }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    constexpr int kLargest = 14, kSmallest = -100;  // exponents: of fp16; of rows with both factors
    int exponent = (__float_as_int(largest) >> 23) - 127;
    if (exponent > 127 || largest == 0.0f) exponent = kLargest;  // infinite, or all zeros
    exponent = max(exponent, kSmallest);
    const float factor = __int_as_float((kLargest - exponent + 127) << 23);
    const float back = __int_as_float((exponent - kLargest + 127) << 23);
    const auto two = [&](const float(&of)[2]) {
      return arch::pack<__half>(of[0] * factor, of[1] * factor);
    };
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
      word[slice][n][lane] = make_uint2(two(values[slice][0]), two(values[slice][1]));
    if (lane % 4 == 0) undo[n * 8 + lane / 4] = back;
  }
};

/// The offsets of a lane's 16-byte columns in a tile of keys, for ldmatrix. A tile begins a
/// multiple of 16 rows into its stage, so offsets inside it depend only on the lane; they repeat
/// after kPeriod loads, which make a panel.
template <class Traits>
class KeyFragments {
 public:
  /// The four matrices of a load are keys 0 to 7, keys 8 to 15, and the same for the next 16 bytes.
  __device__ KeyFragments() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPeriod; ++i)
      column_[i] = static_cast<std::uint32_t>(Layout::offset(lane % 16, 2 * i + lane / 16));
  }
  /// The offset of load `i`, which takes 32 bytes of each key.
  __device__ std::uint32_t operator()(int i) const {
    return column_[i % kPeriod] + i / kPeriod * Layout::kPanelBytes;
  }

 private:
  using Layout = typename Traits::Layout;
  static constexpr int kPeriod = Layout::kPeriod / 2;
  std::uint32_t column_[kPeriod];
};

/// The same for this warp's loads of a tile of values.
template <class Traits>
class ValueFragments {
 public:
  /// The four matrices of a load are keys 0 to 7, their next 16 bytes, and the same for keys 8 to
  /// 15; with fp8 they are those of KeyFragments.
  __device__ ValueFragments() {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int row = Traits::kFp8 ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int half = Traits::kFp8 ? lane / 16 : lane / 8 % 2;
#pragma unroll
    for (int own = 0; own < Traits::kOwnLoads; ++own)
      column_[own] = static_cast<std::uint32_t>(
          Traits::Layout::offset(row, 2 * (warp + own * Traits::kWarps) + half));
  }
  __device__ std::uint32_t operator()(int own) const { return column_[own]; }
  /// Whether the warp has such a load.
  __device__ static bool has(int own) {
    return Traits::kLoads % Traits::kWarps == 0 ||
           static_cast<int>(threadIdx.x) / 32 + own * Traits::kWarps < Traits::kLoads;
  }

 private:
  std::uint32_t column_[Traits::kOwnLoads];
};

/// Converts the four fp8 numbers of a register to fp16: the first two into low, the others into
/// high.
template <class Traits>
__device__ __forceinline__ void widen(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  if constexpr (arch::kTarget >= 890) {
    arch::widen_fp8<Traits::kE5M2>(four, low, high);
  } else {
    low = widen_two<__half>(four & 0xffff, Traits::kE5M2);
    high = widen_two<__half>(four >> 16, Traits::kE5M2);
  }
}

/// s = K Q^T for 16 keys and all rows. Even and odd slices have separate sums, since a product
/// waits for the sum that it adds to.
template <class Traits>
__device__ __forceinline__ void multiply_keys(float (&s)[Traits::kRowTiles][4], std::uint32_t keys,
                                              const KeyFragments<Traits>& offset,
                                              const DecodeQueries<Traits>& queries) {
  using T = typename Traits::Element;
  float sums[2][Traits::kRowTiles][4] = {};
  const auto multiply = [&](int slice, const std::uint32_t(&a)[4]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      const uint2 b = queries.word[slice][n][threadIdx.x % 32];
      arch::mma<T>(sums[slice % 2][n], a, b.x, b.y);
    }
  };
#pragma unroll
  for (int load = 0; load < Traits::kLoads; ++load) {
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

/// O^T += V^T P^T for 16 keys and the warp's own columns of the values.
template <class Traits>
__device__ __forceinline__ void multiply_values(typename Traits::State& state, std::uint32_t values,
                                                const ValueFragments<Traits>& offset,
                                                const uint2 (&weights)[Traits::kRowTiles][32]) {
  using T = typename Traits::Element;
  uint2 b[Traits::kRowTiles];
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) b[n] = weights[n][threadIdx.x % 32];
  const auto multiply = [&](int own, const std::uint32_t(&a)[4]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::mma<T>(state.o[own * Traits::kRowTiles + n], a, b[n].x, b[n].y);
  };
#pragma unroll
  for (int load = 0; load < Traits::kOwnLoads; ++load) {
    if (!offset.has(load)) break;
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

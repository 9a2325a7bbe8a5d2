// Moves several elements at a time between memory and fp32 registers, with the bits of element.hpp
// (a NaN may lose its sign and payload).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/common/access.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// An OutScale that loads its factor when it is constructed: early, beside other loads.
struct LoadedScale {
  float factor = 1.0f;
  bool is_given;
  bool inverse;

  __device__ explicit LoadedScale(const OutScale& scale)
      : is_given(scale.data != nullptr), inverse(scale.inverse) {
    if (is_given) factor = *scale.data;
  }
  template <int kCount>
  __device__ void apply(float (&values)[kCount]) const {
    if (!is_given) return;
#pragma unroll
    for (float& value : values) value = inverse ? value * factor : value / factor;
  }
};

/// Move kBytes from or to memory that is aligned to them, up to 16 in one instruction.
template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Chunk {
  std::uint32_t words[kBytes / 4];
};
template <>
struct alignas(2) Chunk<2> {
  std::uint16_t half;
};
template <>
struct Chunk<1> {
  std::uint8_t byte;
};

template <int kCount>
__device__ void to_elements(__half (&to)[kCount], const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = __float2half_rn(values[i]);
}
template <int kCount>
__device__ void to_elements(__nv_bfloat16 (&to)[kCount], const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = __float2bfloat16_rn(values[i]);
}
template <int kCount>
__device__ void to_elements(float (&to)[kCount], const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = values[i];
}

/// Converts to fp8, saturating. From sm_89 on one instruction converts two values.
template <int kCount>
__device__ void to_fp8(std::uint8_t (&to)[kCount], const float (&values)[kCount],
                       __nv_fp8_interpretation_t kind) {
  if constexpr (kCount == 1) {
    to[0] = __nv_cvt_float_to_fp8(values[0], __NV_SATFINITE, kind);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const unsigned pair =
          __nv_cvt_float2_to_fp8x2(make_float2(values[i], values[i + 1]), __NV_SATFINITE, kind);
      to[i] = static_cast<std::uint8_t>(pair);
      to[i + 1] = static_cast<std::uint8_t>(pair >> 8);
    }
  }
}

/// Stores kCount elements of a type known at compile time. `to` is aligned to access_bytes.
template <class T, int kCount>
__device__ void store_as(T* to, const float (&values)[kCount]) {
  union {
    T elements[kCount];
    Chunk<static_cast<int>(sizeof(T)) * kCount> chunk;
  } rounded;
  to_elements(rounded.elements, values);
  *reinterpret_cast<decltype(rounded.chunk)*>(to) = rounded.chunk;
}
template <int kCount>
__device__ void store_as_fp8(std::uint8_t* to, const float (&values)[kCount], DType dtype) {
  union {
    std::uint8_t elements[kCount];
    Chunk<kCount> chunk;
  } rounded;
  to_fp8(rounded.elements, values, dtype == DType::e4m3 ? __NV_E4M3 : __NV_E5M2);
  *reinterpret_cast<decltype(rounded.chunk)*>(to) = rounded.chunk;
}

/// Stores kCount values as elements [i, i + kCount) of `data`, which are aligned to access_bytes.
template <int kCount>
__device__ void store_elements(void* data, DType dtype, std::int64_t i,
                               const float (&values)[kCount]) {
  switch (dtype) {
    case DType::fp32:
      return store_as(static_cast<float*>(data) + i, values);
    case DType::fp16:
      return store_as(static_cast<__half*>(data) + i, values);
    case DType::bf16:
      return store_as(static_cast<__nv_bfloat16*>(data) + i, values);
    default:
      return store_as_fp8(static_cast<std::uint8_t*>(data) + i, values, dtype);
  }
}

}  // namespace longspan::kernels::cuda

// The small element types as C++ types, one value at a time. They convert exactly to fp32, and
// round to nearest even from it; fp8 saturates. NaN stays NaN. (Highway 1.0.3 truncates to
// bfloat16, and its fp16 without F16C has no infinities.)
#pragma once

#include <bit>
#include <cstdint>

#include "longspan/element.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels::host {

struct Half {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};
struct E4m3 {
  std::uint8_t bits;
};
struct E5m2 {
  std::uint8_t bits;
};

/// Calls f(a null T*), where T is the C++ type of the elements.
template <class F>
decltype(auto) with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::fp32:
      return f(static_cast<const float*>(nullptr));
    case DType::fp16:
      return f(static_cast<const Half*>(nullptr));
    case DType::bf16:
      return f(static_cast<const Bfloat16*>(nullptr));
    case DType::e4m3:
      return f(static_cast<const E4m3*>(nullptr));
    default:
      return f(static_cast<const E5m2*>(nullptr));
  }
}

inline float from_float(float value, const float*) { return value; }

inline Bfloat16 from_float(float value, const Bfloat16*) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return {static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40u : rounded)};
}

inline Half from_float(float value, const Half*) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  // Where normal, it rebiases the exponent from 127 to 15 and rounds at bit 13. Overflow carries
  // into infinity.
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14, adding 0.5 lets the adder round to multiples of 2^-24.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - (126u << 23);
  std::uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= (143u << 23) ? 0x7c00u : half;  // 2^16 and above
  half = magnitude > (255u << 23) ? 0x7e00u : half;   // NaN
  return {static_cast<std::uint16_t>(sign | half)};
}

inline E4m3 from_float(float value, const E4m3*) {
  return {static_cast<std::uint8_t>(element::narrow<4, 3, true>(value))};
}

inline E5m2 from_float(float value, const E5m2*) {
  return {static_cast<std::uint8_t>(element::narrow<5, 2, true>(value))};
}

}  // namespace longspan::kernels::host

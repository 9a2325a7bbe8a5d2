/// \file
/// One element of an array whose type is known at run time. Loading is exact. Storing rounds to the
/// nearest, ties to even; fp8 saturates at its largest finite value, and NaN stays NaN. Host and
/// CUDA run these functions; a kernel may use an instruction that gives the same bits.
///
/// fp8: e4m3 has no infinity, largest 448; e5m2 has infinities, largest finite 57344 (OCP 8-bit
/// floating point specification, revision 1.0).
#pragma once

#include <bit>
#include <cstdint>

#include "longspan/storage.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// Conversions between fp32 and the bits of smaller floats.
namespace element {

/// Converts a small float of kExponent exponent and kMantissa mantissa bits to fp32 (exact).
template <int kExponent, int kMantissa>
LONGSPAN_HD constexpr float widen(std::uint32_t bits) {
  constexpr std::uint32_t kBias = (1u << (kExponent - 1)) - 1;
  const std::uint32_t sign = (bits >> (kExponent + kMantissa) & 1u) << 31;
  const std::uint32_t magnitude = bits & ((1u << (kExponent + kMantissa)) - 1);
  const std::uint32_t exponent = magnitude >> kMantissa;
  if (exponent == 0) {  // subnormal: an integer times 2^(1 - bias - mantissa bits)
    const float unit = std::bit_cast<float>((128u - kBias - kMantissa) << 23);
    const float value = static_cast<float>(magnitude) * unit;
    return sign ? -value : value;
  }
  const bool has_infinity = !(kExponent == 4 && kMantissa == 3);
  const bool special = has_infinity ? exponent == (1u << kExponent) - 1 : magnitude == 0x7fu;
  const std::uint32_t wide = special ? 0x7f800000u | (magnitude << (23 - kMantissa) & 0x7fffffu)
                                     : (magnitude << (23 - kMantissa)) + ((127u - kBias) << 23);
  return std::bit_cast<float>(sign | wide);
}

/// The reverse, rounded to nearest even. Past the largest finite value it gives that value with
/// kSaturate, otherwise infinity. NaN stays NaN.
template <int kExponent, int kMantissa, bool kSaturate>
LONGSPAN_HD constexpr std::uint32_t narrow(float value) {
  constexpr std::uint32_t kBias = (1u << (kExponent - 1)) - 1;
  constexpr bool kHasInfinity = !(kExponent == 4 && kMantissa == 3);
  constexpr std::uint32_t kAll = (1u << (kExponent + kMantissa)) - 1;
  constexpr std::uint32_t kInfinity = kAll & ~((1u << kMantissa) - 1);
  constexpr std::uint32_t kLargest = kHasInfinity ? kInfinity - 1 : kAll - 1;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 31 << (kExponent + kMantissa);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | kAll;  // NaN
  std::uint32_t result = 0;
  if (magnitude < (128u - kBias) << 23) {
    // Below the smallest normal: adding 2^(23 + 1 - bias - mantissa bits) makes the adder round.
    const float magic = std::bit_cast<float>((128u - kBias - kMantissa + 23u) << 23);
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + magic) -
             std::bit_cast<std::uint32_t>(magic);
  } else {
    const std::uint32_t rebiased = magnitude - ((127u - kBias) << 23);
    const std::uint32_t odd = rebiased >> (23 - kMantissa) & 1u;
    result = (rebiased + ((1u << (22 - kMantissa)) - 1) + odd) >> (23 - kMantissa);
  }
  if (result > kLargest) result = kSaturate || !kHasInfinity ? kLargest : kInfinity;
  return sign | result;
}

}  // namespace element

/// Element i of `data` as fp32.
LONGSPAN_HD inline float load_element(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::fp32:
      return static_cast<const float*>(data)[i];
    case DType::fp16:
      return element::widen<5, 10>(static_cast<const std::uint16_t*>(data)[i]);
    case DType::bf16:
      return std::bit_cast<float>(
          static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(data)[i]) << 16);
    case DType::e4m3:
      return element::widen<4, 3>(static_cast<const std::uint8_t*>(data)[i]);
    default:
      return element::widen<5, 2>(static_cast<const std::uint8_t*>(data)[i]);
  }
}

/// Stores `value` as element i of `data`, rounded; fp8 saturates, fp16 and bf16 overflow to
/// infinity.
LONGSPAN_HD inline void store_element(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::fp32:
      static_cast<float*>(data)[i] = value;
      break;
    case DType::fp16:
      static_cast<std::uint16_t*>(data)[i] =
          static_cast<std::uint16_t>(element::narrow<5, 10, false>(value));
      break;
    case DType::bf16: {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
      const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      static_cast<std::uint16_t*>(data)[i] =
          static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40u : rounded);
      break;
    }
    case DType::e4m3:
      static_cast<std::uint8_t*>(data)[i] =
          static_cast<std::uint8_t>(element::narrow<4, 3, true>(value));
      break;
    default:
      static_cast<std::uint8_t*>(data)[i] =
          static_cast<std::uint8_t>(element::narrow<5, 2, true>(value));
  }
}

/// A small array of floats of any type, such as sinks or slopes. Null: not given.
struct Floats {
  const void* data = nullptr;  ///< the first element; null: not given
  DType dtype = DType::fp32;   ///< any float type

  /// Not given.
  Floats() = default;
  /// An array of fp32.
  LONGSPAN_HD Floats(const float* values) : data(values) {}  // NOLINT: an array of floats is one
  /// An array of any float type.
  LONGSPAN_HD Floats(const void* values, DType type) : data(values), dtype(type) {}

  /// Whether they are given.
  LONGSPAN_HD explicit operator bool() const { return data != nullptr; }
  /// The i-th element as fp32.
  LONGSPAN_HD float operator[](std::int64_t i) const { return load_element(data, dtype, i); }
};

/// The array from element i on; not given if `floats` is not.
LONGSPAN_HD inline Floats floats_from(const Floats& floats, std::int64_t i) {
  if (!floats) return floats;
  return {
      static_cast<const char*>(floats.data) + i * static_cast<std::int64_t>(size_of(floats.dtype)),
      floats.dtype};
}

}  // namespace longspan

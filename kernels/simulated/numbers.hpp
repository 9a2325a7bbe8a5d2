// Roundings to the types of tensor cores, as the GPU's conversions do: to nearest even, and to tf32
// with ties away from zero. NaN becomes the one NaN that the instructions give.
#pragma once

#include <bit>
#include <cstdint>

namespace longspan::simulated {
namespace numbers {

inline constexpr std::uint32_t kInfinity = 0x7f800000;

/// The magnitude of a float (bits) in a format of `kBits` of mantissa whose smallest normal number
/// is 2^kLeast, rounded; it may come out as 2^(largest exponent + 1).
template <int kBits, int kLeast>
std::uint32_t narrow(std::uint32_t magnitude) {
  constexpr int kDropped = 23 - kBits;
  constexpr std::uint32_t kSmallest = static_cast<std::uint32_t>(127 + kLeast) << 23;
  if (magnitude < kSmallest) {
    // The spacing of floats around this value is the step of the format's subnormals, so the sum
    // rounds to it.
    constexpr std::uint32_t kLarge = static_cast<std::uint32_t>(127 + kLeast + kDropped) << 23;
    const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kLarge);
    return std::bit_cast<std::uint32_t>(sum) - kLarge;
  }
  constexpr std::uint32_t kHalf = (1u << (kDropped - 1)) - 1;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(126 + kLeast) << 23;
  return (magnitude + kHalf + (magnitude >> kDropped & 1) - kRebias) >> kDropped;
}

}  // namespace numbers

inline std::uint16_t fp16_bits(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > numbers::kInfinity) return 0x7fff;
  const std::uint32_t sign = bits >> 16 & 0x8000;
  constexpr std::uint32_t kTooLarge = 0x47800000;  // 2^16
  const std::uint32_t narrow =
      magnitude >= kTooLarge ? 0x7c00 : numbers::narrow<10, -14>(magnitude);
  return static_cast<std::uint16_t>(sign | narrow);
}

inline std::uint16_t bf16_bits(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffff) > numbers::kInfinity) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// To e4m3, saturating at 448.
inline std::uint8_t e4m3_bits(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > numbers::kInfinity) return 0x7f;
  const std::uint32_t sign = bits >> 24 & 0x80;
  constexpr std::uint32_t kTooLarge = 0x43e80000;  // 464, and beyond towards what would be 480
  const std::uint32_t narrow = magnitude >= kTooLarge ? 0x7e : numbers::narrow<3, -6>(magnitude);
  return static_cast<std::uint8_t>(sign | (narrow > 0x7e ? 0x7e : narrow));
}

inline std::uint32_t tf32_bits(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > numbers::kInfinity) return 0x7fffffff;
  if (magnitude == numbers::kInfinity) return bits;
  return (bits + 0x1000) & ~0x1fffu;
}

inline std::uint16_t fp16_of_e5m2(std::uint8_t x) {
  return (x & 0x7f) > 0x7c ? 0x7fff : static_cast<std::uint16_t>(x << 8);
}

inline std::uint16_t fp16_of_e4m3(std::uint8_t x) {
  const unsigned sign = (x & 0x80u) << 8, magnitude = x & 0x7fu;
  if (magnitude == 0x7f) return 0x7fff;
  if (magnitude >= 8) return static_cast<std::uint16_t>(sign | ((magnitude << 7) + (8u << 10)));
  // Subnormals of e4m3, steps of 2^-9, are normal in fp16.
  if (magnitude == 0) return static_cast<std::uint16_t>(sign);
  const unsigned top = static_cast<unsigned>(std::bit_width(magnitude)) - 1;
  return static_cast<std::uint16_t>(sign | (15 - 9 + top) << 10 |
                                    ((magnitude << (10 - top)) & 0x3ff));
}

}  // namespace longspan::simulated

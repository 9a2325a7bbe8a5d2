/// \file
/// One row of a cache whose rows carry their scales (RowFormat): where it lies, its numbers, and
/// how an append makes it. Host and CUDA run these functions, and nothing else knows the layouts.
///
///     number c = code c * scale of group c / group       for c below `coded`
///     number c = number c - coded of the others          from there on
///
/// A number is exact but for one rounding of the product to fp32.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "longspan/element.hpp"
#include "longspan/storage.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The addresses of a row.
struct StoredRow {
  std::byte* data = nullptr;    ///< codes, and the other numbers
  std::byte* scales = nullptr;  ///< of its groups; in the row, or behind the data of a page
};

namespace element {

/// e2m1 to fp32 (exact); the upper bits are not read.
LONGSPAN_HD constexpr float widen_e2m1(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> 1 & 3u, mantissa = bits & 1u;
  const float size = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                   : 0.25f * static_cast<float>((2u + mantissa) << exponent);
  return (bits & 8u) != 0 ? -size : size;
}

/// ue8m0 to fp32 (exact): 2^(bits - 127), and NaN for 255.
LONGSPAN_HD constexpr float widen_ue8m0(std::uint32_t bits) {
  if (bits == 255u) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(bits == 0 ? 0x00400000u : bits << 23);
}

}  // namespace element

/// The scale of a group of the row.
LONGSPAN_HD inline float load_scale(const StoredRow& row, const RowFormat& format, int group) {
  const auto byte = [&](int i) { return std::to_integer<std::uint32_t>(row.scales[i]); };
  switch (format.scale) {
    case GroupScale::single:
      return load_element(row.scales, DType::fp32, group);
    case GroupScale::power:
      return element::widen_ue8m0(byte(group));
    default:
      return element::widen<4, 3>(byte(8 * (group % 4) + group / 4));
  }
}

/// Code c of the row, without its scale.
LONGSPAN_HD inline float load_code(const StoredRow& row, const RowFormat& format, int c) {
  if (format.code == Code::fp8) return load_element(row.data, DType::e4m3, c);
  return element::widen_e2m1(std::to_integer<std::uint32_t>(row.data[c / 2]) >> c % 2 * 4);
}

/// Number c of the row.
LONGSPAN_HD inline float load_number(const StoredRow& row, const RowFormat& format, int c) {
  if (c >= format.coded)
    return load_element(row.data + format.rest_at, format.rest, c - format.coded);
  return load_code(row, format, c) * load_scale(row, format, c / format.group);
}

/// The scale that an append gives a group whose largest number has the size `amax`.
LONGSPAN_HD inline float scale_for(const RowFormat& format, float amax) {
  const bool to_power = format.rule == ScaleRule::power_of_two;
  const float scale = amax / 448.0f, least = to_power ? 1e-4f : 0x1p-126f;
  if (!(scale > least)) return to_power ? 0x1p-13f : least;  // also for NaN
  if (!to_power) return scale;
  const std::uint32_t up = std::bit_cast<std::uint32_t>(scale) + 0x7fffffu;
  return std::bit_cast<float>(up & 0x7f800000u);  // infinity stays infinity
}

/// Stores the scale of a group, which the format can hold.
LONGSPAN_HD inline void store_scale(const StoredRow& row, const RowFormat& format, int group,
                                    float scale) {
  if (format.scale == GroupScale::single)
    return store_element(row.scales, DType::fp32, group, scale);
  row.scales[group] = static_cast<std::byte>(std::bit_cast<std::uint32_t>(scale) >> 23);
}

/// Stores number c of the row, rounded to the nearest; `scale` is that of its group.
LONGSPAN_HD inline void store_number(const StoredRow& row, const RowFormat& format, int c,
                                     float scale, float value) {
  if (c < format.coded)
    store_element(row.data, DType::e4m3, c, value / scale);
  else
    store_element(row.data + format.rest_at, format.rest, c - format.coded, value);
}

}  // namespace longspan

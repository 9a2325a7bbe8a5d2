// One element of each type: every fp8, fp16 and bf16 code to fp32 and back, rounding beside every
// tie, saturation, NaN. 16 bits are compared with Eigen, fp8 with the format's definition in
// double.
#include <gtest/gtest.h>

#include <Eigen/Core>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "longspan/element.hpp"

namespace longspan::tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float widened(DType dtype, std::uint32_t code) { return load_element(&code, dtype, 0); }

std::uint32_t narrowed(DType dtype, float value) {
  std::uint32_t code = 0;
  store_element(&code, dtype, 0, value);
  return code;
}

std::uint32_t codes(DType dtype) { return is_fp8(dtype) ? 256 : 65536; }

/// (-1)^s 2^(e - bias) (1 + m / 2^bits), from the definition of the formats.
double defined(DType dtype, std::uint32_t code) {
  const int mantissa = dtype == e4m3 ? 3 : 2, bias = dtype == e4m3 ? 7 : 15;
  const double sign = code & 0x80 ? -1 : 1;
  const int exponent = static_cast<int>(code & 0x7f) >> mantissa;
  const int fraction = static_cast<int>(code) & ((1 << mantissa) - 1);
  if (dtype == e4m3 && (code & 0x7f) == 0x7f) return kNan;
  if (dtype == e5m2 && exponent == 31) return fraction ? kNan : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - mantissa);
  return sign * std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
}

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

TEST(Element, EveryFp8CodeIsWhatItsDefinitionSays) {
  for (DType dtype : {e4m3, e5m2})
    for (std::uint32_t code = 0; code < 256; ++code)
      EXPECT_TRUE(same(widened(dtype, code), defined(dtype, code))) << name(dtype) << " " << code;
  EXPECT_EQ(widened(e4m3, 0x7e), 448.0f);
  EXPECT_EQ(widened(e5m2, 0x7b), 57344.0f);
}

TEST(Element, Every16BitCodeIsEigens) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<std::uint16_t>(code);
    EXPECT_TRUE(same(widened(fp16, code), static_cast<float>(std::bit_cast<Eigen::half>(bits))));
    EXPECT_TRUE(
        same(widened(bf16, code), static_cast<float>(std::bit_cast<Eigen::bfloat16>(bits))));
  }
}

TEST(Element, EveryCodeComesBack) {
  for (DType dtype : {fp16, bf16, e4m3, e5m2})
    for (std::uint32_t code = 0; code < codes(dtype); ++code) {
      const float value = widened(dtype, code);
      if (std::isnan(value))
        EXPECT_TRUE(std::isnan(widened(dtype, narrowed(dtype, value)))) << name(dtype) << code;
      else if (dtype == e5m2 && std::isinf(value))
        EXPECT_EQ(widened(dtype, narrowed(dtype, value)), std::copysign(57344.0f, value));
      else
        EXPECT_EQ(narrowed(dtype, value), code) << name(dtype);
    }
}

/// Between neighbours a < b, both of one sign: below the middle a, above it b, on it the even code.
TEST(Element, RoundsToNearestAndTiesToEven) {
  for (DType dtype : {fp16, bf16, e4m3, e5m2}) {
    const std::uint32_t half = codes(dtype) / 2;
    for (std::uint32_t code = 0; code + 1 < half; ++code) {
      const double a = widened(dtype, code), b = widened(dtype, code + 1);
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      const auto middle = static_cast<float>((a + b) / 2);
      ASSERT_EQ(middle, (a + b) / 2);  // fp32 holds it
      const std::uint32_t even = code % 2 == 0 ? code : code + 1;
      const float below = std::nextafter(middle, -kInfinity),
                  above = std::nextafter(middle, kInfinity);
      for (std::uint32_t sign : {0u, half}) {
        const float s = sign ? -1.0f : 1.0f;
        EXPECT_EQ(narrowed(dtype, s * below), sign | code) << name(dtype);
        EXPECT_EQ(narrowed(dtype, s * middle), sign | even) << name(dtype);
        EXPECT_EQ(narrowed(dtype, s * above), sign | (code + 1)) << name(dtype);
      }
    }
  }
}

TEST(Element, SixteenBitsRoundAsEigen) {
  // Every exponent, with mantissas beside every boundary of the two formats.
  for (std::uint32_t high = 0; high < 65536; ++high)
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u,
                              0x8001u, 0xf000u, 0xffffu}) {
      const auto value = std::bit_cast<float>(high << 16 | low);
      if (std::isnan(value)) continue;
      ASSERT_EQ(narrowed(fp16, value), std::bit_cast<std::uint16_t>(Eigen::half(value))) << value;
      ASSERT_EQ(narrowed(bf16, value), std::bit_cast<std::uint16_t>(Eigen::bfloat16(value)))
          << value;
    }
}

TEST(Element, Fp8Saturates) {
  for (const auto& [dtype, largest] : {std::pair{e4m3, 448.0f}, std::pair{e5m2, 57344.0f}}) {
    for (float sign : {1.0f, -1.0f}) {
      for (float value :
           {largest, std::nextafter(largest, kInfinity), largest * 1.03f, largest * 1.0625f,
            largest * 1.125f, largest * 2, 1e30f, std::numeric_limits<float>::max(), kInfinity})
        EXPECT_EQ(widened(dtype, narrowed(dtype, sign * value)), sign * largest) << value;
      EXPECT_TRUE(std::isnan(widened(dtype, narrowed(dtype, sign * kNan))));
    }
  }
}

TEST(Element, SixteenBitsOverflowToInfinityAndNanStays) {
  EXPECT_EQ(widened(fp16, narrowed(fp16, 65519.0f)), 65504.0f);
  EXPECT_EQ(widened(fp16, narrowed(fp16, 65520.0f)), kInfinity);
  EXPECT_EQ(widened(fp16, narrowed(fp16, -1e30f)), -kInfinity);
  EXPECT_EQ(widened(bf16, narrowed(bf16, std::numeric_limits<float>::max())), kInfinity);
  for (DType dtype : {fp32, fp16, bf16, e4m3, e5m2}) {
    // Also those whose mantissa has only low bits, which a truncation would turn into infinity.
    for (std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0xff800001u, 0xffffffffu})
      EXPECT_TRUE(std::isnan(widened(dtype, narrowed(dtype, std::bit_cast<float>(bits)))));
    EXPECT_EQ(narrowed(dtype, 0.0f), 0u);
    EXPECT_TRUE(std::signbit(widened(dtype, narrowed(dtype, -0.0f))));
    EXPECT_EQ(widened(dtype, narrowed(dtype, std::numeric_limits<float>::denorm_min())),
              dtype == fp32 ? std::numeric_limits<float>::denorm_min() : 0.0f);
  }
}

TEST(Element, LoadsAndStoresTheElementItIsAskedFor) {
  for (DType dtype : {fp32, fp16, bf16, e4m3, e5m2}) {
    std::vector<std::byte> memory(5 * size_of(dtype), std::byte{0xff});
    store_element(memory.data(), dtype, 3, 1.5f);
    for (int i = 0; i < 5; ++i) {
      const float value = load_element(memory.data(), dtype, i);
      EXPECT_TRUE(i == 3 ? value == 1.5f : std::isnan(value)) << name(dtype) << i;
    }
  }
}

TEST(Element, Floats) {
  const float values[] = {0.5f, 2.0f};
  EXPECT_FALSE(Floats());
  EXPECT_EQ(Floats(values)[1], 2.0f);
  const std::uint16_t halves[] = {0x3c00, 0xc000};
  EXPECT_EQ(Floats(halves, fp16)[1], -2.0f);
}

}  // namespace
}  // namespace longspan::tests

// Rows that carry their scales: every code, scales of every kind, the parts of each format, and
// what an append writes.
#include "longspan/stored_row.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "longspan/limits.hpp"

namespace longspan::tests {
namespace {

constexpr DType kFormats[] = {DType::latent656, DType::latent656_pow2, DType::latent584,
                              DType::latent528, DType::latent352};

TEST(StoredRow, CodesOfFourBits) {
  const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (std::uint32_t bits = 0; bits < 16; ++bits) {
    const float x = element::widen_e2m1(bits);
    EXPECT_EQ(std::abs(x), sizes[bits & 7]) << bits;
    EXPECT_EQ(std::signbit(x), bits >= 8) << bits;
    EXPECT_EQ(element::widen_e2m1(bits | 0xf0), x) << "of the byte's lower half alone";
  }
}

TEST(StoredRow, ScalesThatArePowersOfTwo) {
  for (int bits = 0; bits < 255; ++bits)
    EXPECT_EQ(element::widen_ue8m0(static_cast<std::uint32_t>(bits)), std::ldexp(1.0f, bits - 127));
  EXPECT_TRUE(std::isnan(element::widen_ue8m0(255)));
}

/// The parts of a row: no byte is of two, and all rows fit what kernels take.
TEST(StoredRow, PartsOfARowAreApart) {
  for (const DType dtype : kFormats) {
    const RowFormat f = row_format_of(dtype);
    std::vector<int> uses(static_cast<std::size_t>(f.bytes), 0);
    const auto use = [&](int begin, int count) {
      for (int i = begin; i < begin + count; ++i) ++uses.at(static_cast<std::size_t>(i));
    };
    const int groups = f.coded / f.group;
    use(0, f.code == Code::fp8 ? f.coded : f.coded / 2);
    use(f.rest_at, (f.dim - f.coded) * (f.rest == DType::bf16 ? 2 : 1));
    use(f.scales_at, groups * (f.scale == GroupScale::single ? 4 : 1));
    int unused = 0;
    for (const int count : uses) {
      EXPECT_LE(count, 1) << name(dtype);
      unused += count == 0;
    }
    EXPECT_EQ(unused, dtype == DType::latent584 ? 1 : 0) << name(dtype);  // padding of its scales
    EXPECT_EQ(f.coded % f.group, 0);
    EXPECT_EQ(f.group % 4, 0) << "kernels load four numbers with one scale";
    EXPECT_LE(f.dim, kMaxHeadDim);
    EXPECT_LE(f.value_dim, kMaxValueDim);
    EXPECT_LE(f.value_dim, f.dim);
    EXPECT_EQ(storage_of(dtype).row_bytes(f.dim), f.bytes);
    EXPECT_EQ(storage_of(dtype).row_elements(f.value_dim), f.bytes);
    EXPECT_EQ(storage_of(dtype).row_elements(0), 0);
    EXPECT_EQ(tensor_type_of(dtype), DType::uint8);
  }
  for (const DType dtype : {fp32, bf16, e4m3, DType::uint8, fp64}) {
    EXPECT_EQ(row_format_of(dtype).bytes, 0);
    EXPECT_EQ(storage_of(dtype).row_elements(80), 80);
    EXPECT_EQ(tensor_type_of(dtype), dtype);
  }
}

/// The scale of group g of 352 bytes is byte 8 (g % 4) + g / 4: all 32, each once.
TEST(StoredRow, PermutedScales) {
  const RowFormat f = row_format_of(DType::latent352);
  std::vector<std::byte> bytes(static_cast<std::size_t>(f.bytes));
  const StoredRow row{bytes.data(), bytes.data() + f.scales_at};
  for (int g = 0; g < 32; ++g) row.scales[8 * (g % 4) + g / 4] = static_cast<std::byte>(0x20 + g);
  for (int g = 0; g < 32; ++g) {
    bytes[static_cast<std::size_t>(8 * g)] = std::byte{0x21};  // 0.5 and 1, the low half first
    const float scale = element::widen<4, 3>(static_cast<std::uint32_t>(0x20 + g));
    EXPECT_EQ(load_number(row, f, 16 * g), 0.5f * scale);
    EXPECT_EQ(load_number(row, f, 16 * g + 1), scale);
  }
  bytes[256] = std::byte{0x38};
  EXPECT_EQ(load_number(row, f, 512), 1) << "the others have no scale";
}

TEST(StoredRow, ScalesOfAnAppend) {
  const RowFormat any = row_format_of(DType::latent656), power = row_format_of(DType::latent584);
  constexpr float kLeast = std::numeric_limits<float>::min(),
                  kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(scale_for(any, 1.0f), 1.0f / 448);
  EXPECT_EQ(scale_for(any, 0.0f), kLeast);
  EXPECT_EQ(scale_for(any, kNan), kLeast);
  EXPECT_EQ(scale_for(any, kInfinity), kInfinity);
  EXPECT_EQ(scale_for(power, 448.0f), 1.0f);
  EXPECT_EQ(scale_for(power, 450.0f), 2.0f);
  EXPECT_EQ(scale_for(power, 0.0f), 0x1p-13f) << "at least 1e-4, rounded up";
  EXPECT_EQ(scale_for(power, 448 * 1.1e-4f), 0x1p-13f);
  EXPECT_EQ(scale_for(power, 448 * 1.3e-4f), 0x1p-12f);
}

/// A number that is stored and loaded is the nearest of its format.
TEST(StoredRow, StoredAndLoaded) {
  for (const DType dtype : {DType::latent656, DType::latent584}) {
    const RowFormat f = row_format_of(dtype);
    std::vector<std::byte> bytes(static_cast<std::size_t>(f.bytes), std::byte{0xff});
    const StoredRow row{bytes.data(), bytes.data() + f.scales_at};
    for (int g = 0; g < f.coded / f.group; ++g) store_scale(row, f, g, std::ldexp(1.0f, -g));
    for (int c = 0; c < f.dim; ++c) {
      const float scale = c < f.coded ? std::ldexp(1.0f, -c / f.group) : 1;
      const float x = static_cast<float>(c % 7 - 3) * scale;
      store_number(row, f, c, scale, x);
      EXPECT_EQ(load_number(row, f, c), x) << name(dtype) << " " << c;
    }
  }
}

}  // namespace
}  // namespace longspan::tests

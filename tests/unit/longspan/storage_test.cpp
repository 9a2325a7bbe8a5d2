// How rows lie in memory: bytes of elements, and scales by page, row and head.
#include "longspan/storage.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace longspan::tests {
namespace {

TEST(StorageFormat, CountsTheBytesOfRows) {
  for (const auto& [dtype, bytes] :
       {std::pair{fp32, 4}, {fp16, 2}, {bf16, 2}, {e4m3, 1}, {e5m2, 1}}) {
    const StorageFormat format = storage_of(dtype);
    EXPECT_EQ(format.bits, 8 * bytes) << name(dtype);
    EXPECT_EQ(format.row_bytes(80), 80 * bytes) << name(dtype);
    EXPECT_EQ(format.row_bytes(0), 0) << name(dtype);
    EXPECT_EQ(format.bytes((std::int64_t{1} << 40) + 3), ((std::int64_t{1} << 40) + 3) * bytes)
        << name(dtype);
    EXPECT_EQ(format.elements(16), 16 / bytes) << name(dtype);
    EXPECT_EQ(format.elements(std::int64_t{1} << 40), (std::int64_t{1} << 40) / bytes)
        << name(dtype);
    EXPECT_EQ(size_of(dtype), static_cast<std::size_t>(bytes)) << name(dtype);
  }
}

/// A caller may ask for strides that no element is reached by; tensor_checks.hpp takes 2^56.
TEST(StorageFormat, HoldsTheLargestStrides) {
  EXPECT_EQ(storage_of(fp32).bytes(std::int64_t{1} << 56), std::int64_t{1} << 58);
}

/// What the arithmetic does for elements of half a byte.
TEST(StorageFormat, CountsInBits) {
  constexpr StorageFormat kFour{.bits = 4};
  EXPECT_EQ(kFour.bytes(6), 3);
  EXPECT_EQ(kFour.row_bytes(6), 3);
  EXPECT_EQ(kFour.row_bytes(7), 4);  // the next row begins at a whole byte
  EXPECT_EQ(kFour.row_bytes(1), 1);
  EXPECT_EQ(kFour.elements(16), 32);
}

TEST(StorageFormat, OnlyFp8NeedsAScale) {
  for (DType dtype : {fp32, fp16, bf16}) EXPECT_FALSE(storage_of(dtype).needs_scale);
  for (DType dtype : {e4m3, e5m2}) EXPECT_TRUE(storage_of(dtype).needs_scale);
}

TEST(StorageFormat, IntegersHaveAFormatToo) {
  for (const auto& [dtype, bytes] :
       {std::pair{DType::int32, 4}, {DType::int64, 8}, {DType::uint8, 1}}) {
    EXPECT_EQ(storage_of(dtype).bits, 8 * bytes) << name(dtype);
    EXPECT_FALSE(storage_of(dtype).needs_scale) << name(dtype);
    EXPECT_EQ(size_of(dtype), static_cast<std::size_t>(bytes)) << name(dtype);
  }
}

TEST(ScaleView, OneOfTheTensorOrOneOfEachHead) {
  const float values[] = {0.5f, 2.0f, 4.0f};
  EXPECT_FALSE(ScaleView());
  EXPECT_EQ(ScaleView().of(0, 7), 1.0f);
  EXPECT_EQ(ScaleView().count(8), 1);
  EXPECT_EQ(ScaleView().from_head(2).of(0, 0), 1.0f);
  EXPECT_EQ(ScaleView().of_row(3, 4).of(0, 5), 1.0f);

  const ScaleView tensor(values, 0, 0, 0), heads(values, 0, 0, 1);
  EXPECT_TRUE(tensor);
  EXPECT_EQ(tensor.of(0, 2), 0.5f);
  EXPECT_EQ(tensor.count(3), 1);
  EXPECT_EQ(tensor.from_head(2).of(0, 0), 0.5f);
  EXPECT_EQ(tensor.of_row(3, 4).of(0, 5), 0.5f);
  EXPECT_EQ(heads.of(0, 1), 2.0f);
  EXPECT_EQ(heads.count(3), 3);
  EXPECT_EQ(heads.from_head(1).of(0, 1), 4.0f);
  EXPECT_EQ(heads.of_row(3, 4).of(0, 2), 4.0f);

  EXPECT_EQ(tensor, ScaleView(values, 0, 0, 0));
  EXPECT_FALSE(tensor == heads);
  EXPECT_FALSE(heads == heads.from_head(1));
}

TEST(ScaleView, OneOfEachSequenceAndHead) {
  const float values[6] = {1, 2, 3, 4, 5, 6};
  const ScaleView scales(values, 0, 0, 1, 3), repeated(values, 0, 0, 0, 1);
  EXPECT_EQ(scales.sequences(2), 2);
  EXPECT_EQ(ScaleView(values, 0, 0, 1).sequences(2), 1);
  for (int b = 0; b < 2; ++b)
    for (int h = 0; h < 3; ++h) {
      EXPECT_EQ(scales.of(b, h), values[b * 3 + h]);
      EXPECT_EQ(scales.from_head(h).of(b, 0), values[b * 3 + h]);
      EXPECT_EQ(scales.of_sequence(b).of(0, h), values[b * 3 + h]);
      EXPECT_EQ(scales.of_row(5, 7).of(b, h), values[b * 3 + h]);
      EXPECT_EQ(repeated.of(b, h), values[b]);
    }
  EXPECT_EQ(scales.of_sequence(1).sequences(2), 1);
  EXPECT_NE(scales, ScaleView(values, 0, 0, 1));
}

/// Scales of each key and kv head, [pages, page, kv_heads] with room between them.
TEST(ScaleView, OneOfEachKeyAndHead) {
  constexpr int kPages = 2, kPage = 3, kHeads = 2;
  const ScaleView strides(nullptr, 40, 5, 2);
  std::vector<float> memory(kPages * 40, -1.0f);
  const auto value = [](int page, int row, int head) {
    return static_cast<float>(100 * page + 10 * row + head);
  };
  for (int page = 0; page < kPages; ++page)
    for (int row = 0; row < kPage; ++row)
      for (int head = 0; head < kHeads; ++head)
        memory[static_cast<std::size_t>(40 * page + 5 * row + 2 * head)] = value(page, row, head);
  ScaleView scales = strides;
  scales.data = memory.data();
  for (int page = 0; page < kPages; ++page)
    for (int row = 0; row < kPage; ++row)
      for (int head = 0; head < kHeads; ++head) {
        EXPECT_EQ(scales.of_row(page, row).of(0, head), value(page, row, head));
        EXPECT_EQ(scales.from_head(head).of_row(page, row).of(0, 0), value(page, row, head));
      }
}

}  // namespace
}  // namespace longspan::tests

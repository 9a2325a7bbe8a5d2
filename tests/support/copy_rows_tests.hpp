// Copies blocks of rows with any steps, widths and numbers, on every device. Nothing beside them is
// written.
#pragma once

#include "src/base/strided_copy.hpp"
#include "tests/support/on_device.hpp"
#include "tests/support/strided_regions.hpp"

namespace longspan::tests {

class CopyRows : public OnDevice {
 protected:
  using Shape = StridedShape;

  /// Copies blocks in one call, each from and to a region of its own, compared with a copy row by
  /// row.
  void expect_copied(const std::vector<Shape>& shapes) {
    const StridedRegions regions(shapes);
    std::vector<std::byte> from(regions.bytes), expected(regions.bytes, std::byte{0xff});
    for (std::byte& byte : from) byte = static_cast<std::byte>(below(256));
    const auto source = on_device(from);
    const auto to = poisoned<std::byte>(regions.bytes);
    std::vector<StridedCopy> copies;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      copies.push_back(regions.copy(i, source.data(), to.data()));
      regions.apply(i, from, expected);
    }
    backend().copy_rows(copies, {});
    EXPECT_EQ(to.values(), expected);
  }
};

TEST_F(CopyRows, OfAnyWidthAtAnyAddress) {
  for (const std::int64_t width : {1, 2, 4, 6, 8, 16, 24, 48, 250, 1024, 8192, 10000})
    for (const std::int64_t ahead : {0, 1, 2, 4, 8, 16})
      for (const std::int64_t gap : {0, 3, 16}) {
        SCOPED_TRACE("width " + std::to_string(width) + " ahead " + std::to_string(ahead) +
                     " gap " + std::to_string(gap));
        expect_copied({{width, 37, gap, 0, ahead}, {width, 1, 0, gap, ahead}});
      }
}

/// More blocks than one launch takes, of all sizes, also empty ones.
TEST_F(CopyRows, OfManyBlocksAtOnce) {
  std::vector<Shape> shapes;
  for (int i = 0; i < 200; ++i)
    shapes.push_back({16 * (1 + below(20)), below(4) == 0 ? 0 : below(300), 16 * below(3),
                      16 * below(3), 4 * below(5)});
  expect_copied(shapes);
  expect_copied({});
  expect_copied({{16, 0, 0, 0, 0}});
  expect_copied(
      {{256, 5000, 512, 0, 0}, {16, 1, 0, 0, 0}});  // of many blocks of threads, and of one
}

/// As wide a word as divides rows, steps and addresses, and no wider.
TEST_F(CopyRows, InTheWidestWordThatFits) {
  std::byte* const base = reinterpret_cast<std::byte*>(std::uintptr_t{4096});
  const auto word = [&](std::int64_t from, std::int64_t to, std::int64_t from_pitch,
                        std::int64_t to_pitch, std::int64_t width) {
    return word_of({base + from, base + to, from_pitch, to_pitch, width, 2});
  };
  EXPECT_EQ(word(0, 0, 64, 32, 16), 16);
  EXPECT_EQ(word(0, 0, 64, 40, 16), 8);
  EXPECT_EQ(word(0, 0, 36, 32, 16), 4);
  EXPECT_EQ(word(0, 2, 64, 32, 16), 2);
  EXPECT_EQ(word(0, 0, 64, 32, 12), 4);
  EXPECT_EQ(word(1, 0, 64, 32, 16), 1);
}

}  // namespace longspan::tests

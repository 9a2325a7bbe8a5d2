// Copies rows of any size at any address to the places of a map, on every device. Nothing else is
// written.
#pragma once

#include "tests/support/on_device.hpp"

namespace longspan::tests {

class PlaceRows : public OnDevice {
 protected:
  /// Rows of `row_bytes`, `ahead` bytes past the start of memory, compared with one copy after the
  /// other.
  void expect_placed(std::int64_t row_bytes, std::int64_t ahead, bool mapped) {
    constexpr std::int64_t kRows = 37;
    const auto bytes = static_cast<std::size_t>(ahead + kRows * row_bytes);
    std::vector<std::byte> from(bytes), expected(bytes, std::byte{0xff});
    for (std::byte& byte : from) byte = static_cast<std::byte>(below(256));
    std::vector<std::int64_t> map(kRows);
    for (std::int64_t i = 0; i < kRows; ++i) map[i] = i % 5 == 0 ? -1 : (i * 8) % kRows;
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::int64_t row = mapped ? map[i] : i;
      if (row >= 0)
        std::memcpy(expected.data() + ahead + row * row_bytes, from.data() + ahead + i * row_bytes,
                    row_bytes);
    }
    const auto source = on_device(from);
    const auto to = poisoned<std::byte>(bytes);
    const auto places = on_device(map);
    backend().place_rows({source.data() + ahead, to.data() + ahead,
                          mapped ? places.data() : nullptr, kRows, row_bytes},
                         {});
    EXPECT_EQ(to.values(), expected) << row_bytes << " bytes, " << ahead << " ahead";
  }
};

TEST_F(PlaceRows, OfAnySizeAtAnyAddress) {
  for (std::int64_t row_bytes : {1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 120, 1000, 1001})
    for (std::int64_t ahead : {0, 1, 2, 4, 8, 16})
      for (bool mapped : {false, true}) expect_placed(row_bytes, ahead, mapped);
}

/// As wide a word as divides rows and addresses, and no wider.
TEST_F(PlaceRows, InTheWidestWordThatFits) {
  std::byte* const base = reinterpret_cast<std::byte*>(std::uintptr_t{4096});
  const auto word = [&](std::int64_t from, std::int64_t to, std::int64_t row_bytes) {
    return kernels::place_word({base + from, base + to, nullptr, 1, row_bytes});
  };
  EXPECT_EQ(word(0, 0, 48), 16);
  EXPECT_EQ(word(0, 0, 120), 8);
  EXPECT_EQ(word(0, 0, 20), 4);
  EXPECT_EQ(word(0, 0, 6), 2);
  EXPECT_EQ(word(0, 0, 5), 1);
  EXPECT_EQ(word(8, 0, 48), 8);
  EXPECT_EQ(word(0, 4, 48), 4);
  EXPECT_EQ(word(2, 0, 48), 2);
  EXPECT_EQ(word(0, 1, 48), 1);
}

}  // namespace longspan::tests

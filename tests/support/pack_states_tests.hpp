// Deals out states of a slot to parts by rows and by heads, bit for bit, on every device. Nothing
// else is written.
#pragma once

#include "tests/support/on_device.hpp"

namespace longspan::tests {

class PackStates : public OnDevice {
 protected:
  static constexpr std::int64_t kTokens = 11;
  static constexpr int kDim = 24;

  /// Compares with copies of one state after the other. An empty map deals out heads.
  void expect_packed(int heads, int parts, const std::vector<std::int64_t>& map) {
    const std::int64_t rows = kTokens * heads;
    const std::int64_t capacity =
        map.empty() ? kTokens : static_cast<std::int64_t>(map.size()) / parts;
    const kernels::StateSlots from{nullptr, rows, kDim, 2};
    kernels::StateSlots to{nullptr,
                           map.empty() ? kTokens * ((heads + parts - 1) / parts) : capacity * heads,
                           kDim, parts};
    std::vector<std::byte> states(static_cast<std::size_t>(2 * from.slot_bytes()));
    for (std::byte& byte : states) byte = static_cast<std::byte>(below(256));
    std::vector<std::byte> expected(static_cast<std::size_t>(parts * to.slot_bytes()),
                                    std::byte{0xff});
    const auto at = [](const kernels::StateSlots& slots, std::vector<std::byte>& bytes) {
      kernels::StateSlots placed = slots;
      placed.data = bytes.data();
      return placed;
    };
    const kernels::StateSlots in = at(from, states), out = at(to, expected);
    const auto move = [&](std::int64_t token, int head, int part, std::int64_t row) {
      const std::int64_t whole = token * heads + head;
      std::memcpy(out.stats(part) + row, in.stats(1) + whole, sizeof(Stats));
      std::memcpy(out.o(part, row), in.o(1, whole), kDim * sizeof(float));
    };
    for (int part = 0; part < parts; ++part) {
      if (map.empty()) {
        const int first = heads * part / parts, own = heads * (part + 1) / parts - first;
        for (std::int64_t token = 0; token < kTokens; ++token)
          for (int h = 0; h < own; ++h) move(token, first + h, part, token * own + h);
      }
      for (std::int64_t i = 0; !map.empty() && i < capacity; ++i)
        for (int h = 0; h < heads && map[part * capacity + i] >= 0; ++h)
          move(map[part * capacity + i], h, part, i * heads + h);
    }
    const auto source = on_device(states);
    const auto packed = poisoned<std::byte>(expected.size());
    const auto places = on_device(map);
    kernels::PackStatesParams p;
    p.from = from;
    p.from.data = source.data();
    p.slot = 1;
    p.to = to;
    p.to.data = packed.data();
    p.heads = heads;
    p.map = map.empty() ? nullptr : places.data();
    p.capacity = capacity;
    backend().pack_states(p, {});
    EXPECT_EQ(packed.values(), expected) << heads << " heads to " << parts << " parts";
  }
};

TEST_F(PackStates, ByHeads) {
  for (const auto& [heads, parts] : {std::pair{1, 1}, {4, 2}, {5, 3}, {7, 7}, {16, 7}})
    expect_packed(heads, parts, {});
}

TEST_F(PackStates, ByRows) {
  expect_packed(3, 2, {10, 0, 2, -1, 5, 4, -1, -1});
  expect_packed(1, 3, {3, -1, 7});
  expect_packed(2, 1, {8, 1, 0, 10, 9});
}

TEST_F(PackStates, OfNoRows) {
  kernels::PackStatesParams p;
  p.to.slots = 2;
  backend().pack_states(p, {});
}

}  // namespace longspan::tests

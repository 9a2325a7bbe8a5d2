// The generator of inputs, for the command, benchmarks and tests. Element i of a tensor is a
// function of only the seed, the tensor's number and i (Philox4x32-10, a counter-based generator).
// So data is the same for every number of ranks and on every machine, and no copy has to be kept.
#pragma once

#include <Random123/philox.h>

#include <array>
#include <cmath>
#include <cstdint>

#include "launcher/problem/elements.hpp"

namespace longspan::launcher {

/// Values of mean 0 and variance 1: even in [-sqrt 3, sqrt 3), or normal.
enum class Distribution : std::uint8_t { uniform, normal };

struct RandomTensor {
  std::uint64_t seed = 0;
  std::uint32_t tensor = 0;
  Distribution distribution = Distribution::uniform;

  /// Elements 4 * block to 4 * block + 3.
  std::array<float, 4> four(std::uint64_t block) const {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto words = r123::Philox4x32{}({{low(block), low(block >> 32), tensor, 0}},
                                          {{low(seed), low(seed >> 32)}});
    std::array<float, 4> values;
    if (distribution == Distribution::uniform)
      for (std::size_t w = 0; w < 4; ++w)
        values[w] = static_cast<float>(static_cast<std::int32_t>(words[w])) * kUnit;
    else
      for (std::size_t w = 0; w < 4; w += 2) polar(words[w], words[w + 1], &values[w]);
    return values;
  }
  float operator()(std::uint64_t i) const { return four(i / 4)[i % 4]; }

  /// Calls use(i, value) for each i in [begin, end).
  template <class Use>
  void for_each(std::int64_t begin, std::int64_t end, const Use& use) const {
    for (std::int64_t i = begin; i < end;) {
      const std::array<float, 4> values = four(static_cast<std::uint64_t>(i) / 4);
      for (std::int64_t w = i % 4; w < 4 && i < end; ++w, ++i)
        use(i, values[static_cast<std::size_t>(w)]);
    }
  }

  /// Stores `count` elements from `first` on at `to`.
  void store(void* to, DType dtype, std::int64_t first, std::int64_t count) const {
    for_each(first, first + count,
             [&](std::int64_t i, float value) { launcher::store(to, dtype, i - first, value); });
  }

 private:
  static constexpr float kUnit = 1.7320508f / 2147483648.0f;  // the unit of a 32-bit signed word

  /// Two independent normal values of two words (Box and Muller).
  static void polar(std::uint32_t one, std::uint32_t other, float* to) {
    constexpr float kUnitOfWord = 0x1p-32f, kTurn = 6.2831853f * kUnitOfWord;
    const float u = (static_cast<float>(one) + 0.5f) * kUnitOfWord;  // in (0, 1]
    const float radius = std::sqrt(-2.0f * std::log(u)), angle = kTurn * static_cast<float>(other);
    to[0] = radius * std::cos(angle);
    to[1] = radius * std::sin(angle);
  }
};

}  // namespace longspan::launcher

// Random inputs of tests, from the common generator: normal, nearly like inputs of models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "launcher/problem/random.hpp"

namespace longspan::tests {

inline launcher::RandomTensor normal_values(std::uint64_t seed, std::uint32_t tensor = 0) {
  return {seed, tensor, launcher::Distribution::normal};
}

inline std::vector<std::byte> random_elements(DType dtype, std::int64_t count, std::uint64_t seed,
                                              std::uint32_t tensor = 0) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  normal_values(seed, tensor).store(bytes.data(), dtype, 0, count);
  return bytes;
}

inline std::vector<float> random_floats(std::int64_t count, std::uint64_t seed,
                                        std::uint32_t tensor = 0) {
  std::vector<float> values(static_cast<std::size_t>(count));
  normal_values(seed, tensor).store(values.data(), fp32, 0, count);
  return values;
}

}  // namespace longspan::tests

// Seeds of tests that draw new inputs in every run; a test names its seed where it fails, and with
// LONGSPAN_TEST_SEED it draws the same inputs again.
#pragma once

#include <cstdlib>
#include <optional>
#include <random>

namespace longspan::tests {

/// Where it is set, seeds follow from it: whoever runs a test again has the same inputs.
inline std::optional<std::mt19937>& repeated_seeds() {
  static std::optional<std::mt19937> seeds;
  return seeds;
}

inline unsigned fresh_seed() {
  if (const char* again = std::getenv("LONGSPAN_TEST_SEED"))
    return static_cast<unsigned>(std::strtoul(again, nullptr, 10));
  return repeated_seeds() ? (*repeated_seeds())() : std::random_device{}();
}

}  // namespace longspan::tests

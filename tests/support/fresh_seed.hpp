// Seeds of random inputs. Every run draws the same ones, so that a change is to blame for a
// failure. LONGSPAN_TEST_SEEDS=new draws others in each run (tests/long.sh). A failing test prints
// its seed, and LONGSPAN_TEST_SEED repeats it.
#pragma once

#include <cstdlib>
#include <mutex>
#include <optional>
#include <random>
#include <string_view>

namespace longspan::tests {

/// Where it is set, seeds follow from it, so that a repeated test has the same inputs.
inline std::optional<std::mt19937>& repeated_seeds() {
  static std::optional<std::mt19937> seeds = [] {
    const char* which = std::getenv("LONGSPAN_TEST_SEEDS");
    const bool draws_new = which && std::string_view(which) == "new";
    return draws_new ? std::optional<std::mt19937>() : std::mt19937(20260101u);
  }();
  return seeds;
}

inline unsigned fresh_seed() {
  if (const char* again = std::getenv("LONGSPAN_TEST_SEED"))
    return static_cast<unsigned>(std::strtoul(again, nullptr, 10));
  static std::mutex mutex;  // tests of several ranks have threads
  const std::lock_guard lock(mutex);
  return repeated_seeds() ? (*repeated_seeds())() : std::random_device{}();
}

}  // namespace longspan::tests

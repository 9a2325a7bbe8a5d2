// Seeds of tests that draw new inputs in every run; a test names its seed where it fails.
#pragma once

#include <random>

namespace longspan::testing {

inline unsigned fresh_seed() { return std::random_device{}(); }

}  // namespace longspan::testing

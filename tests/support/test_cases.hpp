// The number of random cases of a test.
#pragma once

#include <cstdlib>
#include <string>

namespace longspan::tests {

/// LONGSPAN_TEST_CASES, or the usual number.
inline int number_of_cases(int usual) {
  const char* count = std::getenv("LONGSPAN_TEST_CASES");
  return count ? std::stoi(count) : usual;
}

}  // namespace longspan::tests

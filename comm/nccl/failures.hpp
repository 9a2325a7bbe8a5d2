// Failures of one rank among several that open something together: each travels with the next
// exchange, and all ranks act alike.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <string>
#include <vector>

namespace longspan::comm {

/// The text that `step` throws; empty where it worked.
template <class Step>
std::string failure_of(const Step& step) {
  try {
    step();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// The failure of the first rank that failed. All ranks have the same texts, so they report the
/// same.
inline std::string first_failure(const std::vector<std::string>& failures) {
  for (std::size_t p = 0; p < failures.size(); ++p)
    if (!failures[p].empty()) return fmt::format("rank {}: {}", p, failures[p]);
  return {};
}

}  // namespace longspan::comm

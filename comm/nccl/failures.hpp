// What fails on one rank of several that open something together: it travels with the next thing
// that they say to each other, and all of them go the same way.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <string>
#include <vector>

namespace longspan::comm {

/// What `step` throws; empty where it worked.
template <class Step>
std::string failure_of(const Step& step) {
  try {
    step();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// The failure of the first rank that failed. All ranks hear the same texts, and so say the same.
inline std::string first_failure(const std::vector<std::string>& failures) {
  for (std::size_t p = 0; p < failures.size(); ++p)
    if (!failures[p].empty()) return fmt::format("rank {}: {}", p, failures[p]);
  return {};
}

}  // namespace longspan::comm

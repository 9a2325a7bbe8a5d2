#include "comm/control/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

namespace longspan::comm {

std::optional<std::string> difference(const std::vector<std::string>& one,
                                      const std::string& rank_of_one,
                                      const std::vector<std::string>& other,
                                      const std::string& rank_of_other, const std::string& step) {
  if (one == other) return std::nullopt;
  std::size_t i = 0;
  for (; i + 1 < std::min(one.size(), other.size()) && one[i] == other[i]; i += 2) {
    if (one[i + 1] == kNotKnown || other[i + 1] == kNotKnown) continue;
    if (other[i + 1] != one[i + 1])
      return fmt::format(
          "'{}' differs between ranks at '{}': rank {} has {}, rank {} has {}. Give "
          "every rank the same value, and the same calls in the same order.",
          one[i], step, rank_of_one, one[i + 1], rank_of_other, other[i + 1]);
  }
  if (i == one.size() && i == other.size()) return std::nullopt;
  return fmt::format(
      "The lists of arguments differ between rank {} and rank {} at '{}': is every "
      "rank of the same longspan version?",
      rank_of_one, rank_of_other, step);
}

}  // namespace longspan::comm

// The nodes that a test can declare.
#pragma once

#include <vector>

namespace longspan::tests {

/// The sizes of nodes with which `ranks` ranks are several nodes of several ranks.
inline std::vector<int> node_sizes(int ranks) {
  std::vector<int> sizes;
  for (int n = 2; n < ranks; ++n)
    if (ranks % n == 0) sizes.push_back(n);
  return sizes;
}

}  // namespace longspan::tests

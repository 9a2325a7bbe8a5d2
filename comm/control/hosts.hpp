// Finds which ranks share a machine.
#pragma once

#include <string>
#include <vector>

#include "comm/control/control.hpp"

namespace longspan::comm {

struct Place {
  int nodes = 1;
  int local_rank = 0;  // among the ranks of this machine, in rank order
  int local_size = 1;
  int ranks_per_node = 0;  // of every machine (even_nodes)
};

/// The name and boot id of this machine: cloned machines, and containers, may share a name, but not
/// a boot.
std::string this_host();

/// The ranks of a machine, given every rank's machine in `hosts`, where all machines have equally
/// many and they are neighbours; else 0.
int even_nodes(const std::vector<std::string>& hosts);

/// Finds this rank's place among the machines. It is collective.
Place find_place(Control& control);

/// A text such as "4 ranks, 1 node".
std::string describe(int ranks, const Place& place);

}  // namespace longspan::comm

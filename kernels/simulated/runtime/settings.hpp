// The settings of the simulated GPUs from the environment.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace longspan::simulated {

struct Settings {
  std::vector<int> gpus;         // those that this process sees, by their index on the node
  int gpus_of_node = 1;          // LONGSPAN_SIMULATED_GPUS, or the ranks on this host
  std::size_t memory_bytes = 0;  // of each GPU: LONGSPAN_SIMULATED_MEMORY_MB
  bool loads_lazily = false;     // LONGSPAN_SIMULATED_LAZY_LOADING=1: see load()
  std::string fail_call;         // LONGSPAN_SIMULATED_FAIL_CALL=name:N, the name
  int fail_number = 0;           // and N; 0: no call fails
};

/// From the environment at the first call.
const Settings& settings();

}  // namespace longspan::simulated

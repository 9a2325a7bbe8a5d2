// Graphs of work, made by captures, to be replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/simulated/runtime/streams.hpp"

namespace longspan::simulated {

cudaGraph_t make_graph(std::vector<Node> nodes);

}  // namespace longspan::simulated

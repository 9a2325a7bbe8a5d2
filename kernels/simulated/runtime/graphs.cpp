#include "kernels/simulated/runtime/graphs.hpp"

#include <map>
#include <memory>
#include <utility>

#include "kernels/simulated/runtime/captures.hpp"

namespace longspan::simulated {
namespace {

struct Graph {
  std::vector<Node> nodes;
};

/// Replays of one executable graph run one after another, in whatever streams they are.
struct Executable {
  std::vector<Node> nodes;
  OperationPtr last;
};

struct Graphs {
  std::map<cudaGraph_t, std::unique_ptr<Graph>> made;
  std::map<cudaGraphExec_t, std::unique_ptr<Executable>> executable;
};

Graphs& graphs() {
  static Graphs* const all = new Graphs;
  return *all;
}

/// The nodes are put between two operations of the stream that do nothing. Its order applies to all
/// of them, and their order among each other is the graph's.
cudaError_t launch(Executable& graph, Stream& stream) {
  if (stream.capture != nullptr) return add_nodes(stream, graph.nodes);
  OperationPtr first;
  if (const cudaError_t error = submit(stream, {}, &first, {graph.last}); error != cudaSuccess)
    return error;
  std::vector<OperationPtr> queued;
  for (const Node& node : graph.nodes) {
    std::vector<OperationPtr> after;
    OperationPtr overlapped;
    for (const int before : node.after) {
      const OperationPtr& one = queued[static_cast<std::size_t>(before)];
      (before == node.overlapped ? overlapped : after.emplace_back()) = one;
    }
    // All of them wait for the beginning too, since an overlapped kernel may not have begun.
    after.push_back(first);
    queued.push_back(operations().queue(node.work, std::move(after), std::move(overlapped)));
  }
  return submit(stream, {}, &graph.last, std::move(queued));
}

cudaError_t instantiate(cudaGraphExec_t* handle, cudaGraph_t graph) {
  const auto found = graphs().made.find(graph);
  if (handle == nullptr || found == graphs().made.end()) return cudaErrorInvalidValue;
  auto made = std::make_unique<Executable>(Executable{found->second->nodes, nullptr});
  *handle = reinterpret_cast<cudaGraphExec_t>(made.get());
  graphs().executable.emplace(*handle, std::move(made));
  return cudaSuccess;
}

}  // namespace

cudaGraph_t make_graph(std::vector<Node> nodes) {
  auto made = std::make_unique<Graph>(Graph{std::move(nodes)});
  const auto handle = reinterpret_cast<cudaGraph_t>(made.get());
  graphs().made.emplace(handle, std::move(made));
  return handle;
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* handle, cudaGraph_t graph, unsigned long long) {
  return call("cudaGraphInstantiate", [&](Lock&) { return instantiate(handle, graph); });
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* handle, cudaGraph_t graph,
                                          unsigned long long) {
  return call("cudaGraphInstantiateWithFlags", [&](Lock&) { return instantiate(handle, graph); });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  return call("cudaGraphLaunch", [&](Lock&) {
    Stream* const stream = find_stream(stream_handle);
    const auto found = graphs().executable.find(handle);
    if (found == graphs().executable.end()) return cudaErrorInvalidValue;
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return launch(*found->second, *stream);
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call("cudaGraphDestroy", [&](Lock&) {
    return graphs().made.erase(graph) > 0 ? cudaSuccess : cudaErrorInvalidValue;
  });
}

/// Replays in progress keep what they need.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  return call("cudaGraphExecDestroy", [&](Lock&) {
    return graphs().executable.erase(handle) > 0 ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return call("cudaGraphGetNodes", [&](Lock&) {
    const auto found = graphs().made.find(graph);
    if (found == graphs().made.end() || count == nullptr) return cudaErrorInvalidValue;
    if (nodes != nullptr) return cudaErrorNotSupported;  // nodes have no handles here
    *count = found->second->nodes.size();
    return cudaSuccess;
  });
}

}  // extern "C"

// Streams that record their work instead of doing it.
#pragma once

#include "kernels/simulated/runtime/streams.hpp"

namespace longspan::simulated {

/// Adds work to a stream that is captured.
cudaError_t add_node(Stream& stream, Work work);
/// Adds a graph that is launched into it.
cudaError_t add_nodes(Stream& stream, const std::vector<Node>& nodes);
/// Adds a wait for an event, if the stream or the event is part of a capture.
cudaError_t join_capture(Stream& stream, const Event& event);

}  // namespace longspan::simulated

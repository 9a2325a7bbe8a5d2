// Streams that record what they are given instead of doing it.
#pragma once

#include "kernels/simulated/runtime/streams.hpp"

namespace longspan::simulated {

/// Work given to a stream that is captured.
cudaError_t add_node(Stream& stream, Work work);
/// A graph launched into it.
cudaError_t add_nodes(Stream& stream, const std::vector<Node>& nodes);
/// Of a wait for an event, where either is part of a capture.
cudaError_t join_capture(Stream& stream, const Event& event);

}  // namespace longspan::simulated

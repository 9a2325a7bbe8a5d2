// Small arrays of a call as the host sees them, on any device.
#pragma once

#include <cstddef>

#include "longspan/types.hpp"

namespace longspan {

/// Whether work on the stream is captured into a graph: then nothing runs that could be waited for.
bool is_captured(Device device, Stream stream);

/// Copies memory of `device` to the host. The caller has waited for its writers.
void read_back(Device device, const void* from, std::size_t bytes, void* to);

}  // namespace longspan

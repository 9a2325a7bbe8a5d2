// Small arrays of a call as the host sees them, wherever they lie.
#pragma once

#include <cstddef>

#include "longspan/types.hpp"

namespace longspan {

/// Whether what is given to the stream becomes a part of a graph: then nothing runs that could be
/// waited for.
bool is_captured(Device device, Stream stream);

/// Copies memory of `device` to the host. What writes it has been waited for.
void read_back(Device device, const void* from, std::size_t bytes, void* to);

}  // namespace longspan

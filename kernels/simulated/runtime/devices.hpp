// The simulated GPUs.
#pragma once

namespace longspan::simulated {

/// Converts the process's number of a GPU to its index on the node, and back; -1: the process sees
/// none there.
int device_on_node(int device);
int visible_device(int on_node);

}  // namespace longspan::simulated

// Which GPUs there are.
#pragma once

namespace longspan::simulated {

/// The place on the node of the GPU that this process knows by a number, and back; -1: it sees
/// none there.
int device_on_node(int device);
int visible_device(int on_node);

}  // namespace longspan::simulated

// Communicators whose states live on GPUs. In a build without CUDA both throw Unsupported.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// NCCL among the ranks of `control`, each on its `gpu`, or below 0 on that of its local rank.
/// Collective. Two ranks on one GPU are refused, and Unsupported is thrown where the program does
/// not link longspan::nccl.
std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control> control, int gpu);

/// One process alone on its `gpu`, or below 0 on the current one. Needs no NCCL.
std::shared_ptr<Transport> gpu_self(milliseconds deadline, int gpu);

}  // namespace longspan::comm

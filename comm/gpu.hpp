// Makes communicators whose states live on GPUs. In a build without CUDA both throw Unsupported.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// Makes a transport over NCCL among the ranks of `control`, each on its `gpu`, or, where that is
/// below 0, on the GPU of its local rank. It is collective. Two ranks on one GPU are refused, and
/// Unsupported is thrown where the program does not link longspan::nccl.
std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control> control, int gpu);

/// Makes a transport for one process alone on its `gpu`, or, where that is below 0, on the current
/// one. It needs no NCCL.
std::shared_ptr<Transport> gpu_self(milliseconds deadline, int gpu);

}  // namespace longspan::comm

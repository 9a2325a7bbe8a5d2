// Communicators whose states live on GPUs. In a build without CUDA both throw Unsupported.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// NCCL among the ranks of `control`, each on the GPU of its local rank, which becomes the calling
/// thread's current one. Collective. Two ranks on one GPU are refused, and Unsupported is thrown
/// where the program does not link longspan::nccl.
std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control> control);

/// One process alone on its current GPU. Needs no NCCL.
std::shared_ptr<Transport> gpu_self(milliseconds deadline);

}  // namespace longspan::comm

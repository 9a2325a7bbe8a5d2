// Makes communicators whose states are on GPUs. In a build without CUDA both throw Unsupported.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// Makes a transport over NCCL among the ranks of `control`, each on its `gpu`; below 0 it is the
/// GPU of the local rank. Collective. Two ranks on one GPU are refused. Throws Unsupported where
/// the program does not link longspan::nccl.
std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control> control, int gpu);

/// Makes a transport for one process alone on its `gpu`; below 0 it is the current one. Needs no
/// NCCL.
std::shared_ptr<Transport> gpu_self(milliseconds deadline, int gpu);

}  // namespace longspan::comm

// The control plane without MPI, for torchrun and srun: rank 0 listens at a known address.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/control/environment.hpp"

namespace longspan::comm {

/// Collective over the launcher's ranks.
std::unique_ptr<Control> tcp_control(const Launch& launch, milliseconds deadline);

}  // namespace longspan::comm

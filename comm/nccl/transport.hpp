// Makes the transport that runs the collectives over an NCCL communicator.
#pragma once

#include <memory>

#include "comm/control/hosts.hpp"
#include "comm/nccl/link.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// Checks NCCL between the ranks by a first exchange, which also makes its connections. The ranks'
/// GPUs are current.
std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Link> link,
                                          std::shared_ptr<Control> control, const Place& place);

/// Makes the transport over NCCL for ranks that have a control plane: the gpu_transport of a
/// program that links longspan::nccl. `asked` is its GPU there.
std::shared_ptr<Transport> nccl_bootstrap(std::shared_ptr<Control> control, int asked);

}  // namespace longspan::comm

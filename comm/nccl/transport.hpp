// The verbs over an NCCL communicator.
#pragma once

#include <memory>

#include "comm/control/hosts.hpp"
#include "comm/nccl/link.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// UsageError for a GPU that is none of the `visible` ones; below 0 it is to be chosen.
void check_gpu(int asked, int visible);

/// Checks that NCCL works between the ranks by a first exchange, which also makes its
/// connections. The ranks' GPUs are current.
std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Link> link,
                                          std::shared_ptr<Control> control, const Place& place);

}  // namespace longspan::comm

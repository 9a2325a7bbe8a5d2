// The control plane for ranks that have only an NCCL communicator: messages travel over it, through
// GPU memory, and the roll cannot be called.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/nccl/link.hpp"

namespace longspan::comm {

std::shared_ptr<Control> nccl_control(std::shared_ptr<Link> link, int rank, int size,
                                      milliseconds deadline);

}  // namespace longspan::comm

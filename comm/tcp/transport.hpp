// The transport for states on CPUs without MPI: TCP.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// Connects every two ranks of `control`. Collective.
std::shared_ptr<Transport> tcp_transport(std::shared_ptr<Control> control);

}  // namespace longspan::comm

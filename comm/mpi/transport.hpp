// Makes the transport for states on CPUs over MPI.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "comm/mpi/session.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// Collective over `duplicate`, which it shares with the messages of `control`.
std::shared_ptr<Transport> mpi_transport(std::shared_ptr<MpiDuplicate> duplicate,
                                         std::shared_ptr<Control> control);

}  // namespace longspan::comm

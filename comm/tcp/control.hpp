// The control plane without MPI: rank 0 listens at an address from a launcher's variables
// (torchrun, srun), or at one that the caller's own exchange has told the others.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/control/control.hpp"
#include "comm/control/environment.hpp"
#include "comm/tcp/address.hpp"

namespace longspan::comm {

/// Collective over the launcher's ranks. `gives_up` is asked while they look for each other, and
/// from then on (Communicator::on_wait).
std::unique_ptr<Control> tcp_control(const Launch& launch, milliseconds deadline,
                                     std::function<bool()> gives_up = nullptr);

/// Where ranks meet that can tell each other in another way.
struct Meeting {
  int rank = 0;
  int size = 1;
  Door door;        // rank 0's; of the others, where it is
  std::string key;  // the shared secret
};
std::unique_ptr<Control> tcp_control(Meeting meeting, milliseconds deadline,
                                     std::function<bool()> gives_up = nullptr);

}  // namespace longspan::comm

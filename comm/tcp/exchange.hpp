// The control plane of ranks that the caller can bring together: its exchange tells the others
// where rank 0 listens, and a key that only they know.
#pragma once

#include <memory>

#include "comm/control/control.hpp"
#include "longspan/communicator.hpp"

namespace longspan::comm {

/// Collective; see from_exchange. `options` are the caller's: ranks must agree on the device.
std::unique_ptr<Control> exchange_control(int rank, int size, const ByteExchange& exchange,
                                          const CommOptions& options);

}  // namespace longspan::comm

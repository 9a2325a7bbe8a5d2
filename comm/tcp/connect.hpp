// A connection for data between every two ranks: a Unix socket where they share a machine and its
// network namespace, TCP elsewhere. Ranks that have a control plane tell each other where they
// listen; each connects to those of lower rank. Only a rank's key lets a peer in, and only while
// the connections are made: then nothing listens any more.
#pragma once

#include <vector>

#include "comm/control/control.hpp"
#include "comm/tcp/frames.hpp"

namespace longspan::comm {

/// By rank; none to this one. The sockets do not block. Collective: a rank that does not come, or
/// that cannot be reached, is a RankError on all ranks.
std::vector<Fd> connect_ranks(Control& control);

}  // namespace longspan::comm

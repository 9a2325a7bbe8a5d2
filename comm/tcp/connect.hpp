// A connection between every two ranks, for data: a Unix socket where they share a machine and its
// network namespace, TCP elsewhere. Ranks that have a control plane tell each other where they
// listen; each goes to those of lower rank. Only who knows a rank's key is let in, and
// only while the connections are made: then nobody listens any more.
#pragma once

#include <vector>

#include "comm/control/control.hpp"
#include "comm/tcp/frames.hpp"

namespace longspan::comm {

/// By rank; none to this one. The sockets do not block. Collective: a rank that does not come, or
/// that cannot be reached, is a RankError on all of them.
std::vector<Fd> connect_ranks(Control& control);

}  // namespace longspan::comm

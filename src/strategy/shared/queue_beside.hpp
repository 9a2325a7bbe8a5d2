// An attention and the transfers that go beside it, on GPUs: the kernel is queued first, as the
// host's time for a transfer would else come before it, and yet they begin together.
#pragma once

#include "comm/transport.hpp"

namespace longspan {

/// Queues attend(), and then start(), which starts `starts` transfers that wait for what the stream
/// has now, and not for the attention. Where either throws, no later transfer begins early for it.
template <class Attend, class Start>
void queue_beside(comm::Transport& comm, Stream stream, int starts, const Attend& attend,
                  const Start& start) {
  comm.keep_place(stream, starts);
  try {
    attend();
    start();
  } catch (...) {
    comm.forget_place();
    throw;
  }
}

}  // namespace longspan

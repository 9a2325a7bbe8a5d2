/// \file
/// How the states of a run, or its keys, travel between GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace longspan {

/// The ways between GPUs. All of them give the same bits.
enum class Exchange : std::uint8_t {
  automatic,     ///< peer buffers where the GPUs reach each other, else gather
  peer_buffers,  ///< a kernel writes into the peers' memory and merges; for short queries it is the
                 ///< one that ends the attention, too. Of ring-kv, gather-kv and heads: copy
                 ///< engines write into it
  peer_buffers_apart,  ///< peer buffers, always by a kernel of its own
  gather,              ///< NCCL (or MPI), then a merge
};

/// As `longspan run --exchange` takes it.
constexpr const char* name(Exchange exchange) {
  constexpr const char* names[] = {"auto", "peer-buffers", "peer-buffers-apart", "gather"};
  return exchange <= Exchange::gather ? names[static_cast<int>(exchange)] : "no exchange";
}

/// What a layer found that it can do.
struct ExchangeInfo {
  Exchange by = Exchange::gather;  ///< never automatic
  /// peer buffers: runs of more states (rows x heads) are gathered; 0: none is
  std::int64_t most_states = 0;
  std::string reason;  ///< gather: why not by peer buffers; empty where that is plain
  /// Bytes on this rank that the peers write: besides the workspace, and none with gather
  std::size_t peer_bytes = 0;

  /// Whether short runs go by peer buffers.
  bool has_peer_buffers() const {
    return by == Exchange::peer_buffers || by == Exchange::peer_buffers_apart;
  }
  /// One line for people: "peer-buffers (gather past 16384 states)".
  std::string describe() const {
    if (most_states > 0)
      return std::string(name(by)) + " (gather past " + std::to_string(most_states) + " states)";
    return reason.empty() ? name(by) : std::string(name(by)) + " (" + reason + ")";
  }
};

}  // namespace longspan

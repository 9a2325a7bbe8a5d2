/// \file
/// How the states of a run, or its keys, travel between GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace longspan {

/// The ways between GPUs. All of them give the same bits.
enum class Exchange : std::uint8_t {
  automatic,     ///< peer buffers if the GPUs can reach each other's memory, otherwise gather
  peer_buffers,  ///< a kernel writes into the peers' memory and merges; for short queries that
                 ///< kernel also ends the attention. With ring-kv, gather-kv and heads, copy
                 ///< engines write into it
  peer_buffers_apart,  ///< peer buffers, always by a separate kernel
  gather,              ///< NCCL (or MPI), then a merge
};

/// The name that `longspan run --exchange` takes.
constexpr const char* name(Exchange exchange) {
  constexpr const char* names[] = {"auto", "peer-buffers", "peer-buffers-apart", "gather"};
  return exchange <= Exchange::gather ? names[static_cast<int>(exchange)] : "no exchange";
}

/// The exchange that a layer chose.
struct ExchangeInfo {
  Exchange by = Exchange::gather;  ///< never automatic
  /// peer buffers: runs of more states (rows x heads) use gather; 0: no run does
  std::int64_t most_states = 0;
  std::string reason;  ///< gather: why not peer buffers; empty if that is plain
  /// Bytes on this rank that the peers write; not part of the workspace, 0 with gather
  std::size_t peer_bytes = 0;

  /// Whether short runs use peer buffers.
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

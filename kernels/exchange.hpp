// Exchange and merge in one kernel. Every rank pushes its states into the peer buffers of the
// others (peer_view.hpp), waits for theirs, folds all in the fixed order and finishes. Every word
// of four bytes is its own flag: a peer buffer at rest is 0, and no word that travels is 0. The
// variants differ in what travels; they give the same bits as all_gather followed by merge.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/digest.hpp"
#include "kernels/params.hpp"
#include "src/base/peer_view.hpp"

namespace longspan::kernels {

enum class Push : std::uint8_t {
  automatic,  // by size
  one_trip,   // every state goes to every rank, and every rank merges all rows
  two_trips,  // states go to the rank that merges their rows, and results come back: fewer bytes
};

constexpr const char* name(Push push) {
  constexpr const char* names[] = {"automatic", "one-trip", "two-trips"};
  return names[static_cast<int>(push)];
}

struct ExchangeParams {
  PeerView peers;
  MergeParams merge;  // states: [ranks] slots, of which this rank's own is filled; rows null
  std::int64_t capacity = 0;  // rows that the peer buffers were made for
  std::uint64_t hash = 0;  // of the arguments that must be the same on all ranks (RunDigestParams)
  Push push = Push::automatic;
  int blocks = 0;       // 0: by size. Other numbers are for measurements, up to what the GPU holds
  bool overlap = true;  // the kernel may be launched while the one before it ends
  bool apart = false;   // the kernel may start while the one before it ends
  bool pushed = false;  // the attention kernel pushes if it can, as AttentionKernels::attend sets;
                        // the same on all ranks, since `automatic` depends on it
  std::uint32_t run = 0;                    // comm::RunName::run, for the report
  const std::uint64_t* contents = nullptr;  // RunDigestParams
};

}  // namespace longspan::kernels

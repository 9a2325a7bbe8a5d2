// Exchange and merge in one kernel: every rank pushes its states into the windows of the others
// (peer_view.hpp), waits for theirs, folds all in the fixed order and finishes. The variants differ
// in how a receiver learns that data is there; they give the same bits, which are the bits of
// all_gather followed by merge.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.hpp"
#include "src/peer_view.hpp"

namespace longspan::kernels {

enum class Push : std::uint8_t {
  automatic,  // by size
  beside,  // flags beside the data, in every 16 bytes: no fence and no second trip, twice the bytes
  flags,   // data, then one flag for each block
  shares,  // each rank merges its share of the rows and pushes the results: fewest bytes
  words,   // every word is its own flag: a window at rest is 0, and no word that travels is
  word_shares,  // both
};

constexpr const char* name(Push push) {
  constexpr const char* names[] = {"automatic", "beside", "flags",
                                   "shares",    "words",  "word-shares"};
  return names[static_cast<int>(push)];
}

struct ExchangeParams {
  PeerView peers;
  MergeParams merge;  // states: [ranks] slots, of which this rank's own is filled; rows null
  std::int64_t capacity = 0;  // rows that the windows were made for
  std::uint32_t shape = 0;    // hash of what ranks must agree on
  Push push = Push::automatic;
  int blocks = 0;       // 0: by size. To measure others: alike on all ranks
  bool overlap = true;  // the kernel may come to its place while the one before it ends
};

}  // namespace longspan::kernels

// Computes on the host where the words of one exchange go. Everything that a kernel computes before
// its first store and after the last word has arrived is time for which all ranks wait.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/exchange/peer_buffer_layout.hpp"
#include "longspan/order.hpp"

namespace longspan::kernels::cuda {

/// The destinations of words. The parts of a copy are offsets from its start, the same in every
/// peer buffer. A peer is named by its step: 0 is the rank after this one, and so on around the
/// ring, so that ranks do not all write to one.
struct ExchangeRoute {
  static constexpr int kMostPeers = PeerView::kMostRanks - 1;

  // The fields that a kernel needs before its first store are adjacent, in few lines of the
  // constant cache, which is cold for a new kernel.
  std::uint32_t rows, row_bytes;  // of the states; bytes of a row of o
  std::uint32_t o;                // offset of o in a slot
  std::uint32_t peers;            // ranks - 1
  const std::byte* own_state;     // this rank's, as attention left it
  const std::uint32_t* epoch;
  std::uint32_t copies;  // offset of copy 0 in a peer buffer
  std::uint32_t copy_bytes;
  std::uint32_t slot;                  // this rank's slot, in the peer buffers of others
  std::byte* peer_buffer[kMostPeers];  // by step

  std::byte* own;                 // this rank's peer buffer
  std::uint8_t rank[kMostPeers];  // by step
  Divisor heads;
  std::uint32_t result, lse;

  // These are indexed by the place in the tree, and name the state that folds there.
  const std::byte* place[PeerView::kMostRanks];      // a slot in copy 0, or in own memory
  std::uint32_t place_stride[PeerView::kMostRanks];  // to the next copy; 0 for own memory
  std::uint8_t place_rank[PeerView::kMostRanks];
  std::uint32_t peer_places, empty_places;  // bit sets

  // The rows [first, first + count) that a rank merges in the variant `two_trips`.
  std::uint32_t share_first[kMostPeers], share_count[kMostPeers];  // by step
  std::uint32_t own_first, own_count;
  std::uint32_t share_count_most;  // of any rank
};

inline ExchangeRoute make_route(const ExchangeParams& p) {
  const PeerView& view = p.peers;
  const StateSlots& states = p.merge.states;
  const PeerBufferLayout layout{p.capacity, states.columns(), view.ranks};
  const auto small = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  ExchangeRoute r{.rows = small(states.rows),
                  .row_bytes = small(states.columns() * 4),
                  .o = small(StateSlots::stats_bytes(states.rows)),
                  .peers = small(view.ranks - 1),
                  .own_state = reinterpret_cast<const std::byte*>(states.stats(view.rank)),
                  .epoch = view.epoch,
                  .heads = Divisor(small(p.merge.heads))};
  r.own = view.peer_buffer[view.rank];
  r.copies = small(layout.copy(0));
  r.copy_bytes = small(layout.copy_bytes());
  r.slot = small(layout.slot(view.rank));
  r.result = small(layout.result());
  r.lse = small(layout.lse());

  const std::uint32_t share = (r.rows + r.peers) / (r.peers + 1);
  const auto first = [&](int rank) { return std::min(share * small(rank), r.rows); };
  const auto count = [&](int rank) { return std::min(share, r.rows - first(rank)); };
  r.own_first = first(view.rank);
  r.own_count = count(view.rank);
  r.share_count_most = share;
  for (int step = 0; step < ExchangeRoute::kMostPeers; ++step) {
    const int rank = step < view.ranks - 1 ? (view.rank + 1 + step) % view.ranks : view.rank;
    r.rank[step] = static_cast<std::uint8_t>(rank);
    r.peer_buffer[step] = view.peer_buffer[rank];
    r.share_first[step] = first(rank);
    r.share_count[step] = rank == view.rank ? 0 : count(rank);
  }

  const int levels = log2_ceil(view.ranks);
  for (int place = 0; place < 1 << levels; ++place) {
    const int slot = p.merge.interleaved ? reverse_bits(place, levels) : place;
    const std::uint32_t bit = 1u << place;
    const bool is_peer = slot < view.ranks && slot != view.rank;
    if (slot >= view.ranks) r.empty_places |= bit;
    if (is_peer) r.peer_places |= bit;
    r.place[place] = is_peer ? r.own + layout.copy(0) + layout.slot(slot) : r.own_state;
    r.place_stride[place] = is_peer ? r.copy_bytes : 0;
    r.place_rank[place] = static_cast<std::uint8_t>(is_peer ? slot : view.rank);
  }
  return r;
}

}  // namespace longspan::kernels::cuda

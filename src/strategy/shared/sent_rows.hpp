// The rows, or keys, that a rank sends while those who receive them already attend with others: the
// portions in which they leave, and what a kernel that waits for them is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/key_arrivals.hpp"
#include "src/strategy/shared/stretches.hpp"

namespace longspan {

/// In how many portions the `bytes` travel that a rank sends to one that attends meanwhile, if they
/// are no more stretches than that: the first must come early, and each costs the host and a copy
/// engine two microseconds a copy.
int count_portions(double bytes);

/// The rows of `stretches` in portions that leave one after the other, from the last row of the
/// sequence to its first, as a work tile walks its keys: up to `most` of about the same length, or
/// the stretches themselves where these are as many or more.
std::vector<Stretch> in_portions(std::vector<Stretch> stretches, int most);

/// The first and the last `most` rows of each stretch, of shorter ones all.
std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most);

/// What a rank has of a sequence.
struct SentRows {
  std::vector<Stretch> stretches;
  std::vector<Stretch> portions;  // that leave one after the other

  SentRows(const std::vector<Stretch>& all, int most)
      : stretches(all), portions(in_portions(all, most)) {}
};

/// The put of what this rank says of a run, a word of its receive memory, to the rank `to`.
comm::Put put_of_word(std::uint64_t* word, int to);

/// The most portions of a rank.
std::size_t most_portions(const std::vector<SentRows>& ranks);

/// Lists what all ranks send in `table`, for a kernel of the rank `own`: the signal of a rank's
/// i-th portion is that of piece 1 + i. Returns the number of portions, own stretches among them.
int list_portions(const std::vector<SentRows>& ranks, int own,
                  kernels::KeyArrivals::Portion* table);

}  // namespace longspan

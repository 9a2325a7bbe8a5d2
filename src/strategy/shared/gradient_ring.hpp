// Gradients of guests that return to their ranks around the ring, in fp32, while this rank's own
// arrive from the ranks that had its block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "src/base/parts.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class ReturningSums {
 public:
  static constexpr std::size_t kSlots = 2;  // of each direction

  explicit ReturningSums(comm::Transport& comm);

  /// Takes memory for sums of up to `bytes` bytes.
  void lay_out(Parts& memory, std::int64_t bytes);

  std::byte* leaving(int slot) const { return leaving_[static_cast<std::size_t>(slot)]; }
  const std::byte* arrived(int slot) const { return arriving_[static_cast<std::size_t>(slot)]; }

  /// Starts a move of results. A rank's sums have bytes_of(rank) bytes.
  template <class BytesOf>
  comm::Transfers start(const Move& move, Stream stream, const BytesOf& bytes_of) const {
    const int rank = comm_.rank(), ranks = comm_.size();
    const auto bytes = [&](bool moves, int owner) {
      return moves ? static_cast<std::size_t>(bytes_of(owner)) : 0;
    };
    const comm::Piece sums{leaving(move.slot), bytes(move.sends, (rank + move.distance) % ranks),
                           arriving_[static_cast<std::size_t>(move.slot)],
                           bytes(move.receives, rank)};
    return comm_.start_shifts({&sums, 1}, move.distance, stream,
                              steps_[static_cast<std::size_t>(ranks - move.distance)].c_str());
  }

 private:
  comm::Transport& comm_;
  std::vector<std::string> steps_;             // names of steps, by distance
  std::array<std::byte*, kSlots> leaving_{};   // sums of guests
  std::array<std::byte*, kSlots> arriving_{};  // this rank's, from other ranks
};

}  // namespace longspan

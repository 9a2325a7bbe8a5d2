// The ring of a backward: blocks go round, a rank attends to one while the next arrives, and the
// fp32 gradients of a guest return to its rank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/parts.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class GradientRing {
 public:
  static constexpr std::size_t kSlots = 2;  // of guests, and of sums in each direction

  /// `blocks` names in errors what goes round.
  GradientRing(const LayerContext& layer, const char* blocks);

  /// Takes memory for sums of up to `bytes` bytes, on several ranks.
  void lay_out(Parts& memory, std::int64_t bytes);

  /// The rank that is so far away.
  int rank_at(int distance) const { return (rank() + distance + ranks()) % ranks(); }
  /// A transfer of a block of bytes_of(rank) bytes.
  template <class BytesOf>
  comm::Piece piece(const Move& move, const void* sent, void* received,
                    const BytesOf& bytes_of) const {
    const auto bytes = [&](bool moves, int owner) {
      return moves ? static_cast<std::size_t>(bytes_of(owner)) : 0;
    };
    return {sent, bytes(move.sends, rank()), received,
            bytes(move.receives, rank_at(-move.distance))};
  }
  /// Starts a move of blocks.
  comm::Transfers start(std::span<const comm::Piece> pieces, const Move& move, Stream stream) const;
  /// Starts a move of results. A rank's sums have bytes_of(rank) bytes.
  template <class BytesOf>
  comm::Transfers start_results(const Move& move, Stream stream, const BytesOf& bytes_of) const {
    const auto bytes = [&](bool moves, int owner) {
      return moves ? static_cast<std::size_t>(bytes_of(owner)) : 0;
    };
    return start_sums(move, bytes(move.sends, rank_at(move.distance)), bytes(move.receives, rank()),
                      stream);
  }

  std::byte* leaving(int slot) const { return leaving_[static_cast<std::size_t>(slot)]; }
  const std::byte* arrived(int slot) const { return arriving_[static_cast<std::size_t>(slot)]; }

  /// Walks the ring, or with one rank visits its own block and finishes.
  void walk(const Pass& pass, const IsWanted& is_wanted, Visitor& visitor);

 private:
  int rank() const { return layer_.comm.rank(); }
  int ranks() const { return layer_.comm.size(); }
  comm::Transfers start_sums(const Move& move, std::size_t sent, std::size_t received,
                             Stream stream) const;

  LayerContext layer_;
  std::vector<std::string> block_steps_, result_steps_;  // names of steps, by distance
  Route route_;                                          // of the current run
  Underway underway_;
  std::array<std::byte*, kSlots> leaving_{};   // sums of guests
  std::array<std::byte*, kSlots> arriving_{};  // this rank's, from other ranks
};

}  // namespace longspan

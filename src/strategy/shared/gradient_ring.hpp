// The ring of a backward: blocks go round, a rank attends to one while the next arrives, and the
// fp32 gradients of a guest return to its rank.
//
// A rank adds up gradients as they come, in the order of the ring's steps. Under
// Options::invariant it keeps those of each other rank, and folds them at the end (rank_fold.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/parts.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/shared/rank_fold.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class GradientRing {
 public:
  static constexpr std::size_t kSlots = 2;  // of guests, and of sums that leave

  /// `blocks` names in errors what goes round.
  GradientRing(const LayerContext& layer, const char* blocks);

  /// The bytes of its memory. `guest` are those of the sums of a block that goes round, `staying`
  /// of what it meets.
  static double workspace_bytes(const Options& options, int ranks, double guest, double staying);
  /// Takes memory for sums of up to such sizes, on several ranks.
  void lay_out(Parts& memory, std::int64_t guest, std::int64_t staying);

  /// Whether the gradients of each other rank are kept apart.
  bool keeps() const { return layer_.options.invariant && ranks() > 1; }
  /// If so: those of this rank's block, which ranks return, and those of what stays here, which
  /// this rank makes with each guest.
  const RankParts& returned() const { return returned_; }
  const RankParts& with_guests() const { return with_guests_; }

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
  /// Where a move's results arrive.
  std::byte* arriving(const Move& move) const {
    return keeps() ? returned_.of(rank_at(-move.distance)) : arriving_;
  }

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
  std::array<std::byte*, kSlots> leaving_{};  // sums of guests
  std::byte* arriving_ = nullptr;             // this rank's, from another rank, unless kept
  RankParts returned_, with_guests_;
};

}  // namespace longspan

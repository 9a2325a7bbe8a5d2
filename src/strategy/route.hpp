// The route of a strategy: which block moves from which rank to which, into which slot, in which
// order, beside what, and when a rank attends to it. It is plain data, computed from a few numbers
// and from which rank sees which, so a test can walk it without kernels. A Visitor computes along
// the way (shared/walk.hpp); another Visitor can walk the same route for another purpose.
//
//     moves    transfers to one rank and from another
//     steps    the order in which this rank starts them, waits for them, and attends
//
// A block is one rank's part of the data that travels: its keys, or its rows. On its own rank it is
// at home; on any other it is a guest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace longspan {

/// A transfer in which this rank takes part.
struct Move {
  enum What : std::uint8_t {
    digests,  // only each rank's digest of the run
    blocks,
    results,  // of guests, to the ranks that own these
  };
  What what = blocks;
  int distance = 0;   // to rank + distance and from rank - distance; 0: between all ranks at once
  int part = 0;       // of blocks whose parts do not all travel together
  bool sends = true;  // this rank's block, or the result of the guest
  bool receives = true;  // the guest, or the result of this rank's block
  bool has_digests = false;
  int slot = 0;  // of an arriving guest, or of the leaving result of a guest
};

/// The next action of a rank.
struct Step {
  enum Kind : std::uint8_t { start, wait, exchange, visit, finish };  // exchange: both at once
  /// The guests of a visit.
  static constexpr int kOwn = 0, kAll = -1;  // the rank's own block; those of all ranks together

  Kind kind = start;
  int move = 0;         // for start and wait: an index of Route::moves
  int guest = kOwn;     // for a visit: the distance of its rank, or one of the two constants above
  int slot = 0;         // the slot of that guest
  int result_slot = 0;  // the slot of its result, if that is returned
  int beside = -1;      // for a visit: the move that continues meanwhile
  int early = 0;        // for a visit: the number of moves of the next steps that begin beside it
  bool ends = false;    // for a visit: it writes the result; otherwise a finish does
};

/// It is filled anew for every run, in memory allocated with the layer.
struct Route {
  std::vector<Move> moves;
  std::vector<Step> steps;

  /// The most moves of a route among `ranks` ranks: blocks and results, digests, and a few parts.
  static constexpr std::size_t most_moves(int ranks) {
    return 2 * static_cast<std::size_t>(ranks) + 4;
  }

  Route() = default;
  explicit Route(int ranks);
  void clear();
  /// Adds a move, which no step starts yet; returns its index.
  int add(const Move& move);
  void start(int move) { steps.push_back({.kind = Step::start, .move = move}); }
  void wait(int move) { steps.push_back({.kind = Step::wait, .move = move}); }
  void exchange(int move) { steps.push_back({.kind = Step::exchange, .move = move}); }
  void finish() { steps.push_back({.kind = Step::finish}); }
};

/// Whether rank `to` needs the block of rank `from`. All ranks give the same answer.
using IsWanted = std::function<bool(int from, int to)>;

/// Blocks that visit one rank after another: every rank sends its own, in step s to rank + s, and
/// attends to one while the next arrives. A block that is not wanted does not travel.
struct Ring {
  int ranks = 1;
  int rank = 0;
  int slots = 2;       // that receive guests, in turn
  int first_slot = 0;  // of them
  // Copy engines fill the slots while a visit has the multiprocessors to itself. A sender has to
  // know the slot, so the step alone determines it, and digests travel with the blocks. If each
  // step has its own slot, all blocks start at once.
  bool by_copy_engines = false;
  bool digests_first = false;    // nothing else moves until they are compared
  bool returns_results = false;  // those of guests go to their ranks, and a finish folds them
};
void make_ring(const Ring& ring, const IsWanted& is_wanted, Route& route);

/// Blocks that arrive from all ranks, followed by one visit to all of them.
struct Gather {
  int ranks = 1;
  int parts = 0;         // that arrive one after another, each between all ranks at once; 0: every
                         // block arrives by itself, whole, into the slot of its distance
  int result_parts = 0;  // the same for the results of the visit; a finish follows
  bool beside = false;   // all parts arrive in one move during the visit, which waits for what it
                         // reads, piece by piece
};
void make_gather(const Gather& gather, Route& route);

}  // namespace longspan

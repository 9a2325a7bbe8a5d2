// The route of a strategy: which block moves between whom, into which slot, in which order, beside
// what, and when a rank attends to it. It is plain data, made of a few numbers and of who sees
// whom, so a test walks it without kernels. A Visitor computes on the way (shared/walk.hpp);
// another one walks the same route for something else.
//
//     moves    what goes from a rank to another, and comes from a third
//     steps    in which order this rank starts them, waits for them, and attends
//
// A block is what one rank has of what travels: its keys, or its rows. Its own rank is at home; at
// any other it is a guest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace longspan {

/// A transfer in which this rank takes part.
struct Move {
  enum What : std::uint8_t {
    words,  // what each rank says of the run, and nothing else
    out,    // blocks
    home,   // what was made of guests, to where these came from
  };
  What what = out;
  int distance = 0;   // to rank + distance and from rank - distance; 0: between all ranks at once
  int part = 0;       // of blocks of which not all parts travel together
  bool sends = true;  // this rank's block, or what was made of the guest
  bool receives = true;  // the guest, or what was made of this rank's block
  bool has_words = false;
  int slot = 0;  // of a guest that comes, or of what was made of the guest that leaves
};

/// What a rank does next.
struct Step {
  enum Kind : std::uint8_t { start, wait, exchange, visit, finish };  // exchange: both at once
  /// The guests of a visit.
  static constexpr int kOwn = 0, kAll = -1;  // the rank's own block; those of all ranks together

  Kind kind = start;
  int move = 0;         // that starts or is waited for: an index of Route::moves
  int guest = kOwn;     // of a visit: the distance that it came from, or one of the two above
  int slot = 0;         // where that guest is
  int result_slot = 0;  // of what is made of it, where that goes home
  int beside = -1;      // of a visit: the move that goes on meanwhile
  int early = 0;        // of a visit: so many moves that start in the next steps begin beside it
  bool ends = false;    // of a visit: it makes the result; else a finish does
};

/// It is filled again for every run, in memory that was taken when the layer was made.
struct Route {
  std::vector<Move> moves;
  std::vector<Step> steps;

  /// The most moves of a route among so many ranks: out and home, words, and a few parts.
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

/// Whether rank `to` has a use for the block of rank `from`. All ranks answer alike.
using IsWanted = std::function<bool(int from, int to)>;

/// Blocks that visit one rank after the other: every rank sends its own, in step s to rank + s, and
/// attends to one while the next comes. A block that is not wanted does not travel.
struct Ring {
  int ranks = 1;
  int rank = 0;
  int slots = 2;       // that guests come into, in turn
  int first_slot = 0;  // of them
  // Copy engines fill the slots while a visit has the rest of the device to itself. A sender has to
  // know the slot, so the step alone says which it is, and words travel with the blocks. Where
  // there is a slot for each step all blocks set out at once.
  bool by_copy_engines = false;
  bool words_first = false;  // nothing moves until they are compared
  bool goes_home = false;    // what is made of a guest does, and a finish makes the result of all
};
void make_ring(const Ring& ring, const IsWanted& is_wanted, Route& route);

/// Blocks that come from all ranks, and then one visit to all of them.
struct Gather {
  int ranks = 1;
  int parts = 0;        // that come one after the other, each between all ranks at once; 0: every
                        // block comes by itself, whole, into the slot of its distance
  int parts_home = 0;   // likewise, of what the visit makes of them; then a finish follows
  bool beside = false;  // all parts come in one move while the visit is under way, which waits for
                        // what it reads, piece by piece
};
void make_gather(const Gather& gather, Route& route);

}  // namespace longspan

// Walks a route: starts its moves, waits for them, and has a visitor compute in between.
#pragma once

#include <vector>

#include "src/strategy/route.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// What computes on a route: forward does, as another would on the same route.
class Visitor {
 public:
  virtual ~Visitor() = default;

  /// Starts a move, not of words alone, or queues all of it. What it returns is waited for.
  virtual comm::Transfers start(const Move& move) = 0;

  /// Attends to the guest of a step, or to all. On processors it calls `between` now and then.
  virtual void visit(const Step& step, const kernels::BetweenTiles& between) = 0;

  /// Makes the result, where the last visit does not.
  virtual void finish() {}
};

/// The transfers that are under way, by the moves of a route. A layer has them, so that a run
/// allocates nothing.
class Underway {
 public:
  Underway() = default;
  explicit Underway(int ranks) : moves_(Route::most_moves(ranks)) {}

  comm::Transfers& of(int move) { return moves_[static_cast<std::size_t>(move)]; }
  comm::Transfer& words() { return words_; }
  /// Drops what an exception has left.
  void drop();

 private:
  std::vector<comm::Transfers> moves_;
  comm::Transfer words_;  // what moves words alone
};

/// Walks it for a run. `words_step` names the comparison of what ranks say of it, where it travels
/// by itself.
void walk(const Route& route, const Pass& pass, comm::Transport& comm, const char* words_step,
          Underway& underway, Visitor& visitor);

}  // namespace longspan

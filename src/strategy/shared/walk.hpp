// Walks a route: starts its moves, waits for them, and has a visitor compute in between.
#pragma once

#include <vector>

#include "src/strategy/route.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// The computation along a route, for example forward.
class Visitor {
 public:
  virtual ~Visitor() = default;

  /// Starts a move, unless it is only digests, or queues all of it. The caller waits for the
  /// returned transfers.
  virtual comm::Transfers start(const Move& move) = 0;

  /// Attends to the guest of a step, or to all. On CPUs it calls `between` from time to time.
  virtual void visit(const Step& step, const kernels::BetweenTiles& between) = 0;

  /// Takes what a move has brought; it is called behind the wait for it.
  virtual void arrived(const Move& /*move*/) {}

  /// Writes the result, if the last visit does not.
  virtual void finish() {}
};

/// The transfers in progress, by the moves of a route. A layer owns them, so that a run allocates
/// nothing.
class Underway {
 public:
  Underway() = default;
  explicit Underway(int ranks) : moves_(Route::most_moves(ranks)) {}

  comm::Transfers& of(int move) { return moves_[static_cast<std::size_t>(move)]; }
  comm::Transfer& digests() { return digests_; }
  /// Drops the transfers that an exception left.
  void drop();

 private:
  std::vector<comm::Transfers> moves_;
  comm::Transfer digests_;  // of a move of digests only
};

/// Walks it for a run. `compare_step` names the comparison of the ranks' reports, if they travel by
/// themselves.
void walk(const Route& route, const Pass& pass, comm::Transport& comm, const char* compare_step,
          Underway& underway, Visitor& visitor);

}  // namespace longspan

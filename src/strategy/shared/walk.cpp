#include "src/strategy/shared/walk.hpp"

namespace longspan {
namespace {

/// Lets transfers progress, if their transport needs calls to do so. An error ends the
/// communicator, and the wait throws it.
void let_go_on(comm::Transfers& transfers) noexcept {
  try {
    transfers.test();
  } catch (...) {
  }
}

class Walker {
 public:
  Walker(const Route& route, const Pass& pass, comm::Transport& comm, const char* compare_step,
         Underway& underway, Visitor& visitor)
      : route_(route),
        pass_(pass),
        comm_(comm),
        compare_step_(compare_step),
        underway_(underway),
        visitor_(visitor) {}

  void take(const Step& step) {
    switch (step.kind) {
      case Step::start:
        return start(step.move);
      case Step::wait:
        return wait(step.move);
      case Step::exchange:
        return exchange(step.move);
      case Step::visit:
        return visit(step);
      case Step::finish:
        return visitor_.finish();
    }
  }

 private:
  const Move& move(int index) const { return route_.moves[static_cast<std::size_t>(index)]; }
  Stream stream() const { return pass_.run.stream; }

  void start(int index) {
    if (move(index).what == Move::digests)
      underway_.digests() = comm_.start_compare(pass_.digests, stream(), compare_step_);
    else
      underway_.of(index) = visitor_.start(move(index));
  }

  void wait(int index) {
    enter_exchange();
    if (move(index).what == Move::digests)
      underway_.digests().wait(stream());
    else
      underway_.of(index).wait(stream());
    visitor_.arrived(move(index));
  }

  void exchange(int index) {
    enter_exchange();
    if (move(index).what == Move::digests)
      comm_.compare(pass_.digests, stream(), compare_step_);
    else
      visitor_.start(move(index)).wait(stream());
    visitor_.arrived(move(index));
  }

  void enter_exchange() {
    if (!waits_) pass_.run.enter(Phase::exchange);
    waits_ = true;
  }

  void visit(const Step& step) {
    kernels::BetweenTiles between;
    if (step.beside >= 0) between = [beside = &underway_.of(step.beside)] { let_go_on(*beside); };
    waits_ = false;
    if (step.early > 0) comm_.keep_place(stream(), step.early);
    visitor_.visit(step, between);
  }

  const Route& route_;
  const Pass& pass_;
  comm::Transport& comm_;
  const char* compare_step_;
  Underway& underway_;
  Visitor& visitor_;
  bool waits_ = false;  // so that the phase is marked
};

}  // namespace

void Underway::drop() {
  digests_ = {};
  for (comm::Transfers& move : moves_) move = {};
}

void walk(const Route& route, const Pass& pass, comm::Transport& comm, const char* compare_step,
          Underway& underway, Visitor& visitor) {
  Walker walker(route, pass, comm, compare_step, underway, visitor);
  try {
    for (const Step& step : route.steps) walker.take(step);
  } catch (...) {
    comm.forget_place();  // otherwise a later transfer would begin early
    underway.drop();
    throw;
  }
}

}  // namespace longspan

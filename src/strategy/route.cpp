#include "src/strategy/route.hpp"

namespace longspan {
namespace {

/// Builds the route of a ring, step by step.
class RingMaker {
 public:
  RingMaker(const Ring& ring, const IsWanted& is_wanted, Route& route)
      : ring_(ring), is_wanted_(is_wanted), route_(route) {}

  void make() {
    list_moves();
    begin_compare();
    for (int s = 0; s < ring_.ranks;) {
      const bool ends = s == last_ && !ring_.returns_results;
      if (ends) await_all_digests(s);
      const int next = ends && ring_.by_copy_engines ? ring_.ranks : next_of(s);
      visit_beside(s, next);
      if (ring_.returns_results && s > 0) send_results(s);
      if (next < ring_.ranks) {
        await_digests();
        route_.wait(block_move(next));
      }
      s = next;
    }
    if (!ring_.returns_results) return;
    await_digests();
    await_result();
    route_.finish();
  }

 private:
  // Indices of moves: by distance, words last.
  int block_move(int s) const { return s - 1; }
  int result_move(int s) const { return ring_.ranks - 1 + s - 1; }
  const Move& move(int s) const { return route_.moves[static_cast<std::size_t>(block_move(s))]; }
  bool moves(int s) const { return move(s).sends || move(s).receives; }
  bool attends(int s) const { return s == 0 || move(s).receives; }
  int rank_at(int distance) const { return (ring_.rank + distance + ring_.ranks) % ring_.ranks; }

  void list_moves() {
    int came = 0;
    for (int s = 1; s < ring_.ranks; ++s) {
      Move block{.distance = s, .has_digests = ring_.by_copy_engines};
      block.sends = is_wanted_(ring_.rank, rank_at(s));
      block.receives = is_wanted_(rank_at(-s), ring_.rank);
      block.slot = ring_.first_slot + (ring_.by_copy_engines ? s - 1 : came) % ring_.slots;
      if (block.receives) ++came, last_ = s;
      route_.add(block);
    }
    for (int s = 1; ring_.returns_results && s < ring_.ranks; ++s)
      route_.add({.what = Move::results,
                  .distance = ring_.ranks - s,
                  .sends = move(s).receives,
                  .receives = move(s).sends,
                  .slot = s % kResultSlots});
    digests_ = route_.add({.what = Move::digests, .has_digests = true});
  }

  void begin_compare() {
    has_compared_ = ring_.by_copy_engines || ring_.digests_first;
    if (ring_.digests_first)
      route_.exchange(digests_);
    else if (!ring_.by_copy_engines)
      route_.start(digests_);
  }
  /// Waits for the ranks' reports of the run, once, if no block brings them.
  void await_digests() {
    if (!has_compared_) route_.wait(digests_);
    has_compared_ = true;
  }
  /// The same if blocks bring the reports. All blocks then move, because the result needs the
  /// reports of all ranks.
  void await_all_digests(int s) {
    await_digests();
    for (++s; ring_.by_copy_engines && s < ring_.ranks; ++s) {
      if (s > started_) start(s);
      route_.wait(block_move(s));
    }
  }

  /// The next step in which this rank takes part in a move; the number of ranks if there is none.
  /// Moves of results are interleaved with others, in the same order on all ranks, so no step is
  /// skipped there.
  int next_of(int s) const {
    const bool skips = !ring_.by_copy_engines && !ring_.returns_results;
    do ++s;
    while (s < ring_.ranks && skips && !moves(s));
    return s;
  }

  void start(int s) {
    route_.start(block_move(s));
    started_ = s;
  }

  /// Visits the guest of step `s`, if one came, while the moves of `next` run; if they use the same
  /// slot, they run afterwards.
  void visit_beside(int s, int next) {
    const bool all_at_once = ring_.by_copy_engines && ring_.slots == ring_.ranks - 1;
    const int end = all_at_once ? ring_.ranks : next + 1;  // of the moves that start now
    const bool sets_out = next < ring_.ranks && next > started_;
    const bool behind =
        sets_out && s > 0 && attends(s) && move(next).receives && move(s).slot == move(next).slot;
    // Copy engines do not occupy multiprocessors, and the visit takes longest.
    const bool early = sets_out && !behind && ring_.by_copy_engines && attends(s);
    const auto start_next = [&] {
      for (int t = next; t < end; ++t) start(t);
    };
    if (sets_out && !behind && !early) start_next();
    if (attends(s))
      visit(s, next < ring_.ranks && !behind ? block_move(next) : -1, early ? end - next : 0);
    if (behind || early) start_next();
  }

  void visit(int s, int beside, int early) {
    route_.steps.push_back({.kind = Step::visit,
                            .guest = s,
                            .slot = s == 0 ? 0 : move(s).slot,
                            .result_slot = s % kResultSlots,
                            .beside = beside,
                            .early = early,
                            .ends = s == last_ && !ring_.returns_results});
  }

  /// Waits for the last result that was sent, and for the one that came with it.
  void await_result() {
    if (leaving_ > 0) route_.wait(result_move(leaving_));
    leaving_ = 0;
  }
  /// Results arrive one at a time, so that they need one slot.
  void send_results(int s) {
    await_result();
    route_.start(result_move(s));
    leaving_ = s;
  }

  static constexpr int kResultSlots = 2;

  const Ring& ring_;
  const IsWanted& is_wanted_;
  Route& route_;
  int digests_ = 0;
  int last_ = 0;     // the step of the last guest; 0: there is none
  int started_ = 0;  // the last step whose moves have started
  bool has_compared_ = false;
  int leaving_ = 0;  // the step whose result is on its way; 0: none
};

}  // namespace

Route::Route(int ranks) {
  moves.reserve(most_moves(ranks));
  // Each move has one start, one wait and at most one visit.
  steps.reserve(3 * most_moves(ranks));
}

void Route::clear() {
  moves.clear();
  steps.clear();
}

int Route::add(const Move& move) {
  moves.push_back(move);
  return static_cast<int>(moves.size()) - 1;
}

void make_ring(const Ring& ring, const IsWanted& is_wanted, Route& route) {
  route.clear();
  RingMaker(ring, is_wanted, route).make();
}

namespace {

/// Every block by itself, all at once; the ranks' reports go before them.
void gather_by_shifts(const Gather& gather, Route& route) {
  route.start(route.add({.what = Move::digests, .has_digests = true}));
  for (int s = 1; s < gather.ranks; ++s) route.start(route.add({.distance = s, .slot = s}));
  for (int move = 0; move < gather.ranks; ++move) route.wait(move);
}

}  // namespace

void make_gather(const Gather& gather, Route& route) {
  route.clear();
  if (gather.parts == 0) gather_by_shifts(gather, route);
  for (int part = 0; part < gather.parts; ++part) {
    const int move = route.add({.part = part, .has_digests = true});
    if (gather.beside)
      route.start(move);
    else
      route.exchange(move);
  }
  const bool ends = gather.result_parts == 0;
  route.steps.push_back(
      {.kind = Step::visit, .guest = Step::kAll, .beside = gather.beside ? 0 : -1, .ends = ends});
  if (gather.beside) route.wait(0);
  if (ends) return;
  for (int part = 0; part < gather.result_parts; ++part)
    route.exchange(route.add({.what = Move::results, .part = part}));
  route.finish();
}

}  // namespace longspan

// Walks the routes of all ranks together, without kernels: every sent message is received, no wait
// is endless, every needed block is visited once, and none is overwritten before that.
#include "src/strategy/route.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace longspan {
namespace {

constexpr int kMostRanks = 8;

/// Which rank needs which rank's block: [from][to].
struct Wanted {
  std::vector<std::vector<bool>> by;
  bool operator()(int from, int to) const {
    return by[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  }
};

Wanted wanted_where(int ranks, const std::function<bool(int, int)>& rule) {
  Wanted wanted;
  for (int from = 0; from < ranks; ++from) {
    wanted.by.emplace_back();
    for (int to = 0; to < ranks; ++to) wanted.by.back().push_back(rule(from, to));
  }
  return wanted;
}
Wanted all_wanted(int ranks) {
  return wanted_where(ranks, [](int, int) { return true; });
}

/// One rank's state in a walk.
struct Rank {
  Route route;
  std::size_t next = 0;         // step
  std::vector<int> started;     // moves, in this order
  std::size_t ended = 0;        // of them, the number
  std::set<int> waited;         // moves
  std::map<int, int> guests;    // by slot: whose block is there, not visited yet
  std::map<int, int> results;   // by slot: of whose block, made and not sent yet
  std::multiset<int> visited;   // whose blocks
  std::multiset<int> returned;  // ranks whose result for the own block has come
  std::set<int> heard;          // whose digests
  bool results_of_all = false;  // are made, of all blocks together
  int results_made = 0;
};

/// Walks the routes of all ranks step by step. As between GPUs, a rank's moves run one after the
/// other in the order of their starts, and one ends when its ranks have come to it too. So a route
/// that waits too early, or ranks that start in different orders, stand still.
class World {
 public:
  World(int ranks, const Wanted& wanted, const std::function<void(int, Route&)>& make)
      : wanted_(wanted), ranks_(static_cast<std::size_t>(ranks)) {
    for (int r = 0; r < ranks; ++r) {
      Route route(ranks);
      const auto* moves = route.moves.data();
      const auto* steps = route.steps.data();
      make(r, route);
      if (route.moves.data() != moves || route.steps.data() != steps)
        wrong("rank ", r, " allocates when its route is made");
      at(r).route = std::move(route);
      at(r).heard.insert(r);
    }
  }

  /// The first error; empty where all is well.
  const std::string& walk() {
    match_moves();
    bool moves = true;
    while (moves && wrong_.empty()) {
      moves = false;
      for (int r = 0; r < size(); ++r)
        while (wrong_.empty() && take(r)) moves = true;
    }
    for (int r = 0; r < size() && wrong_.empty(); ++r) end(r);
    return wrong_;
  }

 private:
  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& at(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  int around(int r) const { return (r % size() + size()) % size(); }
  template <class... Words>
  void wrong(const Words&... words) {
    if (!wrong_.empty()) return;
    std::ostringstream out;
    (out << ... << words);
    wrong_ = out.str();
  }
  const Move& move(int r, int index) { return at(r).route.moves[static_cast<std::size_t>(index)]; }

  /// The move of rank `other` that is the other end of a move; -1 where it has none.
  int same_at(int other, const Move& one) {
    const std::vector<Move>& moves = at(other).route.moves;
    for (std::size_t i = 0; i < moves.size(); ++i)
      if (moves[i].what == one.what && moves[i].distance == one.distance &&
          moves[i].part == one.part)
        return static_cast<int>(i);
    return -1;
  }

  void match_moves() {
    for (int r = 0; r < size(); ++r)
      for (const Move& one : at(r).route.moves) {
        if (one.distance == 0) {
          for (int other = 0; other < size(); ++other)
            if (same_at(other, one) < 0) wrong("rank ", other, " has no part in a move of all");
          continue;
        }
        const int to = around(r + one.distance), index = same_at(to, one);
        if (index < 0) return wrong("rank ", to, " knows no move from rank ", r);
        const Move& there = move(to, index);
        if (there.receives != one.sends)
          wrong("rank ", r, " sends ", one.sends, ", and rank ", to, " receives ", there.receives);
        if (there.has_digests != one.has_digests) wrong("digests of rank ", r, " are not expected");
        // Copy engines write where the sender would receive.
        if (one.has_digests && there.slot != one.slot) wrong("rank ", r, " writes another slot");
        if (one.what == Move::blocks && one.sends != wanted_(r, to))
          wrong("the block of rank ", r, " sets out to rank ", to, ": ", one.sends);
      }
  }

  /// Takes the next step of a rank; false where it must wait, or has ended.
  bool take(int r) {
    Rank& rank = at(r);
    if (rank.next == rank.route.steps.size()) return false;
    const Step& step = rank.route.steps[rank.next];
    switch (step.kind) {
      case Step::start:
        start(r, step.move);
        break;
      case Step::exchange:
        if (!has_started(r, step.move)) start(r, step.move);
        [[fallthrough]];
      case Step::wait:
        if (!has_started(r, step.move)) wrong("rank ", r, " waits for what never started");
        if (rank.waited.contains(step.move)) wrong("rank ", r, " waits twice");
        if (!wrong_.empty() || !has_come(r, step.move)) return false;
        end_move(r, step.move);
        break;
      case Step::visit:
        visit(r, step);
        break;
      case Step::finish:
        finish(r);
        break;
    }
    ++rank.next;
    return true;
  }

  void start(int r, int index) {
    Rank& rank = at(r);
    const Move& one = move(r, index);
    if (has_started(r, index)) wrong("rank ", r, " starts a move twice");
    rank.started.push_back(index);
    if (one.distance == 0) {
      if (one.what == Move::results && !rank.results_of_all)
        wrong("rank ", r, " sends home what it has not made");
      return;
    }
    const int from = around(r - one.distance);
    if (one.what == Move::blocks && one.receives) {
      if (rank.guests.contains(one.slot)) wrong("rank ", r, " overwrites a guest");
      rank.guests[one.slot] = from;
    }
    if (one.what == Move::results && one.sends) {
      const int to = around(r + one.distance);
      if (!rank.results.contains(one.slot) || rank.results[one.slot] != to)
        wrong("rank ", r, " sends home what it has not made");
    }
  }

  /// Whether a rank has come to its side of another one's move.
  bool is_there(int r, const Move& one) {
    const std::vector<int>& started = at(r).started;
    const auto found = std::find(started.begin(), started.end(), same_at(r, one));
    return found != started.end() &&
           found - started.begin() <= static_cast<std::ptrdiff_t>(at(r).ended);
  }
  bool can_end(int r, const Move& one) {
    if (one.distance == 0) {
      for (int other = 0; other < size(); ++other)
        if (!is_there(other, one)) return false;
      return true;
    }
    const bool hears = one.receives || one.has_digests, says = one.sends || one.has_digests;
    return (!hears || is_there(around(r - one.distance), one)) &&
           (!says || is_there(around(r + one.distance), one));
  }
  /// Moves the transfers of all ranks as far as they can.
  void go_on() {
    bool more = true;
    while (more) {
      more = false;
      for (int r = 0; r < size(); ++r)
        while (at(r).ended < at(r).started.size() &&
               can_end(r, move(r, at(r).started[at(r).ended]))) {
          ++at(r).ended;
          more = true;
        }
    }
  }
  bool has_started(int r, int index) {
    const std::vector<int>& started = at(r).started;
    return std::find(started.begin(), started.end(), index) != started.end();
  }
  bool has_come(int r, int index) {
    go_on();
    const std::vector<int>& started = at(r).started;
    return std::find(started.begin(), started.end(), index) - started.begin() <
           static_cast<std::ptrdiff_t>(at(r).ended);
  }

  void end_move(int r, int index) {
    Rank& rank = at(r);
    const Move& one = move(r, index);
    rank.waited.insert(index);
    for (int other = 0; other < size(); ++other)
      if (one.has_digests && (one.distance == 0 || other == around(r - one.distance)))
        rank.heard.insert(other);
    if (one.what == Move::results && one.distance != 0 && one.receives)
      rank.returned.insert(around(r - one.distance));
    if (one.what == Move::results && one.sends) rank.results.erase(one.slot);
  }

  void visit(int r, const Step& step) {
    Rank& rank = at(r);
    if (step.early > 0) begin_early(r, step);
    if (step.beside >= 0 && !has_started(r, step.beside) && step.early == 0)
      wrong("rank ", r, " attends beside what has not started");
    if (step.guest == Step::kAll) {
      visit_all(r, step);
    } else if (step.guest == Step::kOwn) {
      rank.visited.insert(r);
    } else {
      visit_guest(r, step);
    }
    if (step.ends) result(r);
  }

  /// The moves of the next steps begin beside this visit, and must not touch its guest.
  void begin_early(int r, const Step& step) {
    const std::vector<Step>& steps = at(r).route.steps;
    for (int i = 1; i <= step.early; ++i) {
      const std::size_t other = at(r).next + static_cast<std::size_t>(i);
      if (other >= steps.size() || steps[other].kind != Step::start)
        return wrong("rank ", r, " keeps a place for what does not start");
      const Move& one = move(r, steps[other].move);
      if (step.guest > 0 && one.receives && one.slot == step.slot)
        wrong("rank ", r, " overwrites the guest that it attends to");
    }
  }

  void visit_guest(int r, const Step& step) {
    Rank& rank = at(r);
    const int from = around(r - step.guest);
    const int index = same_at(r, {.what = Move::blocks, .distance = step.guest});
    if (index < 0 || !rank.waited.contains(index)) wrong("rank ", r, " visits who has not come");
    if (!rank.guests.contains(step.slot) || rank.guests[step.slot] != from)
      return wrong("rank ", r, " looks for the guest in another slot");
    rank.guests.erase(step.slot);
    rank.visited.insert(from);
    if (same_at(r, {.what = Move::results, .distance = size() - step.guest}) < 0) return;
    if (rank.results.contains(step.result_slot)) wrong("rank ", r, " overwrites what leaves");
    rank.results[step.result_slot] = from;
  }

  void visit_all(int r, const Step& step) {
    Rank& rank = at(r);
    for (std::size_t i = 0; i < rank.route.moves.size(); ++i) {
      const auto index = static_cast<int>(i);
      if (move(r, index).what == Move::blocks && index != step.beside &&
          !rank.waited.contains(index))
        wrong("rank ", r, " attends to what has not come");
    }
    for (int p = 0; p < size(); ++p) rank.visited.insert(p);
    rank.guests.clear();
    rank.results_of_all = true;
  }

  void finish(int r) {
    for (int host = 0; host < size(); ++host) {
      if (at(r).results_of_all) break;
      const bool was_there = host != r && wanted_(r, host);
      if (at(r).returned.count(host) != (was_there ? 1u : 0u))
        wrong("rank ", r, " has from rank ", host,
              " so many results: ", at(r).returned.count(host));
    }
    result(r);
  }

  void result(int r) {
    Rank& rank = at(r);
    ++rank.results_made;
    // Beside a visit the kernel itself compares the digests.
    bool beside = false;
    for (const Step& step : rank.route.steps)
      beside |= step.guest == Step::kAll && step.beside >= 0;
    if (!beside && rank.heard.size() != ranks_.size())
      wrong("rank ", r, " makes a result and has not heard all");
    for (int from = 0; from < size(); ++from) {
      const std::size_t wants = from == r || wanted_(from, r) ? 1 : 0;
      if (rank.visited.count(from) != wants)
        wrong("rank ", r, " has visited rank ", from, " so often: ", rank.visited.count(from));
    }
  }

  void end(int r) {
    Rank& rank = at(r);
    if (rank.next != rank.route.steps.size())
      return wrong("rank ", r, " waits for ever in step ", rank.next);
    if (rank.results_made != 1) wrong("rank ", r, " makes results: ", rank.results_made);
    if (rank.started.size() != rank.waited.size())
      wrong("rank ", r, " does not wait for all that it starts");
    if (!rank.guests.empty() || !rank.results.empty())
      wrong("rank ", r, " leaves something behind");
  }

  const Wanted& wanted_;
  std::vector<Rank> ranks_;
  std::string wrong_;
};

/// The routes of strategies, and other valid ones.
std::vector<std::pair<std::string, Ring>> rings(int ranks) {
  const int steps = std::max(ranks - 1, 1);
  return {{"ring-kv", {.slots = 2}},
          {"ring-kv, own keys copied", {.slots = 1, .first_slot = 1}},
          {"ring-kv, by copy engines", {.slots = std::min(2, steps), .by_copy_engines = true}},
          {"ring-kv, all at once", {.slots = steps, .by_copy_engines = true}},
          {"ring-kv, by copy engines, one slot", {.slots = 1, .by_copy_engines = true}},
          {"ring-q", {.digests_first = true, .returns_results = true}},
          {"ring-q, one slot", {.slots = 1, .returns_results = true}},
          {"ring-q, by copy engines",
           {.slots = std::min(2, steps), .by_copy_engines = true, .returns_results = true}}};
}

void expect_ring(const std::string& name, Ring ring, const Wanted& wanted) {
  const int ranks = ring.ranks;
  World world(ranks, wanted, [&](int rank, Route& route) {
    ring.rank = rank;
    make_ring(ring, wanted, route);
  });
  EXPECT_EQ(world.walk(), "") << name << " of " << ranks;
}

TEST(Ring, BringsEveryBlockToWhoWantsIt) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks)
    for (auto [name, ring] : rings(ranks)) {
      ring.ranks = ranks;
      expect_ring(name, ring, all_wanted(ranks));
      expect_ring(name + ", causal", ring,
                  wanted_where(ranks, [](int from, int to) { return from <= to; }));
      expect_ring(name + ", own alone", ring,
                  wanted_where(ranks, [](int from, int to) { return from == to; }));
      expect_ring(name + ", a window", ring, wanted_where(ranks, [](int from, int to) {
                    return from == to || from + 1 == to;
                  }));
    }
}

TEST(Ring, BringsThemWhoeverWantsThem) {
  std::mt19937 random(20261129);
  for (int ranks = 2; ranks <= kMostRanks; ++ranks)
    for (auto [name, ring] : rings(ranks)) {
      ring.ranks = ranks;
      for (int i = 0; i < 200; ++i) {
        const unsigned share = 1 + random() % 7;
        expect_ring(name, ring,
                    wanted_where(ranks, [&](int, int) { return random() % 8 < share; }));
        if (HasFailure()) return;
      }
    }
}

TEST(Gather, BringsEveryBlockToAll) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks)
    for (const Gather& gather :
         {Gather{.parts = 0}, Gather{.parts = 2}, Gather{.parts = 1, .beside = true},
          Gather{.parts = 1}, Gather{.parts = 2, .result_parts = 1},
          Gather{.parts = 3, .result_parts = 1}, Gather{.parts = 3},
          Gather{.parts = 1, .result_parts = 1, .beside = true},
          Gather{.parts = 0, .result_parts = 2}}) {
      const Wanted wanted = all_wanted(ranks);
      World world(ranks, wanted, [&](int, Route& route) {
        Gather own = gather;
        own.ranks = ranks;
        make_gather(own, route);
      });
      EXPECT_EQ(world.walk(), "") << gather.parts << " parts of " << ranks;
    }
}

/// A route as text.
std::string text_of(const Route& route) {
  std::ostringstream out;
  const auto name = [&](int index) {
    const Move& one = route.moves[static_cast<std::size_t>(index)];
    const std::string what = one.what == Move::digests  ? "digests"
                             : one.what == Move::blocks ? ""
                                                        : "results ";
    if (one.what == Move::digests) return what;
    if (one.distance == 0) return what + "part " + std::to_string(one.part);
    return what + std::to_string(one.distance) + " slot " + std::to_string(one.slot);
  };
  for (const Step& step : route.steps) {
    switch (step.kind) {
      case Step::start:
        out << "start " << name(step.move);
        break;
      case Step::wait:
        out << "wait " << name(step.move);
        break;
      case Step::exchange:
        out << "exchange " << name(step.move);
        break;
      case Step::finish:
        out << "finish";
        break;
      case Step::visit:
        out << "visit ";
        step.guest == Step::kAll ? out << "all" : out << step.guest;
        if (step.beside >= 0) out << " beside " << name(step.beside);
        if (step.early > 0) out << ", early " << step.early;
        if (step.ends) out << ", ends";
    }
    out << '\n';
  }
  return out.str();
}

std::string ring_in_words(Ring ring, const Wanted& wanted) {
  Route route(ring.ranks);
  make_ring(ring, wanted, route);
  return text_of(route);
}

/// While a rank attends to one block the next one comes.
TEST(Ring, ComesBesideVisits) {
  EXPECT_EQ(ring_in_words({.ranks = 3}, all_wanted(3)),
            "start digests\nstart 1 slot 0\nvisit 0 beside 1 slot 0\nwait digests\nwait 1 slot 0\n"
            "start 2 slot 1\nvisit 1 beside 2 slot 1\nwait 2 slot 1\nvisit 2, ends\n");
  EXPECT_EQ(ring_in_words({.ranks = 3, .slots = 1, .first_slot = 1}, all_wanted(3)),
            "start digests\nstart 1 slot 1\nvisit 0 beside 1 slot 1\nwait digests\nwait 1 slot 1\n"
            "visit 1\nstart 2 slot 1\nwait 2 slot 1\nvisit 2, ends\n");
  EXPECT_EQ(ring_in_words({.ranks = 3, .slots = 2, .by_copy_engines = true}, all_wanted(3)),
            "visit 0 beside 1 slot 0, early 2\nstart 1 slot 0\nstart 2 slot 1\nwait 1 slot 0\n"
            "visit 1 beside 2 slot 1\nwait 2 slot 1\nvisit 2, ends\n");
  EXPECT_EQ(
      ring_in_words({.ranks = 3, .digests_first = true, .returns_results = true}, all_wanted(3)),
      "exchange digests\nstart 1 slot 0\nvisit 0 beside 1 slot 0\nwait 1 slot 0\nstart 2 slot 1\n"
      "visit 1 beside 2 slot 1\nstart results 2 slot 1\nwait 2 slot 1\nvisit 2\n"
      "wait results 2 slot 1\nstart results 1 slot 0\nwait results 1 slot 0\nfinish\n");
}

/// Guests use the slots in turn, whatever else is sent.
TEST(Ring, ComesBesideVisitsToWhoSendsNothing) {
  const Wanted wanted = wanted_where(3, [](int from, int to) { return from > 0 || to == 0; });
  EXPECT_EQ(ring_in_words({.ranks = 3}, wanted), ring_in_words({.ranks = 3}, all_wanted(3)));
}

/// A rank that receives no block goes on at once, and has the others' digests before its result.
TEST(Ring, LeavesOutWhatNobodyWants) {
  const Wanted own = wanted_where(3, [](int from, int to) { return from == to; });
  EXPECT_EQ(ring_in_words({.ranks = 3}, own), "start digests\nwait digests\nvisit 0, ends\n");
  EXPECT_EQ(ring_in_words({.ranks = 3, .by_copy_engines = true}, own),
            "start 1 slot 0\nwait 1 slot 0\nstart 2 slot 1\nwait 2 slot 1\nvisit 0, ends\n");
}

std::string gather_in_words(const Gather& gather) {
  Route route(gather.ranks);
  make_gather(gather, route);
  return text_of(route);
}

TEST(Gather, ComesAheadOfTheVisitOrBesideIt) {
  EXPECT_EQ(gather_in_words({.ranks = 3}),
            "start digests\nstart 1 slot 1\nstart 2 slot 2\nwait digests\nwait 1 slot 1\n"
            "wait 2 slot 2\nvisit all, ends\n");
  EXPECT_EQ(gather_in_words({.ranks = 3, .parts = 3, .result_parts = 1}),
            "exchange part 0\nexchange part 1\nexchange part 2\nvisit all\n"
            "exchange results part 0\nfinish\n");
  EXPECT_EQ(gather_in_words({.ranks = 3, .parts = 1, .beside = true}),
            "start part 0\nvisit all beside part 0, ends\nwait part 0\n");
}

}  // namespace
}  // namespace longspan

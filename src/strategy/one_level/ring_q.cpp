// The strategy ring-q: keys do not travel. The rows of sharded queries travel to them, and their
// states come back.
//
//     for s = 1 ... P - 1:  state = attend(rows of rank - s, my keys)   while those of rank - s - 1
//     arrive, and the state of rank - s + 1 returns
//     out = merge(every rank's state of my rows)
//
// Every rank sends its own rows, in step s to rank + s; rows that see no key of a rank do not
// travel to it. A state waits in the slot of its keys' rank for the one merge at the end, the same
// as that of gather-states: it does not depend on the order of arrival.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "longspan/error.hpp"
#include "src/base/at.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/row_gradients.hpp"
#include "src/strategy/shared/row_starts.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class RingQ final : public Strategy {
 public:
  explicit RingQ(const LayerContext& layer)
      : layer_(layer),
        rows_(layer),
        starts_(layer),
        row_steps_(1),
        state_steps_(1),
        route_(ranks()),
        underway_(ranks()) {
    states_.emplace(layer_.kernels, layer_.bounds, ranks());
    if (layer_.options.gradients) gradients_.emplace(layer_, rows_, starts_);
    for (int s = 1; s < ranks(); ++s) {
      row_steps_.push_back(fmt::format("ring of queries, step {} of {}", s, ranks() - 1));
      state_steps_.push_back(fmt::format("ring of states, step {} of {}", s, ranks() - 1));
    }
  }

  void lay_out(Parts& memory) override {
    const std::int64_t most = layer_.bounds.tokens;
    states_->lay_out(memory);
    if (gradients_) gradients_->lay_out(memory);
    if (ranks() == 1) return;
    starts_.lay_out(memory);
    if (layer_.kernels.device() != Device::host) sent_ = memory.take(at(most * rows_.row_bytes()));
    for (std::byte*& slot : leaving_) slot = take_slot(memory);
    for (std::byte*& rows : visiting_) rows = memory.take(at(most * rows_.row_bytes()));
  }

  void backward(Pass& pass, const GradientArgs& args) override { gradients_->backward(pass, args); }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  /// Two phases per step, and two around them.
  int most_marks() const override { return 3 * ranks() + 4; }

  void prepare(Pass& pass) override {
    const Run& run = pass.run;
    check(run);
    pass.keys_travel = ranks() > 1;
    std::int64_t rows =
        pass.attend.tokens;  // of a slot: what the other ranks use for this rank's rows
    if (ranks() > 1) rows = rows_.rows_of(run, rank());
    pass.attend.tokens = std::min(pass.attend.tokens, rows);
    states_->give(pass, rank(), rows);
    pass.merge.interleaved = run.arrays.keys.layout == Layout::interleaved;
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    run.enter(Phase::attend);
    if (ranks() == 1) return pass.attend_to(pass.merge, Phase::merge, layer_.kernels);
    pass.write_own_digest(layer_.kernels);
    append_new_keys(layer_, pass);
    find_starts(pass);
    make_route(run);
    if (own_rows(run) == sent_)
      layer_.kernels.place_rows({static_cast<const std::byte*>(run.args.q.data), sent_, nullptr,
                                 run.args.q.shape[0], rows_.row_bytes()},
                                run.stream);
    Forward forward(*this, pass);
    walk(route_, pass, layer_.comm, "ring of queries, agreement", underway_, forward);
  }

 private:
  /// Computes states of guests, which return to their ranks, and of the rank's own rows, and merges
  /// the latter.
  class Forward final : public Visitor {
   public:
    Forward(const RingQ& ring, const Pass& pass) : ring_(ring), pass_(pass) {}

    comm::Transfers start(const Move& move) override {
      return move.what == Move::blocks ? ring_.start_rows(pass_.run, move)
                                       : ring_.start_states(pass_, move);
    }

    void visit(const Step& step, const kernels::BetweenTiles& between) override {
      pass_.run.enter(Phase::attend);
      ring_.attend(pass_, step, between);
      if (step.guest == Step::kOwn) ring_.write_empty(pass_);
    }

    void finish() override {
      pass_.run.enter(Phase::merge);
      ring_.layer_.kernels.merge(pass_.merge, pass_.run.stream);
    }

   private:
    const RingQ& ring_;
    const Pass& pass_;
  };

  int rank() const { return layer_.comm.rank(); }
  int ranks() const { return layer_.comm.size(); }
  /// The rank whose rows are here in step s, and the rank that has this rank's rows.
  int guest(int s) const { return (rank() - s + ranks()) % ranks(); }
  int host(int s) const { return (rank() + s) % ranks(); }

  std::byte* take_slot(Parts& memory) const {
    const kernels::AttendParams& bounds = layer_.bounds;
    return memory.take(
        at(kernels::StateSlots::bytes(bounds.tokens * bounds.heads, bounds.value_dim)));
  }

  void check(const Run& run) const {
    const auto refuse = [](const char* what) {
      throw Unsupported(fmt::format("strategy ring-q does not take {}; gather-states does", what));
    };
    const Layout layout = run.arrays.queries.layout;
    if (layout == Layout::listed) refuse("listed query rows");
    if (layout == Layout::ranges && ranks() > 1 && layer_.kernels.device() != Device::host)
      refuse("ranges of query rows on a GPU");
  }

  /// Makes the route of the rows.
  void make_route(const Run& run) {
    make_ring(
        {.ranks = ranks(), .rank = rank(), .digests_first = true, .returns_results = true},
        [&](int rows, int keys) {
          return rows_.rows_of(run, rows) > 0 && may_see(run, layer_.kernels.device(), rows, keys);
        },
        route_);
  }

  /// Computes the starts of sequences in each rank's rows, and points the pass at its own.
  void find_starts(Pass& pass) const {
    const Run& run = pass.run;
    starts_.find(run);
    starts_.give(run, rank(), pass.attend.batch);
    if (run.arrays.query_start != nullptr) pass.merge.batch.size = run.arrays.batch;
    starts_.give(run, rank(), pass.merge.batch);
  }

  /// This rank's rows for sending: in place, or in a copy if they are fewer than the bound that
  /// travels.
  const void* own_rows(const Run& run) const {
    return run.args.q.shape[0] < rows_.rows_of(run, rank()) ? sent_ : run.args.q.data;
  }

  comm::Transfers start_rows(const Run& run, const Move& move) const {
    const auto bytes = [&](bool moves, int rank) {
      return moves ? at(rows_.rows_of(run, rank) * rows_.row_bytes()) : 0;
    };
    const comm::Piece rows{own_rows(run), bytes(move.sends, rank()), visiting_[at(move.slot)],
                           bytes(move.receives, guest(move.distance))};
    return layer_.comm.start_shifts({&rows, 1}, move.distance, run.stream,
                                    row_steps_[at(move.distance)].c_str());
  }

  /// Sends the guest's states back, and receives this rank's own from the rank that had its rows.
  comm::Transfers start_states(const Pass& pass, const Move& move) const {
    const int s = ranks() - move.distance;
    const kernels::StateSlots& own = pass.attend.state;
    const std::size_t sent = at(slot_of(rows_.rows_of(pass.run, guest(s)), nullptr).slot_bytes());
    const comm::Piece states{leaving_[at(move.slot)], move.sends ? sent : 0,
                             own.data + host(s) * own.slot_bytes(),
                             move.receives ? at(own.slot_bytes()) : 0};
    return layer_.comm.start_shifts({&states, 1}, move.distance, pass.run.stream,
                                    state_steps_[at(s)].c_str());
  }

  kernels::StateSlots slot_of(std::int64_t rows, std::byte* data) const {
    return {data, rows * layer_.bounds.heads, layer_.bounds.value_dim, 1};
  }

  /// Attends with the guest's rows to this rank's keys.
  void attend(const Pass& pass, const Step& step, const kernels::BetweenTiles& between) const {
    const kernels::AttendParams& bounds = layer_.bounds;
    const Run& run = pass.run;
    kernels::AttendParams p = pass.attend;
    if (step.guest != Step::kOwn) {
      p.tokens = rows_.rows_of(run, guest(step.guest));
      p.queries = run.arrays.queries.with_rank(guest(step.guest));
      starts_.give(run, guest(step.guest), p.batch);
      p.q = {visiting_[at(step.slot)], std::int64_t{bounds.heads} * bounds.head_dim,
             bounds.head_dim};
      p.state = slot_of(p.tokens, leaving_[at(step.result_slot)]);
      p.slot = 0;
    }
    layer_.kernels.attend(p, kernels::StateEpilogue{}, run.stream, {}, between);
  }

  /// Writes empty states of this rank's rows into the slots of ranks whose keys no row sees: they
  /// attend to a share without keys. (The owner's own share would not work: a tile of rows may
  /// reach over keys that none of its rows sees.)
  void write_empty(const Pass& pass) const {
    constexpr std::int64_t kBeyondAnyLength = std::numeric_limits<std::int32_t>::max();
    kernels::AttendParams p = pass.attend;
    p.shard = Shard::interleaved(p.shard.length, 1, 2, kBeyondAnyLength);
    for (const Move& move : route_.moves) {
      if (move.what != Move::blocks || move.sends) continue;
      p.slot = host(move.distance);
      layer_.kernels.attend(p, pass.run.stream);
    }
  }

  LayerContext layer_;
  DealtRows rows_;
  RowStarts starts_;
  std::optional<RowGradients> gradients_;             // with Options::gradients
  std::vector<std::string> row_steps_, state_steps_;  // names of steps, by distance
  Route route_;                                       // of the current run
  Underway underway_;
  std::optional<StateMemory> states_;     // [ranks] slots of this rank's rows
  std::byte* sent_ = nullptr;             // on GPUs: this rank's rows, up to a bound
  std::array<std::byte*, 2> leaving_{};   // slots of a guest's rows
  std::array<std::byte*, 2> visiting_{};  // a guest's rows
};

std::string refusal(const Options& options, int ranks) {
  if (std::string parts = refuse_parts(options); !parts.empty()) return parts;
  if (ranks == 1) return "";
  if (!options.queries)
    return "it sends the rows of sharded queries (Options::queries); others have none to send";
  if (options.exchange != Exchange::automatic && options.exchange != Exchange::gather)
    return fmt::format("it sends rows and their states, and does not take exchange {}",
                       name(options.exchange));
  return "";
}

/// Counts the slots of this rank's rows, and two of guests with their rows. If all rows see keys of
/// all ranks, everything travels; a mask reduces that.
RunCost cost(const Options& options, int ranks, const RunSize& size, Device device) {
  const double rows = options.queries ? size.most_tokens : size.tokens;
  const double slot = state_slot_bytes(options, rows, options.heads);
  const double gradients = RowGradients::workspace_bytes(options, ranks, size, device);
  if (ranks == 1) return {.workspace_bytes = slot + gradients};
  const double queries = rows * query_row_bytes(options), others = ranks - 1;
  return {.received_bytes = others * (queries + slot),
          .workspace_bytes = (ranks + 2) * slot + 2 * queries + gradients,
          .overlapped_bytes = others * queries + (others - 1) * slot,
          .messages = 2,
          .work = 1.0 / ranks,
          .calls = static_cast<double>(ranks),
          .merged_bytes = ranks * slot,
          .copied_bytes = rows * query_row_bytes(options),
          .backward = RowGradients::cost(options, ranks, size)};
}

}  // namespace

StrategyEntry ring_q() {
  return {.info = {"ring-q", "its own rows", "its own rows",
                   "(P-1)/P T heads (head_dim b + 4 (value_dim + 2))"},
          .preference = 5,
          .keeps_order = [](const Options&, int) { return true; },
          .gradients = GradientsOf::sharded_queries,
          .takes_tables = false,
          .sends_rows_back = true,
          .balanced = [](const Options&) { return Balanced::by_keys; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<RingQ>(layer);
          }};
}

}  // namespace longspan

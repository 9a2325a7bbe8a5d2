// The strategy ring-q: keys stay where they are, the rows of sharded queries travel to them, and
// their states come back.
//
//     for s = 1 ... P - 1:  state = attend(rows of rank - s, my keys)   while those of rank - s - 1
//     come, and the state of rank - s + 1 goes home
//     out = merge(every rank's state of my rows)
//
// Every rank sends its own rows, in step s to rank + s; rows that see no key of a rank do not
// travel to it. A state waits in its keys' rank's slot for the one merge at the end, which is that
// of gather-states: it does not depend on who was first.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "longspan/error.hpp"
#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class RingQ final : public Strategy {
 public:
  explicit RingQ(const Layer& layer)
      : layer_(layer), rows_(layer), steps_(static_cast<std::size_t>(ranks())) {
    states_.emplace(layer_.kernels, layer_.bounds, ranks());
    for (int s = 1; s < ranks(); ++s) {
      steps_[at(s)].rows = fmt::format("ring of queries, step {} of {}", s, ranks() - 1);
      steps_[at(s)].states = fmt::format("ring of states, step {} of {}", s, ranks() - 1);
    }
  }

  void lay_out(Parts& memory) override {
    const std::int64_t most = layer_.bounds.tokens, batch = layer_.bounds.batch.size;
    states_->lay_out(memory);
    if (ranks() == 1) return;
    starts_ = memory.take_array<std::int32_t>(at(ranks() * (batch + 1)));
    if (layer_.kernels.device() != Device::host) sent_ = memory.take(at(most * rows_.row_bytes()));
    for (std::byte*& slot : leaving_) slot = take_slot(memory);
    for (std::byte*& rows : visiting_) rows = memory.take(at(most * rows_.row_bytes()));
  }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  /// Two phases a step, and two around them.
  int most_marks() const override { return 3 * ranks() + 4; }

  void prepare(Pass& pass) override {
    const Run& run = pass.run;
    check(run);
    pass.keys_travel = ranks() > 1;
    std::int64_t rows =
        pass.attend.tokens;  // of a slot: as many as the others take for this rank's
    if (ranks() > 1) rows = rows_.rows_of(run, rank());
    pass.attend.tokens = std::min(pass.attend.tokens, rows);
    states_->give(pass, rank(), rows);
    pass.merge.interleaved = run.arrays.keys.layout == Layout::interleaved;
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    const kernels::AttentionKernels& kernels = layer_.kernels;
    run.enter(Phase::attend);
    if (ranks() == 1) return pass.attend_to(pass.merge, Phase::merge, kernels);
    pass.say_to(kernels);
    append_new_keys(layer_, pass);
    find_starts(pass);
    plan(run);

    run.enter(Phase::exchange);
    if (pass.said)
      layer_.comm.all_gather(nullptr, nullptr, 0, run.stream, "ring of queries, agreement",
                             pass.said);
    if (own_rows(run) == sent_)
      layer_.kernels.place_rows({static_cast<const std::byte*>(run.args.q.data), sent_, nullptr,
                                 run.args.q.shape[0], rows_.row_bytes()},
                                run.stream);
    comm::Transfer coming = start_rows(run, 1);
    std::array<comm::Transfer, 2> going;
    run.enter(Phase::attend);
    attend(run, pass.attend, coming);
    for (int s = 1; s < ranks(); ++s) {
      run.enter(Phase::exchange);
      coming.wait(run.stream);
      if (s + 1 < ranks()) coming = start_rows(run, s + 1);
      comm::Transfer& home = going[at(s % 2)];
      home.wait(run.stream);  // of two steps before, from the same slot
      run.enter(Phase::attend);
      if (steps_[at(s)].comes) attend(run, guest_params(pass, s), coming);
      if (!steps_[at(s)].goes) write_empty(pass, host(s));
      run.enter(Phase::exchange);
      home = start_states(pass, s);
    }
    for (comm::Transfer& home : going) home.wait(run.stream);
    run.enter(Phase::merge);
    kernels.merge(pass.merge, run.stream);
  }

 private:
  struct Step {
    std::string rows, states;  // names
    bool comes = false;        // rows of the guest do
    bool goes = false;         // the rank's own do
  };
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  int rank() const { return layer_.comm.rank(); }
  int ranks() const { return layer_.comm.size(); }
  /// Whose rows are here in step s, and where this rank's rows are.
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

  /// Finds whose rows go where.
  void plan(const Run& run) {
    const auto meet = [&](int rows, int keys) {
      return rows_.rows_of(run, rows) > 0 && may_see(run, layer_.kernels.device(), rows, keys);
    };
    for (int s = 1; s < ranks(); ++s) {
      steps_[at(s)].comes = meet(guest(s), rank());
      steps_[at(s)].goes = meet(rank(), host(s));
    }
  }

  std::int32_t* starts_of(const Run& run, int rank) const {
    return starts_ + std::int64_t{rank} * (run.arrays.batch + 1);
  }

  /// Finds where the sequences of each rank's rows begin.
  void find_starts(Pass& pass) const {
    const Run& run = pass.run;
    if (run.arrays.query_start == nullptr) return;
    for (int p = 0; p < ranks(); ++p)
      layer_.kernels.row_starts({run.arrays.queries.with_rank(p), run.arrays.query_start,
                                 run.arrays.batch, starts_of(run, p)},
                                run.stream);
    pass.attend.batch.query_start = starts_of(run, rank());
    pass.merge.batch.size = run.arrays.batch;
    pass.merge.batch.query_start = starts_of(run, rank());
  }

  /// This rank's rows as they are sent: where they lie, or, where that is less than the bound that
  /// travels, in a copy.
  const void* own_rows(const Run& run) const {
    return run.args.q.shape[0] < rows_.rows_of(run, rank()) ? sent_ : run.args.q.data;
  }

  comm::Transfer start_rows(const Run& run, int s) const {
    const Step& step = steps_[at(s)];
    const auto bytes = [&](bool moves, int rank) {
      return moves ? at(rows_.rows_of(run, rank) * rows_.row_bytes()) : 0;
    };
    return layer_.comm.start_shift(own_rows(run), bytes(step.goes, rank()), visiting_[at(s % 2)],
                                   bytes(step.comes, guest(s)), s, run.stream, step.rows.c_str());
  }

  /// Sends the guest's states home, and brings this rank's own from where its rows were.
  comm::Transfer start_states(const Pass& pass, int s) const {
    const Run& run = pass.run;
    const Step& step = steps_[at(s)];
    const kernels::StateSlots& own = pass.attend.state;
    const std::size_t sent = at(slot_of(rows_.rows_of(run, guest(s)), nullptr).slot_bytes());
    return layer_.comm.start_shift(
        leaving_[at(s % 2)], step.comes ? sent : 0, own.data + host(s) * own.slot_bytes(),
        step.goes ? at(own.slot_bytes()) : 0, ranks() - s, run.stream, step.states.c_str());
  }

  kernels::StateSlots slot_of(std::int64_t rows, std::byte* data) const {
    return {data, rows * layer_.bounds.heads, layer_.bounds.value_dim, 1};
  }

  /// Describes the attention of the guest's rows to this rank's keys.
  kernels::AttendParams guest_params(const Pass& pass, int s) const {
    const Run& run = pass.run;
    const kernels::AttendParams& bounds = layer_.bounds;
    kernels::AttendParams p = pass.attend;
    p.tokens = rows_.rows_of(run, guest(s));
    p.queries = run.arrays.queries.with_rank(guest(s));
    if (run.arrays.query_start != nullptr) p.batch.query_start = starts_of(run, guest(s));
    p.q = {visiting_[at(s % 2)], std::int64_t{bounds.heads} * bounds.head_dim, bounds.head_dim};
    p.state = slot_of(p.tokens, leaving_[at(s % 2)]);
    p.slot = 0;
    return p;
  }

  void attend(const Run& run, const kernels::AttendParams& p, comm::Transfer& coming) const {
    layer_.kernels.attend(p, kernels::StateEpilogue{}, run.stream, {}, [&coming] {
      try {
        coming.test();
      } catch (...) {  // it ends the communicator, and the wait throws it
      }
    });
  }

  /// Writes empty states of this rank's rows in the slot of a rank none of whose keys they see:
  /// they attend to a share without keys. (The owner's own share would not do: a tile of rows may
  /// reach over keys that none of its rows sees.)
  void write_empty(const Pass& pass, int owner) const {
    constexpr std::int64_t kBeyondAnyLength = std::numeric_limits<std::int32_t>::max();
    kernels::AttendParams p = pass.attend;
    p.shard = Shard::interleaved(p.shard.length, 1, 2, kBeyondAnyLength);
    p.slot = owner;
    layer_.kernels.attend(p, pass.run.stream);
  }

  Layer layer_;
  DealtRows rows_;
  std::vector<Step> steps_;               // of the run at hand, by distance
  std::optional<StateMemory> states_;     // [ranks] slots of this rank's rows
  std::int32_t* starts_ = nullptr;        // [ranks, batch + 1]
  std::byte* sent_ = nullptr;             // on GPUs: this rank's rows, up to a bound
  std::array<std::byte*, 2> leaving_{};   // a slot of a guest's rows each
  std::array<std::byte*, 2> visiting_{};  // a guest's rows each
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

/// Counts the slots of this rank's rows, and two of guests with their rows. Where all rows see keys
/// of all ranks everything travels; a mask leaves some of it out.
RunCost cost(const Options& options, int ranks, const RunSize& size, Device) {
  const double rows = options.queries ? size.most_tokens : size.tokens;
  const double slot = state_slot_bytes(options, rows, options.heads);
  if (ranks == 1) return {.workspace_bytes = slot};
  const double queries = rows * query_row_bytes(options), others = ranks - 1;
  return {.received_bytes = others * (queries + slot),
          .workspace_bytes = (ranks + 2) * slot + 2 * queries,
          .overlapped_bytes = others * queries + (others - 1) * slot,
          .messages = 2,
          .work = 1.0 / ranks,
          .calls = static_cast<double>(ranks),
          .merged_bytes = ranks * slot,
          .copied_bytes = rows * query_row_bytes(options)};
}

}  // namespace

StrategyEntry ring_q() {
  return {.info = {"ring-q", "its own rows", "its own rows",
                   "(P-1)/P T heads (head_dim b + 4 (value_dim + 2))"},
          .preference = 5,
          .keeps_order = [](const Options&, int) { return true; },
          .takes_tables = false,
          .balanced = [](const Options&) { return Balanced::by_keys; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const Layer& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<RingQ>(layer);
          }};
}

}  // namespace longspan

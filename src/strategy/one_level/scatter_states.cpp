// The strategy scatter-states: keys do not travel, and every rank gets only the states of its own
// part of the result, some rows or some heads.
//
//     queries (all ranks')  ->  state over my keys  ->  each rank's part of it  ->  one merge
//
// States merge in the order of gather-states, so the bits are the same. If every rank gets the
// whole result, the finished rows are gathered.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/finished_rows.hpp"
#include "src/strategy/shared/state_gradients.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class ScatterStates final : public Strategy {
 public:
  explicit ScatterStates(const LayerContext& layer) : layer_(layer), rows_(layer) {
    if (layer.options.gradients) gradients_.emplace(layer, rows_);
    layer_.bounds.tokens = rows_.most_tokens();
    states_.emplace(layer_.kernels, layer_.bounds);
  }

  void lay_out(Parts& memory) override {
    const kernels::AttendParams& bounds = layer_.bounds;
    const auto ranks = static_cast<std::size_t>(comm().size());
    const std::int64_t tokens = bounds.tokens;
    states_->lay_out(memory);
    rows_.lay_out(memory);
    if (gradients_) gradients_->lay_out(memory);
    if (alone()) return;
    const std::int64_t part = rows_.are_dealt() ? rows_.most_capacity() * bounds.heads
                              : by_heads()      ? tokens * most_heads()
                                                : share(tokens) * bounds.heads;
    leaving_ = take_slot(memory, part, ranks);
    arriving_ = take_slot(memory, part, ranks);
    if (!gathers_result()) return;
    even_map_ = memory.take_array<std::int64_t>(ranks * static_cast<std::size_t>(share(tokens)));
    finished_ = memory.take(ranks * static_cast<std::size_t>(slot_of(share(tokens)).bytes()));
  }

  void backward(Pass& pass, const GradientArgs& args) override { gradients_->backward(pass, args); }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  void prepare(Pass& pass) override {
    const Run& run = pass.run;
    const kernels::AttendParams& bounds = layer_.bounds;
    rows_.prepare(pass);
    states_->give(pass);
    pass.merge.interleaved = run.arrays.keys.layout == Layout::interleaved;
    if (rows_.are_dealt()) pass.merge.rows = rows_.own_map(run);
    if (alone()) return;
    pass.merge.states = {arriving_, most_states(pass), bounds.value_dim, comm().size()};
    pass.merge.rows_are_same = true;
    pass.merge.state_heads = pass.merge.first_head = 0;  // only the rank's own heads arrive
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    const kernels::AttentionKernels& kernels = layer_.kernels;
    if (!alone()) pass.write_own_digest(kernels);
    if (rows_.are_dealt()) {
      run.enter(Phase::exchange);
      rows_.gather(pass);
    }

    run.enter(Phase::attend);
    if (alone()) return pass.attend_to(pass.merge, Phase::merge, kernels);
    kernels.attend(pass.attend, run.stream);

    run.enter(Phase::exchange);
    scatter(pass);

    run.enter(Phase::merge);
    if (!gathers_result()) return kernels.merge(pass.merge, run.stream);
    kernels::MergeParams own = pass.merge;  // into this rank's slot, then sent to all ranks
    const FinishedSlot slot = slot_of(share(pass.attend.tokens));
    std::byte* const mine = finished_ + comm().rank() * slot.bytes();
    own.tokens = slot.rows;
    own.rows = even_map_ + comm().rank() * slot.rows;
    own.batch = {};
    own.out = slot.out(mine);
    own.lse = slot.lse(mine);
    kernels.merge(own, run.stream);
    run.enter(Phase::exchange);
    gather_result(pass, slot, mine);
  }

 private:
  FinishedSlot slot_of(std::int64_t rows) const {
    return {rows, layer_.bounds.heads, layer_.bounds.value_dim, layer_.options.dtypes.of_out()};
  }

  comm::Transport& comm() const { return layer_.comm; }
  bool alone() const { return comm().size() == 1; }
  bool by_heads() const { return layer_.options.results.part == ResultPart::heads; }
  /// Whether every rank receives rows that others finish.
  bool gathers_result() const { return !alone() && !rows_.are_dealt() && !by_heads(); }
  std::int64_t share(std::int64_t tokens) const {
    return (tokens + comm().size() - 1) / comm().size();
  }
  std::int64_t most_heads() const { return share(layer_.bounds.heads); }
  /// The most states of a rank's part of a run.
  std::int64_t most_states(const Pass& pass) const {
    const std::int64_t heads = layer_.bounds.heads;
    return rows_.are_dealt() ? rows_.capacity(pass.run) * heads
           : by_heads()      ? pass.attend.tokens * most_heads()
                             : share(pass.attend.tokens) * heads;
  }
  std::byte* take_slot(Parts& memory, std::int64_t rows, std::size_t slots) const {
    return memory.take(slots * static_cast<std::size_t>(
                                   kernels::StateSlots::bytes(rows, layer_.bounds.value_dim)));
  }

  /// Sends each rank the states of its part. If all get the whole result, rows are distributed
  /// round robin.
  void scatter(const Pass& pass) const {
    const Run& run = pass.run;
    const kernels::AttendParams& attend = pass.attend;
    kernels::PackStatesParams pack;
    pack.from = attend.state;
    pack.to = pass.merge.states;
    pack.to.data = leaving_;
    pack.heads = attend.heads;
    pack.capacity = attend.tokens;
    if (rows_.are_dealt()) {
      pack.map = rows_.map();
      pack.capacity = rows_.capacity(run);
    } else if (!by_heads()) {
      pack.map = even_map_;
      pack.capacity = share(attend.tokens);
      layer_.kernels.map_rows({Shard::striped(attend.tokens, 0, comm().size()),
                               {},
                               comm().size(),
                               pack.capacity,
                               even_map_},
                              run.stream);
    }
    layer_.kernels.pack_states(pack, run.stream);
    comm().all_to_all(leaving_, arriving_, static_cast<std::size_t>(pack.to.slot_bytes()),
                      run.stream, "exchange of states", pass.digests);
  }

  /// Receives the finished rows of all ranks, and copies them to their places.
  void gather_result(const Pass& pass, const FinishedSlot& slot, std::byte* mine) const {
    comm().all_gather(mine, finished_, static_cast<std::size_t>(slot.bytes()), pass.run.stream,
                      "gather of results");
    kernels::PackOutputsParams place = slot.take_from(finished_, comm().size());
    place.to = pass.merge.out;
    place.to_lse = pass.merge.lse;
    place.map = even_map_;
    place.batch = pass.merge.batch;
    place.headers = pass.merge.headers;
    layer_.kernels.pack_outputs(place, pass.run.stream);
  }

  LayerContext layer_;
  DealtRows rows_;
  std::optional<StateGradients> gradients_;  // with Options::gradients
  std::optional<StateMemory> states_;        // one slot of all rows
  std::byte* leaving_ = nullptr;      // [ranks] slots, each rank's part of this rank's states
  std::byte* arriving_ = nullptr;     // [ranks] slots, every rank's states of this rank's part
  std::int64_t* even_map_ = nullptr;  // [ranks, share of the rows], if all get the whole result
  std::byte* finished_ = nullptr;     // [ranks] Slot
};

std::string refusal(const Options& options, int ranks) {
  if (ranks > 1 && options.exchange != Exchange::automatic && options.exchange != Exchange::gather)
    return fmt::format("it has no exchange {}", name(options.exchange));
  return "";
}

/// Counts the rank's own states and, twice, slots of one part; with sharded queries the rows of all
/// ranks, twice; and for a whole result the finished rows of all ranks.
RunCost cost(const Options& o, int ranks, const RunSize& size, Device device) {
  const bool gathers_queries = o.queries.has_value();
  const bool by_heads = o.results.part == ResultPart::heads;
  const bool gathers_result = !gathers_queries && o.results.part == ResultPart::all && ranks > 1;
  const double rows = most_result_rows(o, ranks, size);
  const double whole = gathers_queries ? ranks * rows : size.tokens;
  const double part =
      ranks == 1 ? 0
                 : state_slot_bytes(o, rows, by_heads ? (o.heads + ranks - 1) / ranks : o.heads);
  const double queries = gathers_queries ? rows * query_row_bytes(o) : 0;
  const FinishedSlot slot{static_cast<std::int64_t>(rows), o.heads, o.of_values(),
                          o.dtypes.of_out()};
  const double finished = gathers_result ? static_cast<double>(slot.bytes()) : 0;
  return {.received_bytes = (ranks - 1) * (queries + part + finished),
          .workspace_bytes = state_slot_bytes(o, whole, o.heads) +
                             ranks * (2 * part + 2 * queries + finished +
                                      (by_heads ? 0 : rows * sizeof(std::int64_t))) +
                             StateGradients::workspace_bytes(o, ranks, size, device),
          .messages = ranks == 1 ? 0.0 : 1.0 + (gathers_queries ? 1 : 0) + (gathers_result ? 1 : 0),
          .work = 1.0 / ranks,
          .keys_read = 1.0 / ranks,
          .merged_bytes = ranks == 1 ? whole * state_row_bytes(o) : ranks * part,
          .copied_bytes = ranks * (part + 2 * queries + 2 * finished),
          .backward = StateGradients::cost(o, ranks, size)};
}

}  // namespace

StrategyEntry scatter_states() {
  return {.info = {"scatter-states", "all rows, or its own rows", "all, its rows, or its heads",
                   "(P-1)/P T heads 4 (value_dim + 2)"},
          .preference = 4,
          .keeps_order = [](const Options&, int) { return true; },
          .gradients = GradientsOf::all_queries,
          .takes_tables = true,
          .sends_rows_back = true,
          .takes_indices = true,
          .balanced = [](const Options&) { return Balanced::by_keys; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<ScatterStates>(layer);
          }};
}

}  // namespace longspan

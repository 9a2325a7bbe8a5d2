// The strategy ring-kv: keys and values travel around, one rank's at a time, beside the compute.
//
//     state = attend(my rows, my keys),   then for s = 1 ... P - 1:
//     state = attend(my rows, keys of rank - s) from state      while those of rank - s - 1 come
//     the last of them ends with the result
//
// Every rank sends its own keys, in step s to rank + s, so what no row of a rank sees is neither
// sent to it nor waited for. A rank keeps two blocks of keys besides what it was given. Where its
// own keys have to be copied before they can be sent, one of the two holds them: a block then comes
// in when the one before it is no longer needed, and only the first comes beside compute.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

/// What moves in one step: keys, values, and where listed keys stand.
struct Flight {
  std::array<comm::Transfer, 3> parts;

  void wait(Stream stream) {
    for (comm::Transfer& part : parts) part.wait(stream);
  }
  /// Lets it go on. What it finds wrong ends the communicator, and is thrown by the wait.
  void go_on() noexcept {
    try {
      for (comm::Transfer& part : parts) part.test();
    } catch (...) {
    }
  }
};

class RingKv final : public Strategy {
 public:
  explicit RingKv(const Layer& layer)
      : layer_(layer), keys_(layer), steps_(static_cast<std::size_t>(layer.comm.size())) {
    layer_.bounds.resume = layer_.comm.size() > 1;
    scratch_bytes_ = layer_.kernels.attend_scratch(layer_.bounds);
    for (int s = 1; s < layer_.comm.size(); ++s)
      steps_[s].name = fmt::format("ring of keys, step {} of {}", s, layer_.comm.size() - 1);
  }

  void lay_out(Parts& memory) override {
    const kernels::AttendParams& bounds = layer_.bounds;
    state_ = memory.take(static_cast<std::size_t>(
        kernels::StateSlots::bytes(bounds.tokens * bounds.heads, bounds.value_dim)));
    scratch_ = memory.take(scratch_bytes_);
    if (layer_.comm.size() == 1) return;
    keys_.lay_out(memory);
    for (KeyBlock& block : blocks_) block = keys_.take_block(memory, keys_.block_rows());
  }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  /// Two phases a step, two ahead of the first, one for the merge and one for the end.
  int most_marks() const override { return 2 * layer_.comm.size() + 4; }

  void prepare(Run& run) const override {
    keys_.check(run, "ring-kv");
    run.keys_travel = layer_.comm.size() > 1;
    run.attend.scratch = scratch_;
    run.attend.scratch_bytes = scratch_bytes_;
    run.attend.state = {state_, run.attend.tokens * layer_.bounds.heads, layer_.bounds.value_dim,
                        1};
    run.merge.states = run.attend.state;
  }

  void queue(Run& run) const override {
    const int ranks = layer_.comm.size();
    run.enter(Phase::attend);
    if (ranks == 1) return run.attend_to(run.merge, Phase::merge, layer_.kernels);
    layer_.kernels.say(run.say, run.stream);
    keys_.begin(run, "ring of keys, counts");
    const KeyBlock own = own_block(run);
    const bool in_place = own.k != blocks_[0].k;
    const int last = plan(run);

    run.enter(Phase::exchange);
    comm::Transfer word;  // what ranks say of the run, where no counts have said it
    if (run.arrays.keys.layout != Layout::listed)
      word = layer_.comm.start_all_gather(nullptr, nullptr, 0, run.stream,
                                          "ring of keys, agreement", run.said);
    int block = in_place ? 0 : 1;
    Flight coming;
    int step = next_step(0);
    start(run, step, own, blocks_[block], coming);
    run.enter(Phase::attend);
    if (last == 0) word.wait(run.stream);  // the result is made of what all ranks mean alike
    attend(run, last == 0, coming);

    for (int behind = step; step < ranks; step = behind) {
      run.enter(Phase::exchange);
      word.wait(run.stream);
      coming.wait(run.stream);
      behind = next_step(step);
      const KeyBlock& here = blocks_[block];
      if (in_place) {
        if (steps_[step].receives) block = 1 - block;
        start(run, behind, own, blocks_[block], coming);
      }
      if (steps_[step].receives) {
        run.enter(Phase::attend);
        give(run, rank_at(-step), here);
        attend(run, step == last, coming);
      }
      if (!in_place) start(run, behind, own, blocks_[block], coming);
    }
    word.wait(run.stream);
  }

 private:
  struct Step {
    std::string name;
    bool sends = false;
    bool receives = false;
  };

  int rank_at(int distance) const {
    return (layer_.comm.rank() + distance + layer_.comm.size()) % layer_.comm.size();
  }

  /// This rank's keys as they are sent.
  KeyBlock own_block(const Run& run) const {
    if (!keys_.must_copy(run)) return keys_.in_place(run);
    keys_.copy_to(run, blocks_[0]);
    KeyBlock own = blocks_[0];
    own.positions = keys_.in_place(run).positions;
    return own;
  }

  /// Finds what moves in each step; returns the last step that brings keys, or 0.
  int plan(const Run& run) const {
    const int own = layer_.comm.rank();
    int last = 0;
    for (int s = 1; s < layer_.comm.size(); ++s) {
      steps_[s].sends = keys_.are_seen(run, rank_at(s), own);
      steps_[s].receives = keys_.are_seen(run, own, rank_at(-s));
      if (steps_[s].receives) last = s;
    }
    return last;
  }

  /// The next step in which something moves here; the number of ranks where there is none.
  int next_step(int step) const {
    do ++step;
    while (step < layer_.comm.size() && !steps_[step].sends && !steps_[step].receives);
    return step;
  }

  void start(const Run& run, int step, const KeyBlock& own, const KeyBlock& to,
             Flight& flight) const {
    if (step >= layer_.comm.size()) return;
    const Step& how = steps_[step];
    const auto rows = [&](bool moves, int rank) {
      return moves ? static_cast<std::size_t>(keys_.rows_of(run, rank)) : 0;
    };
    const std::size_t sent = rows(how.sends, layer_.comm.rank()),
                      received = rows(how.receives, rank_at(-step));
    const auto move = [&](const void* from, void* into, std::int64_t row_bytes) {
      const auto bytes = static_cast<std::size_t>(row_bytes);
      return layer_.comm.start_shift(from, sent * bytes, into, received * bytes, step, run.stream,
                                     how.name.c_str());
    };
    flight.parts[0] = move(own.k, to.k, keys_.key_bytes());
    flight.parts[1] = move(own.v, to.v, keys_.value_bytes());
    if (to.positions != nullptr)
      flight.parts[2] = move(own.positions, to.positions, sizeof(std::int64_t));
  }

  /// Makes the keys of rank `rank`, which have come, those of the run.
  void give(Run& run, int rank, const KeyBlock& block) const {
    keys_.find_starts(run, rank, block);
    run.attend.k = keys_.keys_in(block);
    run.attend.v = keys_.values_in(block);
    run.attend.pages = {};
    run.attend.batch.key_start = run.arrays.batch > 1 ? block.start : nullptr;
    run.attend.batch.key_pitch = 0;
    run.attend.shard = keys_.shard_of(run, rank, block);
    run.attend.resume = true;
  }

  void attend(Run& run, bool is_last, Flight& coming) const {
    const kernels::BetweenTiles between = [&coming] { coming.go_on(); };
    if (is_last)
      run.attend_to(run.merge, Phase::merge, layer_.kernels, between);
    else
      layer_.kernels.attend(run.attend, kernels::StateEpilogue{}, run.stream, {}, between);
  }

  Layer layer_;
  TravellingKeys keys_;
  mutable std::vector<Step> steps_;  // of the run at hand, by distance
  std::byte* state_ = nullptr;       // one slot
  std::byte* scratch_ = nullptr;     // AttentionKernels::attend_scratch
  std::size_t scratch_bytes_ = 0;
  std::array<KeyBlock, 2> blocks_;
};

std::string refusal(const Options& options, int ranks) {
  if (std::string parts = refuse_parts(options); !parts.empty()) return parts;
  if (ranks == 1) return "";
  if (!options.queries)
    return "it shares the work by rows of the queries, which must be sharded (Options::queries)";
  if (options.limits.max_kv_len == 0) return "it needs max_kv_len, for its workspace";
  if (options.exchange != Exchange::automatic && options.exchange != Exchange::gather)
    return fmt::format("it sends keys, and does not take exchange {}", name(options.exchange));
  return "";
}

RunCost cost(const Options& options, int ranks, const RunSize& size) {
  const double states =
      (options.queries ? size.most_tokens : size.tokens) * state_row_bytes(options);
  if (ranks == 1) return {.workspace_bytes = states};
  const double row = key_row_bytes(options), received = (ranks - 1) * size.keys / ranks * row;
  const double block = most_keys_of_a_rank(options.keys, size.keys, ranks);
  return {.received_bytes = received,
          .workspace_bytes = states + 2 * block * row,
          .overlapped_bytes = received,
          .messages = ranks - 1.0,
          .work = 1.0 / ranks,
          .calls = static_cast<double>(ranks),
          .merged_bytes = (ranks - 1) * states};
}

}  // namespace

StrategyEntry ring_kv() {
  return {.info = {"ring-kv", "its own rows", "its own rows",
                   "(P-1)/P S kv_heads (head_dim + value_dim) b"},
          .preference = 3,
          .keeps_order = [](const Options&, int) { return false; },
          .takes_tables = false,
          .balanced = [](const Options&) { return Balanced::by_queries; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const Layer& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<RingKv>(layer);
          }};
}

}  // namespace longspan

// The strategy gather-states: keys stay where they are, and the small partial states travel.
//
//     queries (all ranks')  ->  state over my keys  ->  every rank's state  ->  one merge
//
// Every rank merges the same states in the same order, so replicated results are bitwise equal.
#include <fmt/format.h>

#include <algorithm>

#include "longspan/error.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class GatherStates final : public Strategy {
 public:
  explicit GatherStates(const Layer& layer) : layer_(layer) {
    if (layer_.options.queries) layer_.bounds.tokens *= layer_.comm.size();
    scratch_bytes_ = layer_.kernels.attend_scratch(layer_.bounds);
  }

  void lay_out(Parts& memory) override {
    const kernels::AttendParams& bounds = layer_.bounds;
    const auto ranks = static_cast<std::size_t>(layer_.comm.size());
    states_ = memory.take(ranks * static_cast<std::size_t>(kernels::StateSlots::bytes(
                                      bounds.tokens * bounds.heads, bounds.value_dim)));
    scratch_ = memory.take(scratch_bytes_);
    if (!layer_.options.queries) return;
    const auto rows = static_cast<std::size_t>(bounds.tokens);
    gathered_ = memory.take(rows * static_cast<std::size_t>(row_bytes()));
    ordered_ = memory.take(rows * static_cast<std::size_t>(row_bytes()));
    row_map_ = memory.take_array<std::int64_t>(rows);
  }

  /// Opens peer buffers for what decode and chunks exchange; past that, gathering is as fast.
  void open(std::uint32_t layer) override {
    constexpr std::int64_t kMostRows = 16384;
    const Options& options = layer_.options;
    const std::int64_t most = options.limits.max_tokens * options.heads;
    std::string why;
    if (layer_.comm.size() == 1 || options.exchange == Exchange::gather) return;
    if (options.queries) {
      why = "queries are sharded";
    } else {
      peer_buffer_rows_ = std::min(kMostRows, most);
      const std::size_t bytes = layer_.kernels.peer_buffer_bytes(
          peer_buffer_rows_, layer_.bounds.value_dim, layer_.comm.size());
      if (bytes > 0)
        peers_ = layer_.comm.open_peer_buffers(layer, bytes, why);
      else
        why = fmt::format("not on the {}", name(layer_.kernels.device()));
    }
    if (!peers_ && options.exchange != Exchange::automatic)
      throw Unsupported(
          fmt::format("exchange {} was asked for, and cannot be had here: {}. Take auto or gather.",
                      name(options.exchange), why));
    if (!peers_) {
      exchange_.reason = why;
      return;
    }
    const bool apart = options.exchange == Exchange::peer_buffers_apart;
    exchange_.by = apart ? Exchange::peer_buffers_apart : Exchange::peer_buffers;
    exchange_.most_states = peer_buffer_rows_ < most ? peer_buffer_rows_ : 0;
  }

  ExchangeInfo exchange() const override { return exchange_; }

  void prepare(Run& run) const override {
    const kernels::AttendParams& bounds = layer_.bounds;
    if (layer_.options.queries) {  // all ranks' rows, once they are gathered
      run.attend.tokens = run.args.total_tokens;
      run.attend.batch.query_start = run.arrays.query_start;
      run.attend.batch.whole_query_start = nullptr;
      run.attend.queries = {};
      run.attend.q = {ordered_, std::int64_t{bounds.heads} * bounds.head_dim, bounds.head_dim};
      run.merge.rows = row_map_ + layer_.comm.rank() * row_capacity(run);
    }
    run.attend.scratch = scratch_;
    run.attend.scratch_bytes = scratch_bytes_;
    run.attend.state = {states_, run.attend.tokens * bounds.heads, bounds.value_dim,
                        layer_.comm.size()};
    run.attend.slot = layer_.comm.rank();
    run.merge.states = run.attend.state;
    run.merge.interleaved = run.arrays.keys.layout == Layout::interleaved;
  }

  void queue(Run& run) const override {
    const kernels::AttentionKernels& kernels = layer_.kernels;
    const bool alone = layer_.comm.size() == 1;  // then no state has to travel
    const kernels::StateSlots& states = run.attend.state;
    const bool by_peer_buffers = peers_ != nullptr && states.rows <= peer_buffer_rows_;
    if (!alone && !by_peer_buffers) kernels.say(run.say, run.stream);
    if (layer_.options.queries) {
      run.enter(Phase::exchange);
      gather_queries(run);
    }

    run.enter(Phase::attend);
    if (alone) return run.attend_to(run.merge, Phase::merge, kernels);
    if (by_peer_buffers) return run.attend_to(exchange_of(run), Phase::exchange, kernels);
    kernels.attend(run.attend, run.stream);

    run.enter(Phase::exchange);
    gather(run, states.data + run.attend.slot * states.slot_bytes(), states.data,
           states.slot_bytes(), "gather of states");

    run.enter(Phase::merge);
    kernels.merge(run.merge, run.stream);
  }

 private:
  kernels::ExchangeParams exchange_of(const Run& run) const {
    layer_.comm.check("attention");  // as no collective does; the step is that of Attention::wait
    kernels::ExchangeParams exchange{*peers_, run.merge, peer_buffer_rows_};
    exchange.hash = run.say.hash;
    exchange.contents = run.say.contents;
    exchange.run = run.merge.headers.run;
    exchange.apart = layer_.options.exchange == Exchange::peer_buffers_apart;
    return exchange;
  }

  /// Gathers what each rank says of its run beside the data.
  void gather(Run& run, const void* send, void* recv, std::int64_t bytes, const char* step) const {
    layer_.comm.all_gather(send, recv, static_cast<std::size_t>(bytes), run.stream, step, run.said);
  }

  /// Brings every rank's query rows here, in the order of the whole q.
  void gather_queries(Run& run) const {
    const Shard& rows = run.arrays.queries;
    const std::int64_t capacity = row_capacity(run), slot_bytes = capacity * row_bytes();
    std::byte* mine = gathered_ + rows.rank * slot_bytes;

    if (rows.layout == Layout::listed)
      gather(run, rows.table, row_map_, capacity * 8, "gather of query positions");
    else
      layer_.rows.map_rows({rows, run.attend.batch, rows.ranks, capacity, row_map_}, run.stream);
    layer_.rows.place_rows({static_cast<const std::byte*>(run.args.q.data), mine, nullptr,
                            run.args.q.shape[0], row_bytes()},
                           run.stream);
    gather(run, mine, gathered_, slot_bytes, "gather of queries");
    layer_.rows.place_rows(
        {gathered_, ordered_, row_map_, rows.ranks * capacity, row_bytes(), run.attend.tokens},
        run.stream);
  }

  /// The most query rows of any rank, as far as every rank knows it: it does for one sequence dealt
  /// out by a rule.
  std::int64_t row_capacity(const Run& run) const {
    const Shard& rows = run.arrays.queries;
    const bool counted = run.arrays.batch == 1 && rows.layout != Layout::listed &&
                         (rows.layout != Layout::ranges || layer_.kernels.device() == Device::host);
    return counted ? rows.max_local_len(rows.length) : layer_.options.limits.max_tokens;
  }

  /// The bytes of a row of queries, [heads, dim].
  std::int64_t row_bytes() const {
    return std::int64_t{layer_.bounds.heads} * layer_.bounds.head_dim *
           static_cast<std::int64_t>(size_of(layer_.bounds.q_dtype));
  }

  Layer layer_;
  std::size_t scratch_bytes_ = 0;
  std::byte* states_ = nullptr;   // [ranks] slots of the most rows
  std::byte* scratch_ = nullptr;  // AttentionKernels::attend_scratch
  // These are there with sharded queries only:
  std::byte* gathered_ = nullptr;    // [ranks, row_capacity, row_bytes]
  std::byte* ordered_ = nullptr;     // [tokens, row_bytes]
  std::int64_t* row_map_ = nullptr;  // [ranks, row_capacity] place of each gathered row

  std::shared_ptr<const PeerView> peers_;  // null: states are gathered
  std::int64_t peer_buffer_rows_ = 0;      // most states that go by peer buffers
  ExchangeInfo exchange_;
};

/// Counts the slots of all ranks' states, and with sharded queries the rows of all of them, twice.
RunCost cost(const Options& options, int ranks, const RunSize& size) {
  const double own_rows = options.queries ? size.most_tokens : 0;
  const double rows = options.queries ? ranks * own_rows : size.tokens;
  const double states = rows * state_row_bytes(options), queries = query_row_bytes(options);
  const double messages = options.queries ? 2 : 1;
  return {
      .received_bytes = (ranks - 1) * (states + own_rows * queries),
      .workspace_bytes = ranks * states + ranks * own_rows * (2 * queries + sizeof(std::int64_t)),
      .messages = ranks == 1 ? 0 : messages,
      .work = 1.0 / ranks,
      .keys_read = 1.0 / ranks,
      .merged_bytes = ranks * (options.queries ? own_rows * state_row_bytes(options) : states),
      .copied_bytes = options.queries ? 2 * rows * queries : 0};
}

}  // namespace

StrategyEntry gather_states() {
  return {.info = {"gather-states", "all rows, or its own rows", "all rows, or its own rows",
                   "(P-1) T heads 4 (value_dim + 2)"},
          .preference = 1,
          .keeps_order = true,
          .takes_every_run = true,
          .balanced = [](const Options&) { return Balanced::by_keys; },
          .refusal = [](const Options&, int) { return std::string(); },
          .cost = cost,
          .make = [](const Layer& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<GatherStates>(layer);
          }};
}

}  // namespace longspan

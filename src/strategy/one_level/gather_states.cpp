// The strategy gather-states: keys do not travel, only the small partial states do.
//
//     queries (all ranks')  ->  state over my keys  ->  every rank's state  ->  one merge
//
// Every rank merges the same states in the same order, so replicated results are bitwise equal.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "longspan/error.hpp"
#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/state_gradients.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

constexpr std::int64_t kMostPeerRows = 16384;  // of states that are exchanged through peer buffers

class GatherStates final : public Strategy {
 public:
  explicit GatherStates(const LayerContext& layer) : layer_(layer), rows_(layer) {
    if (layer.options.gradients) gradients_.emplace(layer, rows_);
    layer_.bounds.tokens = rows_.most_tokens();
    states_.emplace(layer_.kernels, layer_.bounds, layer_.comm.size());
  }

  void lay_out(Parts& memory) override {
    states_->lay_out(memory);
    rows_.lay_out(memory);
    if (gradients_) gradients_->lay_out(memory);
  }

  /// Opens peer buffers for the sizes of decode and chunks; for larger ones, gathering is as fast.
  void open(std::uint32_t layer) override {
    const Options& options = layer_.options;
    const std::int64_t most = options.limits.max_tokens * options.heads;
    std::string why;
    std::size_t bytes = 0;
    if (layer_.comm.size() == 1 || options.exchange == Exchange::gather) return;
    if (options.queries) {
      why = "queries are sharded";
    } else if (options.results.part != ResultPart::all) {
      why = fmt::format("results are by {}", name(options.results.part));
    } else {
      peer_buffer_rows_ = std::min(kMostPeerRows, most);
      bytes = layer_.kernels.peer_buffer_bytes(peer_buffer_rows_, layer_.bounds.value_dim,
                                               layer_.comm.size());
      if (bytes > 0)
        peers_ = layer_.comm.open_peer_buffers(layer, bytes, why);
      else
        why = fmt::format("not on the {}", name(layer_.kernels.device()));
    }
    require_exchange(options, peers_ != nullptr, why);
    if (!peers_) {
      exchange_.reason = why;
      return;
    }
    const bool apart = options.exchange == Exchange::peer_buffers_apart;
    exchange_.by = apart ? Exchange::peer_buffers_apart : Exchange::peer_buffers;
    exchange_.most_states = peer_buffer_rows_ < most ? peer_buffer_rows_ : 0;
    exchange_.peer_bytes = bytes;
  }

  ExchangeInfo exchange() const override { return exchange_; }

  void backward(Pass& pass, const GradientArgs& args) override { gradients_->backward(pass, args); }

  void prepare(Pass& pass) override {
    const Run& run = pass.run;
    rows_.prepare(pass);
    if (rows_.are_dealt()) pass.merge.rows = rows_.own_map(run);
    states_->give(pass, layer_.comm.rank());
    pass.merge.interleaved = run.arrays.keys.layout == Layout::interleaved;
  }

  void queue(Pass& pass) override {
    const Run& run = pass.run;
    const kernels::AttentionKernels& kernels = layer_.kernels;
    const bool alone = layer_.comm.size() == 1;  // then no state has to travel
    const kernels::StateSlots& states = pass.attend.state;
    const bool by_peer_buffers = peers_ != nullptr && states.rows <= peer_buffer_rows_;
    if (!alone && !by_peer_buffers) pass.write_own_digest(kernels);
    if (rows_.are_dealt()) {
      run.enter(Phase::exchange);
      rows_.gather(pass);
    }

    run.enter(Phase::attend);
    if (alone) return pass.attend_to(pass.merge, Phase::merge, kernels);
    if (by_peer_buffers) return pass.attend_to(exchange_of(pass), Phase::exchange, kernels);
    kernels.attend(pass.attend, run.stream);

    run.enter(Phase::exchange);
    layer_.comm.all_gather(states.data + pass.attend.slot * states.slot_bytes(), states.data,
                           static_cast<std::size_t>(states.slot_bytes()), run.stream,
                           "gather of states", pass.digests);

    run.enter(Phase::merge);
    kernels.merge(pass.merge, run.stream);
  }

 private:
  kernels::ExchangeParams exchange_of(const Pass& pass) const {
    layer_.comm.check("attention");  // no collective checks it here; the step is that of
                                     // Attention::wait
    kernels::ExchangeParams exchange{*peers_, pass.merge, peer_buffer_rows_};
    exchange.hash = pass.own_digest.hash;
    exchange.contents = pass.own_digest.contents;
    exchange.run = pass.merge.headers.run;
    exchange.apart = layer_.options.exchange == Exchange::peer_buffers_apart;
    return exchange;
  }

  LayerContext layer_;
  DealtRows rows_;
  std::optional<StateGradients> gradients_;  // with Options::gradients
  std::optional<StateMemory> states_;        // [ranks] slots
  std::shared_ptr<const PeerView> peers_;    // null: states travel by all_gather
  std::int64_t peer_buffer_rows_ = 0;        // most states that are exchanged through peer buffers
  ExchangeInfo exchange_;
};

/// Counts the slots of all ranks' states, and with sharded queries the rows of all ranks, twice.
RunCost cost(const Options& options, int ranks, const RunSize& size, Device device) {
  const double own_rows = options.queries ? size.most_tokens : 0;
  const double rows = options.queries ? ranks * own_rows : size.tokens;
  const double queries = own_rows * query_row_bytes(options);
  const bool whole = options.results.part == ResultPart::all;
  const double merged = options.queries ? own_rows : whole ? size.tokens : size.tokens / ranks;
  const double messages = options.queries ? 2 : 1;
  const bool by_peers = device != Device::host && ranks > 1 && !options.queries && whole &&
                        options.exchange != Exchange::gather &&
                        size.tokens * options.heads <= static_cast<double>(kMostPeerRows);
  return {.received_bytes =
              (ranks - 1) * (state_slot_bytes(options, size.tokens, options.heads) + queries),
          .workspace_bytes = ranks * (state_slot_bytes(options, rows, options.heads) + 2 * queries +
                                      own_rows * sizeof(std::int64_t)) +
                             StateGradients::workspace_bytes(options, ranks, size, device),
          .messages = ranks == 1 ? 0 : messages,
          .peer_messages = by_peers ? messages : 0,
          .work = 1.0 / ranks,
          .keys_read = 1.0 / ranks,
          .merged_bytes = ranks * merged * state_row_bytes(options),
          .copied_bytes = options.queries ? 2 * ranks * queries : 0,
          .backward = StateGradients::cost(options, ranks, size)};
}

}  // namespace

StrategyEntry gather_states() {
  return {.info = {"gather-states", "all rows, or its own rows", "all, its rows, or its heads",
                   "(P-1) T heads 4 (value_dim + 2)"},
          .preference = 1,
          .keeps_order = [](const Options&, int) { return true; },
          .gradients = GradientsOf::all_queries,
          .takes_tables = true,
          .sends_rows_back = true,
          .takes_indices = true,
          .balanced = [](const Options&) { return Balanced::by_keys; },
          .refusal = [](const Options&, int) { return std::string(); },
          .cost = cost,
          .make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<GatherStates>(layer);
          }};
}

}  // namespace longspan

// The strategy heads: ranks share the work by heads, as in DeepSpeed-Ulysses.
//
//     my rows, all heads  ->  all rows, my heads  ->  one attention  ->  my rows, all heads
//
// No states travel or merge, so the bits are those of one rank alone. Between GPUs that reach each
// other, rows travel while the rank attends with others (shared/head_puts.hpp).
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "longspan/error.hpp"
#include "src/base/peer_view.hpp"
#include "src/strategy/shared/head_exchange.hpp"
#include "src/strategy/shared/head_gradients.hpp"
#include "src/strategy/shared/head_puts.hpp"
#include "src/strategy/shared/key_gradients.hpp"
#include "src/strategy/shared/state_memory.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

class Heads final : public Strategy {
 public:
  explicit Heads(const LayerContext& layer) : layer_(layer), own_(layer.bounds) {
    own_.shard.rank = 0;  // of the attention, which has all keys
    own_.shard.ranks = 1;
    if (layer.options.gradients && ranks() == 1) {
      keys_.emplace(layer);
      alone_gradients_.emplace(layer, *keys_);
    }
    if (ranks() > 1) {
      exchange_.emplace(layer, NodeRanks::all(ranks()), layer.comm);
      if (layer.options.gradients) gradients_.emplace(layer, *exchange_);
      puts_.emplace(layer, *exchange_);
      own_.tokens = exchange_->most_tokens();
      own_.heads = exchange_->share().query.size();
      own_.kv_heads = exchange_->share().kv.size();
    }
    states_.emplace(layer_.kernels, own_);
  }

  void lay_out(Parts& memory) override {
    states_->lay_out(memory);
    if (exchange_) exchange_->lay_out(memory);
    if (gradients_) gradients_->lay_out(memory);
    if (alone_gradients_) alone_gradients_->lay_out(memory);
  }

  void backward(Pass& pass, const GradientArgs& args) override {
    if (gradients_) return gradients_->backward(pass, args);
    alone_gradients_->backward(pass, args);
  }

  ExchangeInfo exchange() const override {
    return puts_ ? puts_->exchange() : ExchangeInfo{Exchange::gather};
  }

  void prepare(Pass& pass) override {
    if (exchange_)
      exchange_->prepare(pass, "heads");
    else
      prepare_alone(pass);
    states_->give(pass);
  }

  void queue(Pass& pass) override {
    pass.run.enter(Phase::attend);
    if (!exchange_) return pass.attend_to(pass.merge, Phase::merge, layer_.kernels);
    if (puts_->queue(pass)) return;
    pass.write_own_digest(layer_.kernels);
    exchange_->queue(pass, [&] {
      pass.run.enter(Phase::attend);
      pass.attend_to(pass.merge, Phase::exchange, layer_.kernels);
    });
  }

 private:
  int ranks() const { return layer_.comm.size(); }

  void prepare_alone(Pass& pass) const {
    const Run& run = pass.run;
    if (run.arrays.queries.layout == Layout::listed)
      throw Unsupported(
          "strategy heads does not take listed query rows on one rank; gather-states does");
    if (layer_.options.queries || layer_.options.results.part == ResultPart::rows)  // all of them
      pass.merge.batch = {run.arrays.batch, run.arrays.query_start, run.arrays.kv_len};
  }

  LayerContext layer_;
  std::optional<HeadExchange> exchange_;  // with several ranks
  std::optional<HeadPuts> puts_;          // with several ranks, for the runs that it supports
  // With Options::gradients: with several ranks, or one.
  std::optional<HeadGradients> gradients_;
  std::optional<TravellingKeys> keys_;
  std::optional<KeyGradients> alone_gradients_;
  kernels::AttendParams own_;          // the largest attention, of this rank's heads
  std::optional<StateMemory> states_;  // one slot
};

std::string refusal(const Options& o, int ranks) {
  if (ranks == 1) return "";
  if (std::string why = refuse_head_exchange(o, ranks); !why.empty()) return why;
  if (o.exchange == Exchange::peer_buffers_apart)
    return fmt::format("it sends rows, and does not take exchange {}", name(o.exchange));
  if (o.gradients && o.invariant && o.kv_heads < ranks)
    return fmt::format(
        "{} ranks share {} kv heads, and add up the gradients of one in an order of their own "
        "(invariant)",
        ranks, o.kv_heads);
  if (o.results.part == ResultPart::heads && !are_result_heads(o.heads, o.kv_heads, ranks))
    return fmt::format(
        "results by heads of {} heads and {} kv heads on {} ranks cut through groups "
        "of heads that read one kv head, or are not the heads that it works on",
        o.heads, o.kv_heads, ranks);
  return "";
}

RunCost cost(const Options& o, int ranks, const RunSize& size, Device device) {
  const double own_rows = o.queries ? size.most_tokens : most_result_rows(o, ranks, size);
  const double rows = o.queries ? ranks * own_rows : size.tokens;
  if (ranks == 1 || o.heads < ranks)
    return {.workspace_bytes =
                state_slot_bytes(o, rows, o.heads) + KeyGradients::workspace_bytes(o, 1, size)};
  const bool by_puts = device != Device::host && ranks <= PeerView::kMostRanks && o.queries &&
                       o.exchange != Exchange::gather;
  RunCost cost = by_puts ? head_puts_cost(o, ranks, size) : head_exchange_cost(o, ranks, size);
  cost.workspace_bytes += state_slot_bytes(o, rows, most_heads(o.heads, o.kv_heads, ranks).query) +
                          HeadGradients::workspace_bytes(o, ranks, size);
  cost.backward = HeadGradients::cost(o, ranks, size);
  return cost;
}

}  // namespace

StrategyEntry heads() {
  return {.info = {"heads", "all rows, or its own rows", "all, its rows, or its heads",
                   "(P-1)/P^2 (T heads + S kv_heads) (head_dim + value_dim) b"},
          .preference = 6,
          .keeps_order = folds_as_one_rank,
          .gradients = GradientsOf::all_queries,
          .takes_tables = false,
          .balanced = [](const Options&) { return Balanced::evenly; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<Heads>(layer);
          }};
}

}  // namespace longspan

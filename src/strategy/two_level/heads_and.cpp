// Strategies of two levels: the ranks of a node share the work by heads, over the fast links within
// it. Together they act as one rank of another strategy between the nodes, as in USP (arXiv
// 2405.07719) and in TransformerEngine's "a2a+p2p".
//
//     my rows, all heads  ->  the node's rows, my heads  ->  the other strategy, between the ranks
//     that have these heads, one of every node  ->  my rows, all heads
//
// Backward has the same two levels, and so has the other strategy's.
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "longspan/error.hpp"
#include "src/strategy/shared/head_exchange.hpp"
#include "src/strategy/shared/head_gradients.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

StrategyEntry gather_states();
StrategyEntry scatter_states();
StrategyEntry ring_kv();
StrategyEntry gather_kv();
StrategyEntry ring_q();

namespace {

/// The options of the attention between nodes, with these heads.
Options between_nodes(const Options& options, HeadShare share) {
  const int per_node = options.ranks_per_node;
  Options o = options;
  o.heads = share.query.size();
  o.kv_heads = share.kv.size();
  o.keys = of_nodes(options.keys, per_node);
  if (options.queries) {
    o.queries = of_nodes(*options.queries, per_node);
    o.limits.max_tokens *= per_node;
  }
  if (options.results.part == ResultPart::rows)
    o.results.rows = of_nodes(options.results.rows, per_node);
  o.exchange = Exchange::gather;
  return o;
}

class HeadsAnd final : public Strategy {
 public:
  HeadsAnd(const LayerContext& layer, const StrategyEntry& entry, const char* name)
      : layer_(layer),
        name_(name),
        ranks_(NodeRanks::of(layer.comm.rank(), layer.comm.size(), layer.options.ranks_per_node)),
        levels_(layer.comm.levels(ranks_.count)),
        exchange_(layer, ranks_, *levels_.node),
        options_(between_nodes(layer.options, exchange_.share())),
        between_(entry.make(layer_between_nodes())) {
    if (layer.options.gradients) gradients_.emplace(layer, exchange_);
  }

  void lay_out(Parts& memory) override {
    exchange_.lay_out(memory);
    if (gradients_) gradients_->lay_out(memory);
    between_->lay_out(memory);
  }

  void open(std::uint32_t layer) override { between_->open(layer); }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  int most_marks() const override { return between_->most_marks() + Strategy::most_marks(); }

  void prepare(Pass& pass) override { exchange_.prepare(pass, name_); }

  void queue(Pass& pass) override {
    pass.run.enter(Phase::exchange);
    compare_reports(pass, "agreement on the run");
    or_end_all([&] { exchange_.queue(pass, [&] { attend_between_nodes(pass); }); });
  }

  void backward(Pass& pass, const GradientArgs& args) override {
    compare_reports(pass, "backward, agreement");
    or_end_all([&] {
      gradients_->backward(pass, args, [&](const Pass& own, const Tensor& dout) {
        return gradients_between_nodes(own, dout);
      });
    });
  }

 private:
  /// Compares the reports of a run among all ranks, since two that never exchange data may differ.
  void compare_reports(Pass& pass, const char* step) const {
    pass.write_own_digest(layer_.kernels);
    layer_.comm.all_gather(nullptr, nullptr, 0, pass.run.stream, step, pass.digests);
    pass.digests = nullptr;
  }

  /// Runs the communication of one of the two levels. An error of a level's communicator ends the
  /// layer's communicator too, so every rank learns of the failure at once. Any other error here
  /// must end it too.
  template <class Work>
  void or_end_all(const Work& work) const {
    try {
      work();
    } catch (const std::exception& error) {
      layer_.comm.abort(error.what());
      throw;
    }
  }

  LayerContext layer_between_nodes() const {
    LayerContext layer{options_, layer_.kernels, *levels_.nodes, layer_.bounds};
    layer.bounds.tokens = options_.limits.max_tokens;
    layer.bounds.heads = options_.heads;
    layer.bounds.kv_heads = options_.kv_heads;
    layer.bounds.shard.rank = ranks_.node();
    layer.bounds.shard.ranks = ranks_.nodes;
    return layer;
  }

  void attend_between_nodes(const Pass& pass) const {
    as_layer_between_nodes(pass, [&](Pass& own) { between_->queue(own); });
  }

  Gradients gradients_between_nodes(const Pass& pass, const Tensor& dout) const {
    Gradients gradients;
    GradientArgs args;
    args.dout = dout;
    as_layer_between_nodes(pass, [&](Pass& own) {
      own.terms = pass.terms;
      own.bias_sums = pass.bias_sums;
      own.to = &gradients;
      between_->backward(own, args);
    });
    return gradients;
  }

  /// Gives `work` the pass of the other strategy, as in a layer of one rank per node.
  template <class Work>
  void as_layer_between_nodes(const Pass& pass, const Work& work) const {
    const Run& run = pass.run;
    AttentionArgs args = run.args;
    RunArrays arrays = run.arrays;
    const kernels::AttendParams& p = pass.attend;
    args.q = Tensor(p.q.data, p.q_dtype, {p.tokens, p.heads, p.head_dim});
    args.q.device = run.args.q.device;
    arrays.keys = p.shard;
    if (options_.queries || options_.results.part == ResultPart::rows)
      arrays.queries = part_of_node(arrays.queries, ranks_);
    arrays.q_scale = p.q_scale;
    arrays.k_scale = p.k_scale;
    arrays.v_scale = p.v_scale;
    arrays.slopes = p.bias.slopes;
    arrays.sinks = pass.merge.sinks;
    const Run between{.args = args,
                      .arrays = arrays,
                      .stream = run.stream,
                      .attend = pass.attend,
                      .merge = pass.merge,
                      .timed = run.timed,
                      .enter = run.enter};
    Pass own(between);
    between_->prepare(own);
    work(own);
  }

  LayerContext layer_;
  const char* name_;
  NodeRanks ranks_;
  const comm::Levels& levels_;
  HeadExchange exchange_;
  Options options_;  // between nodes
  std::unique_ptr<Strategy> between_;
  std::optional<HeadGradients> gradients_;  // with Options::gradients
};

/// Why two levels cannot serve such a layer, whatever the strategy between nodes.
std::string refuse_levels(const Options& o, int ranks) {
  const int per_node = o.ranks_per_node;
  if (per_node == 0)
    return "Options::ranks_per_node is not given, and not every node is known to have as many "
           "ranks, side by side";
  if (ranks % per_node != 0)
    return fmt::format("nodes of {} ranks (Options::ranks_per_node) do not divide {} ranks",
                       per_node, ranks);
  if (per_node == ranks) return "all ranks are of one node";
  if (per_node == 1) return "every rank has a node of its own";
  if (std::string why = refuse_head_exchange(o, per_node); !why.empty()) return why;
  if (o.exchange != Exchange::automatic && o.exchange != Exchange::gather)
    return fmt::format("it sends rows within nodes, and does not take exchange {}",
                       name(o.exchange));
  if (is_by_table(o.keys) || (o.queries && is_by_table(*o.queries)) ||
      (o.results.part == ResultPart::rows && is_by_table(o.results.rows)))
    return "it takes keys and rows that are dealt out by a rule, and not by a table";
  if (o.results.part == ResultPart::heads) return "it does not give results by heads";
  return "";
}

HeadShare most_of(const Options& o) {
  const MostHeads most = most_heads(o.heads, o.kv_heads, o.ranks_per_node);
  return {{0, most.query}, {0, most.kv}};
}

/// The cost of the exchange among the ranks of a node, plus that of the strategy between nodes on a
/// node's share.
RunCost cost_with(const StrategyEntry& between, const Options& o, int ranks, const RunSize& size,
                  Device device) {
  const int per_node = o.ranks_per_node, nodes = ranks / per_node;
  RunSize node = size;
  node.keys = most_keys_of_a_rank(of_nodes(o.keys, per_node), size.keys, nodes);
  if (o.results.part == ResultPart::rows) node.tokens /= nodes;  // that its ranks get
  RunCost cost = head_exchange_cost(o, per_node, node);
  RunSize all = size;
  all.most_tokens *= per_node;
  Options far = between_nodes(o, most_of(o));
  far.exchange = Exchange::gather;  // GPUs of different nodes do not reach each other
  const RunCost other = between.cost(far, nodes, all, device);
  cost.far_bytes = other.received_bytes;
  cost.received_bytes += other.received_bytes;
  cost.workspace_bytes += other.workspace_bytes;
  cost.overlapped_bytes = other.overlapped_bytes;
  cost.messages += other.messages + 1;  // and the comparison of reports
  cost.work *= other.work;
  cost.calls = other.calls;
  cost.keys_read *= other.keys_read;
  cost.merged_bytes = other.merged_bytes;
  cost.copied_bytes += other.copied_bytes;
  if (!o.gradients) return cost;
  cost.workspace_bytes += HeadGradients::workspace_bytes(o, per_node, node, true);
  cost.backward = HeadGradients::cost(o, per_node, node);
  cost.backward.far_bytes = other.backward.received_bytes;
  cost.backward.received_bytes += other.backward.received_bytes;
  cost.backward.overlapped_bytes = other.backward.overlapped_bytes;
  cost.backward.messages += other.backward.messages + 1;
  cost.backward.calls = other.backward.calls;
  cost.backward.copied_bytes += other.backward.copied_bytes;
  return cost;
}

constexpr char kGatherStates[] = "heads+gather-states", kGatherKv[] = "heads+gather-kv",
               kRingKv[] = "heads+ring-kv", kScatterStates[] = "heads+scatter-states",
               kRingQ[] = "heads+ring-q";

template <StrategyEntry (*other)(), const char* own_name>
StrategyEntry heads_and(const char* received) {
  StrategyEntry entry = other();
  entry.info.name = own_name;
  entry.info.received = received;
  entry.info.levels = 2;
  entry.info.result = "its own rows, or all";
  entry.preference += 10;
  entry.keeps_order = [](const Options&, int) { return false; };
  entry.takes_tables = false;
  entry.takes_fp64 = false;
  entry.takes_indices = false;
  entry.refusal = [](const Options& o, int ranks) {
    if (std::string why = refuse_levels(o, ranks); !why.empty()) return why;
    const std::string why = other().refusal(between_nodes(o, most_of(o)), ranks / o.ranks_per_node);
    return why.empty() ? why : "between nodes, " + why;
  };
  entry.cost = [](const Options& o, int ranks, const RunSize& size, Device device) {
    return cost_with(other(), o, ranks, size, device);
  };
  entry.make = [](const LayerContext& layer) -> std::unique_ptr<Strategy> {
    return std::make_unique<HeadsAnd>(layer, other(), own_name);
  };
  return entry;
}

}  // namespace

std::vector<StrategyEntry> two_level_strategies() {
  return {heads_and<gather_states, kGatherStates>("near + (N-1) T heads/G 4 (value_dim + 2)"),
          heads_and<gather_kv, kGatherKv>("near + (N-1)/N S kv_heads/G (head_dim + value_dim) b"),
          heads_and<ring_kv, kRingKv>("near + (N-1)/N S kv_heads/G (head_dim + value_dim) b"),
          heads_and<scatter_states, kScatterStates>("near + (N-1)/N T heads/G 4 (value_dim + 2)"),
          heads_and<ring_q, kRingQ>("near + (N-1)/N T heads/G (head_dim b + 4 (value_dim + 2))")};
}

}  // namespace longspan

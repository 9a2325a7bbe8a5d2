#include "launcher/plan/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "launcher/io/output_file.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/shapes.hpp"
#include "launcher/problem/world.hpp"
#include "longspan/options.hpp"
#include "longspan/storage.hpp"
#include "longspan/strategy.hpp"
#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

/// A cluster, and its task.
class Cluster {
 public:
  Cluster(const PlanOptions& o, const Machine& machine)
      : machine_(machine), ranks_(o.nodes * o.ranks_per_node), per_node_(o.ranks_per_node) {
    const RunOptions shape = run_options(o.shape, Device::cuda);
    options_ = {.heads = shape.heads,
                .kv_heads = shape.kv_heads,
                .head_dim = shape.dim,
                .value_dim = o.value_dim > 0 ? o.value_dim : shape.dim,
                .values_in_keys = o.values_in_keys,
                .dtypes = {.compute = dtype_named(shape.dtype)},
                .mask = o.mask,
                .indices = {.top_k = o.top_k},
                .keys = {o.layout, o.block},
                .gradients = o.backward,
                .ranks_per_node = per_node_};
    const std::int64_t tokens = o.tokens > 0 ? o.tokens : o.kv;
    // All ranks have few rows, as in decode; many rows are shared.
    if (ranks_ > 1 && tokens >= 64 * std::int64_t{ranks_} && o.top_k == 0)
      options_.queries = options_.keys;
    options_.limits = {.max_tokens = options_.queries ? (tokens + ranks_ - 1) / ranks_ : tokens,
                       .max_kv_len = o.kv,
                       .max_workspace = o.max_workspace};
    size_ = largest_run(options_, ranks_);
    size_.tokens = static_cast<double>(tokens);
  }

  int ranks() const { return ranks_; }
  bool shares_rows() const { return options_.queries.has_value(); }
  const Options& options() const { return options_; }

  std::vector<Forecast> rows() const {
    std::vector<Forecast> all = forecast(options_, {ranks_, per_node_}, size_, machine_);
    std::erase_if(
        all, [this](const Forecast& f) { return !f.strategy->is_for_nodes_of(per_node_, ranks_); });
    return all;
  }

  /// Bytes of inputs and outputs on a rank.
  double tensors() const {
    const StorageFormat format = storage_of(options_.dtypes.compute);
    const auto row = static_cast<double>(format.row_bytes(options_.head_dim)),
               value = static_cast<double>(format.row_bytes(options_.of_values()));
    const double rows = options_.queries ? size_.most_tokens : size_.tokens;
    const double keys =
        size_.keys / ranks_ * options_.kv_heads * (row + (options_.values_in_keys ? 0 : value));
    const double queries = rows * options_.heads * (row + value);      // and results
    const double gradients = options_.gradients ? keys + queries : 0;  // and dout
    return keys + queries + 4 * rows * options_.heads + gradients;
  }

  /// Seconds of all the work, shared evenly and without transfers.
  double ideal() const {
    Options alone = options_;
    alone.queries.reset();
    alone.limits.max_workspace = 0;
    const auto one = forecast(alone, {.ranks = 1}, size_, machine_);
    return (one.front().attend + one.front().backward) / ranks_;
  }

 private:
  Machine machine_;
  int ranks_, per_node_;
  Options options_;
  RunSize size_;
};

std::string text_of(double bytes) {
  constexpr double kTiB = 0x1p40;
  return bytes < 8 * kTiB ? size_text(static_cast<std::size_t>(bytes))
                          : fmt::format("{:.4g} TiB", bytes / kTiB);
}

std::string table(const PlanOptions& o, const Cluster& cluster, const Machine& machine,
                  const std::vector<Forecast>& rows, const Forecast* best) {
  const Options& options = cluster.options();
  std::string text = fmt::format(
      "# longspan {} plan | {} nodes of {} ranks | constants: {}\n# keys {} | query rows {}, {} | "
      "heads {}/{} dim {}{} {} | {}\n",
      LONGSPAN_VERSION, o.nodes, o.ranks_per_node, origin_of(machine), o.kv,
      o.tokens > 0 ? o.tokens : o.kv, cluster.shares_rows() ? "sharded" : "replicated",
      options.heads, options.kv_heads, options.head_dim,
      options.values_in_keys ? fmt::format(" with values of {}", options.of_values())
      : options.of_values() != options.head_dim ? fmt::format("/{}", options.of_values())
                                                : "",
      name(options.dtypes.compute),
      o.top_k > 0           ? fmt::format("{} keys of each row", o.top_k)
      : options.mask.causal ? "causal"
                            : "full");
  const auto of_backward = [&](const auto& time, const auto& bytes) {
    return options.gradients ? fmt::format("{:>11}{:>12}", time, bytes) : "";
  };
  text += fmt::format("#{:<21}{:>11}{:>11}{:>11}{:>11}{:>11}{:>12}{:>12}{}{:>12}{:>9}{:>11}\n",
                      "strategy", "time", "attend", "exchange", "hidden", "merge", "received",
                      "from nodes", of_backward("backward", "received"), "memory", "balance",
                      "efficiency");
  const double ideal = cluster.ideal();
  for (const Forecast& f : rows) {
    text += fmt::format("{}{:<21}", &f == best ? ">" : " ", f.strategy->name);
    if (!f.refusal.empty()) {
      text += fmt::format("  no: {}\n", f.refusal);
      continue;
    }
    text += fmt::format(
        "{:>11}{:>11}{:>11}{:>11}{:>9}{:>12}{:>12}{}{:>12}{:>9.3f}{:>11.3f}\n",
        time_text(f.seconds()), time_text(f.attend), time_text(f.exchange), time_text(f.hidden),
        time_text(f.merge), text_of(f.cost.received_bytes), text_of(f.far_bytes),
        of_backward(time_text(f.backward), text_of(f.cost.backward.received_bytes)),
        text_of(cluster.tensors() + f.cost.workspace_bytes), f.balance, ideal / f.seconds());
  }
  return text +
         "# memory: inputs, outputs and workspace of a rank, but for the scratch of kernels\n";
}

nlohmann::ordered_json record(const PlanOptions& o, const Cluster& cluster, const Machine& machine,
                              const std::vector<Forecast>& rows, const Forecast* best) {
  nlohmann::ordered_json json{{"longspan", LONGSPAN_VERSION},
                              {"nodes", o.nodes},
                              {"ranks_per_node", o.ranks_per_node},
                              {"constants", to_json(machine)},
                              {"kv_len", o.kv},
                              {"tokens", o.tokens > 0 ? o.tokens : o.kv},
                              {"backward", o.backward},
                              {"chosen", best ? best->strategy->name : ""}};
  for (const Forecast& f : rows) {
    nlohmann::ordered_json one{{"strategy", f.strategy->name}, {"refusal", f.refusal}};
    if (f.refusal.empty()) {
      one["seconds"] = f.seconds();
      one["attend_s"] = f.attend;
      one["exchange_s"] = f.exchange;
      one["hidden_s"] = f.hidden;
      one["merge_s"] = f.merge;
      if (o.backward) {
        one["backward_s"] = f.backward;
        one["backward_received_bytes"] = f.cost.backward.received_bytes;
      }
      one["balance"] = f.balance;
      one["received_bytes"] = f.cost.received_bytes;
      one["received_from_nodes_bytes"] = f.far_bytes;
      one["memory_bytes"] = cluster.tensors() + f.cost.workspace_bytes;
      one["efficiency"] = cluster.ideal() / f.seconds();
    }
    json["strategies"].push_back(one);
  }
  return json;
}

Machine machine_of(const PlanOptions& o) {
  if (o.machine.empty()) return built_in_machine(Device::cuda);
  std::error_code none;
  if (!std::filesystem::exists(o.machine, none))
    throw InputError(fmt::format("{} (--machine) cannot be opened", o.machine));
  return machine_in(o.machine, Device::cuda);
}

}  // namespace

int plan(const Communicator& control, const CommandLine& line) {
  const PlanOptions& o = line.plan;
  together(control, "planning", [&] {
    if (control.rank() != 0) return;
    const RunOptions shape = run_options(o.shape, Device::cuda);
    if (o.values_in_keys && o.value_dim > shape.dim)
      throw UsageError(fmt::format(
          "--values-in-keys with --dim {} and --value-dim {}: values that are the first columns of "
          "their keys are no wider than these",
          shape.dim, o.value_dim));
    if (o.values_in_keys && o.backward)
      throw UsageError("--values-in-keys with --backward: latent keys have no gradients by it");
    if (shape.heads % shape.kv_heads != 0)
      throw UsageError(fmt::format("--heads {} is not a multiple of --kv-heads {}", shape.heads,
                                   shape.kv_heads));
    refuse_equal_files(
        std::array<NamedFile, 2>{{{"--machine", o.machine, false}, {"--json", o.json}}});
    std::optional<OutputFile> json;
    if (!o.json.empty()) json.emplace(o.json);
    const Machine machine = machine_of(o);
    const Cluster cluster(o, machine);
    const std::vector<Forecast> rows = cluster.rows();
    const Forecast* best = nullptr;
    for (const Forecast& f : rows)
      if (f.refusal.empty() && (!best || f.seconds() < best->seconds())) best = &f;
    print(table(o, cluster, machine, rows, best),
          json && json->is_standard_output() ? stderr : stdout);
    if (!json) return;
    const std::string text = json_text(record(o, cluster, machine, rows, best));
    json->write(text.data(), text.size());
    json->commit();
  });
  return 0;
}

}  // namespace longspan::launcher

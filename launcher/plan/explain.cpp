#include "launcher/plan/explain.hpp"

#include <fmt/format.h>

#include "launcher/judge/report.hpp"

namespace longspan::launcher {

std::string explanation(std::span<const Forecast> forecasts, const Options& options, int ranks) {
  const auto of_backward = [&](const auto& time, const auto& bytes) {
    return options.gradients ? fmt::format("{:>11}{:>13}", time, bytes) : "";
  };
  std::string text =
      fmt::format("# {:<21}{:>12}{:>11}{:>11}{:>11}{:>11}{:>10}{:>13}{}{:>13}\n", "predicted",
                  "time (ms)", "attend", "exchange", "hidden", "merge", "balance", "received",
                  of_backward("backward", "received"), "workspace");
  for (const Forecast& f : forecasts) {
    if (!f.strategy->is_for_nodes_of(options.ranks_per_node, ranks)) continue;
    text += fmt::format("#{}{:<21}", options.strategy == f.strategy->name ? ">" : " ",
                        f.strategy->name);
    if (!f.refusal.empty()) {
      text += fmt::format("  no: {}\n", f.refusal);
      continue;
    }
    const auto bytes = [](double count) { return size_text(static_cast<std::size_t>(count)); };
    text += fmt::format(
        "{:>12}{:>11}{:>11}{:>11}{:>11}{:>10.3f}{:>13}{}{:>13}\n", ms_text(f.seconds() * 1e3),
        ms_text(f.attend * 1e3), ms_text(f.exchange * 1e3), ms_text(f.hidden * 1e3),
        ms_text(f.merge * 1e3), f.balance, bytes(f.cost.received_bytes),
        of_backward(ms_text(f.backward * 1e3), bytes(f.cost.backward.received_bytes)),
        bytes(f.cost.workspace_bytes));
    if (!f.reservation.empty()) text.insert(text.size() - 1, "  not by auto: " + f.reservation);
  }
  return text;
}

}  // namespace longspan::launcher

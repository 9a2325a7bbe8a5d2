#include "launcher/bench/scale_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const ScaleRow& r) {
  ordered_json json{{"phase", r.phase},   {"ranks", r.ranks},       {"kv_len", r.kv},
                    {"tokens", r.tokens}, {"strategy", r.strategy}, {"no", r.no},
                    {"chosen", r.chosen}, {"fastest", r.fastest}};
  if (!r.no.empty()) return json;
  json["not_by_auto"] = r.not_by_auto;
  json["time_ms"] = to_json(r.time);
  if (r.forward) json["forward_ms"] = to_json(*r.forward);
  if (r.backward) json["backward_ms"] = to_json(*r.backward);
  json["predicted_ms"] = r.predicted;
  json["balance"] = r.balance;
  json["split"] = {{"attend", r.attend}, {"exchange", r.exchange}, {"merge", r.merge}};
  json["received_bytes"] = r.received_bytes;
  json["counted_bytes"] = r.counted_bytes;
  json["workspace_bytes"] = r.workspace_bytes;
  json["peer_bytes"] = r.peer_bytes;
  json["peak_bytes"] = nullptr;
  if (r.peak_bytes) json["peak_bytes"] = *r.peak_bytes;
  json["efficiency"] = nullptr;
  if (r.efficiency) json["efficiency"] = *r.efficiency;
  if (r.check) json["check"] = to_json(*r.check);
  return json;
}

/// Whether two rows are of one problem on the same number of ranks.
bool same_problem(const ScaleRow& a, const ScaleRow& b) {
  return a.phase == b.phase && a.ranks == b.ranks && a.kv == b.kv && a.tokens == b.tokens;
}

}  // namespace

std::string header(const ScaleReport& r) {
  const RunOptions& o = r.shape;
  const std::string text = fmt::format(
      "# {} scaling{} | {} heads {}/{} dim {} | batch {} | keys {} | causal | {}inputs: seed {}\n",
      r.weak ? "weak" : "strong", r.graph ? " in graphs" : "", o.dtype, o.heads, o.kv_heads, o.dim,
      o.batch, r.shard,
      r.backend == name(Device::host) ? fmt::format("threads {} | ", r.threads) : "", r.seed);
  return text + fmt::format(
                    "#{:<8}{:>6}{:>10}{:>9}  {:<21}{:>10}{:>10}{:>10}{:>11}{:>8}{:>9}{:>7}{:>9}"
                    "{:>12}{:>12}{:>12}{:>12}{:>7}\n",
                    "phase", "ranks", "kv", "tokens", "strategy", "time (ms)", "min", "predicted",
                    "efficiency", "attend%", "exchange%", "merge%", "balance", "received",
                    "counted", "workspace", "peak", "#wrong");
}

std::string row(const ScaleRow& r) {
  std::string text =
      fmt::format(" {:<8}{:>6}{:>10}{:>9} {}{:<21}", r.phase, r.ranks, r.kv, r.tokens,
                  r.chosen && r.fastest ? "*"
                  : r.chosen            ? ">"
                  : r.fastest           ? "*"
                                        : " ",
                  r.strategy);
  if (!r.no.empty()) return text + fmt::format("  no: {}\n", r.no);
  return text + fmt::format(
                    "{:>10}{:>10}{:>10}{:>11}{:>8.1f}{:>9.1f}{:>7.1f}{:>9.3f}{:>12}{:>12}{:>12}{:>"
                    "12}{:>7}\n",
                    ms_text(r.time.median), ms_text(r.time.min), ms_text(r.predicted),
                    r.efficiency ? fmt::format("{:.3f}", *r.efficiency) : "-", 100 * r.attend,
                    100 * r.exchange, 100 * r.merge, r.balance,
                    size_text(static_cast<std::size_t>(r.received_bytes)),
                    size_text(static_cast<std::size_t>(r.counted_bytes)),
                    size_text(r.workspace_bytes),
                    r.peak_bytes ? size_text(static_cast<std::size_t>(*r.peak_bytes)) : "-",
                    r.check ? fmt::to_string(r.check->wrong) : "-");
}

std::string summary(const ScaleReport& report) {
  int points = 0, within = 0;
  double worst = 1;
  for (const ScaleRow& chosen : report.rows) {
    if (!chosen.chosen || chosen.ranks == 1) continue;
    for (const ScaleRow& best : report.rows) {
      if (!best.fastest || !same_problem(best, chosen)) continue;
      const double ratio = chosen.time.median / best.time.median;
      ++points;
      within += ratio <= 1.05;
      worst = std::max(worst, ratio);
    }
  }
  if (points == 0) return "";
  return fmt::format(
      "# auto: within 5 % of the fastest in {} of {} problems on several ranks; {:.3f} times its "
      "time at worst\n",
      within, points, worst);
}

std::string to_csv(const ScaleReport& report) {
  std::string text =
      "phase,ranks,kv_len,tokens,strategy,chosen,fastest,median_ms,min_ms,max_ms,predicted_ms,"
      "efficiency,attend,exchange,merge,balance,received_bytes,counted_bytes,workspace_bytes,"
      "peer_bytes,wrong,forward_ms,backward_ms,peak_bytes\n";
  for (const ScaleRow& r : report.rows) {
    if (!r.no.empty()) continue;
    text += fmt::format(
        "{},{},{},{},{},{:d},{:d},{:.6g},{:.6g},{:.6g},{:.6g},{},{:.4f},{:.4f},{:.4f},"
        "{:.4f},{:.0f},{:.0f},{},{},{},{},{},{}\n",
        r.phase, r.ranks, r.kv, r.tokens, r.strategy, r.chosen, r.fastest, r.time.median,
        r.time.min, r.time.max, r.predicted,
        r.efficiency ? fmt::format("{:.4f}", *r.efficiency) : "", r.attend, r.exchange, r.merge,
        r.balance, r.received_bytes, r.counted_bytes, r.workspace_bytes, r.peer_bytes,
        r.check ? fmt::to_string(r.check->wrong) : "",
        r.forward ? fmt::format("{:.6g}", r.forward->median) : "",
        r.backward ? fmt::format("{:.6g}", r.backward->median) : "",
        r.peak_bytes ? fmt::format("{:.0f}", *r.peak_bytes) : "");
  }
  return text;
}

ordered_json to_json(const ScaleReport& r) {
  const RunOptions& o = r.shape;
  ordered_json json{{"longspan", LONGSPAN_VERSION},
                    {"backend", r.backend},
                    {"world", r.world},
                    {"constants", to_json(r.machine)},
                    {"case",
                     {{"scaling", r.weak ? "weak" : "strong"},
                      {"graph", r.graph},
                      {"batch", o.batch},
                      {"heads", o.heads},
                      {"kv_heads", o.kv_heads},
                      {"dim", o.dim},
                      {"dtype", o.dtype},
                      {"shard", r.shard},
                      {"inputs", fmt::format("seed {}", r.seed)}}},
                    {"threads", r.threads}};
  json["rows"] = ordered_json::array();
  for (const ScaleRow& one : r.rows) json["rows"].push_back(to_json(one));
  return json;
}

}  // namespace longspan::launcher

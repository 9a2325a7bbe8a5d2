#include "launcher/bench/decode_report.hpp"

#include <fmt/format.h>

#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const DecodeReport& report, const DecodeRow& r) {
  ordered_json json{
      {"kv_len", r.kv},
      {"caches", r.caches},
      {"cache_bytes", r.cache_bytes},
      {"workspace_bytes", r.workspace_bytes},
      {"time_ms", to_json(r.time)},
      {"times_ms", r.times},
      {"layer_us", r.time.median * 1e3 / report.options.layers},
      {"split_ms", {{"append", r.append}, {"attend", r.attend}, {"exchange", r.exchange}}},
      {"bandwidth_gbs", r.bandwidth}};
  json["alone"] = nullptr;
  json["efficiency"] = nullptr;
  if (r.alone) json["alone"] = {{"kv_len", r.alone_kv}, {"time_ms", to_json(*r.alone)}};
  if (r.efficiency) json["efficiency"] = *r.efficiency;
  if (!r.not_alone.empty()) json["not_alone"] = r.not_alone;
  if (r.check) json["check"] = to_json(*r.check);
  json["digest"] = fmt::format("{:016x}", r.digest);
  return json;
}

}  // namespace

std::string header(const DecodeReport& r) {
  const DecodeOptions& o = r.options;
  std::string text = fmt::format(
      "# decode | {} heads {}/{} dim {} | cache {}{} | batch {}, {} new token{} each | layers {} | "
      "keys {}{} | {}inputs: seed {}\n",
      o.dtype, o.heads, o.kv_heads, o.dim, o.kv_dtype.empty() ? o.dtype : o.kv_dtype,
      o.page > 0 ? fmt::format(" in pages of {}", o.page) : "", o.batch, o.tokens,
      o.tokens > 1 ? "s" : "", o.layers, o.shard, o.invariant ? " | invariant" : "",
      r.backend == name(Device::host) ? fmt::format("threads {} | ", r.threads)
      : r.ranks > 1                   ? fmt::format("exchange {} | ", r.exchange_by)
                                      : "",
      r.seed);
  text += fmt::format("#{:>10}{:>7}{:>6}{:>30}{:>11}{:>26}{:>9}{:>10}{:>11}\n", "", "", "",
                      "step (ms)   ", "layer", "share of the step (%)  ", "", "alone", "");
  text += fmt::format(
      "#{:>10}{:>7}{:>6}{:>10}{:>10}{:>10}{:>11}{:>8}{:>9}{:>9}{:>9}{:>10}{:>11}{:>10}{:>10}{:>8}"
      "\n",
      "kv", "caches", "ranks", "median", "min", "max", "(us)", "append", "attend", "exchange",
      "GB/s", "(ms)", "efficiency", "max|err|", "rel err", "#wrong");
  return text;
}

std::string row(const DecodeReport& report, const DecodeRow& r) {
  const auto share = [&](double ms) { return 100 * ms / r.time.median; };
  std::string text = fmt::format(
      " {:>10}{:>7}{:>6}{:>10}{:>10}{:>10}{:>11.2f}{:>8.1f}{:>9.1f}{:>9.1f}{:>9.4g}{:>10}{:>11}",
      r.kv, r.caches, report.ranks, ms_text(r.time.median), ms_text(r.time.min),
      ms_text(r.time.max), r.time.median * 1e3 / report.options.layers, share(r.append),
      share(r.attend), share(r.exchange), r.bandwidth, r.alone ? ms_text(r.alone->median) : "-",
      r.efficiency ? fmt::format("{:.3f}", *r.efficiency) : "-");
  if (r.check)
    text += fmt::format("{:>10.1e}{:>10.1e}{:>8}\n", r.check->max_error, r.check->relative_error,
                        r.check->wrong);
  else
    text += fmt::format("{:>10}{:>10}{:>8}\n", "-", "-", "-");
  if (!r.not_alone.empty()) text += fmt::format("# not alone: {}\n", r.not_alone);
  return text;
}

ordered_json to_json(const DecodeReport& r) {
  const DecodeOptions& o = r.options;
  ordered_json json{{"longspan", LONGSPAN_VERSION},
                    {"backend", r.backend},
                    {"world", r.world},
                    {"exchange", r.exchange_by},
                    {"constants", to_json(r.machine)},
                    {"case",
                     {{"ranks", r.ranks},
                      {"scaling", o.weak ? "weak" : "strong"},
                      {"batch", o.batch},
                      {"tokens", o.tokens},
                      {"heads", o.heads},
                      {"kv_heads", o.kv_heads},
                      {"dim", o.dim},
                      {"dtype", o.dtype},
                      {"kv_dtype", o.kv_dtype.empty() ? o.dtype : o.kv_dtype},
                      {"page", o.page},
                      {"layers", o.layers},
                      {"shard", o.shard},
                      {"invariant", o.invariant},
                      {"inputs", fmt::format("seed {}", r.seed)}}},
                    {"threads", r.threads},
                    {"warmup", o.warmup},
                    {"iterations", o.iterations}};
  json["rows"] = ordered_json::array();
  for (const DecodeRow& one : r.rows) json["rows"].push_back(to_json(r, one));
  return json;
}

}  // namespace longspan::launcher

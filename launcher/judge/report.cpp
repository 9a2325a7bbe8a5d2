#include "launcher/judge/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "longspan/option_table.hpp"
#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

using nlohmann::ordered_json;

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

Spread spread_of(const std::vector<double>& values) {
  if (values.empty()) return {};
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return {median(values), *least, *most};
}

ordered_json to_json(const Spread& s) {
  return {{"median", s.median}, {"min", s.min}, {"max", s.max}};
}

ordered_json to_json(const Judgement& j) {
  ordered_json made{{"rows", j.rows},
                    {"max_error", j.max_error},
                    {"relative_error", j.relative_error},
                    {"relative_bound", j.relative_bound},
                    {"plain_error", j.plain_error},
                    {"lse_error", j.lse_error},
                    {"bound", j.bound}};
  for (const GradientErrors& of : j.gradients)
    made[of.name] = {{"max_error", of.max_error},
                     {"plain_error", of.plain_error},
                     {"largest", of.largest},
                     {"wrong", of.wrong}};
  made["wrong"] = j.wrong;
  made["right"] = j.right;
  return made;
}

ordered_json to_json(const Machine& machine) {
  return {{"from", machine.name}, {"measured", machine.measured}};
}

std::string size_text(std::size_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes < std::size_t{1} << 20) return fmt::format("{:.1f} KiB", value / (1 << 10));
  if (bytes < std::size_t{1} << 30) return fmt::format("{:.1f} MiB", value / (1 << 20));
  return fmt::format("{:.2f} GiB", value / (1 << 30));
}

std::string ms_text(double ms) {
  return fmt::format("{:.{}f}", ms, ms >= 100 ? 1 : ms >= 1 ? 3 : 4);
}

ScoreNumbers score_numbers(const ScoreOptions& options) {
  ScoreNumbers numbers;
  visit_score_options(options, [&]<class T>(const OptionInfo& option, const T& value) {
    if constexpr (std::is_same_v<T, double>) numbers.emplace_back(option.name, value);
  });
  return numbers;
}

std::string rope_text(const RopeOptions& rope) {
  if (rope.dim == 0) return "";
  return fmt::format(" rope {}{} theta {} scale {}", rope.dim,
                     rope.interleaved ? " interleaved" : "", rope.base, rope.scale);
}

Report describe(const Communicator& world, const Problem& problem, const RunOptions& options,
                const Attention& layer) {
  const Options& o = layer.options();
  Report r;
  r.strategy = layer.strategy().name;
  r.backend = name(world.device());
  r.world = world.describe();
  r.exchange_by = layer.exchange().describe();
  r.ranks = world.size();
  r.kv = *std::max_element(problem.kv_lens.begin(), problem.kv_lens.end());
  r.tokens = *std::max_element(problem.q_lens.begin(), problem.q_lens.end());
  r.rows = problem.tokens();
  r.batch = problem.batch();
  r.heads = o.heads;
  r.kv_heads = o.kv_heads;
  r.dim = o.head_dim;
  r.value_dim = problem.value_dim();
  r.dtype = name(o.dtypes.compute);
  r.qkv_dtype = name(problem.q.dtype);
  r.fp8_products = o.dtypes.fp8_products;
  r.bf16_products = o.dtypes.bf16_products;
  r.values_in_keys = o.values_in_keys;
  r.top_k = o.indices.top_k;
  r.shard = options.shard;
  r.inputs = options.q.empty() ? problem.q.label : options.q;
  r.shard_queries = problem.queries.has_value();
  r.invariant = o.invariant;
  r.causal = o.mask.causal;
  r.alignment = name(o.mask.alignment);
  r.window = o.mask.window;
  r.score = score_numbers(o.score);
  r.rope = o.rope;
  r.dropout = o.dropout;
  r.dropout_seed = problem.dropout_seed[0];
  r.alibi = options.alibi;
  r.lengths = options.lengths;
  const std::size_t own[] = {layer.workspace_bytes(), layer.exchange().peer_bytes};
  for (const std::string& text :
       world.gather(ordered_json(own).dump(), "gather of workspace sizes")) {
    const auto theirs = ordered_json::parse(text).get<std::vector<std::size_t>>();
    r.workspace_bytes = std::max(r.workspace_bytes, theirs.at(0));
    r.peer_bytes = std::max(r.peer_bytes, theirs.at(1));
  }
  return r;
}

void measure(const Communicator& world, const Problem& problem, const std::vector<Sample>& samples,
             Report& r) {
  ordered_json mine = ordered_json::array();
  for (const Sample& s : samples)
    mine.push_back({s.time, s.phases.attend, s.phases.exchange, s.phases.merge, s.backward});

  r.times.assign(samples.size(), 0.0);
  r.backward_times = r.times;
  std::vector<double> exchange(samples.size(), std::numeric_limits<double>::infinity());
  for (const std::string& text : world.gather(mine.dump(), "gather of times")) {
    const ordered_json theirs = ordered_json::parse(text);
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const auto s = theirs[i].get<std::vector<double>>();
      r.times[i] = std::max(r.times[i], s[0]);
      exchange[i] = std::min(exchange[i], s[2]);
      r.attend += s[1];
      r.exchange += s[2];
      r.merge += s[3];
      r.backward_times[i] = std::max(r.backward_times[i], s[4]);
    }
  }
  const double total = std::max(r.attend + r.exchange + r.merge, 1e-12);
  r.attend /= total;
  r.exchange /= total;
  r.merge /= total;
  r.time = spread_of(r.times);
  const double pairs = 2.0 * r.heads * problem.visible_pairs();
  r.tflops = pairs * (r.dim + r.value_dim) / (r.time.median * 1e-3) / 1e12;
  r.goes_back = problem.goes_back();
  if (r.goes_back) {
    r.backward = spread_of(r.backward_times);
    r.backward_tflops =
        pairs * (3.0 * r.dim + 2.0 * r.value_dim) / (r.backward.median * 1e-3) / 1e12;
  }
  r.exchange_ms = median(exchange);
  if (r.ranks > 1 && r.exchange_ms > 0)
    r.busbw =
        cost_of(problem.layer_options(r.ranks), r.ranks, problem.run_size(r.ranks)).received_bytes /
        (r.exchange_ms * 1e-3) / 1e9;
}

std::string title(const Communicator& world) {
  return fmt::format("# longspan {} | {} | {}\n", LONGSPAN_VERSION, name(world.device()),
                     world.describe());
}

std::string constants_line(const Machine& machine) {
  return fmt::format("# constants: {}\n", origin_of(machine));
}

std::string json_text(const ordered_json& record) {
  return record.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string time_text(double seconds) {
  for (const auto& [unit, name] : {std::pair{3600.0, "h"}, {1.0, "s"}, {1e-3, "ms"}})
    if (seconds >= unit) return fmt::format("{:.4g} {}", seconds / unit, name);
  return fmt::format("{:.4g} us", seconds * 1e6);
}

namespace {

/// The lines of the backward, below those of the forward.
std::string backward_text(const Report& r) {
  std::string text = fmt::format(
      "# backward: median {} ms, min {}, max {}, {:.4g} TFLOP/s | with the forward {} ms\n",
      ms_text(r.backward.median), ms_text(r.backward.min), ms_text(r.backward.max),
      r.backward_tflops, ms_text(r.time.median + r.backward.median));
  if (!r.judgement || r.judgement->gradients.empty()) return text;
  text += "# gradients, largest error (that of plain fp32):";
  for (const GradientErrors& of : r.judgement->gradients)
    text += fmt::format(" {} {:.1e} ({:.1e})", of.name, of.max_error, of.plain_error);
  return text + "\n";
}

}  // namespace

std::string header(const Report& r) {
  std::string score;
  for (const auto& [name, value] : r.score)
    if (value != 0) score += fmt::format("{} {} ", name, value);
  if (r.rope.dim > 0) score += rope_text(r.rope).substr(1) + " ";
  if (r.dropout.p > 0) score += fmt::format("dropout {} seed {} ", r.dropout.p, r.dropout_seed);
  std::string seen = r.top_k > 0 ? fmt::format("{} keys of each row ", r.top_k)
                     : r.causal  ? "causal "
                                 : "full ";
  if (r.alignment != name(Alignment::lower_right)) seen += r.alignment + " ";
  std::string text = fmt::format(
      "# keys {} | queries {} | {}{}{}{}{}{}{}| {}{}{}inputs: {} | workspace {} per rank\n",
      r.shard, r.shard_queries ? "sharded by rows" : "replicated", seen,
      r.window > 0 ? fmt::format("window {} ", r.window) : "", score,
      r.alibi.empty() ? "" : fmt::format("ALiBi {} ", r.alibi), r.invariant ? "invariant " : "",
      r.qkv_dtype != r.dtype ? fmt::format("q, k, v in {} ", r.qkv_dtype) : "",
      r.fp8_products    ? "products of e4m3 "
      : r.bf16_products ? "products of bf16 "
                        : "",
      r.batch > 1 ? fmt::format("batch {} | ", r.batch) : "",
      r.values_in_keys       ? fmt::format("values in the first {} of keys | ", r.value_dim)
      : r.value_dim != r.dim ? fmt::format("values of {} | ", r.value_dim)
                             : "",
      r.ranks > 1 && r.backend == name(Device::cuda) ? fmt::format("exchange {} | ", r.exchange_by)
                                                     : "",
      r.inputs, size_text(r.workspace_bytes));
  text += fmt::format("#{:>14}{:>10}{:>8}{:>6}{:>5}{:>5}{:>6}{:>30}{:>10}{:>24}{:>10}\n", "", "",
                      "", "", "", "", "", "time (ms)   ", "", "share of time (%)  ", "busbw");
  text += fmt::format(
      "#{:>14}{:>10}{:>8}{:>6}{:>5}{:>5}{:>6}{:>10}{:>10}{:>10}{:>10}{:>8}{:>9}{:>7}{:>10}{:>10}"
      "{:>10}{:>8}\n",
      "strategy", "kv", "tokens", "heads", "kvh", "dim", "dtype", "median", "min", "max", "TFLOP/s",
      "attend", "exchange", "merge", "(GB/s)", "max|err|", "rel err", "#wrong");
  return text;
}

std::string row(const Report& r) {
  std::string text = fmt::format(
      " {:>14}{:>10}{:>8}{:>6}{:>5}{:>5}{:>6}{:>10}{:>10}{:>10}{:>10.4g}{:>8.1f}{:>9.1f}{:>7.1f}"
      "{:>10.4g}",
      r.strategy, r.kv, r.tokens, r.heads, r.kv_heads, r.dim, r.dtype, ms_text(r.time.median),
      ms_text(r.time.min), ms_text(r.time.max), r.tflops, 100 * r.attend, 100 * r.exchange,
      100 * r.merge, r.busbw);
  if (r.judgement) {
    text += fmt::format("{:>10.1e}{:>10.1e}{:>8}\n", r.judgement->max_error,
                        r.judgement->relative_error, r.judgement->wrong);
  } else {
    text += fmt::format("{:>10}{:>10}{:>8}\n", "-", "-", "-");
  }
  if (r.judgement && r.judgement->rows > 0)
    text += fmt::format(
        "# compared {} of {} rows with float64; plain {} attention on one device is off by "
        "{:.1e}\n",
        r.judgement->rows, r.rows, r.dtype, r.judgement->plain_error);
  if (r.goes_back) text += backward_text(r);
  if (r.digest) text += fmt::format("# digest {:016x}\n", *r.digest);
  return text;
}

namespace {

ordered_json case_of(const Report& r) {
  ordered_json made{{"strategy", r.strategy},
                    {"ranks", r.ranks},
                    {"kv_len", r.kv},
                    {"tokens", r.tokens},
                    {"batch", r.batch},
                    {"heads", r.heads},
                    {"kv_heads", r.kv_heads},
                    {"dim", r.dim},
                    {"value_dim", r.value_dim},
                    {"values_in_keys", r.values_in_keys},
                    {"dtype", r.dtype},
                    {"qkv_dtype", r.qkv_dtype},
                    {"fp8_products", r.fp8_products},
                    {"bf16_products", r.bf16_products},
                    {"causal", r.causal},
                    {"causal_alignment", r.alignment},
                    {"window", r.window}};
  for (const auto& [name, value] : r.score) made[name] = value;
  made["alibi"] = r.alibi;
  if (r.top_k > 0) made["top_k"] = r.top_k;
  if (r.rope.dim > 0)
    made["rope"] = {{"dim", r.rope.dim},
                    {"interleaved", r.rope.interleaved},
                    {"theta", r.rope.base},
                    {"scale", r.rope.scale}};
  if (r.dropout.p > 0)
    made["dropout"] = {
        {"p", r.dropout.p}, {"seed", r.dropout_seed}, {"first_head", r.dropout.first_head}};
  if (r.goes_back) made["backward"] = true;
  made["shard"] = r.shard;
  made["shard_queries"] = r.shard_queries;
  made["invariant"] = r.invariant;
  made["inputs"] = r.inputs;
  if (!r.lengths.empty()) made["lengths"] = r.lengths;
  return made;
}

}  // namespace

ordered_json to_json(const Report& r) {
  ordered_json json{{"longspan", LONGSPAN_VERSION},
                    {"backend", r.backend},
                    {"world", r.world},
                    {"exchange", r.exchange_by},
                    {"case", case_of(r)},
                    {"constants", to_json(r.machine)},
                    {"workspace_bytes", r.workspace_bytes},
                    {"peer_bytes", r.peer_bytes},
                    {"time_ms", to_json(r.time)},
                    {"times_ms", r.times},
                    {"tflops", r.tflops},
                    {"share", {{"attend", r.attend}, {"exchange", r.exchange}, {"merge", r.merge}}},
                    {"exchange_ms", r.exchange_ms},
                    {"busbw_gbs", r.busbw}};
  if (r.goes_back)
    json["backward"] = {{"time_ms", to_json(r.backward)},
                        {"times_ms", r.backward_times},
                        {"tflops", r.backward_tflops}};
  if (r.judgement) json["check"] = to_json(*r.judgement);
  if (r.digest) json["digest"] = fmt::format("{:016x}", *r.digest);
  return json;
}

}  // namespace longspan::launcher

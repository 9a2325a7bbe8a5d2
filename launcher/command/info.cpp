#include "launcher/command/info.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "launcher/judge/report.hpp"
#include "longspan/info.hpp"
#include "longspan/option_table.hpp"
#include "longspan/strategy.hpp"

namespace longspan::launcher {

using nlohmann::ordered_json;

std::string strategies_text() {
  std::string text = fmt::format("{:<21}{:<28}{:<28}{}\n", "strategy", "queries a rank holds",
                                 "result a rank gets", "bytes received per rank");
  for (const StrategyInfo& s : strategies())
    text += fmt::format("{:<21}{:<28}{:<28}{}\n", s.name, s.queries, s.result, s.received);
  return text +
         "P ranks, T query rows, S keys, b bytes of a key's element; of two levels N nodes of G "
         "ranks, "
         "and\nnear (G-1)/(G P) (T heads + S kv_heads) (head_dim + value_dim) b from the own "
         "node\n";
}

std::string info_text(const std::string& world, bool json) {
  if (json) {
    ordered_json all{{"world", world}};
    for (const auto& [name, value] : system_info()) all[name] = value;
    for (const StrategyInfo& s : strategies())
      all["strategies"].push_back({{"name", s.name},
                                   {"queries", s.queries},
                                   {"result", s.result},
                                   {"received", s.received}});
    return json_text(all);
  }
  std::string text;
  for (const auto& [name, value] : system_info()) text += fmt::format("{:<12}{}\n", name, value);
  return text + fmt::format("{:<12}{}\n\n{}", "world", world, strategies_text());
}

std::string features_text(bool json) {
  if (json) {
    ordered_json all = ordered_json::array();
    for (const FeatureInfo& f : features())
      all.push_back({{"name", f.name},
                     {"meaning", f.meaning},
                     {"asked of", f.by},
                     {"host", f.host},
                     {"cuda", f.cuda}});
    return json_text(all);
  }
  std::string text =
      fmt::format("{:<22}{:<6}{:<6}{:<14}{}\n", "feature", "host", "cuda", "asked of", "meaning");
  for (const FeatureInfo& f : features())
    text += fmt::format("{:<22}{:<6}{:<6}{:<14}{}\n", f.name, f.host ? "yes" : "no",
                        f.cuda ? "yes" : "no", f.by, f.meaning);
  return text;
}

std::string kernels_text(bool json) {
  const auto yes = [](bool is) { return is ? "yes" : "no"; };
  ordered_json all = ordered_json::array();
  std::string text =
      fmt::format("{:<7}{:<17}{:<12}{:<18}{:<22}{:<10}{:<10}{}\n", "device", "kernel", "queries",
                  "heads", "rows end in", "arrivals", "new keys", "takes");
  for (const KernelInfo& k : kernel_families()) {
    all.push_back({{"device", k.device},
                   {"kernel", k.name},
                   {"queries", k.queries},
                   {"heads", k.heads},
                   {"takes", k.takes},
                   {"rows end in", k.ends},
                   {"arrivals", k.arrivals},
                   {"new keys", k.new_keys}});
    text += fmt::format("{:<7}{:<17}{:<12}{:<18}{:<22}{:<10}{:<10}{}\n", k.device, k.name,
                        k.queries, k.heads, k.ends, yes(k.arrivals), yes(k.new_keys), k.takes);
  }
  return json ? json_text(all) : text;
}

namespace {

/// A line of the tables of options and arguments: its name, and how ranks compare it.
struct Named {
  std::string member;
  const char* python;
  const char* command;
  std::string compared;
};

std::vector<Named> options_and_arguments() {
  std::vector<Named> all;
  const Options options;
  visit_options(options, [&](const OptionInfo& o, const auto&) {
    all.push_back({"Options::" + o.member(), o.python, o.command, o.own != nullptr ? "no" : "yes"});
  });
  const AttentionArgs args;
  visit_arguments(args, [&](const ArgumentInfo& a, const auto&) {
    const char* compared[] = {"what it holds", "whether given", "ranges", "yes", "no"};
    all.push_back({std::string("AttentionArgs::") + a.name, a.python, nullptr,
                   compared[static_cast<int>(a.compared)]});
  });
  return all;
}

}  // namespace

std::string options_text(bool json) {
  const auto or_empty = [](const char* text) { return text != nullptr ? text : ""; };
  ordered_json all = ordered_json::array();
  std::string text =
      fmt::format("{:<33}{:<16}{:<18}{}\n", "C++", "Python", "longspan run", "ranks compare");
  for (const Named& n : options_and_arguments()) {
    all.push_back({{"C++", n.member},
                   {"Python", or_empty(n.python)},
                   {"longspan run", or_empty(n.command)},
                   {"ranks compare", n.compared}});
    text += fmt::format("{:<33}{:<16}{:<18}{}\n", n.member, or_empty(n.python), or_empty(n.command),
                        n.compared);
  }
  return json ? json_text(all) : text;
}

std::string environment_text(bool json) {
  if (json) {
    ordered_json all = ordered_json::array();
    for (const EnvironmentVariable& v : environment())
      all.push_back(
          {{"name", v.name}, {"value", v.value}, {"standard", v.standard}, {"meaning", v.meaning}});
    return json_text(all);
  }
  std::size_t names = 0, values = 0, standards = 0;  // the widths of the columns
  std::vector<EnvironmentVariable> rows{{"variable", "value", "standard", "meaning"}};
  for (const EnvironmentVariable& v : environment()) rows.push_back(v);
  for (EnvironmentVariable& v : rows) {
    if (v.value.empty()) v.value = "-";
    names = std::max(names, v.name.size());
    values = std::max(values, v.value.size());
    standards = std::max(standards, v.standard.size());
  }
  std::string text;
  for (const EnvironmentVariable& v : rows)
    text += fmt::format("{:<{}}  {:<{}}  {:<{}}  {}\n", v.name, names, v.value, values, v.standard,
                        standards, v.meaning);
  return text;
}

}  // namespace longspan::launcher

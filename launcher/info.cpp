#include "launcher/info.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "longspan/info.hpp"
#include "longspan/strategy.hpp"

namespace longspan::launcher {

using nlohmann::ordered_json;

std::string strategies_text() {
  std::string text = fmt::format("{:<16}{:<28}{:<28}{}\n", "strategy", "queries a rank holds",
                                 "result a rank gets", "bytes received per rank");
  for (const StrategyInfo& s : strategies())
    text += fmt::format("{:<16}{:<28}{:<28}{}\n", s.name, s.queries, s.result, s.received);
  return text + "P ranks, T query rows\n";
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
    return all.dump(2) + "\n";
  }
  std::string text;
  for (const auto& [name, value] : system_info()) text += fmt::format("{:<12}{}\n", name, value);
  return text + fmt::format("{:<12}{}\n\n{}", "world", world, strategies_text());
}

std::string environment_text(bool json) {
  if (json) {
    ordered_json all = ordered_json::array();
    for (const EnvironmentVariable& v : environment())
      all.push_back(
          {{"name", v.name}, {"value", v.value}, {"standard", v.standard}, {"meaning", v.meaning}});
    return all.dump(2) + "\n";
  }
  std::string text =
      fmt::format("{:<24}{:<12}{:<16}{}\n", "variable", "value", "standard", "meaning");
  for (const EnvironmentVariable& v : environment())
    text += fmt::format("{:<24}{:<12}{:<16}{}\n", v.name, v.value.empty() ? "-" : v.value,
                        v.standard, v.meaning);
  return text;
}

}  // namespace longspan::launcher

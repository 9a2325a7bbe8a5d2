#include "launcher/options/help.hpp"

#include <sstream>

namespace longspan::launcher {
namespace {

constexpr std::size_t kWidth = 80, kColumn = 30;

/// Writes `left`, and `right` wrapped beside it, or below it where `left` is too long.
std::string two_columns(const std::string& left, const std::string& right) {
  std::string text, line = "  " + left;
  if (line.size() + 2 > kColumn) {
    text = line + "\n";
    line.clear();
  }
  line.resize(kColumn, ' ');
  std::istringstream words(right);
  bool first = true;  // whether the word is the first of its line
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > kWidth) {
      text += line + "\n";
      line.assign(kColumn, ' ');
      first = true;
    }
    line += (first ? "" : " ") + word;
  }
  return text + line + "\n";
}

}  // namespace

std::string Help::make_option_name(const CLI::Option* option, bool positional) const {
  const auto& names = option->get_lnames();
  if (positional || names.empty()) return Formatter::make_option_name(option, positional);
  std::string text;
  for (const std::string& letter : option->get_snames()) text += "-" + letter + ",";
  return text + "--" + names.front();
}

std::string Help::make_option(const CLI::Option* option, bool positional) const {
  return two_columns(make_option_name(option, positional) + make_option_opts(option),
                     make_option_desc(option));
}

std::string Help::make_subcommand(const CLI::App* command) const {
  return two_columns(command->get_name(), command->get_description());
}

}  // namespace longspan::launcher

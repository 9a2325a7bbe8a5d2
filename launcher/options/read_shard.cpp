#include "launcher/options/read_shard.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "launcher/options/numbers.hpp"
#include "launcher/options/spelling.hpp"

namespace longspan::launcher {

bool read_shard(const std::string& text, std::initializer_list<Layout> allowed, Layout& layout,
                std::int64_t& block) {
  const std::string rule = text.substr(0, text.find(':'));
  bool known = false;
  for (Layout candidate : allowed) {
    if (rule == name(candidate)) layout = candidate, known = true;
  }
  const bool has_block = rule.size() != text.size();
  const std::string keys = has_block ? text.substr(rule.size() + 1) : "128";
  return known && (!has_block || layout == Layout::interleaved) && read_number(keys, block) &&
         block >= 1 && block <= kMostRows;
}

void read_rule(const char* option, const std::string& text, Layout& layout, std::int64_t& block) {
  if (!read_shard(text, {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved},
                  layout, block))
    throw CLI::ValidationError(
        option, fmt::format("{} is not one of contiguous, zigzag, striped, interleaved, "
                            "interleaved:BLOCK with a block of 1 to {} keys{}",
                            in_quotes(text), kMostRows,
                            suggestion(text, {"contiguous", "zigzag", "striped", "interleaved"})));
}

}  // namespace longspan::launcher

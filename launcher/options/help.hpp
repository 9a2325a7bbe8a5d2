// Lays out the command's help in two columns, with no line longer than a terminal of 80 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace longspan::launcher {

class Help : public CLI::Formatter {
 public:
  /// Leaves out the older names that an option also has.
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace longspan::launcher

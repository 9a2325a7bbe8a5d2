// Lays out the command's help in two columns, within the 80 columns of a terminal.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace longspan::launcher {

class Help : public CLI::Formatter {
 public:
  /// Leaves out older names of options.
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace longspan::launcher

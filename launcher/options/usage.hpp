// Explains an error in a command line: which word, of which command, and what was probably meant.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace longspan::launcher {

/// The command that was parsed last, as it is typed: "bench decode". Empty where there is none.
std::string name_of_command(const CLI::App& app);

/// The message for an error of parsing `argv` by `app`.
std::string what_is_wrong(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv);

}  // namespace longspan::launcher

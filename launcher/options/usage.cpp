#include "launcher/options/usage.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "launcher/options/numbers.hpp"
#include "launcher/options/spelling.hpp"

namespace longspan::launcher {
namespace {

using Words = std::vector<std::string>;

const CLI::App& last_command(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? app : last_command(*parsed.front());
}

std::string path_of(const CLI::App& command) {
  if (command.get_parent() == nullptr) return {};
  const std::string before = path_of(*command.get_parent());
  return before + (before.empty() ? "" : " ") + command.get_name();
}

/// All commands below `app`, without those that only hold others.
std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  std::vector<const CLI::App*> all;
  const auto every = [](const CLI::App*) { return true; };
  for (const CLI::App* command : app.get_subcommands(every)) {
    const auto below = commands_of(*command);
    if (below.empty()) all.push_back(command);
    all.insert(all.end(), below.begin(), below.end());
  }
  return all;
}

Words options_of(const CLI::App& command) {
  Words names;
  for (const CLI::Option* option : command.get_options()) names.push_back(option->get_name());
  return names;
}

bool has_option(const CLI::App& command, const std::string& name) {
  return command.get_option_no_throw(name) != nullptr;
}

/// The name without a value: `--kv` of `--kv=100`.
std::string option_in(const std::string& argument) {
  return argument.substr(0, argument.find('='));
}

bool looks_like_option(const std::string& argument) {
  double number = 0;
  return argument.size() > 1 && argument[0] == '-' && !read_number(argument, number);
}

std::string unknown_command(const CLI::App& app, const CLI::App& parent, const std::string& word) {
  Words names;
  for (const CLI::App* command : commands_of(parent)) names.push_back(path_of(*command));
  // At the top level, users may leave out the first word of two.
  for (const CLI::App* command : commands_of(app))
    if (command->get_name() == word && path_of(*command) != word)
      return fmt::format("there is no command {}; did you mean {}?", in_quotes(word),
                         path_of(*command));
  if (word == "help" || word == "version")
    return fmt::format("there is no command {}; did you mean longspan --{}?", in_quotes(word),
                       word);
  const std::string before = path_of(parent);
  const std::string typed = before.empty() ? word : before + " " + word;
  return fmt::format("there is no command {}{}; there {} {}", in_quotes(typed),
                     suggestion(typed, names), names.size() == 1 ? "is" : "are",
                     fmt::join(names, ", "));
}

std::string unknown_option(const CLI::App& app, const CLI::App& command, const std::string& name) {
  const std::string path = path_of(command);
  const std::string who = path.empty() ? "longspan alone" : path;
  const std::string near = suggestion(name, options_of(command));
  Words others;
  for (const CLI::App* other : commands_of(app))
    if (has_option(*other, name)) others.push_back(path_of(*other));
  if (others.empty() || !near.empty())
    return fmt::format("{} has no option {}{}", who, in_quotes(name), near);
  return fmt::format("{} has no option {}; {} {} it", who, in_quotes(name), fmt::join(others, ", "),
                     others.size() == 1 ? "has" : "have");
}

/// A word without an option before it that could take it.
std::string unexpected_value(const CLI::App& command, const std::string& value, int argc,
                             char** argv) {
  const CLI::Option* option = nullptr;  // the last one before the value
  for (int i = 1; i < argc && argv[i] != value; ++i)
    if (looks_like_option(argv[i])) option = command.get_option_no_throw(option_in(argv[i]));
  std::string text = fmt::format("{} stands behind no option that takes it", in_quotes(value));
  if (option == nullptr) return text;
  return fmt::format("{}: {} takes {}", text, option->get_name(),
                     option->get_items_expected_max() == 0 ? "no value" : "one value");
}

std::string unexpected(const CLI::App& app, int argc, char** argv) {
  const CLI::App& command = last_command(app);
  const Words words = app.remaining(true);
  const auto option = std::find_if(words.begin(), words.end(), looks_like_option);
  if (option != words.end()) return unknown_option(app, command, option_in(*option));
  if (words.empty()) return "there is an argument too many";
  if (!command.get_subcommands([](const CLI::App*) { return true; }).empty())
    return unknown_command(app, command, words.front());
  return unexpected_value(command, words.front(), argc, argv);
}

std::string missing_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App& parent = last_command(app);
  if (!app.remaining(true).empty()) return unexpected(app, argc, argv);
  Words names;
  for (const CLI::App* command : commands_of(parent)) names.push_back(path_of(*command));
  return fmt::format("{} is not a command by itself; there are {}", path_of(parent),
                     fmt::join(names, ", "));
}

/// Two options that exclude each other, or one that another needs.
std::string unfitting_options(const CLI::App& command, const std::string& otherwise) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0) continue;
    for (const CLI::Option* other : option->get_excludes())
      if (other->count() > 0)
        return fmt::format("{} and {} cannot be given together", option->get_name(),
                           other->get_name());
    for (const CLI::Option* other : option->get_needs())
      if (other->count() == 0)
        return fmt::format("{} needs {}, which was not given", option->get_name(),
                           other->get_name());
  }
  return otherwise;
}

/// An option with too many values or with none: CLI11's message has its name.
std::string wrong_count(const CLI::App& command, const std::string& message) {
  const std::size_t first = std::min(message.find("--"), message.size());
  const std::string name = message.substr(first, message.find_first_of(" :=,", first) - first);
  const CLI::Option* option = command.get_option_no_throw(name);
  if (option == nullptr) return message;
  if (option->get_items_expected_max() == 0) return fmt::format("{} takes no value", name);
  if (option->count() > 1) return fmt::format("{} was given {} times", name, option->count());
  return fmt::format("{} needs a value, and none follows it", name);
}

}  // namespace

std::string name_of_command(const CLI::App& app) { return path_of(last_command(app)); }

std::string what_is_wrong(const CLI::App& app, const CLI::ParseError& error, int argc,
                          char** argv) {
  const CLI::App& command = last_command(app);
  std::string message = error.what();
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) return unexpected(app, argc, argv);
  if (dynamic_cast<const CLI::RequiredError*>(&error)) return missing_command(app, argc, argv);
  if (dynamic_cast<const CLI::ExcludesError*>(&error) ||
      dynamic_cast<const CLI::RequiresError*>(&error))
    return unfitting_options(command, message);
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) ||
      dynamic_cast<const CLI::ConversionError*>(&error))
    return wrong_count(command, message);
  return message;
}

}  // namespace longspan::launcher

// Reads the values of options strictly: the whole text, in decimal, and only numbers. CLI11 alone
// accepts nan and inf as numbers, 010 as 8, and -1 as the largest seed.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "longspan/limits.hpp"

namespace longspan::launcher {

constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();  // and keys
constexpr int kMostHeads = 65536;

/// The values of --dim.
inline std::string dim_text() {
  return fmt::format("Dimension of a head: any of 1 to {}", kMaxHeadDim);
}

/// The values of --shard.
inline std::string shard_text() {
  return "How the ranks share the keys: contiguous, zigzag, striped, interleaved[:block]";
}

/// Quotes a value, short enough for one line.
inline std::string in_quotes(const std::string& text) {
  constexpr std::size_t kMost = 60;
  return text.size() <= kMost ? '"' + text + '"' : '"' + text.substr(0, kMost) + "...\"";
}

/// Reads the whole of `text` as a number; returns false where it is not one, or not one that T can
/// hold.
template <class T>
bool read_number(std::string_view text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

/// Takes a whole number, and drops leading zeros, which CLI11 reads as base 8.
template <class T>
CLI::Validator whole(T least, T most) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        T value{};
        if (!read_number(text, value) || value < least || value > most)
          return fmt::format("{} is not a whole number from {} to {}", in_quotes(text), least,
                             most);
        text = fmt::to_string(value);
        return {};
      },
      "");
}

/// Takes a finite number from `least` to `most`.
inline CLI::Validator finite(double least, double most) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        double value = 0;
        if (read_number(text, value) && value >= least && value <= most) return {};
        return fmt::format("{} is not a number from {} to {}", in_quotes(text), least, most);
      },
      "");
}

/// Takes a probability below 1.
inline CLI::Validator probability() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        double value = 0;
        if (read_number(text, value) && value >= 0 && value < 1) return {};
        return fmt::format("{} is not a probability from 0 up to, but not, 1", in_quotes(text));
      },
      "");
}

/// Takes a number for fp32: not so large that it becomes infinite, nor so small that it becomes 0.
inline CLI::Validator single_precision(bool positive) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        float value = 0;
        if (read_number(text, value) && std::isfinite(value) && (!positive || value > 0)) return {};
        return fmt::format("{} is not a {}number that fp32 can hold", in_quotes(text),
                           positive ? "positive " : "finite ");
      },
      "");
}

/// Takes the name of a file. An empty one comes from a shell variable that is not set. One that
/// begins like an option is the next option, where a name was forgotten.
inline CLI::Validator file_name() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        if (text.empty()) return "the name of the file is empty; is a variable not set?";
        if (!text.starts_with("--")) return {};
        return fmt::format("{} is not a file name; for a file of that name write ./{}",
                           in_quotes(text), text);
      },
      "");
}

/// The option for the ranks of a node, for strategies of two levels.
inline void add_ranks_per_node(CLI::App& app, int& ranks, const std::string& group) {
  app.add_option("--ranks-per-node", ranks,
                 "Ranks of a node, for strategies of two levels [the ranks of a machine]")
      ->transform(whole(1, 65536))
      ->group(group);
}

/// Options of timed runs: their number, and that of the runs before them, from `least_warmup` on.
template <class AnyOptions>
void add_run_counts(CLI::App& app, AnyOptions& o, int least_warmup, const std::string& group) {
  app.add_option("--iterations", o.iterations, "Timed runs")
      ->transform(whole(1, 1000000))
      ->group(group)
      ->capture_default_str();
  app.add_option("--warmup", o.warmup, "Runs before these, not timed")
      ->transform(whole(least_warmup, 1000000))
      ->group(group)
      ->capture_default_str();
}

}  // namespace longspan::launcher

#include "launcher/options/spelling.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "launcher/options/numbers.hpp"
#include "longspan/option_table.hpp"
#include "longspan/strategy.hpp"

namespace longspan::launcher {
namespace {

/// The edits between two words, counted row by row of the usual table: `before` is the row above
/// `row`, and `older` the one above that.
std::size_t edits(const std::string& a, const std::string& b) {
  std::vector<std::size_t> older, before, row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    older = std::exchange(before, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = a[i - 1] == b[j - 1];
      row[j] = std::min({before[j] + 1, row[j - 1] + 1, before[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], older[j - 2] + 1);
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  constexpr std::size_t kLongest = 64;  // no name is longer, so the table stays small
  if (word.empty() || word.size() > kLongest) return {};
  const std::size_t letters = word.size() - std::min(word.find_first_not_of('-'), word.size());
  std::vector<std::string> longer;
  for (const std::string& candidate : candidates)
    if (candidate.starts_with(word)) longer.push_back(candidate);
  if (letters >= 3 && longer.size() == 1) return longer.front();
  // A third of the letters may be wrong, or one in a short word.
  std::size_t least = std::max<std::size_t>(1, letters / 3) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edits(word, candidate);
    if (distance >= least) continue;
    least = distance;
    best = candidate;
  }
  return best;
}

std::string suggestion(const std::string& word, const std::vector<std::string>& candidates) {
  const std::string best = nearest(word, candidates);
  return best.empty() ? "" : fmt::format("; did you mean {}?", best);
}

std::vector<std::string> strategy_names(std::vector<std::string> others) {
  for (const StrategyInfo& strategy : strategies()) others.emplace_back(strategy.name);
  return others;
}

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](std::string& text) -> std::string {
        if (std::find(words.begin(), words.end(), text) != words.end()) return {};
        return fmt::format("{} is not one of {}{}", in_quotes(text), fmt::join(words, ", "),
                           suggestion(text, words));
      },
      "");
}

void add_alignment(CLI::App& app, Alignment& alignment, const std::string& group) {
  app.add_option_function<std::string>(
         "--causal-alignment",
         [&alignment](const std::string& text) {
           alignment = choice_named<Alignment>(text).value_or(alignment);
         },
         "Which positions the rows have: the last of the sequence (lower_right), or the first "
         "(upper_left)")
      ->check(one_of(choice_names<Alignment>()))
      ->default_str(name(alignment))
      ->group(group);
}

void add_chunks(CLI::App& app, Mask& mask, const std::string& group) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  CLI::Option* const chunk =
      app.add_option("--chunk", mask.chunk, "Keys of a chunk: a row sees those of its own chunk")
          ->transform(whole(std::int64_t{1}, kMost))
          ->group(group);
  app.add_option("--lookback", mask.lookback, "How many chunks before its own a row sees too")
      ->transform(whole(std::int64_t{0}, kMost))
      ->needs(chunk)
      ->group(group);
  app.add_option("--prefix", mask.prefix,
                 "How many first keys a row sees whatever --window and --chunk say")
      ->transform(whole(std::int64_t{0}, kMost))
      ->group(group);
}

}  // namespace longspan::launcher

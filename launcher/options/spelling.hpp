// Finds the probable word for a misspelt one.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "longspan/mask.hpp"

namespace longspan::launcher {

/// The only candidate that begins with `word`, or else the one with the fewest edits (a letter
/// more, less or other, two letters exchanged). Empty where none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

/// "; did you mean X?", or nothing where no candidate is near.
std::string suggestion(const std::string& word, const std::vector<std::string>& candidates);

/// The names of the strategies, behind `others`.
std::vector<std::string> strategy_names(std::vector<std::string> others = {});

/// Takes one of `words`. A refusal lists them.
CLI::Validator one_of(std::vector<std::string> words);

/// Adds --causal-alignment.
void add_alignment(CLI::App& app, Alignment& alignment, const std::string& group);

/// Adds --chunk, --lookback and --prefix.
void add_chunks(CLI::App& app, Mask& mask, const std::string& group);

}  // namespace longspan::launcher

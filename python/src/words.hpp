// Arguments that are not arrays. Each raises a TypeError that names the argument where its Python
// type is wrong.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "longspan/mask.hpp"
#include "longspan/option_table.hpp"
#include "longspan/options.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"
#include "python/src/arguments.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// "causal is a str; a bool is wanted".
[[noreturn]] void wrong_type(nb::handle given, const char* name, const char* wanted);

/// "alibi is 'x'; 'context' and 'query' are supported".
[[noreturn]] void no_such_choice(const char* name, const std::string& asked,
                                 const std::vector<std::string>& choices);

bool flag(nb::handle given, const char* name);
std::int64_t integer(nb::handle given, const char* name);
/// The number as an int of a size or a count. Throws InputError where it is not one.
int small(std::int64_t number, const char* name);
std::optional<std::int64_t> maybe_integer(nb::handle given, const char* name);
double real(nb::handle given, const char* name);
std::string text(nb::handle given, const char* name);

/// A number in fp32. InputError for one that is not 0 and becomes 0 there, which has another
/// meaning.
float single(nb::handle given, const char* name);

/// `causal` where it may be flags of sequences: these, or None for a bool, which is the mask's.
nb::object flags_of(nb::handle causal);

/// Sets the bounds of a mask from (left, right) as in flash-attention: keys on each side besides
/// the query's own, -1 for no bound.
void set_window(Mask& mask, nb::handle window_size);

/// One of the choices of an option, by its name.
template <class Choice>
Choice choice_of(nb::handle given, const char* name) {
  const std::string asked = text(given, name);
  if (const std::optional<Choice> choice = choice_named<Choice>(asked)) return *choice;
  no_such_choice(name, asked, choice_names<Choice>());
}

/// A name of a layout, or a Sharding.
Sharding sharding_of(nb::handle given, const char* name);

/// "all", "heads", or rows as sharding_of takes them.
Results results_of(nb::handle given, const char* name);

// ---- the same for an argument that has its name in its type -------------------------------------

template <Literal kLiteral>
bool flag(Argument<kLiteral> given) {
  return flag(given, given.kName);
}
template <Literal kLiteral>
std::int64_t integer(Argument<kLiteral> given) {
  return integer(given, given.kName);
}
template <Literal kLiteral>
int small(Argument<kLiteral> given) {
  return small(integer(given), given.kName);
}
template <Literal kLiteral>
std::optional<std::int64_t> maybe_integer(Argument<kLiteral> given) {
  return maybe_integer(given, given.kName);
}
template <Literal kLiteral>
std::string text(Argument<kLiteral> given) {
  return text(given, given.kName);
}

}  // namespace longspan::python

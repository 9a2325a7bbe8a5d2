// Options by name: which of them a function takes, and their values, from the table of options
// (longspan/option_table.hpp). A new option of the table is an argument of Attention and attend()
// without a line here; one of the mask or the score is an argument of every call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "longspan/option_table.hpp"
#include "python/src/arguments.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/words.hpp"

namespace longspan::python {

/// Adds the Python names of the options that `wanted` accepts.
template <class Wanted>
constexpr void add_options(NameList& names, const Wanted& wanted) {
  const Options options;
  visit_options(options, [&](const OptionInfo& option, const auto&) {
    if (option.python != nullptr && wanted(option)) names.add(option.python);
  });
}

/// Whether an option says how a score is made, or which scores are.
constexpr bool is_of_scores(const OptionInfo& option) {
  const std::string_view group = option.group;
  return group == "mask." || group == "score.";
}

/// Adds the Python names of the arguments of a run.
constexpr void add_run_arguments(NameList& names) {
  const AttentionArgs args;
  visit_arguments(args, [&](const ArgumentInfo& argument, const auto&) {
    if (argument.python != nullptr) names.add(argument.python);
  });
}

// ---- the value of one option --------------------------------------------------------------------

inline void take(bool& to, nb::handle given, const char* name) { to = flag(given, name); }
inline void take(int& to, nb::handle given, const char* name) {
  to = small(integer(given, name), name);
}
inline void take(std::int64_t& to, nb::handle given, const char* name) {
  to = integer(given, name);
}
inline void take(float& to, nb::handle given, const char* name) { to = single(given, name); }
/// One that kernels of fp32 read too.
inline void take(double& to, nb::handle given, const char* name) {
  single(given, name);
  to = real(given, name);
}
inline void take(std::string& to, nb::handle given, const char* name) { to = text(given, name); }
inline void take(DType& to, nb::handle given, const char* name) { to = dtype_of(given, name); }
inline void take(Sharding& to, nb::handle given, const char* name) {
  to = sharding_of(given, name);
}
inline void take(Results& to, nb::handle given, const char* name) { to = results_of(given, name); }
template <class Choice>
requires std::is_enum_v<Choice>
void take(Choice& to, nb::handle given, const char* name) { to = choice_of<Choice>(given, name); }
/// None is the default.
template <class T>
void take(std::optional<T>& to, nb::handle given, const char* name) {
  if (!given.is_none()) take(to.emplace(), given, name);
}

/// Where an option is not among the arguments, or is not taken by its type.
inline constexpr int kNoPlace = -1;

/// For every option of the table its place among the names of a function, without those that the
/// function takes itself.
template <const NameList& kNames, const NameList& kOwn>
consteval auto option_places() {
  std::array<int, NameList::kMost> places{};
  std::size_t i = 0;
  const Options options;
  visit_options(options, [&](const OptionInfo& option, const auto&) {
    const bool is_taken = option.python != nullptr && !kOwn.has(option.python);
    places[i++] = is_taken ? kNames.find(option.python) : kNoPlace;
  });
  return places;
}

template <const NameList& kNames, const NameList& kOwn>
inline constexpr auto kOptionPlaces = option_places<kNames, kOwn>();

/// Sets every option that is among the arguments, except those named in `kOwn`.
template <const NameList& kOwn, const NameList& kNames>
void take_options(Options& o, const Arguments<kNames>& given) {
  std::size_t option = 0;
  visit_options(o, [&](const OptionInfo&, auto& member) {
    const int place = kOptionPlaces<kNames, kOwn>[option++];
    if (place == kNoPlace) return;
    const nb::handle value = given[static_cast<std::size_t>(place)];
    // One pair in Python, which has both members.
    if (static_cast<const void*>(&member) == &o.mask.right) return;
    if (static_cast<const void*>(&member) == &o.mask.window) return set_window(o.mask, value);
    take(member, value, kNames[static_cast<std::size_t>(place)]);
  });
}

}  // namespace longspan::python

// Arguments that are not arrays. Each raises a TypeError that names the argument where its Python
// type is wrong.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "longspan/mask.hpp"
#include "longspan/options.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// "causal is a str; a bool is wanted".
[[noreturn]] void wrong_type(nb::handle given, const char* name, const char* wanted);

bool flag(nb::handle given, const char* name);
std::int64_t integer(nb::handle given, const char* name);
/// The number as an int of a size or a count. Throws InputError where it is not one.
int small(std::int64_t number, const char* name);
std::optional<std::int64_t> maybe_integer(nb::handle given, const char* name);
double real(nb::handle given, const char* name);
std::optional<float> maybe_real(nb::handle given, const char* name);
std::string text(nb::handle given, const char* name);

/// (left, right) as in flash-attention: keys on each side besides the query's own, -1 for no bound.
Mask mask_of(nb::handle causal, nb::handle window_size);

/// "query" or "context".
Alibi alibi_of(nb::handle given);

ScoreOptions score_of(nb::handle softmax_scale, nb::handle softcap, Alibi alibi);

/// "auto", "peer-buffers", "peer-buffers-apart" or "gather".
Exchange exchange_of(nb::handle given);

/// A name of a layout, or a Sharding.
Sharding sharding_of(nb::handle given, const char* name);
std::optional<Sharding> maybe_sharding(nb::handle given, const char* name);

/// "all", "heads", or rows as sharding_of takes them.
Results results_of(nb::handle given);

}  // namespace longspan::python

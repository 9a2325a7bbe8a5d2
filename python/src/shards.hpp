// Sharding and Shard in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "python/src/arrays.hpp"

namespace longspan::python {

/// The numbers of a table; none where it was not given. InputError for anything but a vector of
/// int64 on CPUs.
std::vector<std::int64_t> values_of(const Array& array, const char* name);

void bind_shards(nanobind::module_& m);

}  // namespace longspan::python

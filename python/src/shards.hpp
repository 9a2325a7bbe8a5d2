// Sharding and Shard in Python.
#pragma once

#include <nanobind/nanobind.h>

namespace longspan::python {

void bind_shards(nanobind::module_& m);

}  // namespace longspan::python

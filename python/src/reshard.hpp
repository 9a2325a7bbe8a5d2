// Binds the move of a cache between two layouts.
#pragma once

#include <nanobind/nanobind.h>

namespace longspan::python {

void bind_reshard(nanobind::module_& m);

}  // namespace longspan::python

// The calls of serving engines in Python.
#pragma once

#include <nanobind/nanobind.h>

namespace longspan::python {

void bind_serving(nanobind::module_& m);

}  // namespace longspan::python

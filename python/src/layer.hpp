// Binds Attention, one layer.
#pragma once

#include <nanobind/nanobind.h>

namespace longspan::python {

void bind_layer(nanobind::module_& m);

}  // namespace longspan::python

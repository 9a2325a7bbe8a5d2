// Binds attend().
#pragma once

#include <nanobind/nanobind.h>

namespace longspan::python {

void bind_attention(nanobind::module_& m);

}  // namespace longspan::python

// Errors of the library as Python exceptions (longspan/_errors.py), and the names of arguments as
// the Python functions have them.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace longspan::python {

namespace nb = nanobind;

/// From here on what the library throws reaches Python as its exceptions.
void translate_errors();

/// "kv_len[1] is -3" -> "cache_seqlens[1] is -3".
std::string with_python_names(const std::string& message);

}  // namespace longspan::python

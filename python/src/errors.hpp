// Errors of the library as Python exceptions (longspan/_errors.py), with the Python names of
// arguments: names.cpp has the one table of them.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <utility>

#include "longspan/error.hpp"
#include "python/src/names.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// From here on the library's errors reach Python as its exceptions.
void translate_errors();

/// Text of the library, the system or another rank as a str. Bytes that are not UTF-8 become
/// U+FFFD.
nb::str python_text(std::string_view text);

/// Sets the Python exception of `error`, unless one is set already (a KeyboardInterrupt that ended
/// the call). The names are those of `function`.
void set_error(const Error& error, Function function);
/// The same for a TypeError or ValueError of the binding.
void set_error(const nb::builtin_exception& error, Function function);

/// call(), whose errors name arguments as `function` does.
template <class Callable>
auto with_names_of(Function function, const Callable& call) {
  try {
    return call();
  } catch (const Error& error) {
    set_error(error, function);
  } catch (const nb::builtin_exception& error) {
    set_error(error, function);
  }
  throw nb::python_error();
}

}  // namespace longspan::python

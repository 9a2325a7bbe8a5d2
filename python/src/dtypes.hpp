// Types of elements: the library's, and their names in the buffer protocol, NumPy and DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "longspan/types.hpp"
#include "python/src/dlpack.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// The name in NumPy and torch: "bfloat16".
const char* dtype_name(DType dtype);
/// The inverse, also for the dtypes of NumPy and torch. TypeError, InputError.
DType dtype_of(nb::handle given, const char* name);

/// For a letter of the buffer protocol, with elements of `size` bytes in this machine's order.
std::optional<DType> dtype_of_format(const char* format, Py_ssize_t size);
std::optional<DType> dtype_of_dlpack(dlpack::Type type);
/// The types of ml_dtypes, which have no letter in the buffer protocol.
std::optional<DType> added_dtype(nb::handle array);

/// For messages: "float8_e4m3fnuz", "complex64".
std::string type_text(dlpack::Type type);
/// The same for an array of NumPy: "float32 in the other byte order".
std::string numpy_type_text(nb::handle array);
/// Throws InputError for elements of a type without a DType.
[[noreturn]] void refuse_type(const char* argument, const std::string& found);

}  // namespace longspan::python

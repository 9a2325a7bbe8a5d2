#include "python/src/errors.hpp"

#include <exception>

namespace longspan::python {
namespace {

const char* class_of(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::usage:
      return "UsageError";
    case ErrorKind::input:
      return "InputError";
    case ErrorKind::unsupported:
      return "UnsupportedError";
    case ErrorKind::rank_failure:
    case ErrorKind::timeout:
      return "RankError";
    case ErrorKind::backend:
      return "BackendError";
    default:
      return "InternalError";
  }
}

void raise(const Error& error, Function function) {
  const nb::object type = nb::module_::import_("longspan._errors").attr(class_of(error));
  const nb::str message = python_text(with_python_names(error.what(), function));
  if (const auto* of_rank = dynamic_cast<const RankError*>(&error)) {
    const nb::object made = type(message, of_rank->rank(), python_text(of_rank->step()));
    PyErr_SetObject(type.ptr(), made.ptr());
    return;
  }
  PyErr_SetObject(type.ptr(), message.ptr());
}

}  // namespace

nb::str python_text(std::string_view text) {
  PyObject* const made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(made);
}

void set_error(const Error& error, Function function) {
  if (PyErr_Occurred() != nullptr) return;
  // An error of Python's own code is raised with its message unchanged.
  try {
    raise(error, function);
  } catch (nb::python_error& failed) {
    failed.restore();
  }
}

void set_error(const nb::builtin_exception& error, Function function) {
  if (error.type() != nb::exception_type::type_error) throw error;
  const nb::str message = python_text(with_python_names(error.what(), function));
  PyErr_SetObject(PyExc_TypeError, message.ptr());
}

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      set_error(error, Function::any);
    }
  });
}

}  // namespace longspan::python

#include "python/src/words.hpp"

#include <cmath>
#include <limits>

#include "longspan/error.hpp"

namespace longspan::python {

void wrong_type(nb::handle given, const char* name, const char* wanted) {
  const std::string type = nb::cast<std::string>(nb::handle(Py_TYPE(given.ptr())).attr("__name__"));
  throw nb::type_error((std::string(name) + " is " +
                        (given.is_none() ? "None" : "of type '" + type + "'") + "; " + wanted +
                        " is wanted")
                           .c_str());
}

void no_such_choice(const char* name, const std::string& asked,
                    const std::vector<std::string>& choices) {
  std::string known;
  for (std::size_t i = 0; i < choices.size(); ++i)
    known += (i == 0 ? "'" : i + 1 < choices.size() ? "', '" : "' and '") + choices[i];
  throw InputError(std::string(name) + " is '" + asked + "'; " + known + "' are supported");
}

bool flag(nb::handle given, const char* name) {
  if (given.ptr() == Py_True) return true;
  if (given.ptr() == Py_False) return false;
  wrong_type(given, name, "a bool");
}

std::int64_t integer(nb::handle given, const char* name) {
  if (PyBool_Check(given.ptr()) || !PyIndex_Check(given.ptr()))
    wrong_type(given, name, "an integer");
  const nb::object index = nb::steal(PyNumber_Index(given.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0)
    throw InputError(std::string(name) + " is past 63 bits, which no size here reaches");
  return value;
}

int small(std::int64_t number, const char* name) {
  if (number < 0 || number > std::numeric_limits<std::int32_t>::max())
    throw InputError(std::string(name) + " is " + std::to_string(number) +
                     "; 0 to 2^31 - 1 are possible");
  return static_cast<int>(number);
}

std::optional<std::int64_t> maybe_integer(nb::handle given, const char* name) {
  if (given.is_none()) return std::nullopt;
  return integer(given, name);
}

double real(nb::handle given, const char* name) {
  if (PyFloat_Check(given.ptr())) return PyFloat_AsDouble(given.ptr());
  const bool is_number = !PyBool_Check(given.ptr()) && !PyUnicode_Check(given.ptr()) &&
                         (PyIndex_Check(given.ptr()) || nb::hasattr(given, "__float__"));
  if (!is_number) wrong_type(given, name, "a number");
  const nb::object made = nb::steal(PyNumber_Float(given.ptr()));
  if (!made.is_valid()) throw nb::python_error();
  return PyFloat_AsDouble(made.ptr());
}

float single(nb::handle given, const char* name) {
  const double value = real(given, name);
  const auto rounded = static_cast<float>(value);
  if (rounded == 0 && value != 0) {
    const std::string text = nb::cast<std::string>(nb::repr(nb::float_(value)));
    throw InputError(std::string(name) + " is " + text +
                     ", which is below what float32 holds; give 0 where that is meant");
  }
  return rounded;
}

std::string text(nb::handle given, const char* name) {
  if (!PyUnicode_Check(given.ptr())) wrong_type(given, name, "a str");
  // Bytes from the system that are not text are surrogates in a str; this turns them back.
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(given.ptr(), "utf-8", "surrogateescape"));
  if (!bytes.is_valid()) throw nb::python_error();
  const auto size = static_cast<std::size_t>(PyBytes_Size(bytes.ptr()));
  return {PyBytes_AsString(bytes.ptr()), size};
}

nb::object flags_of(nb::handle causal) {
  return PyBool_Check(causal.ptr()) ? nb::none() : nb::borrow(causal);
}

void set_window(Mask& mask, nb::handle window_size) {
  if (!PyTuple_Check(window_size.ptr()) && !PyList_Check(window_size.ptr()))
    wrong_type(window_size, "window_size", "a pair (left, right)");
  if (nb::len(window_size) != 2)
    throw InputError("window_size has " + std::to_string(nb::len(window_size)) +
                     " entries; (left, right) are wanted, -1 for no bound");
  const std::int64_t left = integer(nb::object(window_size[0]), "window_size[0]");
  const std::int64_t right = integer(nb::object(window_size[1]), "window_size[1]");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
  if (left < -1 || right < -1 || left > kMost || right > kMost)
    throw InputError("window_size is (" + std::to_string(left) + ", " + std::to_string(right) +
                     "); each is a number of keys up to 2^31 - 2, or -1 for no bound");
  mask.window = left + 1;
  mask.right = right;
}

Sharding sharding_of(nb::handle given, const char* name) {
  Sharding made;
  if (nb::try_cast<Sharding>(given, made)) return made;
  if (!PyUnicode_Check(given.ptr())) wrong_type(given, name, "a Sharding, or the name of a layout");
  const std::string asked = text(given, name);
  std::string known;
  for (int i = 0; i <= static_cast<int>(Layout::listed); ++i) {
    const char* const layout = longspan::name(static_cast<Layout>(i));
    if (asked == layout) return {static_cast<Layout>(i)};
    known += (i == 0 ? "" : ", ") + std::string(layout);
  }
  throw InputError(std::string(name) + " is '" + asked + "'; the layouts are " + known);
}

Results results_of(nb::handle given, const char* name) {
  if (PyUnicode_Check(given.ptr())) {
    const std::string asked = text(given, name);
    for (const ResultPart part : {ResultPart::all, ResultPart::heads})
      if (asked == longspan::name(part)) return {part};
  }
  return {ResultPart::rows, sharding_of(given, name)};
}

}  // namespace longspan::python

// Arguments by name, at the border of Python. Every function of the extension module takes keyword
// arguments only. The name of an argument is part of its C++ type, so a wrong name does not
// compile, and a swapped pair is a difference of types. Python gets a TypeError at once for a name
// that is missing or unknown.
//
//     nb::object merge(Argument<"v"> v, Argument<"s"> s);      few arguments
//     nb::object attend(const Arguments<kAttend>& given);      many, whose names come from the
//                                                              tables of option_table.hpp
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <string_view>
#include <type_traits>

#include "python/src/errors.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// A string literal as a template argument.
template <std::size_t kSize>
struct Literal {
  char text[kSize];
  consteval Literal(const char (&given)[kSize]) { std::copy_n(given, kSize, text); }
};

/// The value that Python gives for the argument of that name.
template <Literal kLiteral>
struct Argument : nb::handle {
  static constexpr const char* kName = kLiteral.text;
  explicit Argument(nb::handle value) : nb::handle(value) {}
};

/// Names of arguments, each once.
class NameList {
 public:
  static constexpr std::size_t kMost = 112;

  constexpr NameList() = default;
  constexpr NameList(std::initializer_list<const char*> names) {
    for (const char* const name : names) add(name);
  }
  constexpr void add(const char* name) {
    if (find(name) < 0) names_[count_++] = name;
  }
  /// -1 where it is not there.
  constexpr int find(std::string_view name) const {
    for (std::size_t i = 0; i < count_; ++i)
      if (name == names_[i]) return static_cast<int>(i);
    return -1;
  }
  constexpr bool has(std::string_view name) const { return find(name) >= 0; }
  constexpr bool begins_with(const NameList& other) const {
    for (std::size_t i = 0; i < other.count_; ++i)
      if (i >= count_ || std::string_view(names_[i]) != other.names_[i]) return false;
    return true;
  }
  constexpr std::size_t size() const { return count_; }
  constexpr const char* operator[](std::size_t i) const { return names_[i]; }

 private:
  std::array<const char*, kMost> names_{};
  std::size_t count_ = 0;
};

/// The values of the arguments with these names.
template <const NameList& kNames>
class Arguments {
 public:
  explicit Arguments(const std::array<nb::handle, kNames.size()>& values) : values_(values) {}
  /// The first ones of a longer list.
  template <const NameList& kLonger>
  explicit(false) Arguments(const Arguments<kLonger>& longer) {
    static_assert(kLonger.begins_with(kNames));
    for (std::size_t i = 0; i < kNames.size(); ++i) values_[i] = longer[i];
  }

  template <Literal kLiteral>
  Argument<kLiteral> get() const {
    constexpr int kPlace = kNames.find(kLiteral.text);
    static_assert(kPlace >= 0, "the function has no argument of that name");
    return Argument<kLiteral>(values_[kPlace]);
  }
  nb::handle operator[](std::size_t i) const { return values_[i]; }

 private:
  std::array<nb::handle, kNames.size()> values_;
};

// ---- functions and methods with a parameter for each argument, which may be None ---------------

template <class Scope, class Result, class... Args>
void def_by_name(Scope& scope, const char* name, Result (*function)(Args...),
                 Function names_of = Function::any) {
  scope.def(
      name,
      [=](std::conditional_t<true, nb::handle, Args>... given) -> Result {
        return with_names_of(names_of, [&] { return function(Args(given)...); });
      },
      nb::kw_only(), nb::arg(Args::kName).none()...);
}
template <class Scope, class Result, class Class, class... Args>
void def_by_name(Scope& scope, const char* name, Result (Class::*function)(Args...),
                 Function names_of = Function::any) {
  scope.def(
      name,
      [=](Class& self, std::conditional_t<true, nb::handle, Args>... given) -> Result {
        return with_names_of(names_of, [&] { return (self.*function)(Args(given)...); });
      },
      nb::kw_only(), nb::arg(Args::kName).none()...);
}

// ---- functions with many arguments --------------------------------------------------------------

/// Reads the values of a call in the order of a function's names. A caller gives the same names in
/// the same order in each call, as the same objects. So they are compared by address, and by text
/// only in the first call.
class NamedValues {
 public:
  /// Sets [names.size()] values, which live as long as `given`. TypeError where a name is missing
  /// or unknown, or a value has no name.
  void read(const char* function, const NameList& names, PyObject* nameless, PyObject* given,
            nb::handle* values);

 private:
  std::array<nb::object, NameList::kMost> keys_;        // of the last call
  std::array<std::uint8_t, NameList::kMost> places_{};  // of their values in the function's order
};

/// call() as a function of Python, which returns null where an exception is set.
template <class Callable>
PyObject* raising(const Callable& call) noexcept {
  try {
    return nb::object(call()).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// Defines `kFunction`, nb::object(const Arguments<kNames>&), in the module. Python gives more than
/// 15 names as a dict. nanobind would copy it and search for each name, which takes a microsecond.
template <auto kFunction, const NameList& kNames, Function kFunctionOfNames>
class ManyArguments {
 public:
  static void define(nb::module_& m, const char* name) {
    method().ml_name = name;
    method().ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call));
    method().ml_flags = METH_VARARGS | METH_KEYWORDS;
    m.attr(name) = nb::steal(PyCFunction_NewEx(&method(), nullptr, nullptr));
  }

 private:
  static PyMethodDef& method() {
    static PyMethodDef made{};
    return made;
  }
  static PyObject* call(PyObject*, PyObject* nameless, PyObject* named) noexcept {
    static auto* const values = new NamedValues;  // not freed after Python's end
    return raising([&] {
      return with_names_of(kFunctionOfNames, [&] {
        std::array<nb::handle, kNames.size()> given;
        values->read(method().ml_name, kNames, nameless, named, given.data());
        return kFunction(Arguments<kNames>(given));
      });
    });
  }
};

}  // namespace longspan::python

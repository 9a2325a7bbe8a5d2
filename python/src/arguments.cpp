#include "python/src/arguments.hpp"

#include <string>

namespace longspan::python {

void NamedValues::read(const char* function, const NameList& names, PyObject* nameless,
                       PyObject* given, nb::handle* values) {
  const auto refuse = [&](const std::string& what) {
    throw nb::type_error((std::string(function) + ": " + what).c_str());
  };
  if (PyTuple_Size(nameless) != 0) refuse("every argument is given by name");
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t next = 0;
  std::size_t known = 0;
  while (given != nullptr && known < names.size() && PyDict_Next(given, &next, &key, &value) &&
         key == keys_[known].ptr())
    values[places_[known++]] = value;
  if (known == names.size() && static_cast<std::size_t>(PyDict_Size(given)) == known) return;

  for (std::size_t i = 0; i < names.size(); ++i) values[i] = nb::handle();
  std::size_t count = 0;
  next = 0;
  while (given != nullptr && PyDict_Next(given, &next, &key, &value)) {
    const char* const name = PyUnicode_AsUTF8AndSize(key, nullptr);
    if (name == nullptr) throw nb::python_error();
    const int place = names.find(name);
    if (place < 0) refuse("there is no argument '" + std::string(name) + "'");
    keys_[count] = nb::borrow(key);
    places_[count++] = static_cast<std::uint8_t>(place);
    values[place] = value;
  }
  for (std::size_t i = 0; i < names.size(); ++i)
    if (!values[i].is_valid()) refuse("the argument '" + std::string(names[i]) + "' is missing");
}

}  // namespace longspan::python

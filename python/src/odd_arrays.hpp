// Arrays whose memory does not hold their values: lazily negated tensors, wrappers, masked arrays,
// tensors of transforms ... Their memory would silently give wrong results, so each is refused by
// name, with what to give in its place.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "python/src/arrays.hpp"
#include "python/src/dlpack.hpp"

namespace longspan::python {

/// A module that is already imported; null otherwise.
nb::object module_if_loaded(const char* name);
/// Whether `type` derives from `base` of a module that may not be loaded.
bool derives(nb::handle type, const char* module, const char* base);
/// An interned name: nanobind would make a new string for each look-up.
nb::handle interned(const char* name);

/// The oddity of all arrays of a type.
Kind::Odd oddness(nb::handle type);
/// Throws InputError for an array of such a type.
[[noreturn]] void refuse_odd(Kind::Odd odd, nb::handle array, const char* name);

/// Throws Unsupported for a tensor of torch whose derivative is asked for: one that requires grad,
/// or a dual tensor of forward mode.
void refuse_derivatives(nb::handle tensor, const char* name);
/// Whether a tensor of torch means the negative of its memory. InputError where it does on a GPU,
/// where no call makes a copy by itself.
bool is_negated(nb::handle tensor, const char* name);

/// For an array that could not be read, with a Python error set: Ctrl-C and the like pass; other
/// errors become those of refuse_no_memory.
[[noreturn]] void refuse_unreadable(nb::handle array, const char* name);
/// Throws InputError with the reason why an array has no memory to read, or Unsupported in a
/// transform of torch.func. `why` is its library's reason.
[[noreturn]] void refuse_no_memory(nb::handle array, const char* name, const std::string& why);

/// "a device of kind 'metal'".
std::string device_text(dlpack::Place place);

}  // namespace longspan::python

#include "python/src/odd_arrays.hpp"

#include <nanobind/stl/string.h>

#include <iterator>
#include <string_view>

#include "longspan/error.hpp"

namespace longspan::python {
namespace {

/// The result of a tensor's predicate; false where this version of torch lacks it.
bool says_yes(nb::handle tensor, const char* question) {
  PyObject* const attribute = PyObject_GetAttrString(tensor.ptr(), question);
  if (attribute == nullptr) {
    PyErr_Clear();
    return false;
  }
  nb::object result = nb::steal(attribute);
  if (PyCallable_Check(result.ptr())) result = nb::steal(PyObject_CallNoArgs(result.ptr()));
  const bool yes = result.is_valid() && PyObject_IsTrue(result.ptr()) == 1;
  PyErr_Clear();
  return yes;
}

/// The same for a function of a module.
bool says_yes(const char* module, const char* function, nb::handle tensor) {
  const nb::object loaded = module_if_loaded(module);
  if (!loaded.is_valid() || !nb::hasattr(loaded, function)) return false;
  const nb::object asked = loaded.attr(function);
  const nb::object result =
      nb::steal(PyObject_CallFunctionObjArgs(asked.ptr(), tensor.ptr(), nullptr));
  const bool yes = result.is_valid() && PyObject_IsTrue(result.ptr()) == 1;
  PyErr_Clear();
  return yes;
}

/// str() of an attribute, "" where there is none.
std::string text_of(nb::handle object, const char* attribute) {
  const nb::object value = nb::steal(PyObject_GetAttrString(object.ptr(), attribute));
  if (!value.is_valid()) {
    PyErr_Clear();
    return "";
  }
  return nb::cast<std::string>(nb::str(value));
}

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::handle(Py_TYPE(object.ptr())).attr("__name__"));
}

/// Throws where a torch tensor has no memory, or memory that does not hold its values.
void refuse_tensor(nb::handle tensor, const std::string& name) {
  if (says_yes("torch._C._functorch", "is_functorch_wrapped_tensor", tensor))
    throw Unsupported(name +
                      " is in a transform of torch.func (grad, jvp, vmap ...), and there is no "
                      "derivative and no rule for batches: call longspan outside of the transform");
  if (says_yes(tensor, "is_meta"))
    throw InputError(name +
                     " lies on the device 'meta', which has no memory; give a tensor with "
                     "values");
  if (says_yes(tensor, "is_nested"))
    throw InputError(name +
                     " is nested; give one packed array with cu_seqlens_q, or a padded batch "
                     "(torch.nested.to_padded_tensor)");
  const std::string layout = text_of(tensor, "layout");
  if (!layout.empty() && layout != "torch.strided")
    throw InputError(name + " has the layout " + layout + "; give " + name + ".to_dense()");
  if (says_yes(tensor, "is_quantized"))
    throw InputError(name + " is quantized (" + text_of(tensor, "dtype") + "); give " + name +
                     ".dequantize(), or fp8 with its descale");
  if (says_yes("torch", "_is_functional_tensor", tensor))
    throw InputError(name +
                     " is in a functionalized program, where nothing has memory: call "
                     "longspan outside of it, or as an operator of longspan.torch");
  if (says_yes(tensor, "_is_zerotensor"))
    throw InputError(name + " stands for zeros and has no memory; give " + name + ".clone()");
}

}  // namespace

nb::object module_if_loaded(const char* name) {
  PyObject* const modules = PyImport_GetModuleDict();  // borrowed
  PyObject* const found = modules == nullptr ? nullptr : PyDict_GetItemString(modules, name);
  return found == nullptr ? nb::object() : nb::borrow(found);
}

bool derives(nb::handle type, const char* module, const char* base) {
  const nb::object loaded = module_if_loaded(module);
  if (!loaded.is_valid() || !nb::hasattr(loaded, base)) return false;
  const int is = PyObject_IsSubclass(type.ptr(), nb::object(loaded.attr(base)).ptr());
  if (is < 0) throw nb::python_error();
  return is == 1;
}

nb::handle interned(const char* name) {
  return nb::steal(PyUnicode_InternFromString(name)).release();
}

Kind::Odd oddness(nb::handle type) {
  if (derives(type, "numpy.ma", "MaskedArray")) return Kind::masked;
  if (!derives(type, "torch", "Tensor")) return Kind::plain;
  // A class with its own __torch_dispatch__ redefines its operators: it wraps other tensors, is a
  // fake of one, or has a mask.
  constexpr const char* kDispatch = "__torch_dispatch__";
  const nb::object tensor = module_if_loaded("torch").attr("Tensor");
  if (!nb::hasattr(tensor, kDispatch)) return Kind::plain;
  const nb::object own = type.attr(kDispatch), of_all = tensor.attr(kDispatch);
  return own.is(of_all) ? Kind::plain : Kind::wrapper;
}

void refuse_odd(Kind::Odd odd, nb::handle array, const char* name) {
  const std::string given(name);
  if (odd == Kind::masked)
    throw InputError(given +
                     " is a masked array, and its memory does not say what is masked; give " +
                     given + ".filled(0), or " + given + ".data where nothing is");
  refuse_tensor(array, given);
  throw InputError(given + " is a " + class_name(array) +
                   ", a tensor that wraps others or stands for one; give a plain torch.Tensor with "
                   "the values (of a DTensor its to_local(), of a masked tensor its get_data())");
}

void refuse_derivatives(nb::handle tensor, const char* name) {
  static const nb::handle requires_grad = interned("requires_grad");
  const nb::object asked = tensor.attr(requires_grad);
  if (asked.ptr() == Py_True &&
      nb::cast<bool>(module_if_loaded("torch").attr("is_grad_enabled")())) {
    refuse_tensor(tensor, name);  // in a transform, which reports it
    throw Unsupported(std::string(name) +
                      " requires grad, and this call has no backward: call "
                      "longspan.torch.scaled_dot_product_attention, or this under torch.no_grad(), "
                      "or with " +
                      name + ".detach()");
  }
  // Dual tensors exist only inside dual_level(), which counts its levels from 0.
  static nb::handle forward;  // once it is loaded, it stays
  if (!forward.is_valid()) forward = module_if_loaded("torch.autograd.forward_ad").release();
  if (!forward.is_valid()) return;
  static const nb::handle current_level = interned("_current_level");
  const nb::object level = nb::steal(PyObject_GetAttr(forward.ptr(), current_level.ptr()));
  if (!level.is_valid())
    PyErr_Clear();
  else if (PyLong_Check(level.ptr()) && PyLong_AsLong(level.ptr()) < 0)
    return;
  refuse_tensor(tensor, name);
  const nb::object parts = forward.attr("unpack_dual")(tensor);
  if (!nb::object(parts.attr("tangent")).is_none())
    throw Unsupported(std::string(name) +
                      " is a dual tensor of forward mode, and there is no derivative: give "
                      "torch.autograd.forward_ad.unpack_dual(" +
                      name + ").primal");
}

bool is_negated(nb::handle tensor, const char* name) {
  static const nb::handle is_neg = interned("is_neg");
  try {
    if (nb::object(tensor.attr(is_neg)()).ptr() != Py_True) return false;
  } catch (nb::python_error&) {
    return false;  // a parameter without values, which is refused when it is read
  }
  if (says_yes(tensor, "is_cuda"))
    throw InputError(std::string(name) +
                     " is a lazily negated view, whose memory has the other sign; give " + name +
                     ".resolve_neg()");
  return true;
}

void refuse_unreadable(nb::handle array, const char* name) {
  nb::python_error failed;  // takes the error that is set
  if (!failed.matches(PyExc_Exception)) throw failed;
  const std::string text = nb::cast<std::string>(nb::str(failed.value()));
  refuse_no_memory(array, name, text.substr(0, text.find('\n')));
}

void refuse_no_memory(nb::handle array, const char* name, const std::string& why) {
  if (derives(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))), "torch", "Tensor"))
    refuse_tensor(array, name);
  throw InputError(std::string(name) + ", a " + class_name(array) +
                   ", has no memory that can be read" + (why.empty() ? "" : " (" + why + ")") +
                   "; give an array that holds its values");
}

std::string device_text(dlpack::Place place) {
  constexpr const char* kNames[] = {
      "",    "cpu",  "cuda", "pinned memory", "opencl", "",       "",       "vulkan",  "metal",
      "vpi", "rocm", "rocm", "ext_dev",       "cuda",   "oneapi", "webgpu", "hexagon", "maia"};
  const auto type = static_cast<std::size_t>(place.type);
  if (type < std::size(kNames) && kNames[type][0] != '\0')
    return std::string("a device of kind '") + kNames[type] + "'";
  return "a device of a kind that longspan does not know";
}

}  // namespace longspan::python

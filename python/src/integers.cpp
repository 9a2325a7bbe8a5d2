#include "python/src/integers.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "longspan/error.hpp"
#include "python/src/arrays.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/odd_arrays.hpp"

namespace longspan::python {
namespace {

constexpr std::int64_t kLeastInt32 = std::numeric_limits<std::int32_t>::min(),
                       kMostInt32 = std::numeric_limits<std::int32_t>::max();

std::int64_t element(const Tensor& t, std::int64_t at) {
  if (t.dtype == DType::int64) return static_cast<const std::int64_t*>(t.data)[at];
  if (t.dtype == DType::int32) return static_cast<const std::int32_t*>(t.data)[at];
  return static_cast<const std::uint8_t*>(t.data)[at];
}

/// take(value) of every element, the last dimension fastest.
template <class Take>
void for_each(const Tensor& t, const Take& take) {
  std::array<std::int64_t, Tensor::kMaxDims> index{};
  std::int64_t at = 0;
  for (std::int64_t left = t.size(); left > 0; --left) {
    take(element(t, at));
    for (int d = t.dims - 1; d >= 0; --d) {
      at += t.stride[d];
      if (++index[static_cast<std::size_t>(d)] < t.shape[d]) break;
      at -= t.shape[d] * t.stride[d];
      index[static_cast<std::size_t>(d)] = 0;
    }
  }
}

}  // namespace

std::string past_range(const char* name, std::int64_t value) {
  return std::string(name) + " has " + std::to_string(value) +
         "; it is of 32 bits, -2^31 to 2^31 - 1";
}

void check_integers(const Tensor& t, DType wanted, const char* name) {
  const bool is_flag = wanted == DType::uint8;
  if (t.dtype == DType::int32 || t.dtype == DType::int64 || (is_flag && t.dtype == DType::uint8))
    return;
  throw InputError(std::string(name) + " is " + dtype_name(t.dtype) + "; " +
                   (is_flag ? "bool, uint8, int32 or int64" : "int32 or int64") + " is wanted");
}

nb::bytes as_integers(const Tensor& t, DType wanted, const char* name) {
  const auto bytes = static_cast<Py_ssize_t>(static_cast<std::size_t>(t.size()) * size_of(wanted));
  const nb::object made = nb::steal(PyBytes_FromStringAndSize(nullptr, bytes));
  if (!made.is_valid()) throw nb::python_error();
  char* const memory = PyBytes_AsString(made.ptr());  // aligned as after an object header
  if (wanted == DType::int64) {
    auto* to = reinterpret_cast<std::int64_t*>(memory);
    for_each(t, [&](std::int64_t value) { *to++ = value; });
  } else if (wanted == DType::int32) {
    auto* to = reinterpret_cast<std::int32_t*>(memory);
    for_each(t, [&](std::int64_t value) {
      if (value < kLeastInt32 || value > kMostInt32) throw InputError(past_range(name, value));
      *to++ = static_cast<std::int32_t>(value);
    });
  } else {
    auto* to = reinterpret_cast<std::uint8_t*>(memory);
    for_each(t, [&](std::int64_t value) { *to++ = static_cast<std::uint8_t>(value != 0); });
  }
  return nb::borrow<nb::bytes>(made);
}

nb::object torch_integers(nb::handle tensor, DType wanted, int gpu, Stream stream) {
  const nb::object torch = module_if_loaded("torch");
  const auto convert = [&]() -> nb::object {
    if (wanted == DType::uint8) return tensor.attr("ne")(0);  // bool, a byte each
    const nb::object type = torch.attr(dtype_name(wanted));
    if (wanted == DType::int64) return tensor.attr("to")(type);
    return nb::object(tensor.attr("clamp")(kLeastInt32, kMostInt32)).attr("to")(type);
  };
  const nb::object cuda = torch.attr("cuda");
  const auto handle = reinterpret_cast<std::uintptr_t>(stream.handle);
  const nb::object current = nb::object(cuda.attr("current_stream")(gpu)).attr("cuda_stream");
  if (nb::cast<std::uintptr_t>(current) == handle) return convert();
  const nb::object queue =
      handle == 0 ? nb::object(cuda.attr("default_stream")(gpu))
                  : nb::object(cuda.attr("ExternalStream")(handle, nb::arg("device") = gpu));
  const nb::object context = cuda.attr("stream")(queue);
  context.attr("__enter__")();
  nb::object made;
  try {
    made = convert();
  } catch (nb::python_error&) {
    context.attr("__exit__")(nb::none(), nb::none(), nb::none());
    throw;
  }
  context.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return made;
}

}  // namespace longspan::python

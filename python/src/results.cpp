// Results in the caller's own kind of array.
#include <nanobind/ndarray.h>

#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "python/src/arrays.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

dlpack::Type dlpack_of(DType dtype) {
  switch (dtype) {
    case DType::fp64:
      return {dlpack::kFloat, 64, 1};
    case DType::fp32:
      return {dlpack::kFloat, 32, 1};
    case DType::fp16:
      return {dlpack::kFloat, 16, 1};
    case DType::bf16:
      return {dlpack::kBfloat, 16, 1};
    case DType::e4m3:
      return {dlpack::kFloat8E4m3fn, 8, 1};
    case DType::e5m2:
      return {dlpack::kFloat8E5m2, 8, 1};
    case DType::int32:
      return {dlpack::kInt, 32, 1};
    case DType::int64:
      return {dlpack::kInt, 64, 1};
    default:
      return {dlpack::kUInt, 8, 1};
  }
}

nb::object shape_tuple(std::span<const std::int64_t> shape) {
  nb::list extents;
  for (const std::int64_t extent : shape) extents.append(extent);
  return nb::tuple(extents);
}

/// numpy.dtype of each type, made once and kept.
nb::handle numpy_dtype(DType dtype) {
  static std::array<nb::handle, static_cast<std::size_t>(DType::fp64) + 1> known;  // the last one
  nb::handle& made = known.at(static_cast<std::size_t>(dtype));
  if (!made.is_valid()) {
    const bool is_added = dtype == DType::bf16 || is_fp8(dtype);
    nb::object type = nb::str(dtype_name(dtype));
    if (is_added) type = nb::module_::import_("ml_dtypes").attr(dtype_name(dtype));
    made = nb::object(nb::module_::import_("numpy").attr("dtype")(type)).release();
  }
  return made;
}

nb::object numpy_empty(std::span<const std::int64_t> shape, DType dtype) {
  static const nb::handle empty = nb::object(nb::module_::import_("numpy").attr("empty")).release();
  return empty(shape_tuple(shape), numpy_dtype(dtype));
}

nb::object exchange_empty(const Array& like, std::span<const std::int64_t> shape, DType dtype) {
  dlpack::View wanted{};
  const bool on_gpu = like.tensor().device == Device::cuda;
  wanted.place = {on_gpu ? dlpack::kCuda : dlpack::kCpu, on_gpu ? like.gpu() : 0};
  wanted.dims = static_cast<std::int32_t>(shape.size());
  wanted.type = dlpack_of(dtype);
  wanted.shape = const_cast<std::int64_t*>(shape.data());
  std::string why;
  dlpack::ManagedVersioned* managed = nullptr;
  const auto set_error = [](void* context, const char* kind, const char* message) {
    *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
  };
  if (like.kind().api->allocate(&wanted, &managed, &why, set_error) != 0) {
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    throw BackendError("no array for the result: " + why);
  }
  void* made = nullptr;
  if (like.kind().api->object_of(managed, &made) != 0) throw nb::python_error();
  return nb::steal(static_cast<PyObject*>(made));
}

bool makes_by_exchange(const Kind& kind) {
  return kind.api != nullptr && kind.api->allocate != nullptr && kind.api->object_of != nullptr;
}

/// What makes an array of the kind of `like` from our memory.
nb::object from_dlpack_of(nb::handle like) {
  if (nb::hasattr(like, "__array_namespace__"))
    return nb::object(like.attr("__array_namespace__")()).attr("from_dlpack");
  const nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(like.ptr())));
  const std::string name = nb::cast<std::string>(type.attr("__module__"));
  const nb::object module = nb::module_::import_(name.substr(0, name.find('.')).c_str());
  if (nb::hasattr(module, "from_dlpack")) return module.attr("from_dlpack");
  wrong_type(like, "an array", "a kind that a result can be made of, or the argument out");
}

}  // namespace

Result::Result(const Array& given)
    : tensor_(given.writable().tensor()), object_(nb::borrow(given.object())) {}

Result::Result(const Array& like, std::span<const std::int64_t> shape, DType dtype) {
  const Kind kind = like.kind();
  if (kind.name == Kind::numpy) {
    object_ = numpy_empty(shape, dtype);
  } else if (makes_by_exchange(kind)) {
    object_ = exchange_empty(like, shape, dtype);
  } else if (kind.name == Kind::torch) {
    const nb::object torch = nb::module_::import_("torch");
    object_ = like.object().attr("new_empty")(shape_tuple(shape),
                                              nb::arg("dtype") = torch.attr(dtype_name(dtype)));
  }
  if (object_.is_valid()) {
    tensor_ = Array(object_, "out", Array::Wide()).tensor();
    return;
  }
  like_ = from_dlpack_of(like.object());
  late_ = true;
  std::array<std::int64_t, Tensor::kMaxDims> extents{};
  std::array<std::size_t, Tensor::kMaxDims> sizes{};
  std::size_t bytes = size_of(dtype);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    extents[d] = shape[d];
    sizes[d] = static_cast<std::size_t>(shape[d]);
    bytes *= sizes[d];
  }
  const Device device = like.tensor().device;
  auto memory = std::make_unique<Buffer>(device, bytes > 0 ? bytes : 1);
  tensor_.data = memory->data();
  tensor_.dtype = dtype;
  tensor_.device = device;
  tensor_.dims = static_cast<int>(shape.size());
  std::int64_t step = 1;
  for (int d = tensor_.dims - 1; d >= 0; --d) {
    tensor_.shape[d] = extents[d];
    tensor_.stride[d] = step;
    step *= extents[d];
  }
  memory_ = memory.get();
  const nb::capsule owner(memory.release(),
                          [](void* held) noexcept { delete static_cast<Buffer*>(held); });
  const dlpack::Type type = dlpack_of(dtype);
  object_ =
      nb::cast(nb::ndarray<nb::array_api>(tensor_.data, shape.size(), sizes.data(), owner, nullptr,
                                          nb::dlpack::dtype{type.code, type.bits, type.lanes},
                                          device == Device::cuda ? dlpack::kCuda : dlpack::kCpu,
                                          device == Device::cuda ? like.gpu() : 0));
}

void Result::clear() {
  const std::size_t bytes = static_cast<std::size_t>(tensor_.size()) * size_of(tensor_.dtype);
  if (bytes == 0) return;
  if (tensor_.device == Device::host)
    std::memset(tensor_.data, 0, bytes);
  else if (memory_ != nullptr)
    memory_->upload(std::vector<std::byte>(memory_->bytes()).data());
  else if (nb::hasattr(object_, "zero_"))
    object_.attr("zero_")();
  else
    object_.attr("fill")(0);
}

nb::object Result::finish() {
  if (!late_) return object_;
  return like_(object_);
}

Result result_of(const Array& given, const Array& like, std::span<const std::int64_t> shape,
                 DType dtype) {
  if (given) return Result(given);
  return Result(like, shape, dtype);
}

}  // namespace longspan::python

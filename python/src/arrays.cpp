#include "python/src/arrays.hpp"

#include <algorithm>
#include <utility>

#include "longspan/error.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/integers.hpp"
#include "python/src/odd_arrays.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

Kind find_kind(nb::handle type) {
  Kind kind;
  kind.odd = oddness(type);
  if (derives(type, "numpy", "ndarray")) {
    kind.name = Kind::numpy;
    return kind;
  }
  if (derives(type, "torch", "Tensor")) kind.name = Kind::torch;
  if (nb::hasattr(type, "__dlpack_c_exchange_api__")) {
    const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
    void* const found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (found == nullptr) {
      PyErr_Clear();
      return kind;
    }
    const auto* api = static_cast<const dlpack::ExchangeApi*>(found);
    while (api != nullptr && api->version.major != 1) api = api->older;
    if (api != nullptr && api->view_of != nullptr) kind.api = api;
  }
  return kind;
}

/// By type, so that each type is looked up once. Types are kept: their address is the key.
Kind kind_of(nb::handle object) {
  static auto* known = new std::vector<std::pair<PyTypeObject*, Kind>>;  // under the GIL
  PyTypeObject* const type = Py_TYPE(object.ptr());
  for (const auto& [seen, kind] : *known)
    if (seen == type) return kind;
  const Kind kind = find_kind(nb::handle(reinterpret_cast<PyObject*>(type)));
  if (known->size() < 64) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known->emplace_back(type, kind);
  }
  return kind;
}

/// The same memory as integers.
nb::object bits_of(nb::handle array, DType dtype) {
  static const nb::handle view = interned("view");
  static const nb::handle two =
      nb::object(nb::module_::import_("numpy").attr("dtype")("uint16")).release();
  static const nb::handle one =
      nb::object(nb::module_::import_("numpy").attr("dtype")("uint8")).release();
  return array.attr(view)(size_of(dtype) == 2 ? two : one);
}

/// A dense Tensor of the host that starts at `data`.
void set_extents(Tensor& t, const char* name, int dims, const std::int64_t* shape) {
  if (dims > Tensor::kMaxDims)
    throw InputError(std::string(name) + " has " + std::to_string(dims) +
                     " dimensions; there are at most " + std::to_string(Tensor::kMaxDims));
  t.dims = dims;
  std::int64_t step = 1;
  for (int d = dims - 1; d >= 0; --d) {
    t.shape[d] = shape[d];
    t.stride[d] = step;
    step *= shape[d] > 0 ? shape[d] : 1;
  }
}

/// The source gives strides in bytes.
void set_byte_stride(Tensor& t, const char* name, int d, std::int64_t bytes) {
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  if (bytes % size != 0) {
    if (t.shape[d] > 1)
      throw InputError(std::string(name) + " has a stride of " + std::to_string(bytes) +
                       " bytes in dimension " + std::to_string(d) +
                       ", which is not a multiple of its " + std::to_string(size) +
                       "-byte elements; copy it");
    return;  // an extent of 1 is never stepped over
  }
  t.stride[d] = bytes / size;
}

/// An extent of 1 is never stepped over, and libraries give it any stride: it gets the stride of a
/// dense array, so that dense arrays are recognised.
void settle_strides(Tensor& t) {
  int outer = 0;  // dimensions before the first that is stepped over
  while (outer < t.dims && t.shape[outer] == 1) ++outer;
  const bool is_empty = t.size() == 0;
  for (int d = t.dims - 1; d >= 0; --d)
    if (is_empty || d < outer)
      t.stride[d] =
          d == t.dims - 1 ? 1 : t.stride[d + 1] * std::max<std::int64_t>(1, t.shape[d + 1]);
  if (is_empty) return;
  for (int d = outer + 1; d < t.dims; ++d)
    if (t.shape[d] == 1) t.stride[d] = d == t.dims - 1 ? 1 : t.stride[d - 1];
}

}  // namespace

Array::Array(nb::handle object, const char* name) : name_(name) {
  if (!object.is_none()) read(object);
}

Array::Array(nb::handle object, const char* name, Wide) : name_(name), may_be_wide_(true) {
  if (!object.is_none()) read(object);
}

Array::Array(nb::handle object, const char* name, DType dtype, Stream stream) : name_(name) {
  if (object.is_none()) return;
  PyObject* const o = object.ptr();
  if (PyFloat_Check(o) || PyLong_Check(o) || PyList_Check(o) || PyTuple_Check(o)) {
    take_numbers(object, dtype);
    return;
  }
  read(object);
  if (is_float(dtype)) return;
  const bool is_spaced =
      tensor_.device == Device::host && tensor_.stride[tensor_.dims - 1] != 1 && tensor_.size() > 0;
  if (tensor_.dtype != dtype || is_spaced) take_integers(dtype, stream);
}

Array Array::table(nb::handle object, const char* name, Stream stream) {
  Array made(object, name);
  const Tensor& t = made.tensor_;
  const bool is_backwards =
      t.device == Device::host && std::any_of(t.stride.begin(), t.stride.begin() + t.dims,
                                              [](std::int64_t stride) { return stride < 0; });
  if (made && (t.dtype != DType::int32 || is_backwards)) made.take_integers(DType::int32, stream);
  return made;
}

Array::~Array() {
  if (has_buffer_) PyBuffer_Release(&buffer_);
}

Array::Array(Array&& other) noexcept
    : object_(std::exchange(other.object_, {})),
      name_(other.name_),
      tensor_(other.tensor_),
      kind_(other.kind_),
      gpu_(other.gpu_),
      read_only_(other.read_only_),
      is_copy_(other.is_copy_),
      has_buffer_(std::exchange(other.has_buffer_, false)),
      buffer_(other.buffer_),
      holder_(std::move(other.holder_)) {}

const Array& Array::required() const {
  if (!*this) throw nb::type_error((std::string(name_) + " is None; an array is wanted").c_str());
  return *this;
}

const Array& Array::writable() const {
  if (is_copy_)
    throw InputError(std::string(name_) +
                     " is a lazily negated view, and the call writes to it: give a tensor that has "
                     "memory of its own, as " +
                     name_ + ".resolve_neg()");
  if (read_only_) throw InputError(std::string(name_) + " is read-only, and the call writes to it");
  return *this;
}

const Array& Array::floats() const {
  if (!*this || is_float(tensor_.dtype) || tensor_.dtype == DType::fp64) return *this;
  const std::string name(name_);
  if (tensor_.dtype != DType::uint8)
    throw InputError(name + " is " + dtype_name(tensor_.dtype) + "; a float type is wanted");
  throw InputError(name +
                   " is uint8, which does not say what it holds; of bytes that are fp8 give a "
                   "view: " +
                   name + ".view(" + (kind_.name == Kind::torch ? "torch" : "ml_dtypes") +
                   ".float8_e4m3fn), or of float8_e5m2" +
                   (name == "k" ? "; of latent rows that carry their scales give kv_dtype" : ""));
}

void Array::leave_out() {
  object_ = {};
  tensor_ = {};
}

void Array::read(nb::handle object) {
  object_ = object;
  kind_ = kind_of(object);
  if (kind_.odd != Kind::plain) refuse_odd(kind_.odd, object, name_);
  if (kind_.name != Kind::torch) return take_memory(object);
  refuse_derivatives(object, name_);
  if (!is_negated(object, name_)) return take_memory(object);
  const nb::object resolved = object.attr("resolve_neg")();
  is_copy_ = true;
  holder_ = resolved;
  take_memory(resolved);
}

void Array::take_memory(nb::handle source) {
  if (kind_.api != nullptr) {
    take_exchange(source);
  } else if (kind_.name == Kind::numpy) {
    take_buffer();
  } else if (nb::hasattr(source, "__dlpack__")) {
    take_capsule(source);
  } else if (!take_buffer()) {
    wrong_type(object_, name_, "an array (NumPy, or anything with __dlpack__)");
  }
  settle();
  if (tensor_.dtype == DType::fp64 && !may_be_wide_) refuse_type(name_, "float64");
  if (tensor_.data == nullptr) refuse_no_memory(object_, name_, "");
}

void Array::take_integers(DType dtype, Stream stream) {
  check_integers(tensor_, dtype, name_);
  if (tensor_.device == Device::host) {
    const nb::bytes made = as_integers(tensor_, dtype, name_);
    tensor_.data = const_cast<void*>(made.data());
    holder_ = made;
    tensor_.dtype = dtype;
    std::int64_t step = 1;
    for (int d = tensor_.dims - 1; d >= 0; --d) {
      tensor_.stride[d] = step;
      step *= std::max<std::int64_t>(1, tensor_.shape[d]);
    }
    return;
  }
  if (kind_.name != Kind::torch)
    throw InputError(std::string(name_) + " is " + dtype_name(tensor_.dtype) +
                     " on a GPU; convert it there: " + name_ + ".astype('" + dtype_name(dtype) +
                     "')");
  const nb::object made = torch_integers(object_, dtype, gpu_, stream);
  holder_ = made;
  take_memory(made);
}

void Array::take_numbers(nb::handle object, DType dtype) {
  object_ = object;
  std::string bytes;
  const auto add = [&](nb::handle number) {
    const auto put = [&](auto value) {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    };
    if (dtype == DType::fp32) {
      put(static_cast<float>(real(number, name_)));
    } else if (dtype == DType::uint8) {
      put(static_cast<std::uint8_t>(flag(number, name_)));
    } else {
      const std::int64_t value = integer(number, name_);
      if (dtype == DType::int64)
        put(value);
      else if (value == static_cast<std::int32_t>(value))
        put(static_cast<std::int32_t>(value));
      else
        throw InputError(past_range(name_, value));
    }
  };
  const auto is_list = [](nb::handle one) {
    return PyList_Check(one.ptr()) || PyTuple_Check(one.ptr());
  };
  const auto count = [](nb::handle list) { return static_cast<std::int64_t>(nb::len(list)); };
  std::int64_t shape[2] = {1, 0};
  int dims = 1;
  if (!is_list(object)) {
    add(object);
  } else if (shape[0] = count(object); shape[0] > 0 && is_list(nb::object(object[0]))) {
    dims = 2;
    shape[1] = count(nb::object(object[0]));
    for (nb::handle row : object) {
      if (!is_list(row)) wrong_type(row, name_, "a list of lists of numbers");
      if (count(row) != shape[1])
        throw InputError(std::string(name_) + " has rows of " + std::to_string(shape[1]) + " and " +
                         std::to_string(count(row)) + " numbers; all have as many");
      for (nb::handle number : row) add(number);
    }
  } else {
    for (nb::handle number : object) add(number);
  }
  const nb::bytes made(bytes.data(), bytes.size());
  tensor_.dtype = dtype;
  tensor_.data = const_cast<void*>(made.data());
  set_extents(tensor_, name_, dims, shape);
  read_only_ = true;
  holder_ = made;
}

bool Array::take_buffer() {
  PyObject* memory = object_.ptr();
  if (!PyObject_CheckBuffer(memory)) return false;
  std::optional<DType> added;
  if (kind_.name == Kind::numpy) {
    added = added_dtype(object_);
    if (added) {
      holder_ = bits_of(object_, *added);
      memory = holder_.ptr();
    }
  }
  if (PyObject_GetBuffer(memory, &buffer_, PyBUF_RECORDS_RO) != 0) {
    if (kind_.name != Kind::numpy) throw nb::python_error();
    PyErr_Clear();  // there is no letter for such a type
    refuse_type(name_, numpy_type_text(object_));
  }
  has_buffer_ = true;
  const auto dtype = added ? added : dtype_of_format(buffer_.format, buffer_.itemsize);
  if (!dtype) {
    if (kind_.name == Kind::numpy) refuse_type(name_, numpy_type_text(object_));
    refuse_type(name_, std::string("'") + buffer_.format + "'");
  }
  tensor_.dtype = *dtype;
  tensor_.data = buffer_.buf;
  read_only_ = buffer_.readonly != 0;
  std::int64_t shape[PyBUF_MAX_NDIM];
  for (int d = 0; d < buffer_.ndim; ++d) shape[d] = buffer_.shape[d];
  set_extents(tensor_, name_, buffer_.ndim, shape);
  if (buffer_.strides != nullptr)
    for (int d = 0; d < buffer_.ndim; ++d) set_byte_stride(tensor_, name_, d, buffer_.strides[d]);
  return true;
}

void Array::take(const dlpack::View& view) {
  switch (view.place.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      tensor_.device = Device::host;
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      tensor_.device = Device::cuda;
      gpu_ = view.place.index;
      break;
    default:
      throw InputError(std::string(name_) + " lies on " + device_text(view.place) +
                       "; CPUs and CUDA are supported");
  }
  const auto dtype = dtype_of_dlpack(view.type);
  if (!dtype) refuse_type(name_, type_text(view.type));
  tensor_.dtype = *dtype;
  if (view.data != nullptr) tensor_.data = static_cast<char*>(view.data) + view.byte_offset;
  set_extents(tensor_, name_, view.dims, view.shape);
  if (view.strides != nullptr)
    for (int d = 0; d < view.dims; ++d) tensor_.stride[d] = view.strides[d];
}

void Array::take_exchange(nb::handle source) {
  dlpack::View view{};
  if (kind_.api->view_of(source.ptr(), &view) != 0) refuse_unreadable(object_, name_);
  take(view);
}

void Array::take_capsule(nb::handle source) {
  // Makes arrays on a GPU ready on the stream that the call works on: CuPy's own stream, which
  // needs nothing, or the default stream (1 in this protocol).
  const nb::handle type(reinterpret_cast<PyObject*>(Py_TYPE(source.ptr())));
  nb::object capsule;
  try {
    const nb::object place = source.attr("__dlpack_device__")();
    const bool on_gpu = nb::cast<int>(nb::object(nb::int_(nb::object(place[0])))) == dlpack::kCuda;
    nb::dict options;
    if (on_gpu) options["stream"] = derives(type, "cupy", "ndarray") ? -1 : 1;
    const nb::object method = source.attr("__dlpack__");
    try {
      nb::dict with_version(options);
      with_version = nb::cast<nb::dict>(nb::object(options.attr("copy")()));
      with_version["max_version"] = nb::make_tuple(1, 1);
      capsule = method(**with_version);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = method(**options);  // from before DLPack 1.0
    }
  } catch (nb::python_error& error) {
    error.restore();
    refuse_unreadable(object_, name_);
  }
  holder_ = capsule;
  if (PyCapsule_IsValid(holder_.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const dlpack::ManagedVersioned*>(
        PyCapsule_GetPointer(holder_.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1)
      throw InputError(std::string(name_) + " speaks DLPack " +
                       std::to_string(managed->version.major) + "; 1 is known here");
    read_only_ = (managed->flags & dlpack::kReadOnly) != 0;
    take(managed->view);
  } else if (PyCapsule_IsValid(holder_.ptr(), "dltensor")) {
    take(
        static_cast<const dlpack::Managed*>(PyCapsule_GetPointer(holder_.ptr(), "dltensor"))->view);
  } else {
    throw nb::type_error((std::string(name_) + ".__dlpack__() gives no capsule of DLPack").c_str());
  }
  // Arrays of JAX are immutable, and do not always report it here.
  if (derives(type, "jax", "Array")) read_only_ = true;
}

void Array::settle() {
  if (tensor_.dims == 0) {  // one number: [1]
    tensor_.dims = 1;
    tensor_.shape[0] = tensor_.stride[0] = 1;
  }
  settle_strides(tensor_);
  // An array without elements counts as given, wherever it lies. One with elements and no memory
  // does not hold its values: take_memory() refuses it.
  static char nowhere[256];
  if (tensor_.data == nullptr && tensor_.size() == 0) tensor_.data = nowhere;
}

const char* device_name(Device device) { return device == Device::host ? "cpu" : "cuda"; }

void require_gpu(const Array& array, const char* name, int gpu) {
  if (gpu >= 0 && array && array.gpu() >= 0 && array.gpu() != gpu)
    throw InputError(std::string(name) + " lies on GPU " + std::to_string(array.gpu()) +
                     ", and the communicator's is GPU " + std::to_string(gpu));
}

Stream given_stream(nb::handle given) {
  nb::object handle = nb::borrow(given);
  for (const char* name : {"cuda_stream", "ptr"})  // torch, CuPy
    if (nb::hasattr(given, name)) {
      handle = given.attr(name);
      break;
    }
  if (nb::hasattr(given, "__cuda_stream__"))
    handle = nb::object(nb::object(given.attr("__cuda_stream__")())[1]);
  return {reinterpret_cast<void*>(static_cast<std::uintptr_t>(integer(handle, "stream")))};
}

Stream stream_of(nb::handle given, const Array& like) {
  const bool on_gpu = like.tensor().device == Device::cuda;
  if (!given.is_none()) {
    if (!on_gpu)
      throw InputError(
          "stream is given, and the arrays are in CPU memory, where work is done at once");
    return given_stream(given);
  }
  if (!on_gpu) return {};
  void* stream = nullptr;
  const Kind kind = like.kind();
  if (kind.api != nullptr && kind.api->current_stream != nullptr) {
    if (kind.api->current_stream(dlpack::kCuda, like.gpu(), &stream) != 0) throw nb::python_error();
  } else if (kind.name == Kind::torch) {
    const nb::object current =
        module_if_loaded("torch").attr("cuda").attr("current_stream")(like.gpu());
    stream =
        reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::object(current.attr("cuda_stream"))));
  } else if (const nb::object cupy = module_if_loaded("cupy"); cupy.is_valid()) {
    const nb::object current = cupy.attr("cuda").attr("get_current_stream")();
    stream = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::object(current.attr("ptr"))));
  }
  return {stream};
}

}  // namespace longspan::python

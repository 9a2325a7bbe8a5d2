// Arrays of a caller as tensors, for the time of one call, and results in the caller's own kind.
//
//     numpy     the buffer protocol; what ml_dtypes adds (bfloat16, fp8) as integers of their size
//     torch     the exchange interface of DLPack in C, or __dlpack__ where it is older
//     others    __dlpack__ (JAX, CuPy ...), and any buffer
//
// A view keeps its array alive. Only two things are copied: small arrays of integers of another
// width (integers.hpp), and tensors that torch negates lazily, which have no memory of their own
// (odd_arrays.hpp).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"
#include "python/src/arguments.hpp"
#include "python/src/dlpack.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// How an array of a Python type is read, and how one like it is made.
struct Kind {
  enum Name : std::uint8_t { numpy, torch, other };
  /// The memory does not hold the array's values; such arrays are refused.
  enum Odd : std::uint8_t { plain, masked, wrapper };
  Name name = other;
  Odd odd = plain;
  const dlpack::ExchangeApi* api = nullptr;  // torch, where it has one
};

class Array {
 public:
  Array() = default;
  /// `name` is the argument's. None gives no array. TypeError for an object that is not an array.
  /// InputError for element types and strides without a tensor, and for arrays whose memory does
  /// not hold their values. Unsupported for an array whose derivative is asked for.
  Array(nb::handle object, const char* name);
  /// The same for a tensor that may be float64, which other arrays may not be.
  struct Wide {};
  Array(nb::handle object, const char* name, Wide);
  /// A small array, or numbers in place of one: one, a list, or a list of lists. Numbers become
  /// `dtype`, on the host. Arrays of other integers become `dtype` where it is int32, int64 or
  /// uint8 (flags): on the host, or queued on the stream of the call.
  /// InputError for a value out of the range of `dtype`, and for arrays of other types than
  /// integers.
  Array(nb::handle object, const char* name, DType dtype, Stream stream = {});
  /// The same without lists of numbers: block tables.
  static Array table(nb::handle object, const char* name, Stream stream);
  /// The same for an argument that has its name in its type.
  template <Literal kLiteral>
  explicit Array(Argument<kLiteral> given) : Array(given, given.kName) {}
  template <Literal kLiteral>
  Array(Argument<kLiteral> given, DType dtype, Stream stream = {})
      : Array(given, given.kName, dtype, stream) {}
  template <Literal kLiteral>
  static Array wide(Argument<kLiteral> given) {
    return Array(given, given.kName, Wide());
  }
  template <Literal kLiteral>
  static Array table(Argument<kLiteral> given, Stream stream) {
    return table(given, given.kName, stream);
  }
  ~Array();
  Array(Array&& other) noexcept;
  Array& operator=(Array&&) = delete;

  explicit operator bool() const { return static_cast<bool>(object_); }
  const Tensor& tensor() const { return tensor_; }
  Tensor& tensor() { return tensor_; }
  nb::handle object() const { return object_; }
  Kind kind() const { return kind_; }
  int gpu() const { return gpu_; }

  /// TypeError where the argument is missing.
  const Array& required() const;
  /// InputError for a read-only array.
  const Array& writable() const;
  /// InputError for elements that are not floats, such as bytes of an unknown fp8 type.
  const Array& floats() const;
  /// From here on it counts as not given.
  void leave_out();

 private:
  bool take_buffer();
  void read(nb::handle object);
  void take_memory(nb::handle source);
  void take_numbers(nb::handle object, DType dtype);
  void take_integers(DType dtype, Stream stream);
  void take_exchange(nb::handle source);
  void take_capsule(nb::handle source);
  void take(const dlpack::View& view);
  void settle();

  nb::handle object_;
  const char* name_ = "";
  Tensor tensor_;
  Kind kind_;
  int gpu_ = -1;
  bool may_be_wide_ = false;
  bool read_only_ = false;
  bool is_copy_ = false;  // the memory is not the caller's
  bool has_buffer_ = false;
  Py_buffer buffer_{};
  nb::object holder_;  // keeps the memory alive: a capsule, bytes, or an array made for the call
};

/// A result. Where the caller's kind can be made before it is written, tensor() is its memory;
/// otherwise (JAX) finish() makes it from memory of our own.
class Result {
 public:
  Result() = default;
  /// The caller's own array, given as `out`.
  explicit Result(const Array& given);
  /// A dense one of the kind of `like`, on its device.
  Result(const Array& like, std::span<const std::int64_t> shape, DType dtype);

  const Tensor& tensor() const { return tensor_; }
  /// Writes zeros; on a GPU by the array's library, on its current stream, as it made the array.
  void clear();
  /// Where needs_wait(), wait for the work on the memory first.
  nb::object finish();
  bool needs_wait() const { return late_; }

 private:
  Tensor tensor_;
  nb::object object_;
  nb::object like_;
  bool late_ = false;
  Buffer* memory_ = nullptr;  // where late_; of object_
};

/// `given`, which may be missing, or a new array.
Result result_of(const Array& given, const Array& like, std::span<const std::int64_t> shape,
                 DType dtype);

/// Throws InputError where a given array lies on another GPU than the communicator's; a negative
/// one has none.
void require_gpu(const Array& array, const char* name, int gpu);

/// A stream of torch or CuPy, an object with __cuda_stream__, or a handle as a number.
Stream given_stream(nb::handle given);

/// The stream of a call on CUDA: the caller's, or the current one of the arrays' library.
/// InputError for a stream on CPUs.
Stream stream_of(nb::handle given, const Array& like);

/// "cpu" or "cuda".
const char* device_name(Device device);

}  // namespace longspan::python

/// \file
/// A strided view of memory that somebody else owns: the shape of a DLTensor, without the protocol.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "longspan/error.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The C++ types that name a DType by themselves. A flag of one byte is uint8.
template <class T>
concept Element = std::same_as<T, float> || std::same_as<T, std::int32_t> ||
    std::same_as<T, std::int64_t> || std::same_as<T, std::uint8_t> || std::same_as<T, bool>;

/// The DType of a C++ type.
template <Element T>
constexpr DType dtype_of() {
  if constexpr (std::same_as<T, float>) return DType::fp32;
  if constexpr (std::same_as<T, std::int32_t>) return DType::int32;
  if constexpr (std::same_as<T, std::int64_t>) return DType::int64;
  return DType::uint8;
}

/// A view of memory that the caller owns and keeps alive; it is passed by value. What a call needs
/// of it, shape, type and strides, the call checks, with an InputError.
struct Tensor {
  static constexpr int kMaxDims = 6;  ///< most dimensions of a tensor

  void* data = nullptr;                         ///< the first element; null: not given
  DType dtype = DType::fp32;                    ///< of the elements
  Device device = Device::host;                 ///< where `data` lies
  int dims = 0;                                 ///< how many of `shape` and `stride` count
  std::array<std::int64_t, kMaxDims> shape{};   ///< extents, in elements
  std::array<std::int64_t, kMaxDims> stride{};  ///< from one index to the next, in elements

  /// No tensor: an argument that is not given.
  Tensor() = default;

  /// A dense row-major view. InputError for more than kMaxDims extents, a negative one, or more
  /// elements than 63 bits count.
  Tensor(void* memory, DType type, std::initializer_list<std::int64_t> extents,
         Device where = Device::host)
      : data(memory), dtype(type), device(where), dims(static_cast<int>(extents.size())) {
    check_extents(extents);
    int d = 0;
    for (std::int64_t extent : extents) shape[d++] = extent;
    std::int64_t step = 1;
    for (d = dims - 1; d >= 0; --d) {
      stride[d] = step;
      step *= shape[d];
    }
  }

  /// A view with strides, in elements, as many as extents. InputError also for a number of strides
  /// that is not that, and for a negative one.
  Tensor(void* memory, DType type, std::initializer_list<std::int64_t> extents,
         std::initializer_list<std::int64_t> strides, Device where = Device::host)
      : Tensor(memory, type, extents, where) {
    check_strides(extents.size(), strides);
    int d = 0;
    for (std::int64_t step : strides) stride[d++] = step;
  }

  /// The dense view of memory whose type says what it holds. What a call only reads, it does not
  /// write, though a view has no const.
  template <Element T>
  Tensor(const T* memory, std::initializer_list<std::int64_t> extents, Device where = Device::host)
      : Tensor(const_cast<T*>(memory), dtype_of<T>(), extents, where) {}

  /// The strided view likewise.
  template <Element T>
  Tensor(const T* memory, std::initializer_list<std::int64_t> extents,
         std::initializer_list<std::int64_t> strides, Device where = Device::host)
      : Tensor(const_cast<T*>(memory), dtype_of<T>(), extents, strides, where) {}

  /// Whether it has memory.
  explicit operator bool() const { return data != nullptr; }

  /// Elements. An extent of 0 decides first: the product of the others may be past 63 bits.
  std::int64_t size() const {
    std::int64_t n = dims == 0 ? 0 : 1;
    for (int d = 0; d < dims; ++d)
      if (shape[d] == 0) return 0;
    for (int d = 0; d < dims; ++d) n *= shape[d];
    return n;
  }

 private:
  static void check_extents(std::initializer_list<std::int64_t> extents) {
    if (extents.size() > kMaxDims)
      throw InputError("a tensor was asked for with " + std::to_string(extents.size()) +
                       " dimensions; it has at most " + std::to_string(kMaxDims));
    std::int64_t left = std::numeric_limits<std::int64_t>::max();  // for the extents to come
    for (const std::int64_t extent : extents) {
      if (extent < 0)
        throw InputError("a tensor was asked for with an extent of " + std::to_string(extent) +
                         "; extents are not negative");
      if (extent > left)
        throw InputError("a tensor was asked for with more than 2^63 elements; an extent is " +
                         std::to_string(extent));
      if (extent > 0) left /= extent;
    }
  }
  static void check_strides(std::size_t extents, std::initializer_list<std::int64_t> strides) {
    if (strides.size() != extents)
      throw InputError("a tensor was asked for with " + std::to_string(extents) + " extents and " +
                       std::to_string(strides.size()) +
                       " strides; there is one for each extent, in elements");
    for (const std::int64_t step : strides)
      if (step < 0)
        throw InputError("a tensor was asked for with a stride of " + std::to_string(step) +
                         "; strides are not negative");
  }
};

/// A log-sum-exp tensor, fp32, natural log unless a call asks for the base. Both layouts are in
/// use, and for square ones no check could tell them apart, so it is said where the tensor is made.
struct Lse {
  Tensor tensor;  ///< viewed as [tokens, heads]; also [parts, tokens, heads]
  /// Of memory [tokens, heads], or with dimensions ahead of these two.
  static Lse tokens_heads(Tensor t) { return {t}; }
  /// Of memory [heads, tokens], or with dimensions ahead of these two.
  static Lse heads_tokens(Tensor t) {
    const int d = t.dims;
    if (d >= 2 && d <= Tensor::kMaxDims) {
      std::swap(t.shape[d - 2], t.shape[d - 1]);
      std::swap(t.stride[d - 2], t.stride[d - 1]);
    }
    return {t};
  }

  /// Whether there is one.
  explicit operator bool() const { return static_cast<bool>(tensor); }
};

}  // namespace longspan

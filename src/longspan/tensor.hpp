/// \file
/// A strided view of memory that the caller owns: the shape of a DLTensor, without the protocol.
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
#include "longspan/storage.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The C++ types that determine a DType. A flag of one byte is uint8.
template <class T>
concept Element =
    std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, std::int32_t> ||
    std::same_as<T, std::int64_t> || std::same_as<T, std::uint8_t> || std::same_as<T, bool>;

/// The DType of a C++ type.
template <Element T>
constexpr DType dtype_of() {
  if constexpr (std::same_as<T, float>) return DType::fp32;
  if constexpr (std::same_as<T, double>) return DType::fp64;
  if constexpr (std::same_as<T, std::int32_t>) return DType::int32;
  if constexpr (std::same_as<T, std::int64_t>) return DType::int64;
  return DType::uint8;
}

/// A view of memory that the caller owns and keeps alive; it is passed by value. Each call checks
/// the shape, type and strides that it needs, with an InputError.
struct Tensor {
  static constexpr int kMaxDims = 6;  ///< most dimensions of a tensor

  void* data = nullptr;                         ///< the first element; null: not given
  DType dtype = DType::fp32;                    ///< of the elements
  Device device = Device::host;                 ///< where `data` lies
  int dims = 0;                                 ///< number of entries of `shape` and `stride` in
                                                ///< use
  std::array<std::int64_t, kMaxDims> shape{};   ///< extents, in elements
  std::array<std::int64_t, kMaxDims> stride{};  ///< from one index to the next, in elements

  /// An argument that is not given.
  Tensor() = default;

  /// A dense row-major view. InputError for more than kMaxDims extents, a negative extent, or more
  /// elements than fit in 63 bits.
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

  /// A view with strides, in elements, one for each extent. InputError also for another number of
  /// strides, and for a negative stride.
  Tensor(void* memory, DType type, std::initializer_list<std::int64_t> extents,
         std::initializer_list<std::int64_t> strides, Device where = Device::host)
      : Tensor(memory, type, extents, where) {
    check_strides(extents.size(), strides);
    int d = 0;
    for (std::int64_t step : strides) stride[d++] = step;
  }

  /// A dense view of typed memory, which determines the DType. A view has no const, but a call does
  /// not write what it only reads.
  template <Element T>
  Tensor(const T* memory, std::initializer_list<std::int64_t> extents, Device where = Device::host)
      : Tensor(const_cast<T*>(memory), dtype_of<T>(), extents, where) {}

  /// The same with strides.
  template <Element T>
  Tensor(const T* memory, std::initializer_list<std::int64_t> extents,
         std::initializer_list<std::int64_t> strides, Device where = Device::host)
      : Tensor(const_cast<T*>(memory), dtype_of<T>(), extents, strides, where) {}

  /// Whether it is given.
  explicit operator bool() const { return data != nullptr; }

  /// Number of elements. An extent of 0 decides first: the product of the others may exceed 63
  /// bits.
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
    std::int64_t left = std::numeric_limits<std::int64_t>::max();  // for the remaining extents
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
/// use, and no check could tell square ones apart, so the caller names the layout when it makes
/// one.
struct Lse {
  Tensor tensor;  ///< viewed as [tokens, heads]; also [parts, tokens, heads]
  /// From memory [tokens, heads], or with dimensions before these two.
  static Lse tokens_heads(Tensor t) { return {t}; }
  /// From memory [heads, tokens], or with dimensions before these two.
  static Lse heads_tokens(Tensor t) {
    const int d = t.dims;
    if (d >= 2 && d <= Tensor::kMaxDims) {
      std::swap(t.shape[d - 2], t.shape[d - 1]);
      std::swap(t.stride[d - 2], t.stride[d - 1]);
    }
    return {t};
  }

  /// Whether it is given.
  explicit operator bool() const { return static_cast<bool>(tensor); }
};

}  // namespace longspan

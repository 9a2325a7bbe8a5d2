// A strided view of memory that somebody else owns: the shape of a DLTensor, without the protocol.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "longspan/types.hpp"

namespace longspan {

struct Tensor {
  static constexpr int kMaxDims = 6;

  void* data = nullptr;
  DType dtype = DType::fp32;
  Device device = Device::host;
  int dims = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> stride{};  // in elements

  Tensor() = default;

  /// A dense row-major view.
  Tensor(void* memory, DType type, std::initializer_list<std::int64_t> extents,
         Device where = Device::host)
      : data(memory), dtype(type), device(where), dims(static_cast<int>(extents.size())) {
    int d = 0;
    for (std::int64_t extent : extents) shape[d++] = extent;
    std::int64_t step = 1;
    for (d = dims - 1; d >= 0; --d) {
      stride[d] = step;
      step *= shape[d];
    }
  }

  explicit operator bool() const { return data != nullptr; }

  std::int64_t size() const {
    std::int64_t n = dims == 0 ? 0 : 1;
    for (int d = 0; d < dims; ++d) n *= shape[d];
    return n;
  }
};

}  // namespace longspan

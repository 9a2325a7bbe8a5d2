// Loads elements of rows, and rotates them (longspan/rope.hpp): a thread takes eight elements of a
// row if eight are adjacent and aligned, otherwise one.
#pragma once

#include "kernels/cuda/common/convert.cuh"
#include "longspan/rope.hpp"

namespace longspan::kernels::cuda {

/// The number of elements of a thread.
inline constexpr int kVector = 8;

/// Loads kCount elements of any type, from element `at` on; several are aligned to an access. Eight
/// of fp32 are two chunks.
template <int kCount>
__device__ void load_values(const void* data, DType dtype, std::int64_t at,
                            float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    values[0] = load_element(data, dtype, at);
  } else {
    static_assert(kCount == kVector);
    alignas(16) uint4 chunks[2];
    const StorageFormat format = storage_of(dtype);
    const std::byte* from = static_cast<const std::byte*>(data) + format.bytes(at);
    if (format.bits == 32) {
      chunks[0] = reinterpret_cast<const uint4*>(from)[0];
      chunks[1] = reinterpret_cast<const uint4*>(from)[1];
    } else if (format.bits == 16) {
      chunks[0] = *reinterpret_cast<const uint4*>(from);
    } else {
      const uint2 half = *reinterpret_cast<const uint2*>(from);
      chunks[0] = {half.x, half.y, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = load_element(chunks, dtype, i);
  }
}

/// The rotations of elements [column, column + kCount) of a row at one position.
template <int kCount>
struct Rotations {
  const Rope& rope;
  int column;
  Rotation by[kCount];

  __device__ Rotations(const Rope& of, std::int64_t position, int first) : rope(of), column(first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (column + i < rope.dim) by[i] = rope.at(position, rope.pair(column + i));
  }

  /// Rotates the elements, of the row that begins at element `row` of `data`.
  __device__ void apply(const void* data, DType dtype, std::int64_t row,
                        float (&values)[kCount]) const {
    if (column >= rope.dim) return;
    float partners[kCount];
    const bool whole = column + kCount <= rope.dim && rope.dim / 2 % kCount == 0;
    if (!rope.interleaved && whole) {  // all of the other half
      load_values(data, dtype, row + rope.partner(column), partners);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (column + i < rope.dim)
          partners[i] = load_element(data, dtype, row + rope.partner(column + i));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (column + i < rope.dim)
        values[i] = rope.rotated(column + i, values[i], partners[i], by[i]);
  }
};

}  // namespace longspan::kernels::cuda

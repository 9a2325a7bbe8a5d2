// The range of fp16: weights that are factors of products are scaled by powers of two, and their
// sums scaled back in fp32. So gradients do not underflow, whatever the scale of the loss and the
// number of keys.
#pragma once

#include <cstdint>

namespace longspan::kernels::cuda {

/// A power of two for weights of at most `most`, and its inverse: the largest
/// one is then below 2^15, as fp16 can hold.
struct WeightScale {
  float to, back;

  __device__ explicit WeightScale(float most) {
    const int exponent = max(static_cast<int>(__float_as_uint(most) >> 23), 15) - 127;
    to = __uint_as_float(static_cast<std::uint32_t>(14 - exponent + 127) << 23);
    back = __uint_as_float(static_cast<std::uint32_t>(exponent - 14 + 127) << 23);
  }
};

}  // namespace longspan::kernels::cuda

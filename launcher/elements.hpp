// One element of an array whose type is known at run time, as double. Rounding to 16 bits is to
// nearest even (Eigen's).
#pragma once

#include <Eigen/Core>
#include <cstdint>

#include "longspan/types.hpp"

namespace longspan::launcher {

inline double load(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::fp32:
      return static_cast<const float*>(data)[i];
    case DType::fp16:
      return static_cast<float>(static_cast<const Eigen::half*>(data)[i]);
    default:
      return static_cast<float>(static_cast<const Eigen::bfloat16*>(data)[i]);
  }
}

inline void store(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::fp32:
      static_cast<float*>(data)[i] = value;
      break;
    case DType::fp16:
      static_cast<Eigen::half*>(data)[i] = Eigen::half(value);
      break;
    default:
      static_cast<Eigen::bfloat16*>(data)[i] = Eigen::bfloat16(value);
  }
}

/// `value` as the dtype would store it.
inline float rounded(DType dtype, float value) {
  std::uint32_t element = 0;
  store(&element, dtype, 0, value);
  return static_cast<float>(load(&element, dtype, 0));
}

}  // namespace longspan::launcher

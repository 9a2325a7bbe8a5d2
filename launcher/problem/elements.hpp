// Loads and stores one element of an array whose type is known at run time, as double. Loading is
// exact; storing rounds as the library does (longspan/element.hpp).
#pragma once

#include <cstdint>
#include <string>

#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "longspan/types.hpp"

namespace longspan::launcher {

inline double load(const void* data, DType dtype, std::int64_t i) {
  return load_element(data, dtype, i);
}

inline void store(void* data, DType dtype, std::int64_t i, float value) {
  store_element(data, dtype, i, value);
}

/// `value` as the dtype would store it.
inline float rounded(DType dtype, float value) {
  std::uint32_t element = 0;
  store(&element, dtype, 0, value);
  return static_cast<float>(load(&element, dtype, 0));
}

inline DType dtype_named(const std::string& text) {
  for (DType dtype : {fp32, fp16, bf16, e4m3, e5m2})
    if (text == name(dtype)) return dtype;
  throw UsageError("\"" + text + "\" is not an element type");
}

}  // namespace longspan::launcher

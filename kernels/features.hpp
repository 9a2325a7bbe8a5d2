// The list of what attend supports, and on which device. Backends refuse only by this list,
// `longspan info --features` prints it, and the table in the docs is made from it.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

struct Feature {
  const char* name;
  const char* meaning;
  const char* by;  // whether a layer, the calls of `ServingOps`, or both can ask for it; null if no
                   // public call can, only the caller of a backend
  bool host;
  bool cuda;
  bool (*asked)(const AttendParams&);  // whether these params need it

  bool on(Device device) const { return device == Device::host ? host : cuda; }
};

std::span<const Feature> features();

/// Throws Unsupported for head sizes past longspan/limits.hpp.
void check_head_dims(std::int64_t head_dim, std::int64_t value_dim);

/// Throws Unsupported, naming the first feature that the params need and the device lacks.
void check_features(const AttendParams& params, Device device);

}  // namespace longspan::kernels

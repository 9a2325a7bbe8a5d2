// What attend can do, and where: the one list that backends refuse by, that `longspan info
// --features` prints, and that the table in the docs is made from.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

struct Feature {
  const char* name;
  const char* meaning;
  const char* by;  // whether a layer, the calls of `ServingOps`, or both can be asked for it; null:
                   // no public call can, only who calls a backend
  bool host;
  bool cuda;
  bool (*asked)(const AttendParams&);  // do these params need it?

  bool on(Device device) const { return device == Device::host ? host : cuda; }
};

std::span<const Feature> features();

/// Throws Unsupported for a head of sizes past longspan/limits.hpp.
void check_head_dims(std::int64_t head_dim, std::int64_t value_dim);

/// Throws Unsupported, naming the first feature that the params need and the device lacks.
void check_features(const AttendParams& params, Device device);

}  // namespace longspan::kernels

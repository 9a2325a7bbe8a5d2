// Fills in the parts of an attention's shape that depend on the device.
#pragma once

#include "launcher/options/options.hpp"

namespace longspan::launcher {

/// Options of a run of that shape, with inputs made from a seed.
inline RunOptions run_options(const ShapeOptions& shape, Device device) {
  const bool gpu = device == Device::cuda;
  RunOptions o;
  o.heads = shape.heads;
  o.kv_heads = shape.kv_heads > 0 ? shape.kv_heads : shape.heads;
  o.dim = shape.dim > 0 ? shape.dim : gpu ? 128 : 64;
  o.dtype = !shape.dtype.empty() ? shape.dtype : gpu ? "bf16" : "fp32";
  return o;
}

}  // namespace longspan::launcher

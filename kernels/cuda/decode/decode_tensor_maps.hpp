// Tensor maps of keys and values, for the TMA of sm_90 and later.
#pragma once

#include <cuda.h>

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kBoxKeys = 16;

/// Maps of [pages, rows, kv_heads, dim] in boxes of [1, keys, 1, dim]. The dim is cut into panels
/// of 128 bytes (64 if the kernel's rows are not a multiple of 128), permuted as in Tile. A
/// contiguous cache is one page.
struct KvTensorMaps {
  CUtensorMap k, v;
  bool k_valid = false,
       v_valid = false;  // false: the map is not set, because the GPU or the layout has none
  int keys = kBoxKeys;   // of a box
};

/// Makes the maps. `dim` is that of the kernel's instance. `most` is the most keys of a box that
/// the kernel supports, a multiple of kBoxKeys. Boxes have fewer if pages have fewer, or if rows
/// are several panels.
KvTensorMaps kv_tensor_maps(const AttendParams& p, int dim, int most);

}  // namespace longspan::kernels::cuda

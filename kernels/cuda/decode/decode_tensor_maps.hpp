// Tensor maps of keys and values, for the TMA of sm_90 and later.
#pragma once

#include <cuda.h>

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kBoxKeys = 16;

/// Maps of [pages, rows, kv_heads, dim] in boxes of [1, keys, 1, dim]. The dim is cut into panels
/// of 128 bytes (64 where the kernel's rows are no multiple of 128), permuted as Tile permutes. A
/// contiguous cache is one page.
struct KvTensorMaps {
  CUtensorMap k, v;
  bool k_valid = false,
       v_valid = false;  // false: the map is not set, as the GPU or the layout has none
  int keys = kBoxKeys;   // of a box
};

/// Makes the maps. `dim` is that of the kernel's instance. `most` is the number of keys of a box
/// that the kernel can take, a multiple of kBoxKeys; boxes have fewer where pages have fewer, and
/// where rows are several panels.
KvTensorMaps kv_tensor_maps(const AttendParams& p, int dim, int most);

}  // namespace longspan::kernels::cuda

// Keys and values as the TMA of sm_90 and later reads them.
#pragma once

#include <cuda.h>

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kBoxKeys = 16;

/// [pages, rows, kv_heads, dim] in boxes of [1, keys, 1, dim], the dim in panels of 128 bytes (64
/// where the kernel's rows are no multiple of 128), permuted as Tile permutes. Contiguous keys are
/// one page.
struct KvTensorMaps {
  CUtensorMap k, v;
  bool k_valid = false,
       v_valid = false;  // else their map is not set: the GPU or the layout has none
  int keys = kBoxKeys;   // of a box
};

/// `dim`: of the kernel's instance. `most`: keys of a box that the kernel can take, a multiple of
/// kBoxKeys; boxes have fewer where pages have, and where rows are several panels.
KvTensorMaps kv_tensor_maps(const AttendParams& p, int dim, int most);

}  // namespace longspan::kernels::cuda

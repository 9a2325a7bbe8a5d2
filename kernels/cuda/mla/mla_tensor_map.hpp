// The tensor map of latent keys, whose first columns are the values.
#pragma once

#include "kernels/cuda/decode/decode_tensor_maps.hpp"

namespace longspan::kernels::cuda {

/// Makes KvTensorMaps::k as [pages, kv_heads, rows, dim], in boxes of [1, 1, keys, 64 columns], if
/// pages have a multiple of 16 keys. `v` stays unset.
KvTensorMaps mla_tensor_maps(const AttendParams& p);

}  // namespace longspan::kernels::cuda

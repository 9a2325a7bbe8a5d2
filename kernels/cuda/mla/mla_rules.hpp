#pragma once

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// Whether the kernels for latent keys can serve the call, wherever they run: 16 bits of one type,
/// heads wider than those of decode, values that are the first columns of the keys, whole 16 bytes
/// at aligned addresses, no biases, scales of tensors or dropout.
bool takes_latent_keys(const AttendParams& p);

/// The most heads of a kv head whose rows keep the fixed order.
inline constexpr int kLatentRowsInOrder = 16;

}  // namespace longspan::kernels::cuda

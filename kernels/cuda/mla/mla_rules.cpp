// The calls that the kernels for latent keys accept. It needs no CUDA, as the table of families
// does.
#include "kernels/cuda/mla/mla_rules.hpp"

#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/dispatch/instances.hpp"

namespace longspan::kernels::cuda {
namespace {

/// Whether the values are the first columns of the keys.
bool holds_values(const AttendParams& p) {
  return p.v.data == p.k.data && p.v.dense() && p.v.row_stride == p.k.row_stride &&
         (p.kv_heads == 1 || p.v.head_stride == p.k.head_stride) &&
         (!p.pages || p.v.page_stride == p.k.page_stride) && p.value_dim <= p.head_dim;
}

}  // namespace

bool takes_latent_keys(const AttendParams& p) {
  return (p.dtype == DType::bf16 || p.dtype == DType::fp16) && p.q_dtype == p.dtype &&
         p.kv_dtype == p.dtype && p.head_dim > widest(Family::decode) && p.head_dim % 8 == 0 &&
         p.value_dim % 8 == 0 && p.k.dense() && holds_values(p) &&
         access_of(p.k, p.pages, 2, p.head_dim) == Access::chunks && is_aligned<8>(p.q, p.dtype) &&
         !p.bias && !p.dropout && !p.q_scale && !p.k_scale && !p.v_scale;
}

}  // namespace longspan::kernels::cuda

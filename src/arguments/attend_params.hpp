// Options and small arrays that all attention shares, in the form of kernels: for layers and for
// the calls of serving engines.
#pragma once

#include "kernels/params.hpp"
#include "longspan/options.hpp"
#include "src/arguments/run_arrays.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {

/// Sets mask, score and products from `Given`: Options, PagedAttention or AttendState. The head_dim
/// is already set.
template <class Given>
void set_options(kernels::AttendParams& p, const Given& given) {
  p.mask = given.mask;
  p.score = {given.score.scale_of(p.head_dim), static_cast<float>(given.score.softcap)};
  p.wide_score = {given.score.wide_scale_of(p.head_dim), given.score.softcap};
  p.bias.alibi = given.score.alibi;
  p.tf32 = given.dtypes.tf32;
  p.fp8_products = given.dtypes.fp8_products;
  p.bf16_products = given.dtypes.bf16_products;
}

/// The dropout of a layer, without a seed.
inline kernels::Dropout attend_dropout(const Options& options) {
  const double p = options.dropout.p;
  kernels::Dropout dropout;
  dropout.on = p > 0;
  dropout.threshold = kernels::dropout_threshold(p);
  dropout.wide_scale = 1 / (1 - p);
  dropout.scale = static_cast<float>(dropout.wide_scale);
  dropout.first_head = options.dropout.first_head;
  return dropout;
}

/// The most indices of any call with these options.
inline kernels::KeyIndices bounds_of(const IndexOptions& options, int kv_heads) {
  kernels::KeyIndices indices;
  indices.top_k = options.top_k;
  indices.heads = options.top_k > 0 ? kv_heads : 1;
  indices.are_slots = options.slots;
  return indices;
}

/// Sets q, and the arrays of a run or a call other than its keys and values.
inline void set_arrays(kernels::AttendParams& p, const Tensor& q, const RunArrays& arrays) {
  p.q = token_rows_of(q);
  p.q_scale = arrays.q_scale;
  p.k_scale = arrays.k_scale;
  p.v_scale = arrays.v_scale;
  p.batch = {arrays.batch, arrays.query_start, arrays.kv_len, nullptr, arrays.causal};
  p.batch.prefix = arrays.prefix;
  p.batch.left_padding = arrays.left_padding;
  p.batch.used_rows = arrays.used_rows;
  p.documents = arrays.documents;
  p.indices = arrays.indices;
  p.ranges = arrays.ranges;
  p.bias.slopes = arrays.slopes;
  p.bias.qq = arrays.qq_bias;
  p.rope = arrays.rope;
}

/// Sets the location of the keys and values of an attention or an append.
template <class Params>
void set_cache(Params& p, const CacheView& cache) {
  p.k = cache.k;
  p.v = cache.v;
  p.pages = cache.pages;
  if constexpr (requires { p.indices; }) p.indices.slots = cache.keys;
}

}  // namespace longspan

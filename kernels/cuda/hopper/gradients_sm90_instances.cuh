// The instances of backward on Hopper for heads up to 128, by kinds of scores.
#pragma once

#include "kernels/cuda/hopper/gradients_sm90.hpp"
#include "kernels/cuda/hopper/gradients_sm90_launch.cuh"

namespace longspan::kernels::sm90 {

/// The instances for heads up to a width.
template <class Element, bool kScored, bool kDrops>
struct NarrowGradients {
  using Rows = RowGradientTile<Element, kRowGradients64, 3, 3, kScored, kDrops>;
  using Keys = KeyGradientTile<Element, 64, 96, 4, kScored, kDrops>;
};
template <class Element, bool kScored, bool kDrops>
struct WideGradients {
  using Rows = RowGradientTile<Element, kRowGradients128, 3, 3, kScored, kDrops>;
  using Keys = KeyGradientTile<Element, 128, 64, 4, kScored, kDrops>;
};

/// Calls run<Narrow or Wide>() for the heads of a call.
template <class Element, bool kScored, bool kDrops, class Run>
void with_instance(const GradientParams& p, const Run& run) {
  if (p.head_dim <= 64 && p.value_dim <= 64)
    run.template operator()<NarrowGradients<Element, kScored, kDrops>>();
  else
    run.template operator()<WideGradients<Element, kScored, kDrops>>();
}

template <class Instance>
void load_instance() {
  cuda::load_code(row_gradients_kernel<typename Instance::Rows>);
  cuda::load_code(key_gradients_kernel<typename Instance::Keys>);
}

template <bool kScored, bool kDrops>
void GradientInstances<kScored, kDrops>::load() {
  load_instance<NarrowGradients<__half, kScored, kDrops>>();
  load_instance<WideGradients<__half, kScored, kDrops>>();
  load_instance<NarrowGradients<__nv_bfloat16, kScored, kDrops>>();
  load_instance<WideGradients<__nv_bfloat16, kScored, kDrops>>();
}

template <bool kScored, bool kDrops>
void GradientInstances<kScored, kDrops>::launch(const GradientParams& p, CUstream_st* stream) {
  const auto run = [&]<class Instance>() {
    using Keys = typename Instance::Keys;
    if (p.dk.data != nullptr && p.dk.rows > 0)
      launch_keys<Keys>(key_gradients_kernel<Keys>, p, stream);
    if (p.dq.data != nullptr) launch_rows<typename Instance::Rows>(p, stream);
  };
  if (p.dtype == DType::fp16)
    with_instance<__half, kScored, kDrops>(p, run);
  else
    with_instance<__nv_bfloat16, kScored, kDrops>(p, run);
}

}  // namespace longspan::kernels::sm90

// Backward on Hopper: its calls. The instances of heads up to 128 are here, those of wider ones in
// gradients_sm90_wide.cu.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/gradients/sums.hpp"
#include "kernels/cuda/hopper/gradients_sm90.hpp"
#include "kernels/cuda/hopper/gradients_sm90_launch.cuh"
#include "kernels/cuda/hopper/gradients_sm90_wide.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels::sm90 {
namespace {

using Element = __nv_bfloat16;

/// The instances for heads up to a width.
struct Narrow {
  using Rows = RowGradientTile<Element, kRowGradients64>;
  using Keys = KeyGradientTile<Element, 64, 96, 4>;
};
struct Wide {
  using Rows = RowGradientTile<Element, kRowGradients128>;
  using Keys = KeyGradientTile<Element, 128, 64, 4>;
};

/// Calls run<Narrow>() or run<Wide>().
template <class Run>
void with_instance(const GradientParams& p, const Run& run) {
  if (p.head_dim <= 64 && p.value_dim <= 64) return run.template operator()<Narrow>();
  run.template operator()<Wide>();
}

}  // namespace

void load_gradients() {
  cuda::load_code(row_gradients_kernel<Narrow::Rows>);
  cuda::load_code(key_gradients_kernel<Narrow::Keys>);
  cuda::load_code(row_gradients_kernel<Wide::Rows>);
  cuda::load_code(key_gradients_kernel<Wide::Keys>);
  load_wide_gradients();
}

void attend_gradients(const GradientParams& p, CUstream_st* stream) {
  if (p.scratch_bytes < kGradientScratch)
    throw InputError("attend_gradients needs " + std::to_string(kGradientScratch) +
                     " bytes of scratch and was given " + std::to_string(p.scratch_bytes));
  if (std::max(p.head_dim, p.value_dim) > Wide::Rows::kDim) return attend_wide_gradients(p, stream);
  with_instance(p, [&]<class Instance>() {
    if (p.dk.data != nullptr && p.dk.rows > 0)
      launch_keys<typename Instance::Keys>(key_gradients_kernel<typename Instance::Keys>, p,
                                           stream);
    if (p.dq.data != nullptr) launch_rows<typename Instance::Rows>(p, stream);
  });
}

}  // namespace longspan::kernels::sm90

// Backward on Hopper: the instances of heads wider than 128.
#include "kernels/cuda/gradients/sums.hpp"
#include "kernels/cuda/hopper/gradients_sm90_launch.cuh"
#include "kernels/cuda/hopper/gradients_sm90_wide.hpp"
#include "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh"

namespace longspan::kernels::sm90 {
namespace {

using Element = __nv_bfloat16;

/// Keys of up to 192 columns with values of up to 128, as latent attention is trained.
struct Latent {
  static constexpr TileShape kShape{
      .dim = 192, .value_dim = 128, .consumers = 2, .keys = 64, .ping_pong = false};
  using Rows = RowGradientTile<Element, kShape, 4, 2>;
  using Keys = WideKeyTile<Element, 192, 128, 64, 4>;
};
struct Widest {
  static constexpr TileShape kShape{.dim = 256, .consumers = 2, .keys = 48, .ping_pong = false};
  using Rows = RowGradientTile<Element, kShape, 3, 1>;
  using Keys = WideKeyTile<Element, 256, 256, 64, 2>;
};

template <class Instance>
void launch(const GradientParams& p, cudaStream_t stream) {
  using Keys = typename Instance::Keys;
  if (p.dk.data != nullptr && p.dk.rows > 0)
    launch_keys<Keys>(wide_key_gradients_kernel<Keys>, p, stream);
  if (p.dq.data != nullptr) launch_rows<typename Instance::Rows>(p, stream);
}

}  // namespace

void load_wide_gradients() {
  cuda::load_code(row_gradients_kernel<Latent::Rows>);
  cuda::load_code(wide_key_gradients_kernel<Latent::Keys>);
  cuda::load_code(row_gradients_kernel<Widest::Rows>);
  cuda::load_code(wide_key_gradients_kernel<Widest::Keys>);
}

void attend_wide_gradients(const GradientParams& p, CUstream_st* stream) {
  if (p.head_dim <= Latent::Keys::kDim && p.value_dim <= Latent::Keys::kValueDim)
    return launch<Latent>(p, stream);
  launch<Widest>(p, stream);
}

}  // namespace longspan::kernels::sm90

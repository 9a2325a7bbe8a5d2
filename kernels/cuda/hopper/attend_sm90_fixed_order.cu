// The host side of the Hopper kernel in the fixed order: how the rows of a call are loaded.
#include <algorithm>
#include <cstddef>

#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/dispatch/instances.hpp"
#include "kernels/cuda/hopper/attend_sm90_launch.cuh"

namespace longspan::kernels::sm90 {
namespace {

/// Calls run<T>() for the call's instance.
template <class Run>
auto with_instance(const AttendParams& params, const Run& run) {
  const auto of = [&]<class Element>() {
    if (params.head_dim <= kFixedDim64.dim)
      return run.template operator()<FixedOrderTile<Element, kFixedDim64>>();
    return run.template operator()<FixedOrderTile<Element, kFixedDim128>>();
  };
  return params.dtype == DType::fp16 ? of.template operator()<__half>()
                                     : of.template operator()<__nv_bfloat16>();
}

/// How keys or values are loaded. TMA needs rows at multiples of 16 bytes.
Brings brings_of(const KvRows& rows, const AttendParams& params) {
  if (!params.pages && rows.dense() && cuda::is_aligned<8>(rows, params.dtype))
    return Brings::boxes;
  const cuda::Access access = cuda::access_of(rows, params.pages, 2, params.head_dim);
  return access == cuda::Access::chunks ? Brings::chunks : Brings::elements;
}
Brings brings_of(const TokenRows& rows, const AttendParams& params) {
  if (!cuda::is_aligned<8>(rows, params.dtype)) return Brings::elements;
  return fits_query_map(params) ? Brings::boxes : Brings::chunks;
}

template <class T>
void launch(const AttendParams& params, const Finished& finished, int least_rows,
            cudaStream_t stream) {
  static_assert(sizeof(Shared<T>) == cuda::bytes_of(cuda::Family::hopper_in_order,
                                                    cuda::Loader::any16, T::kDim, T::kRows));
  static_assert(T::kStateBytes == state_bytes_in_order(T::kDim, T::kRows));
  KernelParams call{};
  call.sources = {brings_of(params.q, params), brings_of(params.k, params),
                  brings_of(params.v, params), params.scratch + kCounterBytes,
                  depth_in_order(params)};
  if (call.sources.q == Brings::boxes) call.q = query_map_of(params);
  if (call.sources.k == Brings::boxes) call.k = key_map_of<T>(params, params.k, params.head_dim);
  if (call.sources.v == Brings::boxes) call.v = key_map_of<T>(params, params.v, params.value_dim);
  if (params.pages) call.by_page = cuda::Divisor(static_cast<std::uint32_t>(params.pages.size));
  launch_call<T>(attend_kernel<T>, call, params, finished, least_rows, stream);
}

}  // namespace

void attend_in_order(const AttendParams& params, const Finished& finished, int least_rows,
                     CUstream_st* stream) {
  with_instance(params, [&]<class T>() { launch<T>(params, finished, least_rows, stream); });
}

}  // namespace longspan::kernels::sm90

// The host side of the Hopper kernel: it chooses the tile for a call and launches. The fixed order
// has its own file (attend_sm90_fixed_order.cu).
#include "kernels/cuda/hopper/attend_sm90_launch.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/common/overlap.hpp"
#include "kernels/cuda/dispatch/instances.hpp"
#include "longspan/error.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::sm90 {
namespace {

template <class T>
void launch(const AttendParams& params, const Finished& finished, int least_rows,
            cudaStream_t stream) {
  constexpr bool kE4m3 = T::kEightBits, kMost = kE4m3 || T::kScores == ScoreKind::any;
  constexpr int kBytes = cuda::bytes_of(kE4m3 ? cuda::Family::hopper_e4m3 : cuda::Family::hopper,
                                        kE4m3 ? cuda::Loader::any8 : cuda::Loader::any16, T::kDim,
                                        T::kRows, T::kValueDim);
  static_assert(kMost ? sizeof(Shared<T>) == kBytes : sizeof(Shared<T>) <= kBytes);
  KernelParams call{};
  call.q = query_map_of(params);
  if (params.pages) {
    call.by_page = cuda::Divisor(static_cast<std::uint32_t>(params.pages.size));
  } else {
    call.k = key_map_of<T>(params, params.k, params.head_dim);
    call.v = key_map_of<T>(params, params.v, params.value_dim);
  }
  if (params.arrivals != nullptr) {
    static_assert(T::kKeys <= KeyArrivals::kMargin);
    call.arrivals = *params.arrivals;
    call.own_k = key_map_of<T>(params, call.arrivals.k, params.head_dim);
    call.own_v = key_map_of<T>(params, call.arrivals.v, params.value_dim);
  }
  call.softcap = softcap_of(params.score);
  launch_call<T>(attend_kernel<T>, call, params, finished, least_rows, stream);
}

/// Launches the first tile configuration that is wide enough, as cuda::instance_of finds it.
template <class Element, ScoreKind kScores>
void choose_tile(const AttendParams& params, const Finished& finished, int least_rows,
                 cudaStream_t stream) {
  const auto run = [&]<TileShape kShape>() {
    launch<TileTraits<Element, kShape, kScores>>(params, finished, least_rows, stream);
  };
  const auto fits = [&](const TileShape& shape) {
    return params.head_dim <= shape.dim && params.value_dim <= shape.value_dim;
  };
  if (fits(kDim64)) return run.template operator()<kDim64>();
  // Its producer has too few registers for pages, which the tiles after it read.
  if (fits(kDim128To64) && !params.pages) return run.template operator()<kDim128To64>();
  if (fits(kDim80)) return run.template operator()<kDim80>();
  if (fits(kDim96)) return run.template operator()<kDim96>();
  if (fits(kDim128)) return run.template operator()<kDim128>();
  if (fits(kDim192To128)) return run.template operator()<kDim192To128>();
  if (fits(kDim192)) return run.template operator()<kDim192>();
  return run.template operator()<kDim256>();
}

template <class Element>
void choose(const AttendParams& params, const Finished& finished, int least_rows,
            cudaStream_t stream) {
  const auto run = params.bias.slopes             ? choose_tile<Element, ScoreKind::any>
                   : params.score.softcap != 0.0f ? choose_tile<Element, ScoreKind::softcap>
                                                  : choose_tile<Element, ScoreKind::plain>;
  run(params, finished, least_rows, stream);
}

/// The same for products of e4m3.
template <class Result>
void choose_e4m3(const AttendParams& params, const Finished& finished, int least_rows,
                 cudaStream_t stream) {
  const auto run = [&]<TileShape kShape>() {
    launch<TileTraits<__nv_fp8_e4m3, kShape, ScoreKind::plain, Result>>(params, finished,
                                                                        least_rows, stream);
  };
  if (params.head_dim <= kE4m3Dim64.dim) return run.template operator()<kE4m3Dim64>();
  if (params.head_dim <= kE4m3Dim128.dim) return run.template operator()<kE4m3Dim128>();
  return run.template operator()<kE4m3Dim256>();
}

}  // namespace

bool runs_here() {
#ifdef LONGSPAN_SM90A
  constexpr bool kBuilt = true;
#else
  constexpr bool kBuilt = false;  // this build has no code for sm_90a
#endif
  const int major = limits_of_gpu().major, minor = limits_of_gpu().minor;
  const auto ptx_version = [] {  // queried once: it is the same on all GPUs of this capability
    using Some = TileTraits<__half, kDim64>;
    static const int found =
        cuda::ptx_version_of(reinterpret_cast<const void*>(attend_kernel<Some>));
    return found;
  };
  const bool may_be = cuda::is_hoppers_code(kBuilt, major, minor, 90);
  return may_be && cuda::is_hoppers_code(kBuilt, major, minor, ptx_version());
}

void attend(const AttendParams& params, const Finished& finished, int least_rows,
            CUstream_st* stream) {
  if (params.tokens == 0 || params.batch.size == 0) return;
  const std::size_t needed = scratch_bytes(params, limits_of_gpu().multiprocessors);
  if (params.scratch_bytes < needed)
    throw InputError("attend needs " + std::to_string(needed) + " bytes of scratch and was given " +
                     std::to_string(params.scratch_bytes));
  if (params.batch.skip_decode) least_rows = std::max(least_rows, 2);
  if (params.invariant) return attend_in_order(params, finished, least_rows, stream);
  const bool fp16 = params.dtype == DType::fp16;
  const auto run = params.fp8_products ? (fp16 ? choose_e4m3<__half> : choose_e4m3<__nv_bfloat16>)
                                       : (fp16 ? choose<__half> : choose<__nv_bfloat16>);
  run(params, finished, least_rows, stream);
}

}  // namespace longspan::kernels::sm90

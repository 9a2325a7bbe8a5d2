// The host side of the Hopper kernel: it chooses the tile for a call and launches. The fixed order
// has its own file (attend_sm90_fixed_order.cu).
#include "kernels/cuda/hopper/attend_sm90_launch.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/cuda/common/overlap.hpp"
#include "kernels/cuda/dispatch/instances.hpp"
#include "longspan/error.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::sm90 {
namespace {

/// Scales the terms of a polynomial: terms[i] x^(2 i + from) for x of `scale`, times `height`.
/// Returns whether all are floats of full precision.
template <std::size_t kCount>
bool scale_terms(const double (&terms)[kCount], double scale, double height, int from,
                 float (&scaled)[kCount]) {
  bool sound = true;
  for (std::size_t i = 0; i < kCount; ++i) {
    scaled[i] =
        static_cast<float>(terms[i] * height * std::pow(scale, from + 2 * static_cast<int>(i)));
    sound = sound && std::isnormal(scaled[i]);
  }
  return sound;
}

/// The best polynomials of degrees 2 and 4 in x^2 to tanh x / x for |x| <= 0.1875 and 0.6, with
/// errors of 7.2e-8 and 7.3e-8. Then the best quotient of degrees 2 and 3 for |x| <= 2.5, with an
/// error of 5.6e-8. Their terms include the scale and, except for cap_scores, the height. If terms
/// would exceed the range of a float, none is used: with no reach and no terms, 0 is 0.
Softcap softcap_of(const Score& score) {
  if (score.softcap == 0.0f) return {};
  constexpr double kThird[] = {0.999999928359, -0.333296594329, 0.130532899459};
  constexpr double kFifth[] = {0.999999926869, -0.333323099744, 0.13310173658, -0.0521014801156,
                               0.0154754274878};
  constexpr double kAbove[] = {1.00000005637, 0.121009651363, 0.0019967517962};
  constexpr double kBelow[] = {0.454343579389, 0.0201102043483, 9.33304386806e-5};
  constexpr double kReach[] = {0.1875, 0.6, 2.5};
  constexpr double kLeast = 0x1p-13, kMost = 0x1p13;
  const double scale = static_cast<double>(score.scale) / score.softcap;
  const double height = static_cast<double>(score.softcap) * kLog2E;
  Softcap cap{};
  cap.scale = static_cast<float>(scale);
  cap.height = static_cast<float>(height);
  cap.near = -1.0f;
  if (scale < kLeast || scale > kMost) return cap;
  if (scale_terms(kFifth, scale, 1.0, 1, cap.terms))
    cap.near = static_cast<float>(kReach[1] / scale);
  Softcap formed = cap;
  if (scale_terms(kThird, scale, height, 1, formed.third) &&
      scale_terms(kFifth, scale, height, 1, formed.fifth) &&
      scale_terms(kAbove, scale, height, 1, formed.above) &&
      scale_terms(kBelow, scale, 1.0, 2, formed.below)) {
    for (int i = 0; i < 3; ++i) formed.reach[i] = static_cast<float>(kReach[i] / scale);
    return formed;
  }
  return cap;
}

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

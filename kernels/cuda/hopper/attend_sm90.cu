// The host side of the Hopper kernel: it chooses the tile for a call, makes the TMA tensor maps,
// and launches.
#include "kernels/cuda/hopper/attend_sm90.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/overlap.hpp"
#include "kernels/cuda/common/tensor_map.hpp"
#include "kernels/cuda/dispatch/attend.hpp"
#include "longspan/error.hpp"
#include "src/check.hpp"
#include "src/divided_up.hpp"

namespace longspan::kernels::sm90 {
namespace {

/// The TMA tensor map of [count rows, heads, dim] in boxes of [box_rows, 1, 128 bytes].
CUtensorMap tensor_map_of(const Rows& rows, DType dtype, int dim, std::int64_t count, int heads,
                          int box_rows) {
  const int panel = 128 / static_cast<int>(size_of(dtype));
  const cuda::MapDimension dimensions[] = {
      {dim, 1, panel}, {count, rows.row_stride, box_rows}, {heads, rows.head_stride, 1}};
  return cuda::tensor_map(rows.data, dtype, dimensions, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// Whether the queries' sequences follow each other, or lie as a dense [batch, heads, tokens, dim].
bool fits_query_map(const AttendParams& params) {
  const TokenRows& q = params.q;
  return q.gap.rows == 0 ||
         q.gap.elements + q.gap.rows * q.row_stride == params.heads * q.head_stride;
}

/// That of the queries. Where sequences lie apart, the heads of one stand behind those of the
/// other.
CUtensorMap query_map_of(const AttendParams& params) {
  const std::uint32_t apart = params.q.gap.rows;
  return tensor_map_of(params.q, params.q_dtype, params.head_dim, apart > 0 ? apart : params.tokens,
                       apart > 0 ? params.batch.size * params.heads : params.heads, 64);
}

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

/// The best polynomials of degrees 2 and 4 in x^2 to tanh x / x for |x| <= 0.1875 and 0.6, off by
/// 7.2e-8 and 7.3e-8, and the best quotient of degrees 2 and 3 for |x| <= 2.5, off by 5.6e-8; with
/// the scale in their terms, and but for cap_scores the height. Where terms would leave the range
/// of a float none is taken: with no reach and no terms, 0 is 0.
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

int attribute(cudaDeviceAttr name) {
  int device = 0, value = 0;
  LONGSPAN_CUDA(cudaGetDevice(&device));
  LONGSPAN_CUDA(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

/// The number of heads that walk together: their keys and values on this rank fit half of L2, or
/// they have a few waves of work tiles, as the longest tiles of the last heads begin late.
unsigned section_of(const AttendParams& params, unsigned slots, int multiprocessors) {
  const std::int64_t l2_bytes = attribute(cudaDevAttrL2CacheSize);
  const std::int64_t keys = std::max({divided_up(params.shard.length, params.shard.ranks),
                                      params.tokens / params.batch.size, std::int64_t{1}});
  const auto bytes = static_cast<std::int64_t>(size_of(params.kv_dtype));
  const std::int64_t resident =
      std::max<std::int64_t>(1, l2_bytes / 2 / (keys * params.head_dim * 2 * bytes));
  constexpr std::int64_t kWaves = 3;
  const std::int64_t group = params.heads / params.kv_heads;
  const std::int64_t busy = kWaves * multiprocessors / (slots * group);
  const std::int64_t most = std::min<std::int64_t>(std::max(busy, resident), params.kv_heads);
  const std::int64_t sections = divided_up(std::int64_t{params.kv_heads}, most);
  return static_cast<unsigned>(divided_up(std::int64_t{params.kv_heads}, sections) * group);
}

template <class T>
void launch(const AttendParams& params, const Finished& finished, int least_rows,
            cudaStream_t stream) {
  constexpr bool kE4m3 = T::kEightBits, kMost = kE4m3 || T::kScores == Scores::any;
  constexpr int kBytes =
      cuda::bytes_of(kE4m3 ? cuda::Family::hopper_e4m3 : cuda::Family::hopper,
                     kE4m3 ? cuda::Loader::any8 : cuda::Loader::any16, T::kDim, T::kRows);
  static_assert(kMost ? sizeof(Shared<T>) == kBytes : sizeof(Shared<T>) <= kBytes);
  // Tiles of keys end at the last visible key, so no copy reaches past the keys, and their number,
  // which may be known on the device only, is not needed here.
  constexpr std::int64_t kAnyKeys = std::int64_t{1} << 31;
  Call call{};
  call.q = query_map_of(params);
  if (params.pages) {
    call.by_page = cuda::Divisor(static_cast<std::uint32_t>(params.pages.size));
  } else {
    call.k = tensor_map_of(params.k, params.kv_dtype, params.head_dim, kAnyKeys, params.kv_heads,
                           T::kKeys);
    call.v = tensor_map_of(params.v, params.kv_dtype, params.head_dim, kAnyKeys, params.kv_heads,
                           T::kKeys);
  }
  call.params = params;
  call.finished = finished;
  call.least_rows = least_rows;
  const std::int64_t slots = params.batch.query_start ? params.tokens / T::kRows + params.batch.size
                                                      : (params.tokens + T::kRows - 1) / T::kRows;
  call.slots = static_cast<unsigned>(slots);
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  call.section = section_of(params, call.slots, multiprocessors);
  call.work_tiles = call.slots * static_cast<unsigned>(params.heads);
  call.next = reinterpret_cast<unsigned*>(params.ticket);
  call.softcap = softcap_of(params.score);
  if (call.next == nullptr) {
    call.next = reinterpret_cast<unsigned*>(params.scratch);
    LONGSPAN_CUDA(cudaMemsetAsync(call.next, 0, sizeof *call.next, stream));
  }

  const unsigned blocks = std::min(call.work_tiles, static_cast<unsigned>(multiprocessors));
  LONGSPAN_CUDA(cudaFuncSetAttribute(attend_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     sizeof(Shared<T>)));
  cuda::launch_kernel(attend_kernel<T>, {blocks, T::kThreads, stream, sizeof(Shared<T>)}, call);
}

/// Launches the tile configuration for the call's head_dim.
template <class Element, Scores kScores>
void choose_tile(const AttendParams& params, const Finished& finished, int least_rows,
                 cudaStream_t stream) {
  const auto run = [&]<TileShape kShape>() {
    launch<Tile<Element, kShape, kScores>>(params, finished, least_rows, stream);
  };
  if (params.head_dim <= kDim64.dim) return run.template operator()<kDim64>();
  if (params.head_dim <= kDim80.dim) return run.template operator()<kDim80>();
  if (params.head_dim <= kDim96.dim) return run.template operator()<kDim96>();
  if (params.head_dim <= kDim128.dim) return run.template operator()<kDim128>();
  if (params.head_dim <= kDim192.dim) return run.template operator()<kDim192>();
  return run.template operator()<kDim256>();
}

template <class Element>
void choose(const AttendParams& params, const Finished& finished, int least_rows,
            cudaStream_t stream) {
  const auto run = params.bias.slopes             ? choose_tile<Element, Scores::any>
                   : params.score.softcap != 0.0f ? choose_tile<Element, Scores::softcap>
                                                  : choose_tile<Element, Scores::plain>;
  run(params, finished, least_rows, stream);
}

/// The same for products of e4m3.
template <class Result>
void choose_e4m3(const AttendParams& params, const Finished& finished, int least_rows,
                 cudaStream_t stream) {
  const auto run = [&]<TileShape kShape>() {
    launch<Tile<__nv_fp8_e4m3, kShape, Scores::plain, Result>>(params, finished, least_rows,
                                                               stream);
  };
  if (params.head_dim <= kE4m3Dim64.dim) return run.template operator()<kE4m3Dim64>();
  if (params.head_dim <= kE4m3Dim128.dim) return run.template operator()<kE4m3Dim128>();
  return run.template operator()<kE4m3Dim256>();
}

/// Whether PageProducer can read the pages, in tiles that have it (Tile::kPages).
bool is_in_chunks(const AttendParams& params) {
  const auto chunks = [&](const KvRows& rows) {
    return rows.dense() && cuda::access_of(rows, params.pages, 2) == cuda::Access::chunks;
  };
  return params.head_dim > 80 && params.head_dim <= 192 && !params.fp8_products &&
         params.kv_dtype == params.dtype && chunks(params.k) && chunks(params.v);
}

/// Whether the call has all that fp8_products needs.
bool is_plain_e4m3(const AttendParams& params) {
  const auto aligned = [](const auto& rows) { return cuda::is_aligned<16>(rows, DType::e4m3); };
  return params.q_dtype == DType::e4m3 && params.kv_dtype == DType::e4m3 &&
         params.head_dim % 16 == 0 && params.score.softcap == 0.0f && !params.bias &&
         !params.pages && !params.resume && params.k.dense() && params.v.dense() &&
         aligned(params.q) && aligned(params.k) && aligned(params.v);
}

}  // namespace

bool runs_here() {
#ifdef LONGSPAN_SM90A
  constexpr bool kBuilt = true;
#else
  constexpr bool kBuilt = false;  // this build holds no code for sm_90a
#endif
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor);
  const auto ptx_version = [] {  // asked for once: it is the same on all GPUs of this capability
    using Some = Tile<__half, kDim64>;
    static const int found =
        cuda::ptx_version_of(reinterpret_cast<const void*>(attend_kernel<Some>));
    return found;
  };
  const bool may_be = cuda::is_hoppers_code(kBuilt, major, minor, 90);
  return may_be && cuda::is_hoppers_code(kBuilt, major, minor, ptx_version());
}

bool accepts(const AttendParams& params) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  AttendParams unbiased = params;  // ALiBi has an instance of its own; qq_bias has none
  unbiased.bias.slopes = {};
  if (params.pages) {
    if (!is_in_chunks(params)) return false;
    unbiased.pages = {};
    unbiased.k = unbiased.v =
        KvRows(nullptr, std::int64_t{params.kv_heads} * params.head_dim, params.head_dim);
  }
  // ALiBi counts on rows of a tile that stand one after the other.
  const bool rows_follow = params.queries.ranks == 1 ||
                           params.queries.layout == Layout::contiguous ||
                           params.queries.layout == Layout::ranges;
  return runs_here() && fits_query_map(params) && (rows_follow || !params.bias.slopes) &&
         params.dtype != DType::fp32 && params.head_dim >= 48 &&
         cuda::is_square(params.head_dim, params.value_dim) &&
         params.shard.layout != Layout::listed &&
         (params.fp8_products ? is_plain_e4m3(params)
                              : cuda::loader_of(unbiased) == cuda::Loader::plain) &&
         !params.parts && params.score.scale > 0 && !params.invariant && params.tokens < kMost &&
         params.shard.length < kMost;
}

void attend(const AttendParams& params, const Finished& finished, int least_rows,
            CUstream_st* stream) {
  if (params.tokens == 0 || params.batch.size == 0) return;
  if (params.scratch_bytes < kScratchBytes)
    throw InputError("attend needs " + std::to_string(kScratchBytes) +
                     " bytes of scratch and was given " + std::to_string(params.scratch_bytes));
  if (params.batch.skip_decode) least_rows = std::max(least_rows, 2);
  const bool fp16 = params.dtype == DType::fp16;
  const auto run = params.fp8_products ? (fp16 ? choose_e4m3<__half> : choose_e4m3<__nv_bfloat16>)
                                       : (fp16 ? choose<__half> : choose<__nv_bfloat16>);
  run(params, finished, least_rows, stream);
}

}  // namespace longspan::kernels::sm90

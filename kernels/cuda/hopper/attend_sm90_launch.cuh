// What launches of the Hopper kernel share on the host: tensor maps, the order of work tiles, the
// grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tensor_map.hpp"
#include "kernels/cuda/hopper/attend_sm90.cuh"
#include "src/base/check.hpp"
#include "src/base/divided_up.hpp"

namespace longspan::kernels::sm90 {

/// The TMA tensor map of [count rows, heads, dim] in boxes of [box_rows, 1, 128 bytes].
inline CUtensorMap tensor_map_of(const Rows& rows, DType dtype, int dim, std::int64_t count,
                                 int heads, int box_rows) {
  const int panel = storage_of(dtype).elements(128);
  const cuda::MapDimension dimensions[] = {
      {dim, 1, panel}, {count, rows.row_stride, box_rows}, {heads, rows.head_stride, 1}};
  return cuda::tensor_map(rows.data, dtype, dimensions, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// The map of the queries. If sequences lie apart, the heads of one come after those of the other.
inline CUtensorMap query_map_of(const AttendParams& params) {
  const std::uint32_t apart = params.q.gap.rows;
  return tensor_map_of(params.q, params.q_dtype, params.head_dim, apart > 0 ? apart : params.tokens,
                       apart > 0 ? params.batch.size * params.heads : params.heads, 64);
}

/// The map of contiguous keys or values. No copy reaches past the keys, and their number, which
/// maybe only the device knows, is not needed here.
template <class T>
CUtensorMap key_map_of(const AttendParams& params, const KvRows& rows, int dim) {
  constexpr std::int64_t kAnyKeys = std::int64_t{1} << 31;
  return tensor_map_of(rows, params.kv_dtype, dim, kAnyKeys, params.kv_heads, T::kKeys);
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

/// The best polynomials of degrees 2 and 4 in x^2 to tanh x / x for |x| <= 0.1875 and 0.6, with
/// errors of 7.2e-8 and 7.3e-8. Then the best quotient of degrees 2 and 3 for |x| <= 2.5, with an
/// error of 5.6e-8. Their terms include the scale and, except for cap_scores, the height. If terms
/// would exceed the range of a float, none is used: with no reach and no terms, 0 is 0.
inline Softcap softcap_of(const Score& score) {
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
  cap.curve = static_cast<float>(-1 / (height * height));
  cap.near = -1.0f;
  if (scale < kLeast || scale > kMost) return cap;
  if (scale_terms(kFifth, scale, 1.0, 1, cap.terms))
    cap.near = static_cast<float>(kReach[1] / scale);
  Softcap formed = cap;
  if (scale_terms(kThird, scale, height, 1, formed.third) &&
      scale_terms(kFifth, scale, height, 1, formed.fifth) &&
      scale_terms(kAbove, scale, height, 1, formed.above) &&
      scale_terms(kBelow, scale, 1.0, 2, formed.below) && std::isnormal(formed.curve)) {
    for (int i = 0; i < 3; ++i) formed.reach[i] = static_cast<float>(kReach[i] / scale);
    return formed;
  }
  return cap;
}

/// Properties of the current GPU that the host needs before every launch, cached so that the driver
/// is not asked again.
struct GpuLimits {
  int device = -1;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int l2_bytes = 0;
};
inline const GpuLimits& limits_of_gpu() {
  thread_local GpuLimits known;
  int device = 0;
  LONGSPAN_CUDA(cudaGetDevice(&device));
  if (device == known.device) return known;
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    LONGSPAN_CUDA(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  known = {device, attribute(cudaDevAttrComputeCapabilityMajor),
           attribute(cudaDevAttrComputeCapabilityMinor), attribute(cudaDevAttrMultiProcessorCount),
           attribute(cudaDevAttrL2CacheSize)};
  return known;
}

/// Sets the shared memory limit of the kernel of T on the current GPU, the first time there.
template <class T, class Kernel>
void allow_shared_memory(Kernel kernel, std::size_t bytes) {
  static std::atomic<std::uint64_t> allowed = 0;  // a bit for each of the first GPUs
  const int device = limits_of_gpu().device;
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) return;
  LONGSPAN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)));
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

/// The number of heads that are walked together: their keys and values on this rank fit half of L2,
/// or they have a few waves of work tiles, because the longest tiles of the last heads begin late.
inline unsigned section_of(const AttendParams& params, unsigned slots, int multiprocessors) {
  const std::int64_t l2_bytes = limits_of_gpu().l2_bytes;
  const std::int64_t keys = std::max({divided_up(params.shard.length, params.shard.ranks),
                                      params.tokens / params.batch.size, std::int64_t{1}});
  const StorageFormat storage = storage_of(params.kv_dtype);
  const std::int64_t row_bytes =
      storage.row_bytes(params.head_dim) + storage.row_bytes(params.value_dim);
  const std::int64_t resident = std::max<std::int64_t>(1, l2_bytes / 2 / (keys * row_bytes));
  constexpr std::int64_t kWaves = 3;
  const std::int64_t group = params.heads / params.kv_heads;
  const std::int64_t busy = kWaves * multiprocessors / (slots * group);
  const std::int64_t most = std::min<std::int64_t>(std::max(busy, resident), params.kv_heads);
  const std::int64_t sections = divided_up(std::int64_t{params.kv_heads}, most);
  return static_cast<unsigned>(divided_up(std::int64_t{params.kv_heads}, sections) * group);
}

/// The slots of query rows, heads by heads, are the work tiles.
template <class T>
unsigned slots_of(const AttendParams& params) {
  const std::int64_t slots = params.batch.query_start ? params.tokens / T::kRows + params.batch.size
                                                      : (params.tokens + T::kRows - 1) / T::kRows;
  return static_cast<unsigned>(slots);
}

/// The number of slots, from the first on, whose rows see only keys of this rank, as far as the
/// host knows. The end of what rows see ascends from row to row.
template <class T>
unsigned own_slots_of(const AttendParams& params) {
  const KeyArrivals* const arrivals = params.arrivals;
  if (arrivals == nullptr || arrivals->portions == 0 || params.documents || params.ranges ||
      params.batch.hides() || params.batch.causal != nullptr ||
      params.queries.layout == Layout::ranges)
    return 0;
  const KeyArrivals::Portion* const first = arrivals->portion + arrivals->portions - 1;
  if (!first->is_own()) return 0;
  const std::int64_t length = params.shard.length,
                     own = arrivals->portions > 1 ? first[-1].begin : length;
  const auto are_own = [&](unsigned slots) {
    const std::int64_t last = std::int64_t{slots} * T::kRows - 1;
    return params.visible(0, params.query_position(0, last, length), length).end <= own;
  };
  unsigned found = 0, most = static_cast<unsigned>(params.tokens / T::kRows);
  while (found < most) {
    const unsigned middle = found + (most - found + 1) / 2;
    if (are_own(middle))
      found = middle;
    else
      most = middle - 1;
  }
  return found;
}

/// The number of blocks, which are persistent.
template <class T>
unsigned blocks_of(const AttendParams& params) {
  return std::min(slots_of<T>(params) * static_cast<unsigned>(params.heads),
                  static_cast<unsigned>(limits_of_gpu().multiprocessors));
}

/// Completes the call, whose maps are set, and launches a kernel of it.
template <class T>
void launch_call(void (*kernel)(KernelParams), KernelParams& call, const AttendParams& params,
                 const Finished& finished, int least_rows, cudaStream_t stream) {
  call.params = params;
  call.finished = finished;
  call.least_rows = least_rows;
  call.slots = slots_of<T>(params);
  call.section = section_of(params, call.slots, limits_of_gpu().multiprocessors);
  call.work_tiles = call.slots * static_cast<unsigned>(params.heads);
  call.own_slots = own_slots_of<T>(params);
  call.next = reinterpret_cast<unsigned*>(params.ticket);
  if (call.next == nullptr) {
    call.next = reinterpret_cast<unsigned*>(params.scratch);
    LONGSPAN_CUDA(cudaMemsetAsync(call.next, 0, sizeof *call.next, stream));
  }
  allow_shared_memory<T>(kernel, sizeof(Shared<T>));
  cuda::launch_kernel(
      kernel,
      {blocks_of<T>(params), T::kThreads, stream, sizeof(Shared<T>), call.arrivals.behind_puts},
      call);
}

}  // namespace longspan::kernels::sm90

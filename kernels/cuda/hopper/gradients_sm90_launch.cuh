// What launches of backward on Hopper share on the host: tensor maps, and the launches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/gradients/sums.hpp"
#include "kernels/cuda/hopper/attend_sm90_launch.cuh"
#include "kernels/cuda/hopper/gradients_sm90.hpp"
#include "kernels/cuda/hopper/gradients_sm90_keys.cuh"
#include "kernels/cuda/hopper/gradients_sm90_rows.cuh"

namespace longspan::kernels::sm90 {

/// The map of rows beside the queries, in boxes of [box_rows rows, 128 bytes].
inline CUtensorMap row_map_of(const GradientParams& p, const TokenRows& rows, int dim,
                              int box_rows) {
  const std::uint32_t apart = p.q.gap.rows;
  return tensor_map_of(rows, p.dtype, dim, apart > 0 ? apart : p.tokens,
                       apart > 0 ? p.batch.size * p.heads : p.heads, box_rows);
}
inline CUtensorMap key_map(const GradientParams& p, const KvRows& rows, int dim, int box_keys) {
  constexpr std::int64_t kAnyKeys = std::int64_t{1} << 31;  // no copy reaches past the keys
  return tensor_map_of(rows, p.dtype, dim, kAnyKeys, p.kv_heads, box_keys);
}

template <class T>
void launch_rows(const GradientParams& p, cudaStream_t stream) {
  KernelParams call{};
  call.q = row_map_of(p, p.q, p.head_dim, 64);
  call.k = key_map(p, p.k, p.head_dim, T::kKeys);
  call.v = key_map(p, p.v, p.value_dim, T::kKeys);
  call.gradients = {row_map_of(p, p.dout, p.value_dim, 64), p.terms, p.dq, p.resume_rows,
                    p.stores.dq};
  call.softcap = softcap_of(p.score);
  launch_call<T>(row_gradients_kernel<T>, call, p, {}, 1, stream);
}

/// The number of kv heads that are walked together: their query rows fit half of L2, or they have a
/// few waves of work (section_of says why).
inline int section_of_keys(const GradientParams& p, int tiles) {
  constexpr int kWaves = 3;
  const std::int64_t group = p.heads / p.kv_heads;
  const std::int64_t bytes = 2 * group * p.tokens * (p.head_dim + p.value_dim);
  const std::int64_t resident = std::max<std::int64_t>(1, limits_of_gpu().l2_bytes / 2 / bytes);
  const std::int64_t busy = divided_up(kWaves * limits_of_gpu().multiprocessors, tiles);
  const std::int64_t most = std::min<std::int64_t>(std::max(busy, resident), p.kv_heads);
  const std::int64_t sections = divided_up(std::int64_t{p.kv_heads}, most);
  return static_cast<int>(divided_up(std::int64_t{p.kv_heads}, sections));
}

/// Launches a kernel of dk and dv whose tiles are those of T.
template <class T>
void launch_keys(void (*kernel)(KeyGradientParams), const GradientParams& p, cudaStream_t stream) {
  KeyGradientParams call{};
  call.q = row_map_of(p, p.q, p.head_dim, T::kRows);
  call.dout = row_map_of(p, p.dout, p.value_dim, T::kRows);
  call.k = key_map(p, p.k, p.head_dim, 64);
  call.v = key_map(p, p.v, p.value_dim, 64);
  call.params = p;
  call.tiles = static_cast<int>(p.dk.rows / T::kKeys) + p.batch.size;
  call.section = section_of_keys(p, call.tiles);
  call.softcap = softcap_of(p.score);
  allow_shared_memory<T>(kernel, sizeof(KeyGradientShared<T>));
  cuda::launch_kernel(kernel,
                      {static_cast<unsigned>(call.tiles * p.kv_heads), T::kThreads, stream,
                       sizeof(KeyGradientShared<T>)},
                      call);
}

}  // namespace longspan::kernels::sm90

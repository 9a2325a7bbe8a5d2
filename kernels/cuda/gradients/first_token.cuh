// A search over the tokens of a sequence.
#pragma once

#include <cstdint>

namespace longspan::kernels::cuda {

/// The first of `count` tokens that is beyond, as all behind it are; `count` if none is. All lanes
/// of a warp call this.
template <class Beyond>
__device__ inline std::int64_t first_token(std::int64_t count, const Beyond& beyond) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t step = (high - low + 31) / 32, token = low + lane * step;
    const unsigned votes = __ballot_sync(~0u, token >= high || beyond(token));
    const int first = votes == 0 ? 32 : __ffs(static_cast<int>(votes)) - 1;
    if (first == 0) return low;
    const std::int64_t end = low + first * step;
    low += (first - 1) * step + 1;
    if (end < high) high = end;
  }
  return low;
}

}  // namespace longspan::kernels::cuda

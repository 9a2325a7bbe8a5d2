// Sums of several ranks' parts, as the transports on CPUs add them: in fp32, in rank order from
// rank 0 on, with one rounding at the end. The same bits in every run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "longspan/element.hpp"
#include "longspan/types.hpp"

namespace longspan::comm {

/// to [count] = the sum of `ranks` parts [count], of which rank p's is part(p). `to` may be one of
/// them.
template <DType dtype, class Part>
void add_up(void* to, std::size_t count, int ranks, const Part& part) {
  constexpr std::size_t kBlock = 512;
  float sums[kBlock] = {};
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t block = std::min(count - first, kBlock);
    const auto begin = static_cast<std::int64_t>(first);
    for (int p = 0; p < ranks; ++p) {
      const void* from = part(p);
      for (std::size_t i = 0; i < block; ++i) {
        const float one = load_element(from, dtype, begin + static_cast<std::int64_t>(i));
        sums[i] = p == 0 ? one : sums[i] + one;
      }
    }
    for (std::size_t i = 0; i < block; ++i)
      store_element(to, dtype, begin + static_cast<std::int64_t>(i), sums[i]);
  }
}

/// The same for a dtype that reduce_scatter takes.
template <class Part>
void add_up(DType dtype, void* to, std::size_t count, int ranks, const Part& part) {
  if (dtype == fp32)
    add_up<DType::fp32>(to, count, ranks, part);
  else if (dtype == fp16)
    add_up<DType::fp16>(to, count, ranks, part);
  else
    add_up<DType::bf16>(to, count, ranks, part);
}

}  // namespace longspan::comm

// Computes the digest of small arrays (kernels/digest.hpp), element after element.
#include "kernels/digest.hpp"

#include <atomic>

#include "kernels/host/host.hpp"

namespace longspan::kernels::host {

void digest(const DigestParams& p) {
  std::uint64_t all = 0;
  for (int n = 0; n < p.count; ++n) {
    const DigestArray& array = p.arrays[n];
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < array.size(); ++i) sum += mixed_element(i, array.bits(i));
    p.words[n] = sum;
    all += mixed_array(n, sum);
  }
  p.words[p.count] = all;
  std::atomic_ref(p.words[p.count + 1]).store(p.stamp, std::memory_order_release);
}

}  // namespace longspan::kernels::host

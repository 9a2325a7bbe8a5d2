#include "launcher/problem/growing.hpp"

#include <cstring>

#include "launcher/problem/inputs.hpp"

namespace longspan::launcher {

void grow(Device device, const Lengths& lengths, Stream stream) {
#if defined(LONGSPAN_HAVE_CUDA)
  if (device == Device::cuda) return cuda::grow(lengths, stream);
#else
  (void)device, (void)stream;
#endif
  for (int b = 0; b < lengths.batch; ++b) lengths.grow(b);
}

void fill(Device device, const Filling& f, int threads, Stream stream) {
#if defined(LONGSPAN_HAVE_CUDA)
  if (device == Device::cuda) return cuda::fill(f, stream);
#else
  (void)device, (void)stream;
#endif
  const auto bytes = static_cast<std::size_t>(f.row_bytes);
  parallel_for(f.batch * f.capacity, threads, [&](std::int64_t slot) {
    std::byte* const to = f.cache + f.target(slot) * f.row_bytes;
    const std::int64_t from = f.source(slot);
    if (from < 0)
      std::memset(to, 0xff, bytes);
    else
      std::memcpy(to, f.block + from * f.row_bytes, bytes);
  });
}

}  // namespace longspan::launcher

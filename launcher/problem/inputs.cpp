#include "launcher/problem/inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "launcher/problem/elements.hpp"
#include "launcher/problem/random.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {

Source generated(std::uint64_t seed, std::uint32_t tensor, DType dtype, std::int64_t rows,
                 int heads, int dim) {
  Source source{dtype, rows, heads, dim, "seed " + std::to_string(seed), {}};
  source.read = [values = RandomTensor{seed, tensor}, dtype, row_size = source.row_size()](
                    std::int64_t row, std::int64_t first, std::int64_t count, void* to) {
    values.store(to, dtype, row * row_size + first, count);
  };
  return source;
}

Source quantised(Source source, DType to, const std::vector<float>& scale) {
  const auto read = source.read;
  const DType from = source.dtype;
  const std::int64_t group = source.row_size() / static_cast<std::int64_t>(scale.size());
  source.dtype = to;
  source.read = [=](std::int64_t row, std::int64_t first, std::int64_t count, void* values) {
    std::vector<float> wide(count);  // room for any dtype
    read(row, first, count, wide.data());
    for (std::int64_t i = 0; i < count; ++i)
      store(values, to, i,
            static_cast<float>(load(wide.data(), from, i)) / scale[(first + i) / group]);
  };
  return source;
}

Source first_columns(const Source& keys, int dim) {
  Source source = keys;
  source.dim = dim;
  source.read = [read = keys.read, whole = keys.dim, dim, size = size_of(keys.dtype)](
                    std::int64_t row, std::int64_t first, std::int64_t count, void* to) {
    auto* at = static_cast<std::byte*>(to);
    for (const std::int64_t end = first + count; first < end;) {  // of one head after the other
      const std::int64_t column = first % dim, n = std::min(end - first, dim - column);
      read(row, first / dim * whole + column, n, at);
      first += n;
      at += n * static_cast<std::int64_t>(size);
    }
  };
  return source;
}

Source from_file(const NpyFile& file, const std::string& label) {
  const auto& shape = file.shape();
  if (shape.size() != 3 || shape[1] < 1 || shape[2] < 1 || shape[1] > 65536 || shape[2] > 65536)
    throw InputError(fmt::format("{} ({}) has shape {}; [tokens, heads, dim] was expected",
                                 file.path(), label, file.shape_text()));
  return in_file(file, shape[0], static_cast<int>(shape[1]), static_cast<int>(shape[2]));
}

Source in_file(const NpyFile& file, std::int64_t rows, int heads, int dim) {
  Source source{
      file.dtype(), rows, heads, dim, fmt::format("{} {}", file.path(), file.shape_text()), {}};
  source.read = [file, row_bytes = source.row_bytes()](std::int64_t row, std::int64_t first,
                                                       std::int64_t count, void* to) {
    const std::size_t size = size_of(file.dtype());
    file.read(row * row_bytes + first * size, count * size, to);
  };
  return source;
}

void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t)>& f) {
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  threads =
      static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(count, 1)));
  std::vector<std::exception_ptr> failures(threads);
  const auto work = [&](int t) {
    try {
      for (std::int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) f(i);
    } catch (...) {
      failures[t] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  int started = 1;
  try {
    for (; started < threads; ++started) others.emplace_back(work, started);
  } catch (const std::system_error&) {  // without memory or permission for more threads, this one
                                        // does it
  }
  work(0);
  for (int t = started; t < threads; ++t) work(t);
  for (std::thread& thread : others) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace longspan::launcher

// Finds the rows of a tensor in a file, or makes them from a seed. Any rank can read any part of a
// tensor: it reads its own shard to compute and any rows that it checks, without messages.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launcher/io/npy.hpp"
#include "longspan/storage.hpp"
#include "longspan/types.hpp"

namespace longspan::launcher {

/// A tensor [rows, heads, dim] of one type.
struct Source {
  DType dtype = DType::fp32;
  std::int64_t rows = 0;
  int heads = 0;
  int dim = 0;
  std::string label;  // for messages

  /// Copies `count` elements of a row, from element `first` of its heads * dim, to `to`.
  std::function<void(std::int64_t row, std::int64_t first, std::int64_t count, void* to)> read;

  std::int64_t row_size() const { return std::int64_t{heads} * dim; }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(heads * storage_of(dtype).row_bytes(dim));
  }
};

/// The elements of a RandomTensor, uniform.
Source generated(std::uint64_t seed, std::uint32_t tensor, DType dtype, std::int64_t rows,
                 int heads, int dim);

/// The source in fp8: x / scale, rounded. `scale` is [1], or one for each of that many equal groups
/// of heads.
Source quantised(Source source, DType to, const std::vector<float>& scale);

/// The first `dim` elements of each of one head's rows: values in their keys.
Source first_columns(const Source& keys, int dim);

/// Reads the tensor in a file; throws InputError where it is not [rows, heads, dim].
Source from_file(const NpyFile& file, const std::string& label);
/// The array of a file, of any shape, as that tensor.
Source in_file(const NpyFile& file, std::int64_t rows, int heads, int dim);

/// The numbers of tensors in `generated`, beside those of q, k and v (0, 1, 2).
constexpr std::uint32_t kOfDout = 20, kOfDlse = 21;

/// Calls f(i) for i in [0, count), on up to `threads` threads, each with one range of i.
void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t)>& f);

}  // namespace longspan::launcher

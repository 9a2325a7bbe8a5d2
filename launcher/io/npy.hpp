// Reads and writes NumPy's .npy files. A rank reads only the rows of its own shard, by read calls
// and not by a memory map: with that, a truncated file would kill the process.
// Formats 1 to 3 are read; numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/types.hpp"

namespace longspan::launcher {

/// An array in a file, dense and row-major. Throws InputError, which names the file, for any other.
class NpyFile {
 public:
  /// `dtype` is "fp32", "fp16" or "bf16" if the file must hold that, or empty. bf16 has no name in
  /// NumPy: it is stored as two bytes of type 'V2', and must be asked for.
  NpyFile(const std::string& path, const std::string& dtype);

  const std::string& path() const { return path_; }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::string shape_text() const;

  /// Copies `count` bytes of the array, from byte `first` of it, to `to`. Threads may read at once.
  void read(std::size_t first, std::size_t count, void* to) const {
    read_bytes(data_ + first, count, to);
  }

 private:
  void read_bytes(std::size_t first, std::size_t count, void* to) const;

  std::string path_;
  DType dtype_ = DType::fp32;
  std::vector<std::int64_t> shape_;
  struct Descriptor;
  std::shared_ptr<const Descriptor> file_;  // closed with the last copy
  std::size_t data_ = 0;                    // where the array begins in the file
};

/// Makes the header of a .npy file, padded so that the data starts at a multiple of 64 bytes.
std::string npy_header(DType dtype, std::span<const std::int64_t> shape);

}  // namespace longspan::launcher

// NumPy's .npy files: read through a memory map, so that a rank touches only its own shard, and
// written beside the target and renamed, so that a failure leaves nothing behind. Format 1 to 3;
// numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/types.hpp"

namespace longspan::launcher {

/// An array in a file, dense and row-major. Throws InputError, naming the file, for anything else.
class NpyFile {
 public:
  /// `dtype`: "fp32", "fp16" or "bf16" if the file must hold that, or empty. bf16 has no name in
  /// NumPy: it is stored as two bytes without meaning, 'V2', and must be asked for.
  NpyFile(const std::string& path, const std::string& dtype);

  const std::string& path() const { return path_; }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::string shape_text() const;
  const std::byte* data() const { return data_; }

 private:
  std::string path_;
  DType dtype_ = DType::fp32;
  std::vector<std::int64_t> shape_;
  std::shared_ptr<const std::byte> map_;  // unmapped with the last copy
  const std::byte* data_ = nullptr;
};

/// The header of a .npy file, padded so that the data starts at a multiple of 64 bytes.
std::string npy_header(DType dtype, std::span<const std::int64_t> shape);

/// A file that appears whole or not at all.
class OutputFile {
 public:
  /// Throws InputError when `path` cannot be written; creates nothing that lasts.
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  void write(const void* data, std::size_t bytes);
  /// All that was written takes its name.
  void commit();

 private:
  void open();
  [[noreturn]] void fail(const std::string& doing) const;

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace longspan::launcher

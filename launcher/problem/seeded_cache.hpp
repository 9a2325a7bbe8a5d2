// One rank's part of a cache whose keys and values are made from a seed, so that any rank can
// compute the expected value of any byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "launcher/problem/inputs.hpp"
#include "longspan/buffer.hpp"
#include "longspan/communicator.hpp"
#include "longspan/reshard.hpp"

namespace longspan::launcher {

/// Keys, or values, of whole sequences, one after the other.
struct CacheSources {
  Source k, v;
};
CacheSources sources_of(const ReshardOptions& options, std::uint64_t seed);

/// The rows that rank `rank` allocates. Check first that there is as much memory.
std::int64_t cache_rows(const ReshardOptions& options, const CacheRanks& ranks, int page, int rank);
/// Bytes of a row, of keys and values.
double cache_row_bytes(const ReshardOptions& options);

class SeededCache {
 public:
  /// The part of this rank: none where it is not one of `ranks`, whose number is given. With `page`
  /// 0 keys follow each other, sequence after sequence; otherwise they are in pages of `page` keys,
  /// in an order drawn from the seed. `threads` fill it.
  SeededCache(const Communicator& world, const ReshardOptions& options, const CacheRanks& ranks,
              int page, std::uint64_t seed, int threads);

  /// Allocates the memory, and writes the keys, or sets all bits.
  void fill(const CacheSources& sources);
  void poison();
  CacheTensors tensors() const;

  /// Rows of keys and of values that are wrong, or that no key goes to and that were written after
  /// poison().
  std::int64_t wrong_rows(const CacheSources& sources) const;

 private:
  std::size_t row_bytes(bool values) const;
  Tensor tensor(const Buffer& memory, bool values) const;
  Buffer& memory(bool values) { return values ? v_ : k_; }

  std::int64_t columns() const;

  /// Writes the rows of a source to their places.
  void write(const Source& source, std::byte* to) const;
  std::int64_t wrong_rows(const Source& source, const Buffer& memory) const;

  Device device_;
  ReshardOptions options_;
  int page_, threads_;
  std::vector<std::int64_t> source_rows_;  // [rows] of the sources; -1 where no key goes to
  std::vector<std::int32_t> table_;        // [batch, columns], or none
  Buffer k_, v_, block_table_;
};

}  // namespace longspan::launcher

// A digest of small arrays, computed on their device, so that ranks can compare contents that the
// host does not read. The digest of an array is a sum over its elements of a mix of value and
// index. Any order of summation gives the same word, so a block of threads gets the same result as
// one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "longspan/types.hpp"

namespace longspan::kernels {

/// An array of `rows` rows of `columns` elements of `unit` bytes (1, 2, 4 or 8), `pitch` elements
/// apart. An array that is not given has no data and no elements.
struct DigestArray {
  const void* data = nullptr;
  std::int64_t columns = 0;
  std::int64_t rows = 1;
  std::int64_t pitch = 0;
  int unit = 4;

  /// The number of elements. It is computed unsigned, so that unchecked extents cannot overflow.
  LONGSPAN_HD std::int64_t size() const {
    const std::uint64_t all =
        static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(columns);
    return data == nullptr ? 0 : static_cast<std::int64_t>(all);
  }
  /// The bits of element i.
  LONGSPAN_HD std::uint64_t bits(std::int64_t i) const {
    std::uint64_t value = 0;
    const std::int64_t at = i / columns * pitch + i % columns;
    memcpy(&value, static_cast<const std::byte*>(data) + at * unit, unit);
    return value;
  }
};

struct DigestParams {
  static constexpr int kMostArrays = 26;
  DigestArray arrays[kMostArrays] = {};
  int count = 0;
  std::uint64_t* words =
      nullptr;              // [count + 2]: the digest of each array, then of all of them; then
  std::uint64_t stamp = 0;  // this, which the host reads first: once it is there, so are the
                            // digests
};

/// The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators).
LONGSPAN_HD constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The contribution of element i to the array's digest.
LONGSPAN_HD constexpr std::uint64_t mixed_element(std::int64_t i, std::uint64_t bits) {
  return mix(mix(bits + 1) + 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(i + 1));
}
/// The contribution of array n to the digest of all.
LONGSPAN_HD constexpr std::uint64_t mixed_array(int n, std::uint64_t digest) {
  return mixed_element(n, digest);
}

/// Writes this rank's agreement digest: to = hash, with the contents of arrays mixed in.
struct RunDigestParams {
  std::uint64_t hash = 0;
  const std::uint64_t* contents = nullptr;  // [1] the digest of all arrays; null: none
  std::uint64_t* to = nullptr;              // [1]
};

LONGSPAN_HD constexpr std::uint64_t run_digest(std::uint64_t hash, const std::uint64_t* contents) {
  return contents == nullptr ? hash : mix(hash ^ *contents);
}

}  // namespace longspan::kernels

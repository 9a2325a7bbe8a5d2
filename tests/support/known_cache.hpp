// One rank's cache in a test of reshards: every byte of a key follows from the key's position, and
// every other byte is poison.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "longspan/reshard.hpp"
#include "tests/support/key_place.hpp"
#include "tests/support/on_device.hpp"

namespace longspan::tests {

/// Byte `n` of a key's row of all heads, or of its value's.
inline std::byte byte_of(bool is_key, int sequence, std::int64_t position, std::int64_t n) {
  std::uint64_t x = static_cast<std::uint64_t>(position) * 0x9e3779b97f4a7c15u;
  x ^= static_cast<std::uint64_t>(sequence * 2 + is_key + 1) * 0xbf58476d1ce4e5b9u;
  x += static_cast<std::uint64_t>(n) * 0x94d049bb133111ebu;
  return static_cast<std::byte>((x ^ x >> 29) * 0xbf58476d1ce4e5b9u >> 56);
}

/// A rank's positions of each sequence, by the definition of its layout.
inline std::vector<std::vector<std::int64_t>> positions_of(
    const CacheRanks& cache, int rank, const std::vector<std::int64_t>& lengths) {
  std::vector<std::vector<std::int64_t>> positions(lengths.size());
  if (rank < cache.first_rank || rank >= cache.first_rank + cache.ranks) return positions;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    const Shard shard =
        cache.rule.resolve(lengths[b], rank - cache.first_rank, cache.ranks, cache.table.data())
            .for_sequence(static_cast<int>(b));
    for (std::int64_t i = 0; i < lengths[b]; ++i)
      if (shard.owns(i, lengths[b])) positions[b].push_back(i);
  }
  return positions;
}

/// One rank's cache in memory of the device, poisoned but for its keys.
class KnownCache {
 public:
  using Positions = std::vector<std::vector<std::int64_t>>;

  KnownCache(Form form, const KeyShape& shape, const Positions& held, bool filled, Device device,
             std::mt19937& random)
      : device_(device) {
    place_ = {.form = form, .shape = shape};
    std::int64_t longest = 1;
    for (const auto& keys : held) {
      place_.start.push_back(rows_);
      rows_ += static_cast<std::int64_t>(keys.size());
      longest = std::max(longest, static_cast<std::int64_t>(keys.size()));
    }
    place_.capacity = longest + random() % 3;
    if (form == Form::batch) rows_ = place_.capacity * static_cast<std::int64_t>(held.size());
    if (place_.in_pages()) deal_pages(held.size(), random);
    table_ = DeviceArray<std::int32_t>(device, place_.table);
    for (const bool is_key : {false, true}) bytes_[is_key].assign(bytes_of(is_key), kPoison);
    if (filled) write(held);
    for (const bool is_key : {false, true})
      memory_[is_key] = DeviceArray<std::byte>(device, bytes_[is_key]);
  }

  CacheTensors tensors() const {
    CacheTensors t{.k = place_.tensor(true, memory_[true].data(), rows_, device_)};
    if (place_.shape.value_dim > 0)
      t.v = place_.tensor(false, memory_[false].data(), rows_, device_);
    if (place_.in_pages())
      t.block_table =
          Tensor(table_.data(),
                 {static_cast<std::int64_t>(place_.table.size()) / place_.columns, place_.columns},
                 device_);
    return t;
  }

  /// Puts keys at their expected places.
  void write(const Positions& held) {
    const auto size = static_cast<std::int64_t>(size_of(place_.shape.dtype));
    for (std::size_t b = 0; b < held.size(); ++b)
      for (std::size_t i = 0; i < held[b].size(); ++i)
        for (const bool is_key : {false, true})
          for (int e = 0; e < place_.shape.kv_heads * place_.width(is_key); ++e) {
            const int head = e / place_.width(is_key), d = e % place_.width(is_key);
            const std::int64_t at =
                place_.at(is_key, static_cast<int>(b), static_cast<std::int64_t>(i), head, d);
            for (std::int64_t n = 0; n < size; ++n)
              bytes_[is_key][static_cast<std::size_t>(at * size + n)] =
                  byte_of(is_key, static_cast<int>(b), held[b][i], e * size + n);
          }
  }

  /// Whether all bytes are as they were written here.
  bool is_right() const {
    return memory_[true].values() == bytes_[true] && memory_[false].values() == bytes_[false];
  }

 private:
  static constexpr std::byte kPoison{0xff};

  void deal_pages(std::size_t batch, std::mt19937& random) {
    place_.page = static_cast<int>(1 + random() % 20);
    place_.columns = (place_.capacity + place_.page - 1) / place_.page;
    const auto entries = static_cast<std::int64_t>(batch) * place_.columns;
    place_.pages = entries + static_cast<std::int64_t>(random() % 3);
    std::vector<std::int32_t> pages(static_cast<std::size_t>(place_.pages));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    place_.table.assign(pages.begin(), pages.begin() + entries);
  }
  std::size_t bytes_of(bool is_key) const {
    return static_cast<std::size_t>(place_.size(is_key, rows_)) * size_of(place_.shape.dtype);
  }

  Device device_;
  KeyPlace place_;
  std::int64_t rows_ = 0;
  DeviceArray<std::int32_t> table_;
  std::vector<std::byte> bytes_[2];
  DeviceArray<std::byte> memory_[2];
};

}  // namespace longspan::tests

#include "launcher/problem/seeded_cache.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>

#include "launcher/problem/memory.hpp"
#include "longspan/storage.hpp"

namespace longspan::launcher {

CacheSources sources_of(const ReshardOptions& o, std::uint64_t seed) {
  const std::int64_t rows = std::accumulate(o.lengths.begin(), o.lengths.end(), std::int64_t{0});
  return {generated(seed, 1, o.dtype, rows, o.kv_heads, o.head_dim),
          generated(seed, 2, o.dtype, rows, o.kv_heads, o.of_values())};
}

double cache_row_bytes(const ReshardOptions& o) {
  const StorageFormat format = storage_of(o.dtype);
  return 1.0 * o.kv_heads * (format.row_bytes(o.head_dim) + format.row_bytes(o.of_values()));
}

namespace {

/// The part of a sequence on one of the ranks that hold a cache.
Shard shard_of(const ReshardOptions& o, const CacheRanks& ranks, int rank, std::size_t sequence) {
  return ranks.rule.resolve(o.lengths[sequence], rank - ranks.first_rank, ranks.ranks);
}

bool is_one_of(const CacheRanks& ranks, int rank) {
  return rank >= ranks.first_rank && rank < ranks.first_rank + ranks.ranks;
}

/// The pages that every sequence has on a rank: as many as the longest needs.
std::int64_t columns_of(const ReshardOptions& o, const CacheRanks& ranks, int page, int rank) {
  std::int64_t columns = 0;
  for (std::size_t b = 0; b < o.lengths.size(); ++b) {
    const std::int64_t own = shard_of(o, ranks, rank, b).local_len(o.lengths[b]);
    columns = std::max(columns, (own + page - 1) / page);
  }
  return columns;
}

}  // namespace

std::int64_t cache_rows(const ReshardOptions& o, const CacheRanks& ranks, int page, int rank) {
  if (!is_one_of(ranks, rank)) return 0;
  if (page > 0)
    return static_cast<std::int64_t>(o.lengths.size()) * columns_of(o, ranks, page, rank) * page;
  std::int64_t rows = 0;
  for (std::size_t b = 0; b < o.lengths.size(); ++b)
    rows += shard_of(o, ranks, rank, b).local_len(o.lengths[b]);
  return rows;
}

SeededCache::SeededCache(const Communicator& world, const ReshardOptions& options,
                         const CacheRanks& ranks, int page, std::uint64_t seed, int threads)
    : device_(world.device()), options_(options), page_(page), threads_(threads) {
  const int rank = world.rank();
  if (!is_one_of(ranks, rank)) return;
  source_rows_.assign(static_cast<std::size_t>(cache_rows(options, ranks, page, rank)), -1);
  if (page > 0) {
    table_.resize(source_rows_.size() / static_cast<std::size_t>(page));
    std::iota(table_.begin(), table_.end(), 0);
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank));
    std::shuffle(table_.begin(), table_.end(), random);
  }
  std::int64_t first = 0, ahead = 0;  // rows of the sources, and of this cache, ahead of a sequence
  for (std::size_t b = 0; b < options.lengths.size(); ++b) {
    const std::int64_t length = options.lengths[b];
    const Shard shard = shard_of(options, ranks, rank, b);
    const std::int64_t own = shard.local_len(length);
    for (std::int64_t i = 0; i < own; ++i) {
      std::int64_t row = ahead + i;
      if (page > 0) {
        const std::int64_t entry = static_cast<std::int64_t>(b) * columns() + i / page;
        row = std::int64_t{table_[static_cast<std::size_t>(entry)]} * page + i % page;
      }
      source_rows_[static_cast<std::size_t>(row)] = first + shard.position(i, length);
    }
    first += length;
    ahead += own;
  }
}

std::int64_t SeededCache::columns() const {
  return static_cast<std::int64_t>(table_.size() / options_.lengths.size());
}

std::size_t SeededCache::row_bytes(bool values) const {
  const int dim = values ? options_.of_values() : options_.head_dim;
  return static_cast<std::size_t>(options_.kv_heads * storage_of(options_.dtype).row_bytes(dim));
}

void SeededCache::write(const Source& source, std::byte* to) const {
  parallel_for(static_cast<std::int64_t>(source_rows_.size()), threads_, [&](std::int64_t row) {
    std::byte* const at = to + static_cast<std::size_t>(row) * source.row_bytes();
    const std::int64_t from = source_rows_[static_cast<std::size_t>(row)];
    if (from >= 0)
      source.read(from, 0, source.row_size(), at);
    else
      std::memset(at, 0xff, source.row_bytes());
  });
}

void SeededCache::fill(const CacheSources& sources) {
  const std::size_t rows = source_rows_.size();
  for (const bool values : {false, true})
    memory(values) = filled(device_, rows * row_bytes(values),
                            [&](std::byte* to) { write(values ? sources.v : sources.k, to); });
  block_table_ = on_device(device_, table_);
}

void SeededCache::poison() {
  for (const bool values : {false, true})
    memory(values) = poisoned(device_, source_rows_.size() * row_bytes(values));
  block_table_ = on_device(device_, table_);
}

Tensor SeededCache::tensor(const Buffer& memory, bool values) const {
  const auto rows = static_cast<std::int64_t>(source_rows_.size());
  const int dim = values ? options_.of_values() : options_.head_dim;
  if (memory.bytes() == 0) return {};
  if (page_ == 0) return {memory.data(), options_.dtype, {rows, options_.kv_heads, dim}, device_};
  return {memory.data(), options_.dtype, {rows / page_, page_, options_.kv_heads, dim}, device_};
}

CacheTensors SeededCache::tensors() const {
  CacheTensors t{.k = tensor(k_, false), .v = tensor(v_, true)};
  if (!table_.empty())
    t.block_table =
        Tensor(static_cast<const std::int32_t*>(block_table_.data()),
               {static_cast<std::int64_t>(options_.lengths.size()), columns()}, device_);
  return t;
}

std::int64_t SeededCache::wrong_rows(const Source& source, const Buffer& memory) const {
  std::vector<std::byte> found(memory.bytes()), expected(memory.bytes());
  if (found.empty()) return 0;
  memory.download(found.data());
  write(source, expected.data());
  std::atomic<std::int64_t> wrong = 0;
  parallel_for(static_cast<std::int64_t>(source_rows_.size()), threads_, [&](std::int64_t row) {
    const std::size_t at = static_cast<std::size_t>(row) * source.row_bytes();
    if (std::memcmp(found.data() + at, expected.data() + at, source.row_bytes()) != 0) ++wrong;
  });
  return wrong;
}

std::int64_t SeededCache::wrong_rows(const CacheSources& sources) const {
  return wrong_rows(sources.k, k_) + wrong_rows(sources.v, v_);
}

}  // namespace longspan::launcher

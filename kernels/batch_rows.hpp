// Finds the sequence of a row of the batch, and its place in a cache, for kernels that iterate over
// rows, on host and CUDA.
#pragma once

#include <cstdint>

#include "kernels/params.hpp"
#include "longspan/starts.hpp"

namespace longspan::kernels {

/// The sequence of row `token`; -1 if nothing of the row is read or written, because it is past the
/// last sequence, or its sequence is skipped.
LONGSPAN_HD inline int sequence_of_row(const Batch& batch, std::int64_t token) {
  if (batch.query_start == nullptr) return 0;
  if (token >= batch.query_start[batch.size]) return -1;
  const std::int32_t* const starts = batch.query_start;
  const int b = last_start(batch.size, token, [starts](int i) { return starts[i]; });
  return batch.skips(starts[b + 1] - starts[b]) ? -1 : b;
}

/// Whether a row has a sequence. It does not search if no sequence is skipped.
LONGSPAN_HD inline bool in_batch(const Batch& batch, std::int64_t token) {
  if (batch.query_start == nullptr) return true;
  return batch.skip_decode ? sequence_of_row(batch, token) >= 0
                           : token < batch.query_start[batch.size];
}

/// The number of segments that hold keys of this rank, for a sequence with `local_len` of them. It
/// always counts the first one, which may hold only the sink.
LONGSPAN_HD inline int filled_segments(const KeyParts& parts, int segments,
                                       std::int64_t local_len) {
  const std::int64_t each = parts ? parts.size(local_len) : 0;
  const std::int64_t filled = each > 0 ? (local_len + each - 1) / each : 0;
  const std::int64_t most = parts && parts.count < segments ? parts.count : segments;
  return static_cast<int>(filled < 1 ? 1 : filled < most ? filled : most);
}

/// A row of a cache: row `row` of page `page`; row < 0: no row.
struct CacheRow {
  std::int64_t page = 0;
  std::int64_t row = -1;

  LONGSPAN_HD std::int64_t offset(const KvRows& cache) const {
    return page * cache.page_stride + row * cache.row_stride;
  }
};

/// The local key that holds the sequence's new row t, or -1 if another rank owns it.
LONGSPAN_HD inline std::int64_t new_key(const Batch& batch, const Shard& shards, int b,
                                        std::int64_t t, std::int64_t q_len) {
  const Shard shard = shards.for_sequence(b);
  const std::int64_t kv_len = batch.keys(b, shards), position = kv_len - q_len + t;
  return shard.owns(position, kv_len) ? shard.before(position, kv_len) : -1;
}

/// The position of new row `token` of the batch, which has a sequence.
LONGSPAN_HD inline std::int64_t new_position(const AppendParams& p, std::int64_t token) {
  const int b = sequence_of_row(p.batch, token);
  const std::int64_t t = token - p.batch.first_row(b);
  return p.batch.keys(b, p.shard) - p.batch.query_len(b, p.tokens) + t;
}

/// The row of the cache where an append writes row `token` of the batch.
LONGSPAN_HD inline CacheRow cache_row(const AppendParams& p, std::int64_t token) {
  if (p.slots != nullptr) {
    const std::int64_t slot = p.slots[token];
    if (slot < 0) return {};
    // With slots there is no table: a cache without pages has no page stride.
    if (p.k.page_stride == 0) return {0, slot};
    return {slot / p.pages.size, slot % p.pages.size};
  }
  const int b = sequence_of_row(p.batch, token);
  if (b < 0) return {};
  const std::int64_t t = token - p.batch.first_row(b);
  const std::int64_t key = new_key(p.batch, p.shard, b, t, p.batch.query_len(b, p.tokens));
  if (key < 0) return {};
  if (!p.pages) return {0, p.batch.first_key(b) + key};
  const std::int64_t page = p.pages.page(b, key);
  return {page, page < 0 ? -1 : key % p.pages.size};
}

/// The scales of new row `token` at its place in the cache, as those of one sequence.
LONGSPAN_HD inline ScaleView scales_at(const AppendParams& p, const ScaleView& scales,
                                       std::int64_t token, const CacheRow& at) {
  const int b = scales.sequence_stride == 0 ? 0 : sequence_of_row(p.batch, token);
  return scales.of_sequence(b).of_row(at.page, at.row);
}

}  // namespace longspan::kernels

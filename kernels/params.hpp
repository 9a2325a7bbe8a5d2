// What a kernel is told: plain data, passed by value, every pointer with its shape. Host and CUDA
// kernels take the same structs.
//
// Names: tokens = query rows over the batch, heads, kv_heads, dim, kv_len, ranks; group = heads /
// kv_heads. A "row" of a state is one (token, head), numbered token * heads + head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/mask.hpp"
#include "longspan/score.hpp"
#include "longspan/shard.hpp"
#include "longspan/state.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// A tensor [n, heads, dim] whose innermost dimension is dense. Strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  template <class T>
  LONGSPAN_HD T* at(std::int64_t row, std::int64_t head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

/// States of `rows` rows in `slots` equal slots, which lie `slot_bytes` apart: one slot per rank,
/// or per split of a rank's keys. A slot is Stats [rows], then o [rows, dim] in fp32.
struct StateSlots {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  int dim = 0;
  int slots = 1;

  LONGSPAN_HD static std::int64_t stats_bytes(std::int64_t rows) {
    return (rows * 8 + 15) / 16 * 16;
  }
  LONGSPAN_HD static std::int64_t bytes(std::int64_t rows, int dim) {
    return stats_bytes(rows) + rows * dim * 4;
  }
  LONGSPAN_HD std::int64_t slot_bytes() const { return bytes(rows, dim); }
  LONGSPAN_HD Stats* stats(int slot) const {
    return reinterpret_cast<Stats*>(data + slot * slot_bytes());
  }
  LONGSPAN_HD float* o(int slot) const {
    return reinterpret_cast<float*>(data + slot * slot_bytes() + stats_bytes(rows));
  }
  LONGSPAN_HD float* o(int slot, std::int64_t row) const { return o(slot) + row * dim; }
};

/// The sequences of a batch. Null arrays describe the one sequence of `shard.length` keys.
struct Batch {
  int size = 1;
  const std::int32_t* query_start = nullptr;  // [size + 1], or null when size is 1
  const std::int32_t* kv_len = nullptr;       // [size], or null when size is 1
  const std::int64_t* key_start = nullptr;    // [size] first local key of each sequence; null: 0

  LONGSPAN_HD std::int64_t first_row(int b) const { return query_start ? query_start[b] : 0; }
  LONGSPAN_HD std::int64_t query_len(int b, std::int64_t tokens) const {
    return query_start ? query_start[b + 1] - query_start[b] : tokens;
  }
  LONGSPAN_HD std::int64_t keys(int b, const Shard& shard) const {
    return kv_len ? kv_len[b] : shard.length;
  }
  LONGSPAN_HD std::int64_t first_key(int b) const { return key_start ? key_start[b] : 0; }
};

/// One rank's keys -> one partial state per row (slot `slot` of `state`). Every row of the batch is
/// written, empty ones as empty states; rows past the last sequence are not touched.
struct AttendParams {
  DType dtype = DType::fp32;
  std::int64_t tokens = 0;
  int heads = 1;
  int kv_heads = 1;
  int dim = 0;

  Rows q;  // [tokens, heads, dim]
  Rows k;  // [keys on this rank, kv_heads, dim]
  Rows v;  // as k

  Batch batch;
  Shard shard;
  Mask mask;
  Score score;
  bool invariant = false;  // keep the fixed order also for long queries

  StateSlots state;
  int slot = 0;

  std::byte* scratch = nullptr;  // Backend::attend_scratch bytes
  std::size_t scratch_bytes = 0;
};

/// `slots` states of each row -> out and lse. States fold in the order of fold_place, neighbours
/// first; then the sink; then the one rounding to the output dtype.
struct MergeParams {
  StateSlots states;
  bool interleaved = false;  // shards are interleaved: see fold_place
  int heads = 1;
  const float* sinks = nullptr;        // [heads], natural units; or null
  const std::int64_t* rows = nullptr;  // [tokens] token of the state for each token of the result,
                                       // < 0: none; null: the same
  std::int64_t tokens = 0;             // of the result
  DType dtype = DType::fp32;           // of the result
  Rows out;                            // [tokens, heads, dim]
  float* lse = nullptr;                // [tokens, heads], natural log; or null
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
};

/// Where sharded query rows stand in the whole q. Rank p's i-th row of the batch is row
/// map[p * capacity + i] of the whole, -1 past its last.
struct MapParams {
  Shard shard;  // of the query rows; rank is ignored
  Batch batch;  // query_start of the whole q; kv_len is not read
  int ranks = 1;
  std::int64_t capacity = 0;
  std::int64_t* map = nullptr;  // [ranks, capacity]
};

/// to[map[i]] = from[i] for map[i] >= 0; a null map copies. Rows of `row_bytes`, a multiple of 16.
struct PlaceParams {
  const std::byte* from = nullptr;    // [count, row_bytes]
  std::byte* to = nullptr;            // [any, row_bytes]
  const std::int64_t* map = nullptr;  // [count], or null
  std::int64_t count = 0;
  std::int64_t row_bytes = 0;
};

/// First local key of each sequence when the rank's keys are packed: an exclusive prefix sum of
/// shard.local_len(kv_len[b]).
struct KeyStartParams {
  Shard shard;
  const std::int32_t* kv_len = nullptr;  // [batch]
  std::int64_t capacity = 0;             // > 0: keys are [batch, capacity]; start = b * capacity
  int batch = 0;
  std::int64_t* key_start = nullptr;  // [batch]
};

}  // namespace longspan::kernels

// Computes positions of rows: the small index kernels of sharded queries, packed keys and split
// contexts; and rotates rows by their positions, and their gradients back.
#include <algorithm>
#include <cstring>

#include "kernels/batch_rows.hpp"
#include "kernels/host/host.hpp"
#include "kernels/host/rotations.hpp"

namespace longspan::kernels::host {

void map_rows(const MapParams& p) {
  for (int rank = 0; rank < p.ranks; ++rank) {
    const Shard shard = p.shard.with_rank(p.first + rank);
    std::int64_t* map = p.map + rank * p.capacity;
    std::int64_t count = 0;
    for (int b = 0; b < p.batch.size; ++b) {
      const std::int64_t own =
          std::min(shard.for_sequence(b).local_len(p.rows_of(b)), p.capacity - count);
      for (std::int64_t i = 0; i < own; ++i) map[count++] = p.row(shard, b, i);
    }
    std::fill(map + count, map + p.capacity, -1);
  }
}

void place_rows(const PlaceParams& p, ThreadPool& pool) {
  pool.run_stretches(p.count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t to = p.map != nullptr ? p.map[i] : i;
      if (to >= 0 && to < p.places)
        std::memcpy(p.to + to * p.row_bytes, p.from + i * p.row_bytes, p.row_bytes);
    }
  });
}

namespace {

/// Rotates row `token`, all of its heads. The type is known to the compiler.
template <DType kType>
void rotate_row(const RotateParams& p, const Rotations& by, std::int64_t token) {
  for (int head = 0; head < p.geometry.heads; ++head) {
    const std::int64_t from = p.from.offset(token, head), to = p.to.offset(token, head);
    for (int d = 0; d < p.geometry.head_dim; ++d)
      store_element(p.to.data, kType, to + d, by.element(p.from.data, kType, from, d));
  }
}

}  // namespace

void rotate_rows(const RotateParams& p, ThreadPool& pool) {
  pool.run(p.geometry.tokens, [&](std::int64_t token, int) {
    const int b = sequence_of_row(p.geometry.batch, token);
    if (b < 0) return;
    const Rotations by(p.rope, p.position(b, token));
    switch (p.geometry.q_dtype) {
      case DType::fp32:
        return rotate_row<DType::fp32>(p, by, token);
      case DType::fp16:
        return rotate_row<DType::fp16>(p, by, token);
      default:
        return rotate_row<DType::bf16>(p, by, token);
    }
  });
}

void turn_back_sums(const TurnBackParams& p, ThreadPool& pool) {
  const int group = p.rows.geometry.heads / p.rows.geometry.kv_heads;
  pool.run(p.rows.geometry.tokens, [&](std::int64_t token, int) {
    const int b = sequence_of_row(p.rows.geometry.batch, token);
    if (b < 0) return;
    const Rotations by(p.rows.rope, p.rows.position(b, token));
    for (int kv_head = 0; kv_head < p.rows.geometry.kv_heads; ++kv_head)
      for (int h = 0; h < group; ++h) by.turn_back(p.sums.at(kv_head, token * group + h));
  });
}

void turn_back_keys(const TurnBackKeysParams& p, ThreadPool& pool) {
  pool.run(p.sums.rows, [&](std::int64_t row, int) {
    const SummedKeys::Key key = p.keys.at(row);
    if (key.sequence < 0) return;
    const Rotations by(p.rope, p.keys.position(key));
    for (int head = 0; head < p.kv_heads; ++head) by.turn_back(p.sums.at(head, row));
  });
}

void key_starts(const KeyStartParams& p) {
  std::int64_t start = 0;
  for (int b = 0; b < p.batch; ++b) {
    p.key_start[b] = start;
    start += p.capacity > 0 ? p.capacity : p.shard.for_sequence(b).local_len(p.kv_len[b]);
  }
}

void row_starts(const RowStartParams& p) {
  std::int64_t start = 0;
  for (int b = 0; b < p.batch; ++b) {
    p.start[b] = p.within(start);
    start += p.shard.for_sequence(b).local_len(p.whole_start[b + 1] - p.whole_start[b]);
  }
  p.start[p.batch] = p.within(start);
}

void cut_context(const ContextCutParams& p) {
  for (int b = 0; b < p.batch.size; ++b) {
    const std::int64_t kv_len = p.batch.kv_len[b];
    const std::int64_t context = kv_len - p.batch.query_len(b, p.tokens);
    std::int64_t* range = p.ranges + std::int64_t{3} * b;
    range[0] = 0;
    range[1] = std::max<std::int64_t>(context, 0);
    range[2] = kv_len;
  }
}

}  // namespace longspan::kernels::host

// The rows and keys of a tile, found once and kept in shared memory: where they are, what they see,
// and the terms of their scores. Owned tiles and those that stream by have the same slots.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/gradients/plan.hpp"

namespace longspan::kernels::cuda {

/// A tensor whose rows a kernel loads, in elements from its first one on.
struct GradientTensor {
  const void* data;
  DType dtype;
  int dim;
  bool aligned;  // eight elements at a time may be read
};

/// Rows of nobody, and of padding, are zeros: what their memory holds reaches no sum.
inline constexpr std::int64_t kNoRow = -1;

/// Packed rows. A row that sees nothing on any rank has infinity for its lse, so that its weights
/// are 0, and zeros for its q and dout.
template <int kCount>
struct RowSlots {
  std::int64_t first_at[kCount];   // its q; kNoRow: zeros
  std::int64_t second_at[kCount];  // its dout
  Interval view[kCount];           // the local keys, or positions, that it sees
  float lse[kCount], lse_low[kCount], d[kCount];
  int index[kCount], head[kCount];  // for biases and dropout, as in QueryRow

  /// The i-th of the packed rows [first, first + count), or the last one without any weight.
  __device__ void find(int i, const GradientParams& p, const Divisor& by_group,
                       const Sequence& sequence, int kv_head, std::int64_t first, int count) {
    const TileCoord tile{sequence.index, kv_head, 0, first, count, by_group};
    set(i, p, sequence, packed_row(tile, min(i, count - 1)), i < count);
  }
  /// A row; `exists`: it may have weights.
  __device__ void set(int i, const GradientParams& p, const Sequence& sequence, const PackedRow& at,
                      bool exists) {
    const std::int64_t token = sequence.first_row + at.token;
    RowTerm term = p.terms[token * p.heads + at.head];
    if (!exists || term.lse == -infinity()) term = {infinity(), 0.0f, 0.0f};
    const bool sees_some = term.lse != infinity();
    first_at[i] = sees_some ? p.q.offset(token, at.head) : kNoRow;
    second_at[i] = sees_some ? p.dout.offset(token, at.head) : kNoRow;
    view[i] = row_view(p, sequence, at.token, 0);
    lse[i] = term.lse;
    lse_low[i] = term.lse_low;
    d[i] = term.d;
    index[i] = p.bias || p.dropout ? static_cast<int>(p.query_index(sequence.index, at.token)) : 0;
    head[i] = at.head;
  }
};

/// Keys of one kv head.
template <int kCount>
struct KeySlots {
  std::int64_t first_at[kCount];   // its key; kNoRow: zeros
  std::int64_t second_at[kCount];  // its value
  std::int64_t place[kCount];      // what views contain: its local index, or its position; -1: none
  int column[kCount];              // for biases and dropout, as in key_column

  /// The i-th of the keys [first, first + count). `view`: of the rows that it meets; other keys are
  /// not read.
  __device__ void find(int i, const GradientParams& p, const Sequence& sequence, int kv_head,
                       std::int64_t first, int count, const View& view) {
    set(i, p, sequence, kv_head, first + i, i < count, view);
  }
  __device__ void set(int i, const GradientParams& p, const Sequence& sequence, int kv_head,
                      std::int64_t key, bool exists, const View& view) {
    bool is_read = exists && view.any.contains(key);
    place[i] = !exists ? -1 : view.table != nullptr ? view.table[key] : key;
    if (view.table != nullptr && is_read) is_read = view.positions.contains(place[i]);
    first_at[i] = is_read ? p.k.offset(sequence.first_key + key, kv_head) : kNoRow;
    second_at[i] = is_read ? p.v.offset(sequence.first_key + key, kv_head) : kNoRow;
    column[i] = is_read && (p.bias || p.dropout) ? key_column(p, sequence, view, key) : 0;
  }
};

/// A tile of what streams by.
struct StreamTile {
  std::int64_t first;  // < 0: none is left
  int count;
  int leaf;  // of the fixed order
};

/// Walks over tiles of the rows or keys in `part`, in the order of their sum. In the fixed order
/// these are the segments of each virtual rank; no tile reaches from one segment into the next.
struct StreamWalk {
  SegmentOrder order;
  Interval part;           // at least these are walked; empty: none
  std::int64_t total = 0;  // rows or keys of the sequence here
  std::int64_t unit = 0;   // of a segment; 0: in no fixed order

  template <int kTile>
  __device__ StreamTile next() {
    while (at_ >= stop_)
      if (!enter<kTile>()) return {-1, 0, 0};
    const std::int64_t left = end_ - at_;
    const StreamTile tile{at_, static_cast<int>(left < kTile ? left : kTile), leaf_};
    at_ += kTile;
    return tile;
  }

 private:
  /// Steps to the next segment, of which nothing may be in `part`; false at the end.
  template <int kTile>
  __device__ bool enter() {
    if (leaf_ >= (unit > 0 ? order.leaves : 1) || part.empty()) return false;
    if (++segment_ >= (unit > 0 ? order.count(leaf_) : 1)) {
      ++leaf_;
      segment_ = -1;
      return true;
    }
    const std::int64_t first = unit > 0 ? order.segment(leaf_, segment_) * unit : 0;
    end_ = unit > 0 && first + unit < total ? first + unit : total;
    stop_ = part.end < end_ ? part.end : end_;
    at_ = part.begin > first ? first + (part.begin - first) / kTile * kTile : first;
    return true;
  }

  int leaf_ = 0;
  std::int64_t segment_ = -1;  // of the leaf
  std::int64_t at_ = 0;        // of the next tile
  std::int64_t stop_ = 0;      // tiles of the segment begin before it
  std::int64_t end_ = 0;       // of the segment
};

}  // namespace longspan::kernels::cuda

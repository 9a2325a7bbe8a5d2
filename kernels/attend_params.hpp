// The parameters of attention, in four parts: sizes and types, locations of the operands,
// destination of the states, and scratch. Functions take the part that they need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/geometry.hpp"
#include "kernels/key_arrivals.hpp"
#include "kernels/tensors.hpp"
#include "longspan/mask.hpp"
#include "longspan/rope.hpp"
#include "longspan/storage.hpp"

namespace longspan::kernels {

/// Sparse attention: the keys that each query row sees, by number. An index that names no key of
/// the row's sequence (below 0, past the end, or in the padding) is nobody, and one that is given
/// twice counts twice.
struct KeyIndices {
  const std::int32_t* data = nullptr;  // [tokens, heads, top_k]; of bounds null
  std::int64_t row_stride = 0;         // in indices
  std::int64_t head_stride = 0;
  int heads = 1;  // 1: all kv heads have the same; otherwise each has its own. Of bounds, the most
  int top_k = 0;  // of a row. Of bounds, the most; 0: a row sees what the mask says
  const std::int32_t* lengths = nullptr;  // [tokens] first indices of a row that count; null: all
  bool are_slots = false;  // rows of this rank's cache, page * page_size + row; otherwise positions
  std::int64_t slots = 0;  // rows of this rank's cache

  LONGSPAN_HD explicit operator bool() const { return top_k > 0; }
};

/// Locations of queries, keys and values.
struct Operands {
  TokenRows q;  // [tokens, heads, head_dim]
  KvRows k;     // [keys on this rank, kv_heads, head_dim], or pages
  KvRows v;     // like k, with value_dim columns; may be the first columns of the keys
  Pages pages;
  KeySpans spans;  // replaces the addresses of k and v; then there are no pages
  // Keys, or queries, that are still in transfer, in host memory and read by the call; only if
  // AttentionKernels::takes_arrivals allows it. Otherwise null.
  const KeyArrivals* arrivals = nullptr;
  Rows new_k;  // as in AppendParams, of `dtype`: the keys of these rows, which are not yet in k and
               // v
  Rows new_v;  // and are written there before the attention; or null
  KeyIndices indices;
  Rope rope;  // of new_k; q is rotated already

  // Each holds for all keys of a head, in all sequences or in one.
  ScaleView q_scale;  // with k_scale, factors of every product, applied first
  ScaleView k_scale;
  ScaleView v_scale;  // of o, in the state
};

/// Cuts each sequence's local keys into `count` parts, each with its own state; the state of part s
/// goes to slot AttendParams::slot + s. A cut ignores the fixed order: it may go through a segment,
/// which then folds in two halves. With count = 0 there is no cut, and one state.
struct KeyParts {
  int count = 0;
  std::int64_t keys = 0;  // in a part; 0: as many tiles of `tile` keys as give `count` parts
  int tile = 16;

  LONGSPAN_HD explicit operator bool() const { return count > 0; }
  LONGSPAN_HD std::int64_t size(std::int64_t local_len) const {
    if (keys > 0) return keys;
    const std::int64_t round = static_cast<std::int64_t>(count) * tile;
    return (local_len + round - 1) / round * tile;
  }
  /// The local keys of part s.
  LONGSPAN_HD Interval of(int s, std::int64_t local_len) const {
    const std::int64_t each = size(local_len), begin = s * each, end = begin + each;
    return {begin < local_len ? begin : local_len, end < local_len ? end : local_len};
  }
};

/// Destination of the states.
struct StateTarget {
  KeyParts parts;
  StateSlots state;
  int slot = 0;
  bool resume = false;  // rows start from the states in `slot` (with parts, each in its own slot)
};

struct Scratch {
  std::byte* scratch = nullptr;  // AttentionKernels::attend_scratch bytes
  std::size_t scratch_bytes = 0;
  int* ticket = nullptr;  // [1] zero between calls, used by one stream at a time; null: part of the
                          // scratch is cleared for each call, which takes a launch
};

/// Turns one rank's keys into one partial state per row (slot `slot` of `state`). Every row of the
/// batch is written, empty ones as empty states. Rows past the last sequence, and of skipped
/// sequences, are not touched. Products are of `dtype`: fp8 inputs are converted to it (exactly),
/// unless fp8_products allows otherwise.
///
/// A rank may have a share of the query rows (`queries`), as it has of the keys. Masks and biases
/// depend on a row's position in its sequence, which only query_position computes.
///
/// With `resume` the rows start from the states in their slot, and end with merge(that state, the
/// state over this call's keys). A row whose state is empty starts anew, whatever its max and o
/// are. A row that sees no key keeps its state (an empty one stays empty, and its max and o may
/// stay as they are). The keys of the two must be disjoint, which nothing checks. The incoming
/// state is outside of the fixed order's tree (order.hpp): the bits then depend on how the caller
/// splits the keys into calls, with or without `invariant`.
struct AttendParams : Geometry, Operands, StateTarget, Scratch {
  /// The scale of the scores, including the scales of a quantised q and k.
  LONGSPAN_HD float scale(int sequence, int kv_head) const {
    return score.scale * q_scale.of(sequence, kv_head) * k_scale.of(sequence, kv_head);
  }
};

}  // namespace longspan::kernels

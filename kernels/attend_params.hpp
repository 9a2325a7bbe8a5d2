// What attention is told, in four parts: what is attended to, where it lies, where the states go,
// and memory to work in. Functions take the part that they need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/geometry.hpp"
#include "kernels/key_arrivals.hpp"
#include "kernels/tensors.hpp"
#include "longspan/element.hpp"
#include "longspan/mask.hpp"

namespace longspan::kernels {

/// Where queries, keys and values are.
struct Operands {
  TokenRows q;  // [tokens, heads, head_dim]
  KvRows k;     // [keys on this rank, kv_heads, head_dim], or pages
  KvRows v;     // as k, of value_dim; may be the first columns of the keys
  Pages pages;
  KeySpans spans;  // in place of the addresses of k and v; then there are no pages
  // Where keys, or queries, still come, in the host's memory and read by the call; only where
  // AttentionKernels::takes_arrivals says so. Else null.
  const KeyArrivals* arrivals = nullptr;
  Rows new_k;  // as in AppendParams, of `dtype`: the keys of these rows, which k and v do not have
  Rows new_v;  // yet and get here, ahead of the attention; or null

  Scales q_scale;  // with k_scale, factors of every product, ahead of everything else
  Scales k_scale;
  Scales v_scale;  // of o, in the state
};

/// Cuts each sequence's local keys into `count` parts, each with a state of its own; the state of
/// part s goes to slot AttendParams::slot + s. A cut lies outside of the fixed order: it may go
/// through a segment, which then folds in two halves. With count = 0 there is no cut, and one
/// state.
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

/// Where the states go.
struct StateTarget {
  KeyParts parts;
  StateSlots state;
  int slot = 0;
  bool resume = false;  // rows begin from the states in `slot` (with parts, each in its own slot)
};

struct Scratch {
  std::byte* scratch = nullptr;  // AttentionKernels::attend_scratch bytes
  std::size_t scratch_bytes = 0;
  int* ticket = nullptr;  // [1] zero between calls, of one stream at a time; where it is null, part
                          // of the scratch is cleared for each call, which costs a launch
};

/// Turns one rank's keys into one partial state per row (slot `slot` of `state`). Every row of the
/// batch is written, empty ones as empty states; rows past the last sequence, and of skipped
/// sequences, are not touched. Products are of `dtype`: what is stored as fp8 is converted to it
/// (exactly), unless fp8_products allows otherwise.
///
/// A rank may have a share of the query rows (`queries`), as it has of the keys. Masks and biases
/// go by where a row stands in its sequence, which query_position alone says.
///
/// With `resume` the rows begin from the states that stand in their slot, and what they end with is
/// merge(that state, the state over this call's keys). A row whose state is empty begins afresh,
/// whatever its max and o are; a row that sees no key keeps its state (an empty one stays empty,
/// and its max and o may stay as they are). The keys of the two must differ; nothing checks that.
/// The state that comes in stands outside of the fixed order's tree (order.hpp): with it bits
/// depend on where the caller cuts the keys into calls, `invariant` or not.
struct AttendParams : Geometry, Operands, StateTarget, Scratch {
  /// The scale of the scores, with those of a quantised q and k.
  LONGSPAN_HD float scale(int kv_head) const {
    return score.scale * q_scale[kv_head] * k_scale[kv_head];
  }
};

}  // namespace longspan::kernels

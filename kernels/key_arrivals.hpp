// Keys and values that other ranks still send while an attention with them already runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tensors.hpp"

namespace longspan::kernels {

/// The keys of one whole sequence, of which this rank's own lie where they are and those of the
/// others come to AttendParams::k and v, some kv heads after the others: piece i has the heads from
/// i * heads on. The kernel waits for a piece before it reads keys of it that are not its own.
///
/// Where k and v have the own keys is memory that need not be written, but for the kMargin keys at
/// each end of a stretch: a tile may have both own keys and those of others.
struct KeyArrivals {
  /// Neighbouring keys of this rank.
  struct Stretch {
    int position;  // in the sequence
    int count;
    int first;  // row of k and v below
  };
  static constexpr int kMostStretches = 4;
  static constexpr int kMostPieces = 8;
  static constexpr int kMargin = 192;    // no kernel has larger tiles of keys
  static constexpr int kLeastRows = 17;  // kernels for fewer query rows do not wait

  // [1 + pieces, ranks]: other than 0 once a rank's part is here. The first row is for what the
  // ranks say of the run (RunHeaders), the others are for the pieces. This rank's own stay 0.
  const std::uint64_t* signals = nullptr;
  int rank = 0;
  int ranks = 1;
  int heads = 0;  // kv heads of a piece

  KvRows k, v;  // the own keys, [keys on this rank, kv_heads, head_dim], and their values
  Stretch own[kMostStretches] = {};
  int stretches = 0;

  LONGSPAN_HD explicit operator bool() const { return signals != nullptr; }
};

}  // namespace longspan::kernels

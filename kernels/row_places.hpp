// Finished rows whose destination is the memory of several ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/types.hpp"

namespace longspan::kernels {

/// The destination of each row of a result, in place of MergeParams::out and lse; the row and head
/// strides of `out` apply to all.
struct RowPlaces {
  /// Neighbouring rows whose destination is the memory of one rank.
  struct Stretch {
    int begin;       // the first; they end where the next stretch begins
    std::byte* out;  // for that row and head 0
    float* lse;      // the same, rows are contiguous
    std::int64_t lse_head_stride;
  };
  static constexpr int kMostStretches = 32;

  Stretch stretch[kMostStretches] = {};
  int stretches = 0;

  LONGSPAN_HD explicit operator bool() const { return stretches > 0; }
  /// The stretch of a row.
  LONGSPAN_HD const Stretch& of(std::int64_t row) const {
    int i = 0;
    while (i + 1 < stretches && stretch[i + 1].begin <= row) ++i;
    return stretch[i];
  }
};

}  // namespace longspan::kernels

// The scores of a tile of some rows, which lie in the lanes of a vector: a key's elements are
// broadcast, so a key is not transposed, and values that are the first columns of their keys (MLA)
// are multiplied from the keys' own panels. Of 16 rows, transposing takes a quarter of the time of
// the products. Each score is the chain of multiply-inl.hpp, with the same bits.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_ROW_LANES_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_ROW_LANES_INL
#undef LONGSPAN_HOST_ROW_LANES_INL
#else
#define LONGSPAN_HOST_ROW_LANES_INL
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/multiply-inl.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/words-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// Prefetches the rows of a segment into the L2 cache, a few lines at a time, beside the products
/// of the segment before.
class RowLinesAhead {
 public:
  void clear() { row_ = end_ = nullptr; }

  /// Values in their keys' rows are prefetched with them.
  void start(const KeyRows& rows, std::int64_t key_bytes, std::int64_t value_bytes) {
    std::size_t count = 0;
    for (int j = 0; j < kSegment; ++j) {
      const std::byte *const k = rows.k()[j], *const v = rows.v()[j];
      if (k != nullptr) rows_[count++] = {k, k + key_bytes};
      if (v != nullptr && v != k) rows_[count++] = {v, v + value_bytes};
    }
    row_ = rows_;
    end_ = rows_ + count;
    at_ = count > 0 ? row_->begin : nullptr;
    lines_ = 0;
    for (const Row* row = row_; row < end_; ++row) lines_ += (row->end - row->begin) / kLine + 1;
  }

  std::int64_t lines() const { return row_ == end_ ? 0 : lines_; }

  HWY_INLINE void next(int lines) {
    for (; lines > 0 && row_ < end_; --lines) {
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
      if (at_ >= row_->end && ++row_ < end_) at_ = row_->begin;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  struct Row {
    const std::byte *begin, *end;
  };

  Row rows_[2 * kSegment];
  const Row *row_ = nullptr, *end_ = nullptr;
  const std::byte* at_ = nullptr;
  std::int64_t lines_ = 0;
};

/// Stores the transpose of kLanes vectors: lane r of vector i to scores[r * kSegment + i].
HWY_INLINE void store_transposed(Vec (&sums)[kLanes], float* scores) {
  const Lanes d;
#if LONGSPAN_HOST_AVX512
  __m512i words[16];
  HWY_UNROLL(16)
  for (int i = 0; i < 16; ++i) words[i] = _mm512_castps_si512(sums[i].raw);
  transpose_words(words);
  HWY_UNROLL(16)
  for (int r = 0; r < 16; ++r) _mm512_store_si512(scores + r * kSegment, words[r]);
#else
  HWY_ALIGN float lanes[kLanes * kLanes];
  for (int i = 0; i < kLanes; ++i) hn::Store(sums[i], d, lanes + i * kLanes);
  for (int r = 0; r < kLanes; ++r)
    for (int i = 0; i < kLanes; ++i) scores[r * kSegment + i] = lanes[i * kLanes + r];
#endif
}

/// The scores of kLanes rows, q [dim, kLanes], and kLanes keys in panels [.., 128, 64]. `lines` are
/// prefetched every four columns.
HWY_INLINE void score_lanes(const float* keys, int dim, const float* q, float* scores,
                            RowLinesAhead& ahead, int lines) {
  const Lanes d;
  Vec sums[kLanes];
  HWY_UNROLL(16)
  for (int i = 0; i < kLanes; ++i) sums[i] = hn::Zero(d);
  for (int panel = 0; panel < dim; panel += kPanel, keys += kSegment * kPanel) {
    const int columns = std::min(kPanel, dim - panel);
    for (int c = 0; c < columns; ++c, q += kLanes) {
      if (c % 4 == 0) ahead.next(lines);
      const Vec rows = hn::Load(d, q);
      HWY_UNROLL(16)
      for (int i = 0; i < kLanes; ++i)
        sums[i] = hn::MulAdd(hn::Set(d, keys[i * kPanel + c]), rows, sums[i]);
    }
  }
  store_transposed(sums, scores);
}

/// Rows whose weights are multiplied by a vector of values at a time. Their sums, a value and a
/// weight fit 32 registers; with fewer, no rows are taken so.
inline constexpr int kWeighedRows = 16;
inline constexpr bool kWeighsRows = kVectors == 4;

/// o[r, c] = sum of weights[r, j] v[j, c] for kWeighedRows rows, 128 apart, and `columns` of a
/// panel: the chain of multiply. `lines` are prefetched every eight keys, which a call of multiply
/// could not.
HWY_NOINLINE inline void weigh_row_lanes(const float* weights, const float* v, int keys, float* o,
                                         std::ptrdiff_t o_stride, int columns, RowLinesAhead& ahead,
                                         int lines) {
  const Lanes d;
  for (int c = 0; c < columns; c += kLanes) {
    Vec sums[kWeighedRows];
    HWY_UNROLL(16)
    for (int r = 0; r < kWeighedRows; ++r) sums[r] = hn::Zero(d);
    for (int j = 0; j < keys; ++j) {
      if (j % 8 == 0) ahead.next(lines);
      const Vec value = hn::LoadU(d, v + j * kPanel + c);
      HWY_UNROLL(16)
      for (int r = 0; r < kWeighedRows; ++r)
        sums[r] = hn::MulAdd(hn::Set(d, weights[r * kSegment + j]), value, sums[r]);
    }
    HWY_UNROLL(16)
    for (int r = 0; r < kWeighedRows; ++r) hn::StoreU(sums[r], d, o + r * o_stride + c);
  }
}

/// scores[r, j] = q[r] . key j for all rows and keys [begin, end), multiples of 16. q is [rows /
/// kLanes, dim, kLanes], and scores has whole vectors of rows.
HWY_NOINLINE inline void score_row_lanes(const float* keys, Range range, int dim, const float* q,
                                         int rows, float* scores, RowLinesAhead& ahead, int lines) {
  for (int row = 0; row < rows; row += kLanes)
    for (int j = range.begin; j < range.end; j += kLanes)
      score_lanes(keys + j * kPanel, dim, q + std::int64_t{row} * dim, scores + row * kSegment + j,
                  ahead, lines);
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target

// The factors of dropout for one row of weights and the keys of a segment, in vectors: 0 for a key
// that is dropped, otherwise 1 / (1 - p). The words are those of DropoutRow (kernels/dropout.hpp).
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_DROPOUT_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_DROPOUT_INL
#undef LONGSPAN_HOST_DROPOUT_INL
#else
#define LONGSPAN_HOST_DROPOUT_INL
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/dropout.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

class SegmentDropout {
 public:
  SegmentDropout(const Geometry& params, const Tile& tile)
      : p_(params), tile_(tile), key_(params.dropout ? params.dropout.key() : PhiloxKey{}) {}

  /// Computes the positions of the segment's keys.
  void start(const Segment& segment) {
    const Sequence& s = tile_.sequence;
    const std::int64_t first = s.shard.position(segment.first, s.kv_len);
    by_fours_ = s.shard.consecutive_in_segment() && first % 4 == 0;
    first_block_ = static_cast<std::uint32_t>(first / 4);
    if (by_fours_) return;
    for (int j = 0; j < segment.keys; ++j)
      position_[j] = static_cast<std::uint32_t>(s.shard.position(segment.first + j, s.kv_len));
  }

  /// The factors of the tile's row `row` of a kv head, [128]; those of `keys` are written.
  const float* factors(int kv_head, int row, Range keys) {
    const int group = p_.heads / p_.kv_heads;
    const std::int64_t of_head = tile_.first + row;
    const Sequence& s = tile_.sequence;
    const DropoutRow of =
        p_.dropout.row(key_, s.index, static_cast<int>(kv_head * group + of_head % group),
                       s.context_len + p_.query_index(s.index, of_head / group));
    const int step = by_fours_ ? 4 * kWords : kWords;
    for (int j = keys.begin / step * step; j < keys.end; j += step)
      by_fours_ ? fill_fours(of, j) : fill_ones(of, j);
    return factors_;
  }

  /// Multiplies a row's weights by their factors. One that is dropped becomes 0, whatever it is.
  void drop(int kv_head, int row, Range keys, float* weights) {
    const Lanes d;
    const float* const factor = factors(kv_head, row, keys);
    for (int j = keys.begin; j < keys.end; j += kLanes)
      hn::Store(kept(hn::Load(d, factor + j), hn::Load(d, weights + j)), d, weights + j);
  }

  /// The product of a factor and what it is the factor of.
  static HWY_INLINE Vec kept(Vec factor, Vec x) {
    const auto zero = hn::Zero(Lanes());
    return hn::IfThenElse(hn::Eq(factor, zero), zero, hn::Mul(factor, x));
  }

 private:
  // A word is the lower half of a lane; what is in the upper half does not matter.
  using Word = hn::CappedTag<std::uint64_t, 8>;
  using Words = hn::Vec<Word>;
  static constexpr int kWords = hn::MaxLanes(Word());
  struct Four {
    Words word[4];
  };

  /// The 64 bits of a product with the lower halves.
  static HWY_INLINE Words product(Words x, std::uint32_t factor) {
#if HWY_TARGET == HWY_SCALAR  // which has no two halves
    return hn::Set(Word(), (hn::GetLane(x) & 0xffffffffu) * factor);
#else
    const hn::Repartition<std::uint32_t, Word> halves;
    return hn::MulEven(hn::BitCast(halves, x), hn::Set(halves, factor));
#endif
  }

  /// As philox, of several counters.
  static HWY_INLINE Four words_of(const DropoutRow& row, Words blocks) {
    const Word d;
    Words a = blocks, b = hn::Set(d, row.row), c = hn::Set(d, row.head),
          e = hn::Set(d, row.sequence);
    PhiloxKey key = row.key;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const Words of_a = product(a, kPhiloxFirst), of_c = product(c, kPhiloxThird);
      a = hn::Xor(hn::Xor(hn::ShiftRight<32>(of_c), b), hn::Set(d, key.low));
      b = of_c;
      c = hn::Xor(hn::Xor(hn::ShiftRight<32>(of_a), e), hn::Set(d, key.high));
      e = of_a;
      key.low += PhiloxKey::kLowStep;
      key.high += PhiloxKey::kHighStep;
    }
    return {{a, b, c, e}};
  }

  HWY_INLINE hn::Vec<hn::Rebind<float, Word>> factor_of(Words words) const {
    const hn::Rebind<std::uint32_t, Word> d;
    const hn::Rebind<float, Word> f;
    const auto word = hn::TruncateTo(d, words);
    const auto kept = hn::Eq(hn::Max(word, hn::Set(d, p_.dropout.threshold)), word);
    return hn::BitCast(f, hn::IfThenElseZero(kept, hn::BitCast(d, hn::Set(f, p_.dropout.scale))));
  }

  /// Of 4 kWords keys from j on, whose positions are in blocks of 4.
  void fill_fours(const DropoutRow& row, int j) {
    const Word d;
    const hn::Rebind<float, Word> f;
    const std::uint64_t block = first_block_ + static_cast<std::uint32_t>(j / 4);
    const Four of = words_of(row, hn::Iota(d, block));
    hn::StoreInterleaved4(factor_of(of.word[0]), factor_of(of.word[1]), factor_of(of.word[2]),
                          factor_of(of.word[3]), f, factors_ + j);
  }

  /// Of kWords keys from j on, at any positions.
  void fill_ones(const DropoutRow& row, int j) {
    const Word d;
    const auto position =
        hn::PromoteTo(d, hn::LoadU(hn::Rebind<std::uint32_t, Word>(), position_ + j));
    const Four of = words_of(row, hn::ShiftRight<2>(position));
    const auto place = hn::And(position, hn::Set(d, 3));
    Words word = of.word[0];
    for (int i = 1; i < 4; ++i)
      word = hn::IfThenElse(hn::Eq(place, hn::Set(d, static_cast<std::uint64_t>(i))), of.word[i],
                            word);
    hn::StoreU(factor_of(word), hn::Rebind<float, Word>(), factors_ + j);
  }

  const Geometry& p_;
  const Tile& tile_;
  const PhiloxKey key_;
  bool by_fours_ = true;
  std::uint32_t first_block_ = 0;           // of the segment's first key
  std::uint32_t position_[kSegment] = {};   // otherwise of each key
  HWY_ALIGN float factors_[kSegment] = {};  // of one row
};

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target

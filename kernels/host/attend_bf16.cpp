// Attends one tile with the CPU's own products of bf16. The order is that of attend_tile.cpp: a
// state for each segment of 128 keys, folded in a tree. Two things differ: the sums of products
// have the order of the instructions, and the weights are rounded to bf16:
//
//     s = score(Q K^T),   m = max s,   p = exp2(s - m),   l = sum p,   o = bf16(p) V
//
// A block of rows takes a segment from the first product to the fold, so all of a block stays in
// the L1 cache. Keys and values are packed once for all blocks of the tile. A row has the same bits
// in every tile, as there.
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/attend_bf16.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>
#include <type_traits>
#include <utility>

#include "hwy/highway.h"
#include "kernels/host/amx-inl.hpp"
#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/bias-inl.hpp"
#include "kernels/host/fold_rows-inl.hpp"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"
#include "longspan/error.hpp"

#if LONGSPAN_COMPILES_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

HWY_BEFORE_NAMESPACE();
#if LONGSPAN_HOST_AMX
HWY_PUSH_ATTRIBUTES("avx512bf16,amx-tile,amx-bf16")
#endif
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

#if LONGSPAN_HOST_AMX

/// The folds between two segments: level first becomes the fold of levels first and second.
struct Folds {
  std::pair<int, int> of[64];
  int count = 0;

  void operator()(int a, int b) { of[count++] = {a, b}; }
};

class Bf16TileRun {
 public:
  Bf16TileRun(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
              const Bf16Space& space)
      : p_(params),
        tile_(tile),
        packed_(packed),
        space_(space),
        visible_(params, tile),
        bias_(params, tile),
        depth_(Bf16Space::depth(params)),
        columns_(Bf16Space::columns(params)),
        blocks_((tile.rows + kBf16BlockRows - 1) / kBf16BlockRows) {
    const float scale = p_.scale(tile.sequence.index, tile.kv_head);
    factor_ = p_.score.softcap == 0.0f ? scale * kLog2E : scale / p_.score.softcap;
    in_one_ = p_.score.softcap == 0.0f && !p_.bias && factor_ > 0.0f;
  }

  void operator()() {
    const TileRegisters registers;
    pack_queries();
    FoldStack stack;
    // A segment is processed when the next one is known, which determines the folds after it and is
    // prefetched.
    Seen *seen = seen_, *next = seen_ + 1;
    bool waits = false;
    int level = 0;
    visible_.for_each_segment([&](std::uint64_t index, const Segment& segment) {
      Folds folds;
      const int next_level = stack.push(index, folds);
      see(segment, *next);
      if (waits) attend_segment(*seen, level, folds, next);
      std::swap(seen, next);
      level = next_level;
      waits = true;
    });
    Folds folds;
    if (stack.finish(folds)) {
      attend_segment(*seen, level, folds, nullptr);
      return;
    }
    std::fill_n(stats(0, 0), tile_.rows, empty_stats());
    std::fill_n(o(0, 0), std::int64_t{tile_.rows} * padded(), 0.0f);
  }

 private:
  int padded() const { return columns_ * 16; }
  Stats* stats(int level, int row) const {
    return space_.stats + std::int64_t{level} * space_.rows + row;
  }
  float* o(int level, int row) const {
    return space_.o + (std::int64_t{level} * space_.rows + row) * padded();
  }
  int rows_of(int block) const {
    return std::min(kBf16BlockRows, tile_.rows - block * kBf16BlockRows);
  }

  void pack_queries() {
    const int group = p_.heads / p_.kv_heads;
    const std::int64_t tiles = blocks_ * (kBf16BlockRows / 16);
    const bool whole = p_.head_dim % 32 == 0;
    const std::int64_t full = whole ? tile_.rows / 16 : 0;  // tiles of rows without padding
    std::fill_n(space_.q + full * depth_ * kTile, (tiles - full) * depth_ * kTile, Element{0});
    const hn::RebindToUnsigned<Lanes8> words;
    const hn::Rebind<Element, Lanes8> narrow;
    with_type(p_.q_dtype, [&]<class T>(const T*) {
      for (int r = 0; r < tile_.rows; ++r) {
        const std::int64_t row = tile_.first + r;
        const T* q =
            p_.q.at<T>(tile_.sequence.first_row + row / group, tile_.kv_head * group + row % group);
        Element* to = space_.q + r / 16 * depth_ * kTile + r % 16 * 32;
        if constexpr (std::is_same_v<T, Bfloat16>) {
          if (whole) {
            for (int c = 0; c < p_.head_dim; c += 32)
              _mm512_store_si512(to + c / 32 * kTile, _mm512_loadu_si512(q + c));
            continue;
          }
        }
        int c = 0;
        for (; c + kLanes8 <= p_.head_dim; c += kLanes8) {
          const auto bits = hn::BitCast(words, load(Lanes8(), q + c));  // all inputs are bf16
          hn::StoreU(hn::DemoteTo(narrow, hn::BitCast(hn::RebindToSigned<Lanes8>(),
                                                      hn::ShiftRight<16>(bits))),
                     narrow, to + c / 32 * kTile + c % 32);
        }
        for (; c < p_.head_dim; ++c)
          to[c / 32 * kTile + c % 32] =
              from_float(load_one(q, c), static_cast<Bfloat16*>(nullptr)).bits;
      }
    });
  }

  /// The keys of a segment that the tile sees.
  struct Seen {
    Segment segment;
    Range any;                             // of all rows
    Range by[kBf16Rows / kBf16BlockRows];  // by each block, in steps of 32 keys
    KeyRows rows;
  };

  void see(const Segment& segment, Seen& seen) const {
    Range any{kSegment, 0};
    for (int block = 0; block < blocks_; ++block) {
      const int row = block * kBf16BlockRows;
      const Range keys = visible_.keys(segment, row, row + rows_of(block) - 1);
      seen.by[block] = {};
      if (keys.begin == keys.end) continue;
      any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
      seen.by[block] = Bf16Space::whole_steps(keys);
    }
    seen.segment = segment;
    seen.any = any;
    if (!packed_) find_seen(p_, tile_, visible_, tile_.kv_head, segment, any, 0, seen.rows);
  }

  /// Finds the packed operands of the segment, or packs them.
  void pack(const Seen& seen) {
    if (packed_) {
      k_ = packed_.at<Element>(seen.segment.first);
      finite_ = packed_.finite[packed_.number(seen.segment.first)] != 0;
    } else {
      k_ = space_.segment;
      if (seen.any.begin < seen.any.end)
        finite_ = pack_bf16_segment(p_, seen.rows, Bf16Space::whole_steps(seen.any), space_.wide,
                                    space_.segment);
    }
    v_ = k_ + Bf16Space::key_elements(p_);
  }

  /// Writes the states of one segment to `level`, and folds. While the vector units compute the
  /// softmax of a block, the matrix unit multiplies the values of the block before and the keys of
  /// the block after it.
  void attend_segment(const Seen& seen, int level, const Folds& folds, const Seen* next) {
    pack(seen);
    if (p_.bias) bias_.start(seen.segment);
    int active[kBf16Rows / kBf16BlockRows], count = 0;
    for (int block = 0; block < blocks_; ++block) {
      if (seen.by[block].begin < seen.by[block].end) {
        active[count++] = block;
        continue;
      }
      const int row = block * kBf16BlockRows, rows = rows_of(block);
      std::fill_n(stats(level, row), rows, empty_stats());
      std::fill_n(leaf(block, level, folds), std::int64_t{rows} * padded(), 0.0f);
      fold_block(block, folds);
    }
    if (count == 0) return;
    Ahead ahead = ahead_of(next);
    const int rows = count * kBf16BlockRows;
    const int lines = static_cast<int>((ahead.lines() + rows - 1) / rows);
    TileProduct values, keys = score_product(seen, active[0], 0);
    keys.run();
    for (int i = 0; i < count; ++i) {
      keys = i + 1 < count ? score_product(seen, active[i + 1], i + 1) : TileProduct();
      weigh_block(seen, active[i], i, level, values, keys, ahead, lines);
      if (i > 0) finish_block(seen, active[i - 1], i - 1, level, folds);
      values = value_product(seen.by[active[i]], active[i], weights(i, 0), level, folds);
    }
    values.run();
    finish_block(seen, active[count - 1], count - 1, level, folds);
  }

  /// Prefetches the operands of a segment, or their sources, line by line.
  class Ahead {
   public:
    Ahead() = default;
    /// Operands that are already packed.
    explicit Ahead(LinesAhead packed) : packed_(packed) {}
    /// Rows of keys and values, in turn.
    Ahead(const KeyRows& rows, const AttendParams& p)
        : rows_{rows.k(), rows.v()},
          bytes_{2 * p.head_dim, 2 * p.value_dim},
          rows_end_(2 * kSegment) {}

    std::int64_t lines() const {
      return packed_.count() + rows_end_ / 2 * ((bytes_[0] + 63) / 64 + (bytes_[1] + 63) / 64);
    }

    HWY_INLINE void next(int lines) {
      packed_.next(lines);
      for (int i = 0; i < lines && row_ < rows_end_; ++i) next_of_rows();
    }

   private:
    HWY_INLINE void next_of_rows() {
      const std::byte* const row = rows_[row_ % 2][row_ / 2];
      if (row != nullptr) hwy::Prefetch(row + at_);
      at_ += 64;
      if (row != nullptr && at_ < bytes_[row_ % 2]) return;
      at_ = 0;
      ++row_;
    }

    LinesAhead packed_;
    const std::byte* const* rows_[2] = {};
    int bytes_[2] = {}, rows_end_ = 0, row_ = 0, at_ = 0;  // rows of values are odd
  };

  Ahead ahead_of(const Seen* next) const {
    if (next == nullptr) return {};
    if (packed_) return Ahead({packed_.at<std::byte>(next->segment.first), packed_.bytes});
    if (packs_dense_bf16(p_)) return {next->rows, p_};
    return {};
  }

  static int halves(int rows) { return rows > 16 ? 2 : 1; }

  // Scores of a block at `place`; its weights overwrite them. Neighbouring blocks use different
  // places.
  float* scores(int place, int row) const {
    return space_.scores + (place % 2 * kBf16BlockRows + row) * kSegment;
  }
  Element* weights(int place, int row) const {
    return reinterpret_cast<Element*>(scores(place, row));
  }

  TileProduct score_product(const Seen& seen, int block, int place) const {
    const Range keys = seen.by[block];
    const std::int64_t along = depth_ * kTile;
    return {{space_.q + block * 2 * along, along, kTile},
            {k_ + keys.begin / 16 * along, along, kTile},
            depth_,
            scores(place, 0) + keys.begin,
            kSegment,
            halves(rows_of(block)),
            (keys.end - keys.begin) / 16};
  }

  TileProduct value_product(Range keys, int block, const Element* weights, int level,
                            const Folds& folds) const {
    return {{weights + keys.begin, 16 * 2 * kSegment, 32, 4 * kSegment},
            {v_ + keys.begin / 32 * columns_ * kTile, kTile, columns_ * kTile},
            (keys.end - keys.begin) / 32,
            leaf(block, level, folds),
            padded(),
            halves(rows_of(block)),
            columns_};
  }

  /// Computes the weights of a block's scores, interleaved with the two products.
  void weigh_block(const Seen& seen, int block, int place, int level, TileProduct values,
                   TileProduct keys, Ahead& ahead, int lines) {
    const auto weigh = [&]<int kVecs>() {
      weigh_rows<kVecs>(seen, block, place, level, values, keys, ahead, lines);
    };
    stores_end();
    const int end = seen.by[block].end;
    if (end > 96)
      weigh.template operator()<8>();
    else if (end > 64)
      weigh.template operator()<6>();
    else if (end > 32)
      weigh.template operator()<4>();
    else
      weigh.template operator()<2>();
    stores_end();
  }

  template <int kVecs>
  void weigh_rows(const Seen& seen, int block, int place, int level, TileProduct values,
                  TileProduct keys, Ahead& ahead, int lines) {
    const int row = block * kBf16BlockRows, rows = rows_of(block);
    const int steps = values.steps() + keys.steps();
    for (int r = 0, due = 0; r < rows; ++r) {
      float* const of_row = scores(place, r);
      float factor = factor_;
      if (!in_one_) {
        score(row + r, seen.by[block], of_row);
        factor = 1.0f;
      }
      Range own = visible_.keys(seen.segment, row + r, row + r);
      if (!visible_.sees_intervals()) {
        visible_.hide(seen.segment, row + r, {0, kSegment}, of_row);
        own = {0, kSegment};
      }
      stats(level, row)[r] = weigh_bf16<kVecs>(of_row, own, factor, weights(place, r));
      ahead.next(lines);
      for (due += steps; due >= rows; due -= rows) {
        if (!values.done())
          values.step();
        else
          keys.step();
      }
    }
  }

  /// The o of a block's leaf; a leaf that folds at once is not kept.
  float* leaf(int block, int level, const Folds& folds) const {
    return folds.count > 0 ? space_.leaf : o(level, block * kBf16BlockRows);
  }

  /// The work after the products of a block.
  void finish_block(const Seen& seen, int block, int place, int level, const Folds& folds) {
    const int row = block * kBf16BlockRows, rows = rows_of(block);
    float* const of_block = leaf(block, level, folds);
    if (!finite_) mend(seen.by[block], rows, place, of_block);
    if (p_.v_scale) {
      const __m512 scale = _mm512_set1_ps(p_.v_scale.of(tile_.sequence.index, tile_.kv_head));
      for (int i = 0; i < rows * padded(); i += 16)
        _mm512_store_ps(of_block + i, _mm512_mul_ps(scale, _mm512_load_ps(of_block + i)));
    }
    fold_block(block, folds);
  }

  /// Turns the products of a row into scores, for options that weigh_bf16 does not handle.
  void score(int row, Range keys, float* scores) {
    const __m512 factor = _mm512_set1_ps(factor_);
    for (int j = keys.begin; j < keys.end; j += 16)
      _mm512_store_ps(scores + j, _mm512_mul_ps(factor, _mm512_load_ps(scores + j)));
    if (p_.score.softcap != 0.0f) cap(scores, keys, p_.score.softcap);
    if (p_.bias) bias_.add(tile_.kv_head, row, keys, scores);
  }

  /// Recomputes rows that became infinite or NaN because of a key that they do not see, without the
  /// values of keys of weight 0.
  void mend(Range keys, int rows, int place, float* of_block) {
    for (int r = 0; r < rows; ++r) {
      if (is_finite_row(of_block + r * padded(), padded())) continue;
      for (int key = keys.begin; key < keys.end; ++key) {
        const bool zero = (weights(place, r)[key] & 0x7fff) == 0;
        const std::int64_t at = key / 32 * columns_ * kTile + key % 32 / 2 * 32 + key % 2;
        for (int c = 0; c < columns_; ++c)
          for (int i = 0; i < 32; i += 2)
            space_.mended[at + c * kTile + i] = zero ? Element{0} : v_[at + c * kTile + i];
      }
      stores_end();
      const std::int64_t first = keys.begin / 32;
      for (int c = 0; c < columns_; ++c) {
        TileProduct({weights(place, r / 16 * 16) + first * 32, 0, 32, 4 * kSegment},
                    {space_.mended + (first * columns_ + c) * kTile, kTile, columns_ * kTile},
                    (keys.end - keys.begin) / 32, space_.wide, 16, 1, 1)
            .run();
        std::copy_n(space_.wide + r % 16 * 16, 16, of_block + r * padded() + c * 16);
      }
    }
  }

  /// The folds of a block, as in fold_states.
  void fold_block(int block, const Folds& folds) {
    const int row = block * kBf16BlockRows, rows = rows_of(block);
    for (int i = 0; i < folds.count; ++i) {
      const auto [first, second] = folds.of[i];
      Stats* const a = stats(first, row);
      const Stats* const b = stats(second, row);
      float* const a_o = o(first, row);
      const float* const b_o = i == 0 ? space_.leaf : o(second, row);
      int r = 0;
      for (; r + 16 <= rows; r += 16)
        if (!fold_16_rows(a + r, a_o + r * padded(), b + r, b_o + r * padded(), padded()))
          fold_states(a + r, a_o + r * padded(), b + r, b_o + r * padded(), 16, padded());
      fold_states(a + r, a_o + r * padded(), b + r, b_o + r * padded(), rows - r, padded());
    }
  }

  const AttendParams& p_;
  const Tile& tile_;
  const PackedSegments& packed_;
  const Bf16Space& space_;
  const VisibleRows<kBf16Rows> visible_;
  Seen seen_[2];  // the current segment, and the next one
  SegmentBias bias_;
  const int depth_, columns_;  // tiles of a row of keys, and of values
  const int blocks_;
  float factor_;                // of the scores
  bool in_one_;                 // only the factor, the mask and the softmax are needed
  const Element* k_ = nullptr;  // the operands of the current segment
  const Element* v_ = nullptr;
  bool finite_ = true;  // the values are
};

void attend_bf16_tile(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
                      const Bf16Space& space) {
  Bf16TileRun(params, tile, packed, space)();
}

bool compiles_bf16_products() { return true; }

#else

bool compiles_bf16_products() { return false; }

void attend_bf16_tile(const AttendParams&, const Tile&, const PackedSegments&, const Bf16Space&) {
  throw Error(ErrorKind::internal, "a tile of bf16 products, which this target does not have");
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
#if LONGSPAN_HOST_AMX
HWY_POP_ATTRIBUTES
#endif
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(attend_bf16_tile);
HWY_EXPORT(compiles_bf16_products);

void attend_bf16_tile(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
                      const Bf16Space& space) {
  HWY_DYNAMIC_DISPATCH(attend_bf16_tile)(params, tile, packed, space);
}

namespace {

/// Whether the CPU has AMX with bf16 and conversions to it, and the system lets this process use
/// them: Linux enables the register state on request.
bool has_amx() {
#if LONGSPAN_COMPILES_AMX && (HWY_TARGETS & (HWY_AVX3 | HWY_AVX3_DL))
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  if (!has_avx512_bf16()) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool has_avx512_bf16() {
#if LONGSPAN_COMPILES_AMX && (HWY_TARGETS & (HWY_AVX3 | HWY_AVX3_DL))
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvx512Bf16) != 0;
#else
  return false;
#endif
}

bool has_bf16_products() {
  static const bool has = has_amx();
  return has && HWY_DYNAMIC_DISPATCH(compiles_bf16_products)();
}

}  // namespace longspan::kernels::host
#endif

// The products of few-row tiles (few_rows-inl.hpp): in place for fp32 and bf16 and, with the byte
// permutations of AVX3_DL, for fp8; other types are widened a few keys at a time.
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/few_rows.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <bit>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/host/few_rows-inl.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/simd-inl.hpp"
#include "longspan/element.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

#if !LONGSPAN_HOST_FEW_ROWS
void score_few(DType, const FewKeys&, int, const float*, int, float*) {}
void weigh_few(DType, const FewKeys&, int, const float*, int, float*, std::ptrdiff_t) {}
#else
using Words = hn::RebindToUnsigned<Lanes>;

/// Block b is the 16 bytes at `offset` of row 4 b.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const std::byte* const* rows, std::ptrdiff_t offset) {
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<D> half;
    return hn::Combine(d, load_blocks(half, rows + hn::MaxLanes(half), offset),
                       load_blocks(half, rows, offset));
  } else {
    return hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(rows[0] + offset));
  }
}

/// words[i], lane j: word i of the 16 bytes at `offset` of row j.
HWY_INLINE void load_words(const std::byte* const* rows, std::ptrdiff_t offset,
                           hn::Vec<Words> (&words)[4]) {
  const Words d;
  const hn::Repartition<std::uint64_t, Words> pairs;
  const auto a0 = load_blocks(d, rows, offset), a1 = load_blocks(d, rows + 1, offset);
  const auto a2 = load_blocks(d, rows + 2, offset), a3 = load_blocks(d, rows + 3, offset);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, a0, a1));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, a0, a1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, a2, a3));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, a2, a3));
  words[0] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
  words[1] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
  words[2] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
  words[3] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
}

#if HWY_TARGET == HWY_AVX3_DL
template <class T>
inline constexpr bool kByTable = std::is_same_v<T, E4m3> || std::is_same_v<T, E5m2>;

/// The bytes of the bf16 equal to codes 0 to 127 of an fp8, exactly.
struct CodeBytes {
  alignas(64) std::uint8_t high[128], low[128];
};
template <class T>
constexpr CodeBytes bytes_of_codes() {
  CodeBytes bytes = {};
  for (std::uint32_t code = 0; code < 128; ++code) {
    const float value =
        std::is_same_v<T, E4m3> ? element::widen<4, 3>(code) : element::widen<5, 2>(code);
    bytes.high[code] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(value) >> 24);
    bytes.low[code] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return bytes;
}

/// Converts 64 codes of an fp8 to fp32, with tables in registers.
template <class T>
class Codes {
 public:
  HWY_INLINE Codes()
      : high_{_mm512_load_si512(kBytes.high), _mm512_load_si512(kBytes.high + 64)},
        low_{_mm512_load_si512(kBytes.low), _mm512_load_si512(kBytes.low + 64)} {}

  /// wide[i], lane j: code i of word j.
  HWY_INLINE void widen(__m512i codes, Vec (&wide)[4]) const {
    const __m512i first_byte = _mm512_set1_epi16(0xff), upper = _mm512_set1_epi32(0xffff0000u);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    // 0xf8: a | (b & c). 0xca: a ? b : c, bit by bit.
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes,
                                                   _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    const __m512i even =
        _mm512_ternarylogic_epi32(first_byte, low, _mm512_slli_epi16(high, 8), 0xca);
    const __m512i odd =
        _mm512_ternarylogic_epi32(first_byte, _mm512_srli_epi16(low, 8), high, 0xca);
    wide[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(even, 16))};
    wide[1] = {_mm512_castsi512_ps(_mm512_slli_epi32(odd, 16))};
    wide[2] = {_mm512_castsi512_ps(_mm512_and_si512(even, upper))};
    wide[3] = {_mm512_castsi512_ps(_mm512_and_si512(odd, upper))};
  }

  /// wide[i]: codes [16 i, 16 i + 16) of kVecs * 16 neighbours, kVecs 2 or 4.
  template <int kVecs>
  HWY_INLINE void widen_row(const T* row, Vec (&wide)[4]) const {
    const __m512i words = _mm512_load_si512(kOrder.of);
    if constexpr (kVecs == 4)
      widen(_mm512_permutexvar_epi8(words, _mm512_loadu_si512(row)), wide);
    else
      widen(_mm512_permutexvar_epi8(words, _mm512_castsi256_si512(_mm256_loadu_si256(
                                               reinterpret_cast<const __m256i*>(row)))),
            wide);
  }

 private:
  static constexpr CodeBytes kBytes = bytes_of_codes<T>();
  struct Order {
    alignas(64) std::uint8_t of[64];
    constexpr Order() : of() {
      for (int i = 0; i < 64; ++i) of[i] = static_cast<std::uint8_t>(i % 4 * 16 + i / 4);
    }
  };
  static constexpr Order kOrder = {};  // byte i of word j: 16 i + j

  __m512i high_[2], low_[2];
};
template <class T>
using CodesOf = std::conditional_t<kByTable<T>, Codes<T>, std::tuple<> >;
#else
template <class T>
inline constexpr bool kByTable = false;
template <class T>
struct CodesOf {};
#endif

/// Element i of a word of T.
template <class T, int i>
HWY_INLINE Vec element(hn::Vec<Words> word) {
  if constexpr (sizeof(T) == 4) return hn::BitCast(Lanes(), word);
  if constexpr (i == 1)
    return hn::BitCast(Lanes(), hn::And(word, hn::Set(Words(), 0xffff0000u)));
  else
    return hn::BitCast(Lanes(), hn::ShiftLeft<16>(word));
}

/// Prefetches rows into the L2 cache, line by line, while other rows are read. It goes in the order
/// of their addresses, which triggers the hardware prefetcher, and a few lines at a time, since
/// many fill the line buffers and make loads wait.
class Ahead {
 public:
  Ahead(const std::byte* const* rows, std::ptrdiff_t bytes) : row_(rows), bytes_(bytes) {}

  HWY_INLINE void next() {
    __builtin_prefetch(*row_ + at_, 0, 2);
    at_ += 64;
    const bool end = at_ >= bytes_;
    row_ += end;
    at_ = end ? 0 : at_;
  }

  HWY_INLINE void next_row() {
    for (std::ptrdiff_t at = 0; at < bytes_; at += 64) __builtin_prefetch(*row_ + at, 0, 2);
    ++row_;
  }

 private:
  const std::byte* const* row_;
  std::ptrdiff_t bytes_, at_ = 0;
};

/// The scores of kGroups * kLanes keys, whose rows are fp32, bf16 or, by table, fp8. The rows
/// `ahead` are next.
template <class T, int kRows, int kGroups, bool kAhead>
HWY_INLINE void score_keys(const std::byte* const* keys, const std::byte* const* ahead, int dim,
                           const float* q, float* scores) {
  constexpr int kPerWord = 4 / sizeof(T);
  const Lanes d;
  [[maybe_unused]] const CodesOf<T> codes;
  Ahead lines(ahead, dim * static_cast<std::ptrdiff_t>(sizeof(T)));
  Vec sums[kGroups][kRows];
  HWY_UNROLL(8)
  for (int g = 0; g < kGroups; ++g) {
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) sums[g][r] = hn::Zero(d);
  }
  for (int c = 0; c < dim; c += 4 * kPerWord) {
    HWY_UNROLL(8)
    for (int g = 0; g < kGroups; ++g) {
      hn::Vec<Words> words[4];
      const std::ptrdiff_t offset = c * static_cast<std::ptrdiff_t>(sizeof(T));
      load_words(keys + g * kLanes, offset, words);
      if constexpr (kAhead) {
        HWY_UNROLL(8)
        for (int i = 0; i < kLanes / 4; ++i) lines.next();
      }
      HWY_UNROLL(8)
      for (int w = 0; w < 4; ++w) {
        const float* left = q + c + w * kPerWord;
        if constexpr (kByTable<T>) {
          Vec wide[4];
          codes.widen(words[w].raw, wide);
          HWY_UNROLL(4)
          for (int i = 0; i < 4; ++i) {
            HWY_UNROLL(8)
            for (int r = 0; r < kRows; ++r)
              sums[g][r] = hn::MulAdd(hn::Set(d, left[r * dim + i]), wide[i], sums[g][r]);
          }
          continue;
        }
        const Vec first = element<T, 0>(words[w]);
        HWY_UNROLL(8)
        for (int r = 0; r < kRows; ++r)
          sums[g][r] = hn::MulAdd(hn::Set(d, left[r * dim]), first, sums[g][r]);
        if constexpr (kPerWord == 2) {
          const Vec second = element<T, 1>(words[w]);
          HWY_UNROLL(8)
          for (int r = 0; r < kRows; ++r)
            sums[g][r] = hn::MulAdd(hn::Set(d, left[r * dim + 1]), second, sums[g][r]);
        }
      }
    }
  }
  HWY_UNROLL(8)
  for (int g = 0; g < kGroups; ++g) {
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) hn::Store(sums[g][r], d, scores + r * kSegment + g * kLanes);
  }
}

/// The same for keys that are already widened, whatever their type.
template <int kRows, int kGroups>
HWY_NOINLINE void score_wide(const std::byte* const* keys, int dim, const float* q, float* scores) {
  score_keys<float, kRows, kGroups, false>(keys, nullptr, dim, q, scores);
}

template <class T>
HWY_NOINLINE void score_few_of(const FewKeys& keys, int dim, const float* q, int rows,
                               float* scores) {
  constexpr bool kInPlace = sizeof(T) == 4 || std::is_same_v<T, Bfloat16> || kByTable<T>;
  with_rows<kFewRows>(rows, [&]<int kRows>() {
    // A single chain per row would wait for its own sums, so there are two.
    constexpr int kGroups = kRows * kLanes <= 16 ? 2 : 1;
    int j = 0;
    const auto score = [&]<int kCount>() {
      constexpr int kKeys = kCount * kLanes;
      if constexpr (kInPlace) {
        score_keys<T, kRows, kCount, true>(keys.rows + j, keys.ahead + j, dim, q, scores + j);
      } else {
        HWY_ALIGN float wide[kKeys * kMaxHeadDim];
        const std::byte* wide_rows[kKeys];
        Ahead lines(keys.ahead + j, dim * static_cast<std::ptrdiff_t>(sizeof(T)));
        for (int i = 0; i < kKeys; ++i) {
          lines.next_row();
          widen(reinterpret_cast<const T*>(keys.rows[j + i]), dim, wide + i * dim);
          wide_rows[i] = reinterpret_cast<const std::byte*>(wide + i * dim);
        }
        score_wide<kRows, kCount>(wide_rows, dim, q, scores + j);
      }
      j += kKeys;
    };
    while (j + kGroups * kLanes <= keys.count) score.template operator()<kGroups>();
    while (j < keys.count) score.template operator()<1>();
  });
}

/// o[r, c] += sum of weights[r, j] v[j, c] for kVecs vectors of columns.
template <class T, int kRows, int kVecs>
HWY_INLINE void weigh_values(const FewKeys& values, int column, int dim, const float* weights,
                             float* o, std::ptrdiff_t o_stride) {
  const Lanes d;
  [[maybe_unused]] const CodesOf<T> codes;
  Ahead lines(values.ahead, dim * static_cast<std::ptrdiff_t>(sizeof(T)));
  Vec sums[kRows][kVecs];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v)
      sums[r][v] = hn::LoadU(d, o + r * o_stride + column + v * kLanes);
  }
  for (int j = 0; j < values.count; ++j) {
    const T* value = reinterpret_cast<const T*>(values.rows[j]) + column;
    if (column == 0) lines.next_row();
    Vec right[kVecs];
    if constexpr (kByTable<T> && kVecs % 2 == 0) {
      constexpr int kEach = kVecs % 4 == 0 ? 4 : 2;
      HWY_UNROLL(2)
      for (int v = 0; v < kVecs; v += kEach) {
        Vec wide[4];
        codes.template widen_row<kEach>(value + v * kLanes, wide);
        HWY_UNROLL(4)
        for (int i = 0; i < kEach; ++i) right[v + i] = wide[i];
      }
    } else {
      HWY_UNROLL(8)
      for (int v = 0; v < kVecs; ++v) right[v] = load(d, value + v * kLanes);
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const Vec left = hn::Set(d, weights[r * kSegment + j]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v)
      hn::StoreU(sums[r][v], d, o + r * o_stride + column + v * kLanes);
  }
}

template <class T>
HWY_NOINLINE void weigh_few_of(const FewKeys& values, int dim, const float* weights, int rows,
                               float* o, std::ptrdiff_t o_stride) {
  with_rows<kFewRows>(rows, [&]<int kRows>() {
    constexpr int kSums = LONGSPAN_HOST_AVX512 ? 24 : 8;  // registers for them
    constexpr int kVecs = kRows * 8 <= kSums   ? 8
                          : kRows * 4 <= kSums ? 4
                          : kRows * 2 <= kSums ? 2
                                               : 1;
    int c = 0;
    const auto weigh = [&]<int kCount>() {
      for (; c + kCount * kLanes <= dim; c += kCount * kLanes)
        weigh_values<T, kRows, kCount>(values, c, dim, weights, o, o_stride);
    };
    weigh.template operator()<kVecs>();
    if constexpr (kVecs > 4) weigh.template operator()<4>();
    if constexpr (kVecs > 2) weigh.template operator()<2>();
    weigh.template operator()<1>();
  });
}

void score_few(DType type, const FewKeys& keys, int dim, const float* q, int rows, float* scores) {
  with_type(type, [&]<class T>(const T*) { score_few_of<T>(keys, dim, q, rows, scores); });
}

void weigh_few(DType type, const FewKeys& values, int dim, const float* weights, int rows, float* o,
               std::ptrdiff_t o_stride) {
  with_type(type,
            [&]<class T>(const T*) { weigh_few_of<T>(values, dim, weights, rows, o, o_stride); });
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

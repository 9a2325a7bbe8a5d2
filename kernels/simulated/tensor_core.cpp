// Products of tensor cores, a warp at a time. An operand's 32 bytes of K are gathered from
// registers or shared memory, widened to fp32, and multiplied in vectors of eight columns.
//
// Sources: the PTX manual, for layouts of fragments and of operands in shared memory; Khattak and
// Mikaitis (arXiv 2512.07004), for how sums are truncated.
#include "kernels/simulated/tensor_core.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "kernels/simulated/builtins.hpp"

// g++ 12 combines the read and write addresses of a loop into one number, counted from a null
// pointer, if one is four times the other, and then loses the writes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-ivopts")
#endif

namespace longspan::simulated {
namespace {

constexpr int kWarp = 32;
constexpr int kRows = 16;      // of a warp's share of a and d
constexpr int kRowBytes = 32;  // of K
constexpr int kMostColumns = 256;
constexpr int kMostProducts = 32;  // of a step: K of e4m3

// Eight columns at a time, for any CPU: compilers map them to its vectors.
using Floats = float __attribute__((vector_size(32)));
using Ints = int __attribute__((vector_size(32)));
using Words = std::uint32_t __attribute__((vector_size(32)));
using Halves = std::uint16_t __attribute__((vector_size(16)));
using Bytes = std::uint8_t __attribute__((vector_size(8)));

constexpr int kLanes = 8;  // of a vector

template <Number kNumber>
constexpr int kElements = kNumber == Number::tf32   ? 8
                          : kNumber == Number::e4m3 ? 32
                                                    : 16;  // of K

// ---- widening ----------------------------------------------------------------------------------

/// Numbers whose exponent and mantissa end at a float's bit `kShift`, and whose exponents are
/// `kBias` less than a float's. Infinities, and e4m3's NaN, have all bits of `kSpecial` set.
template <int kShift, int kBias, std::uint32_t kSpecial>
Floats widen(Words bits, std::uint32_t sign_bit) {
  const Words magnitude = bits & (sign_bit - 1);
  const Floats scaled = (Floats)(magnitude << kShift) * std::bit_cast<float>((127u + kBias) << 23);
  const Words special = (Words)((magnitude & kSpecial) == kSpecial) & 0x7f800000u;
  const Words sign = (bits & sign_bit) << (31 - std::countr_zero(sign_bit));
  return (Floats)((Words)scaled | special | sign);
}

/// Eight adjacent numbers.
template <Number kNumber>
Floats widen_eight(const std::byte* from) {
  if constexpr (kNumber == Number::tf32) {
    Words bits;
    std::memcpy(&bits, from, sizeof(bits));
    return (Floats)(bits & ~0x1fffu);
  } else if constexpr (kNumber == Number::e4m3) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return widen<20, 120, 0x7f>(__builtin_convertvector(bytes, Words), 0x80);
  } else {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Words bits = __builtin_convertvector(halves, Words);
    if constexpr (kNumber == Number::bf16)
      return (Floats)(bits << 16);
    else
      return widen<13, 112, 0x7c00>(bits, 0x8000);
  }
}

/// Eight vectors of eight, transposed.
void transpose(Floats (&m)[8]) {
  Floats pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(m[i], m[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(m[i], m[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      const Floats low = pairs[i + j], high = pairs[i + j + 2];
      fours[i + 2 * j] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * j + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    m[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    m[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// ---- a product ---------------------------------------------------------------------------------

// Only one thread at a time is in the machine, and no product waits halfway.
using Row = float[kMostProducts];  // of a
struct Factors {
  alignas(32) std::byte a_bytes[kRows][kRowBytes];
  alignas(32) std::byte b_bytes[kMostColumns][kRowBytes];  // if K is innermost
  Floats a[kRows][kMostProducts / kLanes];
  Floats b[kMostColumns / kLanes][kMostProducts];  // eight columns of each k
};
Factors factors;

template <Number kNumber>
void widen_a() {
  constexpr int kCount = kElements<kNumber>;
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kCount; k += kLanes)
      factors.a[row][k / kLanes] =
          widen_eight<kNumber>(factors.a_bytes[row] + k * kRowBytes / kCount);
}

template <Number kNumber>
void widen_b(int columns) {
  constexpr int kCount = kElements<kNumber>;
  for (int column = 0; column < columns; column += kLanes)
    for (int k = 0; k < kCount; k += kLanes) {
      Floats eight[8];
      for (int i = 0; i < kLanes; ++i)
        eight[i] = widen_eight<kNumber>(factors.b_bytes[column + i] + k * kRowBytes / kCount);
      transpose(eight);
      for (int i = 0; i < kLanes; ++i) factors.b[column / kLanes][k + i] = eight[i];
    }
}

/// c + a b in fp32: the products of a step first, so that the sum so far is rounded once.
template <int kCount>
void add_rounded(Floats (&c)[4], const Row* a, const Floats* b) {
  Floats s0 = {}, s1 = {}, s2 = {}, s3 = {};  // by name: g++ keeps these in registers
#pragma GCC unroll 8
  for (int k = 0; k < kCount; ++k) {
    const Floats factor = b[k];
    s0 += a[0][k] * factor;
    s1 += a[1][k] * factor;
    s2 += a[2][k] * factor;
    s3 += a[3][k] * factor;
  }
  c[0] += s0;
  c[1] += s1;
  c[2] += s2;
  c[3] += s3;
}

/// c + a b in steps of kGroup products. All addends are truncated to multiples of 2^(e - kKept), e
/// the largest of their exponents, and their sum, which is exact, to fp32. Below 2^-126 all is 0.
template <int kCount, int kGroup, int kKept>
Floats add_cut(Floats c, const float* a, const Floats* b) {
  constexpr int kMagnitude = 0x7fffffff, kExponent = 0x7f800000;
  for (int first = 0; first < kCount; first += kGroup) {
    Floats products[kGroup];
    Ints largest = (Ints)c & kMagnitude;
    for (int k = 0; k < kGroup; ++k) {
      products[k] = a[first + k] * b[first + k];
      const Ints magnitude = (Ints)products[k] & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    constexpr Ints kLeast = Ints{} + ((kKept + 1) << 23);
    Ints exponent = largest & kExponent;
    exponent = exponent > kLeast ? exponent : kLeast;
    const Floats scale = (Floats)(((254 + kKept) << 23) - exponent);
    const Floats step = (Floats)(exponent - (kKept << 23));
    Ints sum = __builtin_convertvector(c * scale, Ints);
    for (int k = 0; k < kGroup; ++k) sum += __builtin_convertvector(products[k] * scale, Ints);
    const Ints negative = sum >> 31, magnitude = (sum ^ negative) - negative;
    Floats cut = __builtin_convertvector(magnitude, Floats);
    cut = (Floats)((Ints)cut + (__builtin_convertvector(cut, Ints) > magnitude));  // -1 if so
    Floats result = (Floats)((Ints)cut ^ (negative & ~kMagnitude)) * step;
    const Ints special = largest >= kExponent;
    bool any = false;
    for (int i = 0; i < kLanes; ++i) any |= special[i] != 0;
    if (any) {  // infinities and NaN, as IEEE adds them
      Floats sums = c;
      for (int k = 0; k < kGroup; ++k) sums += products[k];
      result = special ? sums : result;
    }
    c = result;
  }
  return c;
}

template <Number kNumber>
void add_products(Floats (&c)[4], const Row* a, const Floats* b) {
  constexpr int kCount = kElements<kNumber>;
  if (!exact_tensor_cores()) return add_rounded<kCount>(c, a, b);
  const bool is_new = properties().major >= 9;
  for (int i = 0; i < 4; ++i) {
    if constexpr (kNumber == Number::e4m3)
      c[i] = add_cut<kCount, kCount, 13>(c[i], a[i], b);
    else if (is_new)
      c[i] = add_cut<kCount, kCount, 25>(c[i], a[i], b);
    else
      c[i] = add_cut<kCount, kCount / 2, 24>(c[i], a[i], b);
  }
}

/// d += a b, with the factors in `factors`: lane 4 g + t has in d[lane][4 j + 2 h + e] the element
/// of row g + 8 h, column 8 j + 2 t + e.
template <Number kNumber>
void add_to(float* const (&d)[kWarp], int columns, bool add) {
  for (int j = 0; j < columns / kLanes; ++j)
    for (int row = 0; row < kRows; row += 4) {
      const int h = row / 8, at = 4 * j + 2 * h;
      Floats c[4] = {};
      float* const* lanes = &d[4 * (row % 8)];
      if (add)
        for (int i = 0; i < 16; ++i)
          std::memcpy(reinterpret_cast<float*>(c) + 2 * i, lanes[i] + at, 8);
      add_products<kNumber>(c, reinterpret_cast<const Row*>(factors.a[row]), factors.b[j]);
      for (int i = 0; i < 16; ++i)
        std::memcpy(lanes[i] + at, reinterpret_cast<float*>(c) + 2 * i, 8);
    }
}

/// Lane 4 g + t has in words[2 j + h] the four bytes of row g + 8 h from 16 j + 4 t on.
void gather_a(int lane, const std::uint32_t* words) {
  for (int i = 0; i < 4; ++i)
    std::memcpy(factors.a_bytes[lane / 4 + i % 2 * 8] + i / 2 * 16 + lane % 4 * 4, &words[i], 4);
}

template <class Work>
void with_number(Number number, const Work& work) {
  switch (number) {
    case Number::fp16:
      return work.template operator()<Number::fp16>();
    case Number::bf16:
      return work.template operator()<Number::bf16>();
    case Number::tf32:
      return work.template operator()<Number::tf32>();
    case Number::e4m3:
      return work.template operator()<Number::e4m3>();
  }
}

// ---- exchange within a warp --------------------------------------------------------------------

void nothing(void* const (&)[kWarp], unsigned) {}

using Matrices = std::uint16_t[4][8][8];

/// Lane 4 g + t has elements 2t and 2t + 1 of row g, or, transposed, of column g, of each matrix.
template <bool kTransposed>
void take_fragments(void* const (&lanes)[kWarp], unsigned) {
  Matrices matrices;
  for (int l = 0; l < kWarp; ++l) std::memcpy(matrices[l / 8][l % 8], lanes[l], 16);
  for (int l = 0; l < kWarp; ++l) {
    const int g = l / 4, t = l % 4;
    auto* words = static_cast<std::uint32_t*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      const auto at = [&](int e) -> std::uint32_t {
        return kTransposed ? matrices[i][2 * t + e][g] : matrices[i][g][2 * t + e];
      };
      words[i] = at(0) | at(1) << 16;
    }
  }
}

void take_rows(void* const (&lanes)[kWarp], unsigned) {
  Matrices matrices;
  for (int l = 0; l < kWarp; ++l)
    for (int i = 0; i < 4; ++i)
      std::memcpy(&matrices[i][l / 4][l % 4 * 2], static_cast<std::uint32_t*>(lanes[l]) + i, 4);
  for (int l = 0; l < kWarp; ++l) std::memcpy(lanes[l], matrices[l / 8][l % 8], 16);
}

void take_columns(void* const (&lanes)[kWarp], unsigned) {
  std::uint16_t matrix[8][8];
  for (int l = 0; l < kWarp; ++l) std::memcpy(&matrix[l / 4][l % 4 * 2], lanes[l], 4);
  for (int l = 0; l < kWarp; ++l)
    *static_cast<std::uint32_t*>(lanes[l]) =
        matrix[l % 4 * 2][l / 4] | std::uint32_t{matrix[l % 4 * 2 + 1][l / 4]} << 16;
}

// ---- mma.sync ----------------------------------------------------------------------------------

struct MmaShare {
  float* c;
  const std::uint32_t* a;
  std::uint32_t b[2];
};

template <Number kNumber>
void multiply_warp(void* const (&lanes)[kWarp], unsigned) {
  float* c[kWarp];
  for (int l = 0; l < kWarp; ++l) {
    const auto& share = *static_cast<const MmaShare*>(lanes[l]);
    c[l] = share.c;
    gather_a(l, share.a);
    for (int j = 0; j < 2; ++j)
      std::memcpy(factors.b_bytes[l / 4] + j * 16 + l % 4 * 4, &share.b[j], 4);
  }
  widen_a<kNumber>();
  widen_b<kNumber>(8);
  add_to<kNumber>(c, 8, true);
}

// ---- wgmma -------------------------------------------------------------------------------------

// The fields of a matrix descriptor, in units of 16 bytes.
constexpr int kAddressBits = 14, kPanelShift = 16, kRowsShift = 32, kModeShift = 62;
constexpr std::uint64_t kSwizzle128 = 1;
constexpr std::uint32_t kEightRows = 1024, kLine = 128;

std::uint32_t field(std::uint64_t operand, int shift) {
  return static_cast<std::uint32_t>(operand >> shift & ((1u << kAddressBits) - 1)) << 4;
}

/// An operand in shared memory, in lines of 128 bytes. The eight 16-byte pieces of a line are
/// permuted by the index of the line in its 1024 bytes.
struct SharedOperand {
  std::uint32_t start = 0, panel = 0;
  const std::byte* line = nullptr;  // that contains `start`

  /// `bytes`: from its first line to the end of its last.
  static SharedOperand find(std::uint64_t operand, std::uint32_t bytes, Site site) {
    SharedOperand found{field(operand, 0), field(operand, kPanelShift), nullptr};
    if (operand >> kModeShift != kSwizzle128 || field(operand, kRowsShift) != kEightRows)
      fail("wgmma: this is no operand in the 128-byte swizzle with eight rows in 1024 bytes", site);
    if (found.start % kEightRows >= kLine)
      fail("wgmma: an operand begins in line " + std::to_string(found.start % kEightRows / kLine) +
               " of its 1024 bytes, where the swizzle begins with the first",
           site);
    found.line = find_shared(found.start / kLine * kLine, static_cast<int>(bytes), 1024,
                             "wgmma operand", site);
    return found;
  }
  static std::uint32_t bytes(int rows) { return static_cast<std::uint32_t>(rows) * kLine; }
  std::uint32_t bytes_by_panels(int columns) const {
    return static_cast<std::uint32_t>((columns - 1) / 64) * panel + 2 * kEightRows;
  }

  /// The 16 bytes at `offset` after the start, without the permutation.
  const std::byte* at(std::uint32_t offset) const {
    const std::uint32_t address = start + offset;
    return line + ((address ^ (address >> 3 & 0x70)) - start / kLine * kLine);
  }
  /// A row of 32 bytes of K.
  void read_row(int row, std::byte* to) const {
    const std::uint32_t offset = static_cast<std::uint32_t>(row) * kLine;
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::byte* const from = at(offset + half * 16);
      product_reads(from, 16);
      std::memcpy(to + half * 16, from, 16);
    }
  }
  /// Rows [first, first + kRows) of 16 bits, if the lines are K.
  void read_columns(int first, std::byte (&to)[kRows][kRowBytes]) const {
    for (int k = 0; k < 16; ++k)
      for (int row = 0; row < kRows; row += 8) {
        const std::byte* const from =
            at(static_cast<std::uint32_t>(k) * kLine + static_cast<std::uint32_t>(first + row) * 2);
        product_reads(from, 16);
        for (int i = 0; i < 8; ++i) std::memcpy(to[row + i] + 2 * k, from + 2 * i, 2);
      }
  }
};

struct WgmmaShare {
  Number number;
  int columns, warp;  // of its four
  bool transposed, add, has_registers, a_transposed;
  std::uint32_t registers[4];
  std::uint64_t a, b;
  SharedOperand a_place, b_place;  // of lane 0
  Site site;
};

template <Number kNumber>
void widen_panels(const SharedOperand& b, int columns) {
  if constexpr (kNumber == Number::fp16 || kNumber == Number::bf16)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < columns / kLanes; ++j) {
        const std::byte* const from =
            b.at(static_cast<std::uint32_t>(j / 8) * b.panel +
                 static_cast<std::uint32_t>(k) * kLine + static_cast<std::uint32_t>(j % 8) * 16);
        product_reads(from, 16);
        factors.b[j][k] = widen_eight<kNumber>(from);
      }
}

void multiply_warpgroup(void* const (&lanes)[kWarp], float* const (&d)[kWarp]) {
  const auto& first = *static_cast<const WgmmaShare*>(lanes[0]);
  for (int l = 0; l < kWarp; ++l) {
    const auto& share = *static_cast<const WgmmaShare*>(lanes[l]);
    if (share.b != first.b || share.add != first.add ||
        (!first.has_registers && share.a != first.a))
      fail("wgmma: lane " + std::to_string(l) + " brings other operands than lane 0", share.site);
    if (first.has_registers) gather_a(l, share.registers);
  }
  if (first.a_transposed)
    first.a_place.read_columns(kRows * first.warp, factors.a_bytes);
  else if (!first.has_registers)
    for (int row = 0; row < kRows; ++row)
      first.a_place.read_row(kRows * first.warp + row, factors.a_bytes[row]);
  if (!first.transposed)
    for (int column = 0; column < first.columns; ++column)
      first.b_place.read_row(column, factors.b_bytes[column]);
  with_number(first.number, [&]<Number kNumber>() {
    widen_a<kNumber>();
    if (first.transposed)
      widen_panels<kNumber>(first.b_place, first.columns);
    else
      widen_b<kNumber>(first.columns);
    add_to<kNumber>(d, first.columns, first.add);
  });
}

}  // namespace

void meet_warp(const char* what, Site site) { meet_all(what, nullptr, nothing, site); }

void rows_to_fragments(std::uint32_t (&words)[4], bool transposed, Site site) {
  if (transposed)
    meet_all("ldmatrix.trans", words, take_fragments<true>, site);
  else
    meet_all("ldmatrix", words, take_fragments<false>, site);
}

void fragments_to_rows(std::uint32_t (&words)[4], Site site) {
  meet_all("stmatrix", words, take_rows, site);
}

std::uint32_t transpose_fragment(std::uint32_t word, Site site) {
  meet_all("movmatrix", &word, take_columns, site);
  return word;
}

void multiply(Number number, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
              std::uint32_t b1, Site site) {
  MmaShare share{c, a, {b0, b1}};
  if (number == Number::fp16)
    meet_all("mma.m16n8k16.f16", &share, multiply_warp<Number::fp16>, site);
  else if (number == Number::bf16)
    meet_all("mma.m16n8k16.bf16", &share, multiply_warp<Number::bf16>, site);
  else if (number == Number::tf32)
    meet_all("mma.m16n8k8.tf32", &share, multiply_warp<Number::tf32>, site);
  else
    fail("mma.sync of e4m3 is not among the instructions that kernels use", site);
}

std::uint64_t describe_operand(std::uint32_t address, int panel_bytes, Site site) {
  if (address % kEightRows != 0 || panel_bytes % static_cast<int>(kEightRows) != 0)
    fail("wgmma: operands and their panels begin at multiples of 1024 bytes", site);
  constexpr std::uint32_t kBeyond = 1u << (kAddressBits + 4);
  if (address >= kBeyond || panel_bytes < 0 || static_cast<std::uint32_t>(panel_bytes) >= kBeyond)
    fail("wgmma: an operand lies beyond what its descriptor can say", site);
  return kSwizzle128 << kModeShift | std::uint64_t{kEightRows >> 4} << kRowsShift |
         static_cast<std::uint64_t>(panel_bytes >> 4) << kPanelShift | address >> 4;
}

void multiply_later(Number number, int columns, bool transposed, float* d,
                    const std::uint32_t* registers, std::uint64_t a, std::uint64_t b, bool add,
                    Site site, bool a_transposed) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z, warp = thread / kWarp;
  if (properties().major != 9) fail("wgmma is an instruction of sm_90 alone", site);
  if ((warp / 4 + 1) * 4 * kWarp > threads) fail("wgmma: this warp is of no whole warpgroup", site);
  WgmmaShare share = {.number = number,
                      .columns = columns,
                      .warp = static_cast<int>(warp % 4),
                      .transposed = transposed,
                      .add = add,
                      .has_registers = registers != nullptr,
                      .a_transposed = a_transposed,
                      .registers = {},
                      .a = a,
                      .b = b,
                      .a_place = {},
                      .b_place = {},
                      .site = site};
  if (registers != nullptr) std::copy_n(registers, 4, share.registers);
  if (lane() == 0) {
    if (registers == nullptr)
      share.a_place = SharedOperand::find(a, SharedOperand::bytes(a_transposed ? 16 : 64), site);
    const SharedOperand panels{0, field(b, kPanelShift), nullptr};
    share.b_place = SharedOperand::find(
        b, transposed ? panels.bytes_by_panels(columns) : SharedOperand::bytes(columns), site);
  }
  queue_product(&share, sizeof(share), d, columns / 2, multiply_warpgroup, site);
}

}  // namespace longspan::simulated

// The instructions of kernels/cuda/arch against plain references, written from the PTX manual's
// tables: the places of elements in fragments, the permutation of rows, the rounding of
// conversions. The same tests run on a GPU and in the simulator, and so compare the two.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/common/tensor_map.hpp"
#include "tests/gpu/arch_kernels.hpp"
#include "tests/gpu/gpu_case.hpp"
#include "tests/support/rounding.hpp"

namespace longspan::test {
namespace {

using namespace arch_kernels;
using tests::TensorCore;

int capability() {  // 90: sm_90
  int major = 0, minor = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
  return 10 * major + minor;
}

template <class T>
OnGpu<T> zeros(std::size_t count) {
  return OnGpu<T>(std::vector<T>(count));
}

// ---- formats of numbers ------------------------------------------------------------------------

/// Sign, exponent, mantissa.
struct Format {
  int exponent_bits, mantissa_bits;
  bool has_infinity;  // e4m3 has none, and one NaN of either sign

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  double largest() const {
    const double top = has_infinity ? 2 - std::ldexp(1.0, -mantissa_bits) : 1.75;
    return std::ldexp(top, (1 << exponent_bits) - 1 - has_infinity - bias());
  }
  double decode(std::uint32_t bits) const {
    const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
    const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
    const bool is_top = exponent == (1 << exponent_bits) - 1;
    if (is_top && has_infinity)
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    if (is_top && mantissa == (1u << mantissa_bits) - 1)
      return std::numeric_limits<double>::quiet_NaN();
    const int shift = std::max(exponent, 1) - bias() - mantissa_bits;
    return sign * std::ldexp(mantissa + (exponent > 0 ? 1u << mantissa_bits : 0u), shift);
  }
  /// The value that x rounds to; `away`: ties away from zero, else to even. Beyond the largest:
  /// infinity, or the largest in a format without it.
  double round(double x, bool away) const {
    if (std::isnan(x) || x == 0 || (std::isinf(x) && has_infinity)) return x;
    if (std::isinf(x)) return std::copysign(largest(), x);
    int exponent;
    std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
    const double step = std::ldexp(1.0, std::max(exponent - 1, 1 - bias()) - mantissa_bits);
    const double steps = away ? std::round(x / step) : std::nearbyint(x / step);
    if (std::abs(steps * step) <= largest()) return steps * step;
    return std::copysign(has_infinity ? std::numeric_limits<double>::infinity() : largest(), x);
  }
};

constexpr Format kFp16{5, 10, true}, kBf16{8, 7, true}, kE4M3{4, 3, false}, kE5M2{5, 2, true},
    kTf32{8, 10, true};

Format format_of(Type type) {
  return type == Type::fp16 ? kFp16 : type == Type::bf16 ? kBf16 : kE4M3;
}

/// NaN is NaN; else the same number, and of 0 the same sign.
bool is_same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

/// Of every upper half of a float: the lower halves at and beside all ties of 16-bit formats.
std::vector<float> floats_at_ties() {
  std::vector<float> all;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper)
    for (const std::uint32_t lower :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2000u, 0x2fffu, 0x3000u, 0x3001u, 0x7fffu,
          0x8000u, 0x8001u, 0xf000u, 0xffffu})
      all.push_back(std::bit_cast<float>(upper << 16 | lower));
  return all;
}

TEST(Arch, Packs) {
  LONGSPAN_NEEDS_GPU();
  const std::vector<float> pairs = floats_at_ties();
  const OnGpu<float> in(pairs);
  const std::size_t n = pairs.size() / 2;
  for (const Type type : {Type::fp16, Type::bf16}) {
    const OnGpu<std::uint32_t> out(n);
    pack(type, in.data(), out.data(), static_cast<int>(n));
    const std::vector<std::uint32_t> packed = out.values(n);
    const Format format = format_of(type);
    int wrong = 0;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      const std::uint32_t bits = packed[i / 2] >> (i % 2 * 16) & 0xffff;
      if (!is_same(format.decode(bits), format.round(pairs[i], false)) && ++wrong < 10)
        ADD_FAILURE() << pairs[i] << " became " << std::hex << bits;
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST(Arch, PacksE4M3) {
  LONGSPAN_NEEDS_HOPPER();
  std::vector<float> fours = floats_at_ties();
  for (std::uint32_t bits = 0; bits < 256; ++bits)  // ties lie between neighbours
    for (const float off : {0.0f, 0x1p-20f, -0x1p-20f})
      if (const double x = kE4M3.decode(bits), y = kE4M3.decode(bits + 1); std::isfinite(x + y))
        fours.push_back(static_cast<float>((x + y) / 2) * (1 + off));
  while (fours.size() % 4 != 0) fours.push_back(500.0f);
  const std::size_t n = fours.size() / 4;
  const OnGpu<float> in(fours);
  const OnGpu<std::uint32_t> out(n);
  pack_e4m3(in.data(), out.data(), static_cast<int>(n));
  const std::vector<std::uint32_t> packed = out.values(n);
  int wrong = 0;
  for (std::size_t i = 0; i < fours.size(); ++i) {
    const std::uint32_t bits = packed[i / 4] >> (i % 4 * 8) & 0xff;
    if (!is_same(kE4M3.decode(bits), kE4M3.round(fours[i], false)) && ++wrong < 10)
      ADD_FAILURE() << fours[i] << " became " << std::hex << bits;
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Arch, WidensFp8) {
  LONGSPAN_NEEDS_GPU();
  if (capability() < 89) GTEST_SKIP() << "an instruction of sm_89";
  std::vector<std::uint32_t> fours;
  for (std::uint32_t i = 0; i < 256; i += 4)
    fours.push_back(i | (i + 1) << 8 | (i + 2) << 16 | (i + 3) << 24);
  const OnGpu<std::uint32_t> in(fours);
  for (const bool e5m2 : {false, true}) {
    const OnGpu<uint2> out(fours.size());
    widen_fp8(e5m2, in.data(), out.data(), static_cast<int>(fours.size()));
    const std::vector<uint2> halves = out.values(fours.size());
    for (std::uint32_t i = 0; i < 256; ++i) {
      const std::uint32_t two = i % 4 < 2 ? halves[i / 4].x : halves[i / 4].y;
      const double wide = kFp16.decode(two >> (i % 2 * 16) & 0xffff);
      EXPECT_TRUE(is_same(wide, (e5m2 ? kE5M2 : kE4M3).decode(i))) << i;
    }
  }
}

TEST(Arch, RoundsToTf32) {
  LONGSPAN_NEEDS_GPU();
  const std::vector<float> x = floats_at_ties();
  const OnGpu<float> in(x);
  const OnGpu<std::uint32_t> out(x.size());
  to_tf32(in.data(), out.data(), static_cast<int>(x.size()));
  const std::vector<std::uint32_t> bits = out.values(x.size());
  int wrong = 0;
  for (std::size_t i = 0; i < x.size(); ++i)  // the product reads the upper 19 bits
    if (!is_same(kTf32.decode(bits[i] >> 13), kTf32.round(x[i], true)) && ++wrong < 10)
      ADD_FAILURE() << x[i] << " became " << std::hex << bits[i];
  EXPECT_EQ(wrong, 0);
}

/// The error of y in units in the last place; a subnormal counts as 0.
double units_off(float y, double exact) {
  constexpr double kLeast = std::numeric_limits<float>::min();
  if (std::abs(exact) < kLeast && (y == 0 || std::abs(y) == kLeast)) return 0;
  int exponent;
  std::frexp(exact, &exponent);
  return std::abs(y - exact) / std::ldexp(1.0, exponent - 24);
}

TEST(Arch, ExponentialAndReciprocal) {
  LONGSPAN_NEEDS_GPU();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x = {0.0f, -0.0f, 1.0f, -1.0f, -125.9f, -126.0f, 127.9999f, 0x1p-140f};
  std::mt19937 random(fresh_seed());
  std::uniform_real_distribution<float> some(-126.0f, 128.0f), near(-2.0f, 2.0f);
  for (int i = 0; i < 100000; ++i) x.push_back(i % 2 == 0 ? some(random) : near(random));
  const std::size_t count = x.size();
  for (const float special : {kInf, -kInf, kNaN, 128.0f, -150.0f, -127.5f}) x.push_back(special);
  const OnGpu<float> in(x);
  const OnGpu<float> out(x.size());
  exp2_fast(in.data(), out.data(), static_cast<int>(x.size()));
  std::vector<float> y = out.values(x.size());
  double worst = 0;
  for (std::size_t i = 0; i < count; ++i)
    worst = std::max(worst, units_off(y[i], std::exp2(static_cast<double>(x[i]))));
  EXPECT_LE(worst, 2.5);  // 2 from the correctly rounded result
  EXPECT_EQ(y[count], kInf);
  EXPECT_EQ(y[count + 1], 0.0f);
  EXPECT_TRUE(std::isnan(y[count + 2]));
  EXPECT_EQ(y[count + 3], kInf);
  EXPECT_EQ(y[count + 4], 0.0f);
  EXPECT_EQ(y[count + 5], 0.0f);

  approximate_reciprocal(in.data(), out.data(), static_cast<int>(x.size()));
  y = out.values(x.size());
  worst = 0;
  for (std::size_t i = 2; i < count; ++i)
    if (std::fpclassify(x[i]) == FP_NORMAL)
      worst = std::max(worst, units_off(y[i], 1.0 / static_cast<double>(x[i])));
  EXPECT_LE(worst, 1.01);
  EXPECT_EQ(y[0], kInf);
  EXPECT_EQ(y[1], -kInf);
  EXPECT_EQ(y[7], kInf);  // a subnormal number counts as 0
  EXPECT_EQ(y[count], 0.0f);
  EXPECT_TRUE(std::isnan(y[count + 2]));
}

// ---- matrices of a warp ------------------------------------------------------------------------

std::uint32_t two(std::uint16_t low, std::uint16_t high) { return low | std::uint32_t{high} << 16; }

/// Four matrices [8, 8] of different numbers.
std::vector<std::uint16_t> some_matrices() {
  std::vector<std::uint16_t> all(256);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i * 251 + 17);
  return all;
}

TEST(Arch, Matrices) {
  LONGSPAN_NEEDS_GPU();
  const std::vector<std::uint16_t> matrices = some_matrices();
  const auto at = [&](int matrix, int row, int column) {
    return matrices[static_cast<std::size_t>(64 * matrix + 8 * row + column)];
  };
  const OnGpu<std::uint16_t> in(matrices);
  const OnGpu<std::uint32_t> out(128);
  for (const bool transposed : {false, true}) {
    load_matrices(transposed, in.data(), out.data());
    const std::vector<std::uint32_t> fragments = out.values(128);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int g = lane / 4, t = lane % 4;
        EXPECT_EQ(fragments[static_cast<std::size_t>(4 * lane + i)],
                  transposed ? two(at(i, 2 * t, g), at(i, 2 * t + 1, g))
                             : two(at(i, g, 2 * t), at(i, g, 2 * t + 1)))
            << lane << " " << i;
      }
  }
  std::vector<std::uint32_t> rows(32);
  for (int lane = 0; lane < 32; ++lane)
    rows[static_cast<std::size_t>(lane)] =
        two(at(2, lane / 4, lane % 4 * 2), at(2, lane / 4, lane % 4 * 2 + 1));
  transpose_matrix(OnGpu<std::uint32_t>(rows).data(), out.data());
  const std::vector<std::uint32_t> columns = out.values(32);
  for (int lane = 0; lane < 32; ++lane)
    EXPECT_EQ(columns[static_cast<std::size_t>(lane)],
              two(at(2, lane % 4 * 2, lane / 4), at(2, lane % 4 * 2 + 1, lane / 4)));
}

TEST(Arch, StoresMatrices) {
  LONGSPAN_NEEDS_HOPPER();
  const std::vector<std::uint16_t> matrices = some_matrices();
  std::vector<std::uint32_t> fragments(128);
  for (std::size_t lane = 0; lane < 32; ++lane)
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t at = 64 * i + 8 * (lane / 4) + 2 * (lane % 4);
      fragments[4 * lane + i] = two(matrices[at], matrices[at + 1]);
    }
  const OnGpu<std::uint16_t> out(256);
  store_matrices(OnGpu<std::uint32_t>(fragments).data(), out.data());
  EXPECT_EQ(out.values(256), matrices);
}

// ---- products ----------------------------------------------------------------------------------

/// A matrix of numbers that its format can represent, and their bits.
struct Matrix {
  int rows, columns;
  std::vector<double> values;
  std::vector<std::uint32_t> bits;

  std::size_t index(int row, int column) const {
    return static_cast<std::size_t>(row * columns + column);
  }
  double at(int row, int column) const { return values[index(row, column)]; }
};

/// `whole`: small whole numbers, whose products every tensor core adds exactly.
Matrix random_matrix(std::mt19937& random, int rows, int columns, Format format, bool whole) {
  Matrix matrix{rows, columns, {}, {}};
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> integer(-4, 4);
  const auto add = [&](std::uint32_t bits) {
    matrix.bits.push_back(bits);
    matrix.values.push_back(format.decode(bits));
  };
  for (int i = 0; i < rows * columns; ++i) {
    const double x =
        format.round(whole ? integer(random) : static_cast<double>(normal(random)), false);
    // A float's upper bits are those of bf16 and tf32.
    if (format.exponent_bits == 8) {
      add(std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> (23 - format.mantissa_bits));
      continue;
    }
    if (x == 0) {
      add(0);
      continue;
    }
    int exponent;
    const double fraction = std::frexp(std::abs(x), &exponent);
    const int shift = std::max(exponent - 1, 1 - format.bias());
    const auto steps =
        static_cast<std::uint32_t>(std::ldexp(fraction, exponent - shift + format.mantissa_bits));
    const auto biased = static_cast<std::uint32_t>(shift + format.bias() - 1);
    const std::uint32_t sign = x < 0 ? 1u << (format.bits() - 1) : 0;
    add(sign | ((biased << format.mantissa_bits) + steps));
    EXPECT_EQ(matrix.values.back(), x);
  }
  return matrix;
}

/// c + a b and the allowed error of a tensor core.
struct Exact {
  double sum, off;
};
Exact exact_product(const TensorCore& core, const Matrix& a, const Matrix& b, int row, int column,
                    double sum) {
  double off = 0;
  for (int first = 0; first < a.columns; first += core.products) {
    double largest = std::abs(sum);
    for (int k = first; k < first + core.products; ++k) {
      const double product = a.at(row, k) * b.at(k, column);
      largest = std::max(largest, std::abs(product));
      sum += product;
    }
    off +=
        (core.products + 1) * std::ldexp(largest, -23 - core.bits) + std::ldexp(std::abs(sum), -23);
  }
  return {sum, 1.01 * off};
}

void expect_product(const TensorCore& core, const Matrix& a, const Matrix& b, int row, int column,
                    double before, float found, bool whole) {
  const Exact exact = exact_product(core, a, b, row, column, before);
  if (whole)
    ASSERT_EQ(found, exact.sum) << row << ", " << column;
  else
    ASSERT_NEAR(found, exact.sum, exact.off) << row << ", " << column;
}

/// m16n8: lane 4 g + t has in c[2 h + e] row g + 8 h, column 2 t + e.
std::vector<float> fragment_c(const Matrix& c) {
  std::vector<float> own;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      own.push_back(static_cast<float>(c.at(lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2)));
  return own;
}

TEST(Arch, WarpProducts) {
  LONGSPAN_NEEDS_GPU();
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const TensorCore core = TensorCore::of(compute_capability());
  for (const Type type : {Type::fp16, Type::bf16})
    for (const bool whole : {true, false}) {
      const Format format = format_of(type);
      const Matrix a = random_matrix(random, 16, 16, format, whole);
      const Matrix b = random_matrix(random, 16, 8, format, whole);
      const Matrix c = random_matrix(random, 16, 8, kTf32, whole);
      std::vector<std::uint32_t> own_a, own_b;
      const auto bits = [](const Matrix& m, int row, int column) {
        return m.bits[m.index(row, column)];
      };
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
          const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
          own_a.push_back(bits(a, row, column) | bits(a, row, column + 1) << 16);
        }
        for (int i = 0; i < 2; ++i) {
          const int row = 2 * t + 8 * i;
          own_b.push_back(bits(b, row, g) | bits(b, row + 1, g) << 16);
        }
      }
      const OnGpu<std::uint32_t> gpu_a(own_a), gpu_b(own_b);
      const OnGpu<float> gpu_c(fragment_c(c));
      mma(type, gpu_a.data(), gpu_b.data(), gpu_c.data());
      const std::vector<float> found = gpu_c.values(128);
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
          expect_product(core, a, b, row, column, c.at(row, column),
                         found[static_cast<std::size_t>(4 * lane + i)], whole);
        }
    }
}

TEST(Arch, WarpProductsOfTf32) {
  LONGSPAN_NEEDS_GPU();
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const TensorCore of_16 = TensorCore::of(compute_capability());
  const TensorCore core{of_16.products / 2, of_16.bits};  // as many bytes
  for (const bool whole : {true, false}) {
    const Matrix a = random_matrix(random, 16, 8, kTf32, whole);
    const Matrix b = random_matrix(random, 8, 8, kTf32, whole);
    const Matrix c = random_matrix(random, 16, 8, kTf32, whole);
    std::vector<std::uint32_t> own_a, own_b;
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i)
        own_a.push_back(a.bits[a.index(g + i % 2 * 8, t + i / 2 * 4)] << 13);
      for (int i = 0; i < 2; ++i) own_b.push_back(b.bits[b.index(t + 4 * i, g)] << 13);
    }
    const OnGpu<std::uint32_t> gpu_a(own_a), gpu_b(own_b);
    const OnGpu<float> gpu_c(fragment_c(c));
    mma_tf32(gpu_a.data(), gpu_b.data(), gpu_c.data());
    const std::vector<float> found = gpu_c.values(128);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        expect_product(core, a, b, row, column, c.at(row, column),
                       found[static_cast<std::size_t>(4 * lane + i)], whole);
      }
  }
}

/// The 128-byte swizzle: address bits 4 to 6 are XORed with bits 7 to 9.
std::size_t swizzled(std::size_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

/// `rows` x `columns` with columns innermost, in panels of 128 bytes.
std::vector<std::byte> image(int rows, int columns, int element_bytes,
                             const std::function<std::uint32_t(int, int)>& bits) {
  const int across = 128 / element_bytes, panels = (columns + across - 1) / across;
  std::vector<std::byte> bytes(static_cast<std::size_t>(panels * rows * 128), std::byte{0xff});
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      const auto offset = static_cast<std::size_t>((column / across * rows + row) * 128 +
                                                   column % across * element_bytes);
      const std::uint32_t element = bits(row, column);
      std::memcpy(&bytes[swizzled(offset)], &element, static_cast<std::size_t>(element_bytes));
    }
  return bytes;
}

struct WgmmaCase {
  Type type;
  bool transposed, registers, a_transposed = false;
};

void test_wgmma(std::mt19937& random, const WgmmaCase& c, int columns, bool whole, bool add) {
  const Format format = format_of(c.type);
  const int element_bytes = c.type == Type::e4m3 ? 1 : 2, step = 32 / element_bytes;
  const int depth = kProductSteps * step;
  const Matrix a = random_matrix(random, 64, depth, format, whole);
  const Matrix b = random_matrix(random, depth, columns, format, whole);
  const Matrix before = random_matrix(random, 64, columns, kTf32, whole);
  const std::vector<std::byte> a_image =
      c.a_transposed
          ? image(depth, 64, element_bytes, [&](int k, int m) { return a.bits[a.index(m, k)]; })
          : image(64, depth, element_bytes, [&](int m, int k) { return a.bits[a.index(m, k)]; });
  const std::vector<std::byte> b_image =
      c.transposed ? image(depth, columns, element_bytes,
                           [&](int k, int n) { return b.bits[b.index(k, n)]; })
                   : image(columns, depth, element_bytes,
                           [&](int n, int k) { return b.bits[b.index(k, n)]; });
  // Of warp w of the four, lane 4 g + t holds of A in word 2 j + h the four bytes of row 16 w + g +
  // 8 h that begin at 16 j + 4 t, and of D in 4 j + 2 h + e row 16 w + g + 8 h, column 8 j + 2 t +
  // e.
  std::vector<std::uint32_t> registers;
  for (int i = 0; i < kProductSteps; ++i)
    for (int thread = 0; thread < 128; ++thread)
      for (int word = 0; word < 4; ++word) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + word % 2 * 8;
        const int k = i * step + (word / 2 * 16 + thread % 4 * 4) / element_bytes;
        std::uint32_t bits = 0;
        for (int e = 0; e < 4 / element_bytes; ++e)
          bits |= a.bits[a.index(row, k + e)] << (8 * element_bytes * e);
        registers.push_back(bits);
      }
  const auto place = [&](int thread, int i) {
    return std::array{thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8,
                      i / 4 * 8 + thread % 4 * 2 + i % 2};
  };
  std::vector<float> d;
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < columns / 2; ++i) {
      const auto [row, column] = place(thread, i);
      d.push_back(static_cast<float>(before.at(row, column)));
    }
  const OnGpu<std::byte> gpu_a(a_image), gpu_b(b_image);
  const OnGpu<std::uint32_t> gpu_registers(registers);
  const OnGpu<float> gpu_d(d);
  multiply({.type = c.type,
            .columns = columns,
            .transposed = c.transposed,
            .a = c.registers ? nullptr : gpu_a.data(),
            .registers = gpu_registers.data(),
            .b = gpu_b.data(),
            .add = add,
            .d = gpu_d.data(),
            .a_transposed = c.a_transposed});
  const std::vector<float> found = gpu_d.values(d.size());
  // Of sums of e4m3 13 bits are left below the leading one.
  const TensorCore core = c.type == Type::e4m3 ? TensorCore{32, -10} : TensorCore::of(9);
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < columns / 2; ++i) {
      const auto [row, column] = place(thread, i);
      expect_product(core, a, b, row, column, add ? before.at(row, column) : 0,
                     found[static_cast<std::size_t>(thread * columns / 2 + i)], whole);
    }
}

TEST(Arch, WarpgroupProductsOf16Columns) {
  LONGSPAN_NEEDS_HOPPER();
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (const Type type : {Type::fp16, Type::bf16})
    for (const bool a_transposed : {false, true})
      for (const bool whole : {false, true}) {
        SCOPED_TRACE(a_transposed ? "A transposed" : "A as it is");
        test_wgmma(random, {type, false, false, a_transposed}, 16, whole, a_transposed == whole);
        if (HasFatalFailure()) return;
      }
}

TEST(Arch, WarpgroupProducts) {
  LONGSPAN_NEEDS_HOPPER();
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (const int columns : kColumns)
    for (const WgmmaCase& c :
         {WgmmaCase{Type::fp16, false, false}, WgmmaCase{Type::fp16, false, true},
          WgmmaCase{Type::fp16, true, false}, WgmmaCase{Type::fp16, true, true},
          WgmmaCase{Type::bf16, false, false}, WgmmaCase{Type::bf16, false, true},
          WgmmaCase{Type::bf16, true, false}, WgmmaCase{Type::bf16, true, true},
          WgmmaCase{Type::e4m3, false, false}, WgmmaCase{Type::e4m3, false, true}}) {
      SCOPED_TRACE("columns " + std::to_string(columns) + ", type " +
                   std::to_string(static_cast<int>(c.type)) +
                   (c.transposed ? ", B transposed" : "") +
                   (c.registers ? ", A from registers" : ""));
      test_wgmma(random, c, columns, true, columns % 16 == 0);
      if (HasFatalFailure()) return;
      test_wgmma(random, c, columns, false, columns % 16 != 0);
      if (HasFatalFailure()) return;
    }
}

// ---- copies ------------------------------------------------------------------------------------

TEST(Arch, CopiesOfEachSize) {
  LONGSPAN_NEEDS_GPU();
  std::vector<std::byte> from(16 * kCopies);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i % 250 + 1);
  const OnGpu<std::byte> out(from.size());
  copy_sizes(OnGpu<std::byte>(from).data(), out.data());
  struct Copy {
    int size, bytes;
  };
  std::vector<Copy> copies;
  for (const int size : {4, 8, 16})
    for (int bytes = 0; bytes <= size; ++bytes) copies.push_back({size, bytes});
  for (const Copy copy : {Copy{16, 16}, Copy{16, 0}, Copy{4, 4}}) copies.push_back(copy);
  std::vector<std::byte> expected(from.size(), std::byte{0xff});
  for (std::size_t i = 0; i < copies.size(); ++i)
    for (int b = 0; b < copies[i].size; ++b) {
      const std::size_t at = 16 * i + static_cast<std::size_t>(b);
      expected[at] = b < copies[i].bytes ? from[at] : std::byte{0};
    }
  EXPECT_EQ(out.values(from.size()), expected);
}

TEST(Arch, BarriersKeepTheOrder) {
  LONGSPAN_NEEDS_GPU();
  constexpr int kRounds = 37;
  std::vector<int> in(32 * kRounds), turns(kRounds);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i * i);
  for (std::size_t i = 0; i < turns.size(); ++i) turns[i] = static_cast<int>(i);
  const OnGpu<int> out(in.size());
  pass_through_ring(OnGpu<int>(in).data(), out.data(), kRounds);
  EXPECT_EQ(out.values(in.size()), in);
  take_turns(out.data(), kRounds);
  EXPECT_EQ(out.values(turns.size()), turns);
}

TEST(Arch, WordsOverlapAndFacts) {
  LONGSPAN_NEEDS_GPU();
  const std::vector<uint4> from = {
      {11, 12, 13, 14}, {21, 22, 23, 24}, {31, 32, 33, 34}, {41, 42, 43, 44}};
  const OnGpu<uint4> in(from), to(4), read(7);
  exchange_words(in.data(), to.data(), read.data());
  const auto words = [](const std::vector<uint4>& all) {
    std::vector<std::uint32_t> flat;
    for (const uint4& four : all) flat.insert(flat.end(), {four.x, four.y, four.z, four.w});
    return flat;
  };
  constexpr std::uint32_t kNone = ~0u;
  const std::vector<std::uint32_t> stored = {11, 12,    13,    14,    13, 14, kNone, kNone,
                                             12, kNone, kNone, kNone, 41, 42, 43,    44};
  const std::vector<std::uint32_t> loaded = {11, 12, 13, 14, 13, 14, 0,  0,  12, 0,  0,  0,  1,  2,
                                             3,  4,  5,  6,  7,  0,  11, 12, 13, 14, 11, 12, 11, 0};
  EXPECT_EQ(words(to.values(4)), stored);
  EXPECT_EQ(words(read.values(7)), loaded);

  std::vector<int> numbers(1000);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(3 * i);
  const OnGpu<int> middle(numbers.size()), last(numbers.size());
  overlap(OnGpu<int>(numbers).data(), middle.data(), last.data(), 1000);
  EXPECT_EQ(last.values(numbers.size()), numbers);

  const OnGpu<int> good(kFacts);
  facts(good.data());
  EXPECT_EQ(good.values(kFacts), std::vector<int>(kFacts, 1));
}

// ---- boxes -------------------------------------------------------------------------------------

/// A tensor of whole elements, and the contents of a box of it, innermost dimension first.
struct BoxCase {
  DType dtype;
  std::vector<kernels::cuda::MapDimension> dimensions;
  std::vector<int> at;
};

void test_box(const BoxCase& c) {
  const std::size_t element = size_of(c.dtype);
  const std::size_t rank = c.dimensions.size();
  std::size_t elements = 1, box_elements = 1;
  for (std::size_t d = 0; d < rank; ++d) {
    const auto& dimension = c.dimensions[d];
    const auto stride = static_cast<std::size_t>(d == 0 ? 1 : dimension.stride);
    elements += static_cast<std::size_t>(dimension.extent - 1) * stride;
    box_elements *= static_cast<std::size_t>(dimension.box);
  }
  std::vector<std::byte> tensor(elements * element);
  std::mt19937 random(7);
  for (std::byte& byte : tensor) byte = static_cast<std::byte>(random() % 255 + 1);
  const OnGpu<std::byte> data(tensor);
  const std::size_t bytes = box_elements * element;
  const OnGpu<std::byte> out(bytes);
  const CUtensorMap map = kernels::cuda::tensor_map(data.data(), c.dtype, c.dimensions,
                                                    CU_TENSOR_MAP_L2_PROMOTION_NONE);
  if (rank == 3) {
    load_box(map, c.at[0], c.at[1], c.at[2], static_cast<int>(bytes), out.data());
  } else {
    load_box(map, {c.at[0], c.at[1], c.at[2], c.at[3], c.at[4]}, static_cast<int>(bytes),
             out.data());
  }

  const std::size_t width = static_cast<std::size_t>(c.dimensions[0].box) * element;
  std::vector<std::byte> expected(bytes);
  for (std::size_t i = 0; i < box_elements; ++i) {
    std::size_t rest = i, from = 0;
    bool inside = true;
    for (std::size_t d = 0; d < rank; ++d) {
      const auto& dimension = c.dimensions[d];
      const auto size = static_cast<std::size_t>(dimension.box);
      const std::int64_t at = c.at[d] + static_cast<std::int64_t>(rest % size);
      rest /= size;
      inside = inside && at >= 0 && at < dimension.extent;
      if (inside) from += static_cast<std::size_t>(at * (d == 0 ? 1 : dimension.stride));
    }
    // Chunk of 16 bytes XOR row modulo 8 in rows of 128 bytes, row / 2 modulo 4 in rows of 64.
    const std::size_t row = i * element / width, in_row = i * element % width;
    const std::size_t turned = width == 128 ? row % 8 : row / 2 % 4;
    const std::size_t to = row * width + (in_row ^ turned << 4);
    if (inside) std::memcpy(&expected[to], &tensor[from * element], element);
  }
  EXPECT_EQ(out.values(bytes), expected);
}

TEST(Arch, Boxes) {
  LONGSPAN_NEEDS_HOPPER();
  // Queries or keys [heads, rows, dim]: inside, past the rows, before them, past the dim, outside.
  const std::vector<std::vector<int>> places = {{0, 0, 0},  {0, 5, 1},   {64, 3, 2},
                                                {0, 10, 1}, {0, -3, 0},  {-16, 2, 1},
                                                {64, 9, 1}, {0, 100, 0}, {0, 0, 3}};
  for (const DType dtype : {DType::fp16, DType::bf16, DType::e4m3})
    for (const std::vector<int>& at : places) {
      const int panel = dtype == DType::e4m3 ? 128 : 64;
      SCOPED_TRACE(::testing::Message()
                   << static_cast<int>(dtype) << ": " << at[0] << ", " << at[1] << ", " << at[2]);
      test_box({dtype, {{80, 1, panel}, {13, 96, 24}, {3, 96 * 14, 1}}, at});
    }
  // Pages [pages, rows, heads, panels, panel], of rows of one panel or of two.
  const std::vector<std::vector<int>> paged = {{0, 0, 0, 0, 0},  {0, 16, 0, 1, 2}, {0, 8, 0, 2, 1},
                                               {0, 24, 0, 0, 3}, {0, 0, 1, 1, 0},  {0, 0, 0, 0, 9}};
  for (const DType dtype : {DType::fp16, DType::e5m2})
    for (const int bytes : {128, 64})
      for (const int panels : {1, 2})
        for (const std::vector<int>& at : paged) {
          const int panel = bytes / static_cast<int>(size_of(dtype));
          const int row = panel * 2 * 3;  // of three heads
          SCOPED_TRACE(::testing::Message() << panel << " x " << panels << ", page " << at[4]);
          test_box({dtype,
                    {{panel, 1, panel},
                     {32, row, 16},
                     {2, panel, panels},
                     {3, panel * 2, 1},
                     {4, row * 33, 1}},
                    at});
        }
}

}  // namespace
}  // namespace longspan::test

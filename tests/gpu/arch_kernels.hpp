// Small kernels, one for each function of kernels/cuda/arch, for arch_test.cpp. All pointers are to
// memory of the GPU; each call waits until its kernel has ended.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

namespace longspan::test::arch_kernels {

/// The type of a product's factors.
enum class Type { fp16, bf16, e4m3 };

// ---- of single numbers -------------------------------------------------------------------------

/// n times two floats to two numbers of 16 bits.
void pack(Type type, const float* pairs, std::uint32_t* packed, int n);
/// n times four floats to e4m3. Hopper.
void pack_e4m3(const float* fours, std::uint32_t* packed, int n);
/// n times four numbers of fp8 to fp16. sm_89 and later.
void widen_fp8(bool e5m2, const std::uint32_t* fours, uint2* halves, int n);
void to_tf32(const float* x, std::uint32_t* bits, int n);
void exp2_fast(const float* x, float* y, int n);
void approximate_reciprocal(const float* x, float* y, int n);

// ---- of a warp ---------------------------------------------------------------------------------

/// Rows of four matrices [4, 8, 8] to fragments [32 lanes, 4].
void load_matrices(bool transposed, const std::uint16_t* matrices, std::uint32_t* fragments);
/// Fragments to rows. Hopper.
void store_matrices(const std::uint32_t* fragments, std::uint16_t* matrices);
/// One word of each lane.
void transpose_matrix(const std::uint32_t* rows, std::uint32_t* columns);
/// c [32, 4] += a [32, 4] b [32, 2], all of them fragments.
void mma(Type type, const std::uint32_t* a, const std::uint32_t* b, float* c);
void mma_tf32(const std::uint32_t* a, const std::uint32_t* b, float* c);

// ---- of a warpgroup ----------------------------------------------------------------------------

/// d[64, columns] += a b over kProductSteps steps of 32 bytes. Operands in shared memory are copied
/// there unchanged: A in panels of 64 rows, B in panels of `columns` rows or, transposed, of
/// kProductSteps * 16 rows.
struct Product {
  Type type;
  int columns;
  bool transposed;
  const std::byte* a;              // as it lies in shared memory, or null:
  const std::uint32_t* registers;  // [steps, 128, 4]
  const std::byte* b;
  bool add;                   // to the value of d before; otherwise d is overwritten
  float* d;                   // [128, columns / 2]
  bool a_transposed = false;  // of 16 columns: A in one panel of kProductSteps * 16 rows
};
inline constexpr int kProductSteps = 8;
inline constexpr int kColumns[] = {64, 72, 80, 88, 96, 112, 128, 136, 160, 192, 256};
void multiply(const Product& product);

// ---- copies, barriers, blocks
// --------------------------------------------------------------------

/// cp.async of each size (4, 8, 16) and of each count of bytes up to it, between places 16 bytes
/// apart in `from` and in `to`, which is 0xff before: copy i takes place i. Then one of 16 bytes
/// that is valid, one that is not, and copy_word_async.
inline constexpr int kCopies = 5 + 9 + 17 + 3;
void copy_sizes(const std::byte* from, std::byte* to);

/// Passes `rounds` numbers through a ring of two stages, by mbarriers and cp.async: out[i] = in[i].
void pass_through_ring(const int* in, int* out, int rounds);
/// Two warps take turns at named barriers: out[i] = i.
void take_turns(int* out, int rounds);

/// The box at the coordinates, as it lies in shared memory. Hopper.
void load_box(const CUtensorMap& map, int x, int y, int z, int bytes, std::byte* to);
void load_box(const CUtensorMap& map, const int (&at)[5], int bytes, std::byte* to);

/// to[0 ... 3] by stores of 16, 8, 4 bytes and from there by loads of each kind to read[0 ... 7].
/// Disabled ones do not change their place.
void exchange_words(const uint4* from, uint4* to, uint4* read);
/// from -> middle -> to, by two kernels of which the second may start early.
void overlap(const int* from, int* middle, int* to, int n);
/// Dynamic shared bytes, the alignment and distance of dynamic memory and the variables, the
/// clock's steps: each 1 where right.
inline constexpr int kFacts = 5;
void facts(int* good);

}  // namespace longspan::test::arch_kernels

#include "tests/gpu/arch_kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/cuda/arch/copy_word.cuh"
#include "kernels/cuda/arch/divide.cuh"
#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/arch/tf32.cuh"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::test::arch_kernels {
namespace {

namespace arch = kernels::cuda::arch;
namespace sm90 = kernels::sm90;
using kernels::cuda::launch_kernel;
using kernels::cuda::LaunchConfig;

/// Launches on the default stream and waits.
template <class... Parameters>
void run(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
         const std::type_identity_t<Parameters>&... parameters) {
  LaunchConfig how;
  how.grid = grid;
  how.block = dim3(static_cast<unsigned>(threads));
  how.shared_bytes = static_cast<std::size_t>(shared_bytes);
  launch_kernel(kernel, how, parameters...);
  LONGSPAN_CUDA(cudaDeviceSynchronize());
}

constexpr int kEachThreads = 128, kEachBlocks = 8;

__device__ int first_index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }
__device__ int step() { return static_cast<int>(gridDim.x * blockDim.x); }
__device__ int thread() { return static_cast<int>(threadIdx.x); }

// ---- of single numbers -------------------------------------------------------------------------

template <class T>
__global__ void pack_kernel(const float* pairs, std::uint32_t* packed, int n) {
  for (int i = first_index(); i < n; i += step())
    packed[i] = arch::pack<T>(pairs[2 * i], pairs[2 * i + 1]);
}

__global__ void pack_e4m3_kernel(const float* fours, std::uint32_t* packed, int n) {
  if constexpr (arch::kHasWgmma)
    for (int i = first_index(); i < n; i += step())
      packed[i] =
          sm90::pack_e4m3(fours[4 * i], fours[4 * i + 1], fours[4 * i + 2], fours[4 * i + 3]);
}

template <bool kE5M2>
__global__ void widen_kernel(const std::uint32_t* fours, uint2* halves, int n) {
  if constexpr (arch::kTarget >= 890)
    for (int i = first_index(); i < n; i += step())
      arch::widen_fp8<kE5M2>(fours[i], halves[i].x, halves[i].y);
}

__global__ void to_tf32_kernel(const float* x, std::uint32_t* bits, int n) {
  for (int i = first_index(); i < n; i += step()) bits[i] = arch::to_tf32(x[i]);
}
__global__ void exp2_kernel(const float* x, float* y, int n) {
  for (int i = first_index(); i < n; i += step()) y[i] = arch::exp2_fast(x[i]);
}
__global__ void reciprocal_kernel(const float* x, float* y, int n) {
  for (int i = first_index(); i < n; i += step()) y[i] = arch::approximate_reciprocal(x[i]);
}

// ---- of a warp ---------------------------------------------------------------------------------

template <bool kTransposed>
__global__ void load_matrices_kernel(const std::uint16_t* matrices, std::uint32_t* fragments) {
  auto& shared = *reinterpret_cast<std::uint16_t(*)[256]>(arch::dynamic_shared<128>());
  for (int i = thread(); i < 256; i += 32) shared[i] = matrices[i];
  __syncwarp();
  std::uint32_t r[4];
  const std::uint32_t row = arch::shared_address(shared + 8 * thread());
  if constexpr (kTransposed)
    arch::load_matrices_transposed(r, row);
  else
    arch::load_matrices(r, row);
  for (int i = 0; i < 4; ++i) fragments[4 * thread() + i] = r[i];
}

__global__ void store_matrices_kernel(const std::uint32_t* fragments, std::uint16_t* matrices) {
  if constexpr (arch::kHasWgmma) {
    auto& shared = *reinterpret_cast<std::uint16_t(*)[256]>(arch::dynamic_shared<128>());
    std::uint32_t r[4];
    for (int i = 0; i < 4; ++i) r[i] = fragments[4 * thread() + i];
    sm90::store_matrices(arch::shared_address(shared + 8 * thread()), r);
    __syncwarp();
    for (int i = thread(); i < 256; i += 32) matrices[i] = shared[i];
  }
}

__global__ void transpose_matrix_kernel(const std::uint32_t* rows, std::uint32_t* columns) {
  columns[thread()] = arch::transpose_matrix(rows[thread()]);
}

template <class T>
__global__ void mma_kernel(const std::uint32_t* a, const std::uint32_t* b, float* c) {
  std::uint32_t own_a[4];
  float own_c[4];
  for (int i = 0; i < 4; ++i) own_a[i] = a[4 * thread() + i], own_c[i] = c[4 * thread() + i];
  if constexpr (std::is_same_v<T, float>)
    arch::mma_tf32(own_c, own_a, b[2 * thread()], b[2 * thread() + 1]);
  else
    arch::mma<T>(own_c, own_a, b[2 * thread()], b[2 * thread() + 1]);
  for (int i = 0; i < 4; ++i) c[4 * thread() + i] = own_c[i];
}

// ---- of a warpgroup ----------------------------------------------------------------------------

template <int kN>
struct Operands {
  static constexpr int kPanels = kProductSteps / 4;
  static constexpr int kA = kPanels * 64 * 128, kB = kPanels * kN * 128;
};
template <int kN>
struct TransposedOperand {  // B
  static constexpr int kRows = kProductSteps * 16;
  static constexpr int kB = (kN + 63) / 64 * kRows * 128;
};

template <int kN, class Element, bool kTransposed, bool kRegisters>
__global__ __launch_bounds__(128) void product_kernel(const __grid_constant__ Product product) {
  if constexpr (arch::kHasWgmma) {
    using Sizes = Operands<kN>;
    constexpr int kBytesB = kTransposed ? TransposedOperand<kN>::kB : Sizes::kB;
    std::byte* const a = arch::dynamic_shared<1024>();
    std::byte* const b = a + (kRegisters ? 0 : Sizes::kA);
    const auto copy = [](std::byte* to, const std::byte* from, int bytes) {
      for (int i = 16 * thread(); i < bytes; i += 16 * 128)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    };
    if constexpr (!kRegisters) copy(a, product.a, Sizes::kA);
    copy(b, product.b, kBytesB);
    sm90::fence_shared_stores();
    __syncthreads();

    float d[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] = product.d[thread() * (kN / 2) + i];
    std::uint32_t registers[kProductSteps][4] = {};
    if constexpr (kRegisters)
#pragma unroll
      for (int i = 0; i < kProductSteps; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          registers[i][j] = product.registers[(i * 128 + thread()) * 4 + j];
    const std::uint64_t b_operand =
        sm90::operand(b, kTransposed ? TransposedOperand<kN>::kRows * 128 : kN * 128);
    sm90::wgmma_begin();
#pragma unroll
    for (int i = 0; i < kProductSteps; ++i) {
      const int at_b = kTransposed ? i * 16 * 128 : i / 4 * kN * 128 + i % 4 * 32;
      const bool add = i > 0 || product.add;
      if constexpr (kRegisters)
        sm90::Product<kN>::template registers<Element, kTransposed>(
            d, registers[i], sm90::advance(b_operand, at_b), add);
      else
        sm90::Product<kN>::template shared<Element, kTransposed>(
            d, sm90::advance(sm90::operand(a, 64 * 128), i / 4 * 64 * 128 + i % 4 * 32),
            sm90::advance(b_operand, at_b), add);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::pin(d);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) product.d[thread() * (kN / 2) + i] = d[i];
  }
}

/// multiply_16, whose A may be transposed, but not B.
template <class Element, bool kTransposed>
__global__ __launch_bounds__(128) void narrow_kernel(const __grid_constant__ Product product) {
  if constexpr (arch::kHasWgmma) {
    using Sizes = Operands<16>;
    std::byte* const a = arch::dynamic_shared<1024>();
    std::byte* const b = a + Sizes::kA;
    const auto copy = [](std::byte* to, const std::byte* from, int bytes) {
      for (int i = 16 * thread(); i < bytes; i += 16 * 128)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    };
    copy(a, product.a, Sizes::kA);
    copy(b, product.b, Sizes::kB);
    sm90::fence_shared_stores();
    __syncthreads();
    float d[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] = product.d[thread() * 8 + i];
    sm90::wgmma_begin();
#pragma unroll
    for (int i = 0; i < kProductSteps; ++i)
      sm90::multiply_16<Element, kTransposed>(
          d,
          sm90::advance(sm90::operand(a, 64 * 128),
                        kTransposed ? i * 16 * 128 : i / 4 * 64 * 128 + i % 4 * 32),
          sm90::advance(sm90::operand(b, 16 * 128), i / 4 * 16 * 128 + i % 4 * 32),
          i > 0 || product.add);
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::pin(d);
#pragma unroll
    for (int i = 0; i < 8; ++i) product.d[thread() * 8 + i] = d[i];
  }
}

template <class Element>
void multiply_narrow(const Product& product) {
  const auto kernel =
      product.a_transposed ? narrow_kernel<Element, true> : narrow_kernel<Element, false>;
  run(kernel, 1, 128, Operands<16>::kA + Operands<16>::kB, product);
}

template <int kN, class Element, bool kTransposed>
void multiply_as(const Product& product) {
  using Sizes = Operands<kN>;
  const bool registers = product.a == nullptr;
  const auto kernel = registers ? product_kernel<kN, Element, kTransposed, true>
                                : product_kernel<kN, Element, kTransposed, false>;
  const int bytes =
      (registers ? 0 : Sizes::kA) + (kTransposed ? TransposedOperand<kN>::kB : Sizes::kB);
  LONGSPAN_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  run(kernel, 1, 128, bytes, product);
}

template <int kN>
void multiply_columns(const Product& product) {
  if (product.columns != kN) return;
  if (product.type == Type::e4m3)
    multiply_as<kN, __nv_fp8_e4m3, false>(product);
  else if (product.type == Type::fp16)
    product.transposed ? multiply_as<kN, __half, true>(product)
                       : multiply_as<kN, __half, false>(product);
  else
    product.transposed ? multiply_as<kN, __nv_bfloat16, true>(product)
                       : multiply_as<kN, __nv_bfloat16, false>(product);
}

// ---- copies, barriers, blocks
// --------------------------------------------------------------------

template <int kBytes>
__device__ int copy_each(std::uint32_t to, const std::byte* from, int first) {
  for (int bytes = 0; bytes <= kBytes; ++bytes)
    arch::copy_async<kBytes>(to + 16 * (first + bytes), from + 16 * (first + bytes), bytes);
  return first + kBytes + 1;
}

__global__ void copy_kernel(const std::byte* from, std::byte* to) {
  std::byte* const shared = arch::dynamic_shared<128>();
  if (thread() > 0) return;
  for (int i = 0; i < 16 * kCopies; ++i) shared[i] = std::byte{0xff};
  const std::uint32_t place = arch::shared_address(shared);
  int next = copy_each<4>(place, from, 0);
  next = copy_each<8>(place, from, next);
  arch::commit_copies();
  next = copy_each<16>(place, from, next);
  arch::copy_async(place + 16 * next, from + 16 * next, true);
  ++next;
  arch::copy_async(place + 16 * next, from + 16 * next, false);
  ++next;
  arch::copy_word_async(shared + 16 * next, from + 16 * next);
  arch::commit_copies();
  arch::wait_copies<1>();
  for (int i = 0; i < 16 * 14; ++i) to[i] = shared[i];
  arch::wait_copies<0>();
  for (int i = 16 * 14; i < 16 * kCopies; ++i) to[i] = shared[i];
}

struct Ring {
  arch::Barrier full[2], empty[2];
  int slots[2][32];
};

/// Warp 0 copies 32 numbers a round, one in each lane; warp 1 takes them.
__global__ void ring_kernel(const int* in, int* out, int rounds) {
  Ring& ring = arch::shared_variable<Ring>();
  if (thread() == 0) {
    for (int i = 0; i < 2; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(32);
    }
    arch::publish_barriers();
  }
  __syncthreads();
  const int lane = thread() % 32;
  for (int i = 0; i < rounds; ++i) {
    const int stage = i % 2;
    const auto parity = static_cast<std::uint32_t>(i / 2 % 2);
    if (thread() < 32) {
      ring.empty[stage].wait(parity ^ 1);
      arch::copy_word_async(&ring.slots[stage][lane], in + 32 * i + lane);
      arch::expect_copies(ring.full[stage]);
      __syncwarp();
      if (lane == 0) ring.full[stage].arrive();
    } else {
      ring.full[stage].wait(parity);
      out[32 * i + lane] = ring.slots[stage][lane];
      ring.empty[stage].arrive();
    }
  }
}

/// Warps 0 and 1 take turns: each writes the next number, read from the place where the other left
/// it.
__global__ void turns_kernel(int* out, int rounds) {
  int& last = arch::shared_variable<int>();
  const int warp = thread() / 32;
  if (thread() == 0) last = 0;
  __syncthreads();
  if (warp == 1) arch::named_arrive(1, 64);
  for (int i = warp; i < rounds; i += 2) {
    arch::named_sync(1 + warp, 64);
    if (thread() % 32 == 0) {
      out[i] = last;
      ++last;
    }
    __syncwarp();
    if (i + 1 < rounds) arch::named_arrive(2 - warp, 64);
  }
}

template <class... At>
__global__ void box_kernel(const __grid_constant__ CUtensorMap map, int bytes, std::byte* to,
                           At... at) {
  if constexpr (arch::kTarget >= 900) {
    std::byte* const box = arch::dynamic_shared<1024>();
    auto& full = arch::shared_variable<arch::Barrier>();
    if (thread() == 0) {
      arch::prefetch_map(&map);
      full.init(1);
      arch::publish_barriers();
    }
    __syncthreads();
    if (thread() == 0) {
      full.arrive_expecting(bytes);
      if constexpr (sizeof...(At) == 3)
        arch::load_box(box, &map, at..., &full, arch::cache_policy<arch::Keep::first_to_go>());
      else
        arch::load_box(arch::shared_address(box), &map, at..., &full);
    }
    full.wait(0);
    for (int i = thread(); i < bytes; i += 64) to[i] = box[i];
  }
}

__global__ void words_kernel(const uint4* from, uint4* to, uint4* read) {
  arch::prefetch(from);
  const uint4 four = arch::load_volatile(from);
  arch::store_volatile(to, four);
  arch::store_volatile(to + 1, uint2{four.z, four.w});
  arch::store_volatile(to + 2, four.y);
  arch::load_volatile_if(true, from + 3, to[3]);
  __threadfence();
  read[0] = arch::load_volatile(to);
  const uint2 two = arch::load_volatile_two(to + 1);
  read[1] = {two.x, two.y, 0, 0};
  read[2] = {arch::load_relaxed(&to[2].x), 0, 0, 0};
  for (int wanted = 0; wanted < 2; ++wanted) {
    uint4 a = {1, 2, 3, 4};
    uint2 b = {5, 6};
    std::uint32_t c = 7;
    arch::load_volatile_if(wanted != 0, from, a);
    arch::load_volatile_if(wanted != 0, from, b);
    arch::load_volatile_if(wanted != 0, from, c);
    read[3 + 2 * wanted] = a;
    read[4 + 2 * wanted] = {b.x, b.y, c, 0};
  }
}

__global__ void overlap_kernel(const int* from, int* to, int n) {
  arch::let_next_kernel_start();
  arch::wait_for_kernels_before();
  for (int i = first_index(); i < n; i += step()) to[i] = from[i];
}

constexpr int kFactBytes = 4096;

__global__ void facts_kernel(int* good) {
  const auto address = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  };
  int& first = arch::shared_variable<int>();
  int& second = arch::shared_variable<int, 1>();
  auto& other = arch::shared_variable<double[4]>();
  if (thread() == 0) first = 1, second = 2, other[3] = 3;
  __syncthreads();
  const std::uint64_t before = arch::nanoseconds();
  if (thread() != 31) return;
  good[0] = arch::dynamic_shared_bytes() == kFactBytes;
  good[1] = address(arch::dynamic_shared<1024>()) % 1024 == 0 &&
            arch::shared_address(arch::dynamic_shared<1024>()) % 1024 == 0;
  good[2] =
      first == 1 && second == 2 && other[3] == 3 && &first == &arch::shared_variable<int, 0>();
  good[3] = arch::shared_address(arch::dynamic_shared<1024>() + 48) ==
            arch::shared_address(arch::dynamic_shared<1024>()) + 48;
  good[4] = arch::nanoseconds() >= before;
}

}  // namespace

void pack(Type type, const float* pairs, std::uint32_t* packed, int n) {
  run(type == Type::fp16 ? pack_kernel<__half> : pack_kernel<__nv_bfloat16>, kEachBlocks,
      kEachThreads, 0, pairs, packed, n);
}
void pack_e4m3(const float* fours, std::uint32_t* packed, int n) {
  run(pack_e4m3_kernel, kEachBlocks, kEachThreads, 0, fours, packed, n);
}
void widen_fp8(bool e5m2, const std::uint32_t* fours, uint2* halves, int n) {
  run(e5m2 ? widen_kernel<true> : widen_kernel<false>, kEachBlocks, kEachThreads, 0, fours, halves,
      n);
}
void to_tf32(const float* x, std::uint32_t* bits, int n) {
  run(to_tf32_kernel, kEachBlocks, kEachThreads, 0, x, bits, n);
}
void exp2_fast(const float* x, float* y, int n) {
  run(exp2_kernel, kEachBlocks, kEachThreads, 0, x, y, n);
}
void approximate_reciprocal(const float* x, float* y, int n) {
  run(reciprocal_kernel, kEachBlocks, kEachThreads, 0, x, y, n);
}

void load_matrices(bool transposed, const std::uint16_t* matrices, std::uint32_t* fragments) {
  run(transposed ? load_matrices_kernel<true> : load_matrices_kernel<false>, 1, 32, 512, matrices,
      fragments);
}
void store_matrices(const std::uint32_t* fragments, std::uint16_t* matrices) {
  run(store_matrices_kernel, 1, 32, 512, fragments, matrices);
}
void transpose_matrix(const std::uint32_t* rows, std::uint32_t* columns) {
  run(transpose_matrix_kernel, 1, 32, 0, rows, columns);
}
void mma(Type type, const std::uint32_t* a, const std::uint32_t* b, float* c) {
  run(type == Type::fp16 ? mma_kernel<__half> : mma_kernel<__nv_bfloat16>, 1, 32, 0, a, b, c);
}
void mma_tf32(const std::uint32_t* a, const std::uint32_t* b, float* c) {
  run(mma_kernel<float>, 1, 32, 0, a, b, c);
}

void multiply(const Product& product) {
  multiply_columns<64>(product);
  multiply_columns<72>(product);
  multiply_columns<80>(product);
  multiply_columns<88>(product);
  multiply_columns<96>(product);
  multiply_columns<112>(product);
  multiply_columns<128>(product);
  multiply_columns<136>(product);
  multiply_columns<160>(product);
  multiply_columns<192>(product);
  multiply_columns<256>(product);
  if (product.columns != 16) return;
  product.type == Type::fp16 ? multiply_narrow<__half>(product)
                             : multiply_narrow<__nv_bfloat16>(product);
}

void copy_sizes(const std::byte* from, std::byte* to) {
  run(copy_kernel, 1, 32, 16 * kCopies, from, to);
}
void pass_through_ring(const int* in, int* out, int rounds) {
  run(ring_kernel, 1, 64, 0, in, out, rounds);
}
void take_turns(int* out, int rounds) { run(turns_kernel, 1, 64, 0, out, rounds); }

void load_box(const CUtensorMap& map, int x, int y, int z, int bytes, std::byte* to) {
  run(box_kernel<int, int, int>, 1, 64, bytes, map, bytes, to, x, y, z);
}
void load_box(const CUtensorMap& map, const int (&at)[5], int bytes, std::byte* to) {
  run(box_kernel<int, int, int, int, int>, 1, 64, bytes, map, bytes, to, at[0], at[1], at[2], at[3],
      at[4]);
}

void exchange_words(const uint4* from, uint4* to, uint4* read) {
  run(words_kernel, 1, 1, 0, from, to, read);
}
void overlap(const int* from, int* middle, int* to, int n) {
  LaunchConfig how;
  how.grid = dim3(2);
  how.block = dim3(32);
  launch_kernel(overlap_kernel, how, from, middle, n);
  how.overlaps = true;
  launch_kernel(overlap_kernel, how, middle, to, n);
  LONGSPAN_CUDA(cudaDeviceSynchronize());
}
void facts(int* good) { run(facts_kernel, 1, 32, kFactBytes, good); }

}  // namespace longspan::test::arch_kernels

// Tensor cores on CPUs: the warp-wide operations for the instructions of arch/. The callers read
// and write memory, each lane its own addresses; only operands of wgmma are read by the product
// when it runs.
#pragma once

#include <cstdint>

#include "kernels/simulated/thread.hpp"

namespace longspan::simulated {

/// The types of factors. Sums are fp32.
enum class Number { fp16, bf16, tf32, e4m3 };

/// Whether sums lose what those of a GPU may lose (LONGSPAN_SIMULATED_EXACT, settings.cpp):
/// products exact, groups of them added to the accumulator in one step, aligned to the largest
/// exponent with few extra bits and truncated. Otherwise sums are those of fp32, and take a third
/// of the time.
bool exact_tensor_cores();

/// Synchronises the warp at an instruction that has nothing to exchange.
void meet_warp(const char* what, Site site);

/// ldmatrix after its reads: lane l passes row l % 8 of matrix l / 8, 8 elements of 16 bits, and
/// gets its share of each matrix.
void rows_to_fragments(std::uint32_t (&words)[4], bool transposed, Site site);
/// stmatrix before its writes: the reverse.
void fragments_to_rows(std::uint32_t (&words)[4], Site site);
/// movmatrix.
std::uint32_t transpose_fragment(std::uint32_t word, Site site);

/// mma.sync: c[16, 8] += a[16, K] b[K, 8], K of 32 bytes.
void multiply(Number number, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
              std::uint32_t b1, Site site);

/// The matrix descriptor of wgmma: the 128-byte swizzle.
std::uint64_t describe_operand(std::uint32_t address, int panel_bytes, Site site);
/// wgmma: queues d[64, columns] += a[64, K] b[K, columns], of which this warp has 16 rows.
/// `registers`: its share of a, or null for operand `a`, which may be stored as [K, 64].
void multiply_later(Number number, int columns, bool transposed, float* d,
                    const std::uint32_t* registers, std::uint64_t a, std::uint64_t b, bool add,
                    Site site, bool a_transposed = false);

}  // namespace longspan::simulated

/// \file
/// Basic types: element types, devices, streams, log bases, and the distance that ALiBi multiplies.
#pragma once

#include <cstdint>

// LONGSPAN_HD: a function of host and device. LONGSPAN_HD_APART: the same, but not inlined into
// kernels. Code that is rare, or that a kernel runs once, is then fetched once too: fetches use
// memory that other threads stream through.
#if defined(__CUDACC__)
#define LONGSPAN_HD __host__ __device__
#define LONGSPAN_HD_APART __host__ __device__ __noinline__
#else
#define LONGSPAN_HD
#define LONGSPAN_HD_APART
#endif

/// The whole public interface. Tensors and communicators are values; errors are thrown (error.hpp).
namespace longspan {

/// Element type of a tensor. Arithmetic is fp32 inside, whatever the storage, except that fp64 is
/// computed in fp64; the fp8 types are storage only. The integers are for lengths, starts,
/// positions, block tables and flags.
enum class DType : std::uint8_t {
  fp32,   ///< IEEE single precision
  fp16,   ///< IEEE half precision
  bf16,   ///< the upper half of an fp32
  e4m3,   ///< fp8 of 4 exponent bits; largest 448, no infinity
  e5m2,   ///< fp8 of 5 exponent bits; largest finite 57344
  int32,  ///< lengths, starts and block tables
  int64,  ///< positions and slots
  uint8,  ///< flags, 0 or 1
  fp64,   ///< IEEE double precision; layers on CPUs take it
  // Rows of latent keys that carry their scales, named by the bytes of a row (row_format_of in
  // storage.hpp). A cache of them is a tensor of uint8.
  latent656,       ///< 512 e4m3, 4 fp32 scales, 64 bf16; a scale is amax / 448 (vLLM's fp8_ds_mla)
  latent656_pow2,  ///< the same; append rounds a scale up to a power of two (FlashMLA)
  latent584,       ///< 448 e4m3, 64 bf16, 7 ue8m0 scales: in pages these follow the rows' data
  latent528,       ///< 512 e4m3, 16 ue8m0 scales (MXFP8)
  latent352,       ///< 512 e2m1, 64 e4m3, 32 e4m3 scales (vLLM's nvfp4_ds_mla)
};

inline constexpr DType fp64 = DType::fp64;  ///< short for DType::fp64
inline constexpr DType fp32 = DType::fp32;  ///< short for DType::fp32
inline constexpr DType fp16 = DType::fp16;  ///< short for DType::fp16
inline constexpr DType bf16 = DType::bf16;  ///< short for DType::bf16
inline constexpr DType e4m3 = DType::e4m3;  ///< short for DType::e4m3
inline constexpr DType e5m2 = DType::e5m2;  ///< short for DType::e5m2

/// Whether the type is one of the two fp8 types.
LONGSPAN_HD constexpr bool is_fp8(DType dtype) {
  return dtype == DType::e4m3 || dtype == DType::e5m2;
}
/// Whether the type is a whole row that carries its scales.
LONGSPAN_HD constexpr bool is_latent_row(DType dtype) {
  return dtype >= DType::latent656 && dtype <= DType::latent352;
}
/// Whether the type is a float of at most 32 bits, fp8 included.
constexpr bool is_float(DType dtype) { return dtype <= DType::e5m2; }

/// "bf16", and so on; "no type" for an invalid number.
constexpr const char* name(DType dtype) {
  constexpr const char* names[] = {
      "fp32",  "fp16", "bf16",      "e4m3",           "e5m2",      "int32",     "int64",
      "uint8", "fp64", "latent656", "latent656_pow2", "latent584", "latent528", "latent352"};
  return dtype <= DType::latent352 ? names[static_cast<int>(dtype)] : "no type";
}

/// Where memory lives and kernels run.
enum class Device : std::uint8_t {
  host,  ///< this rank's CPUs
  cuda,  ///< this rank's GPU
};

/// "host" or "cuda".
constexpr const char* name(Device device) { return device == Device::host ? "host" : "cuda"; }

/// The distance that ALiBi multiplies by the head's slope.
enum class Alibi : std::uint8_t {
  context,  ///< slope * (j - context_len), as serving engines do. Shifts the lse, so states merge
            ///< only with states of the same context length
  query,    ///< -slope * |i - j|: as published (Press et al., arXiv 2108.12409)
  sqrt,     ///< -slope * sqrt(i - j) for j < i, else 0: vLLM's alibi_sqrt
};

/// "context", and so on; "no distance" for an invalid number.
constexpr const char* name(Alibi alibi) {
  constexpr const char* names[] = {"context", "query", "sqrt"};
  return alibi <= Alibi::sqrt ? names[static_cast<int>(alibi)] : "no distance";
}

/// The queue that orders work: a cudaStream_t on CUDA. On the host work is done at once and the
/// handle is not read.
struct Stream {
  void* handle = nullptr;  ///< a cudaStream_t; null: the default stream
};

/// Base of a log-sum-exp from outside. It has no default on purpose: a mix of the two gives
/// plausible wrong answers.
enum class LogBase : std::uint8_t {
  e,    ///< natural logarithms
  two,  ///< logarithms to base 2
};

}  // namespace longspan

/// \file
/// The sizes of a head that every device takes, and other numbers that callers are held to, in one
/// place. Which kernels are fast for which sizes: docs/reference/features.md.
#pragma once

namespace longspan {

inline constexpr int kHeadDimStep = 8;       ///< head_dim and value_dim are multiples of it
inline constexpr int kMaxHeadDim = 576;      ///< of queries and keys
inline constexpr int kMaxValueDim = 512;     ///< of values and results
inline constexpr int kMostThreads = 4096;    ///< host threads that a rank may be asked for
inline constexpr int kMostSegments = 65536;  ///< of the keys, in Python's segmented_attention

}  // namespace longspan

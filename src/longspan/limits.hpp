/// \file
/// The head sizes that every device takes, and other limits on callers' arguments, in one place.
/// docs/reference/features.md tells which kernels are fast for which sizes.
#pragma once

namespace longspan {

inline constexpr int kMaxHeadDim = 576;      ///< of queries and keys; any from 1 on
inline constexpr int kMaxValueDim = 512;     ///< of values and results; any from 1 on
inline constexpr int kMostThreads = 4096;    ///< most host threads that a rank may ask for
inline constexpr int kMostSegments = 65536;  ///< of the keys, in Python's segmented_attention

}  // namespace longspan

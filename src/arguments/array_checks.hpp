// Checks type, extents, strides and device of the small arrays of a call. The caller gives tensors;
// kernels take pointers (run_arrays.hpp).
#pragma once

#include "longspan/attention.hpp"
#include "longspan/element.hpp"
#include "longspan/score_terms.hpp"
#include "longspan/serving.hpp"
#include "longspan/storage.hpp"
#include "src/arguments/run_arrays.hpp"

namespace longspan {

/// Checks the arrays and resolves the shards for rank `rank` of `ranks`. Throws InputError, which
/// names the array that does not fit.
RunArrays arrays_of(const AttentionArgs& args, const Options& options, int rank, int ranks,
                    Device device);
RunArrays arrays_of(const Append& append, const Options& options, int rank, int ranks,
                    Device device);

/// Checks the arrays of a call over a paged cache, for a rank that holds all keys. kv_len must be
/// given.
RunArrays arrays_of(const PagedAttention& args, int heads, int kv_heads, Device device);

/// Checks the arrays of a call over some keys of each sequence, and resolves the shard.
RunArrays arrays_of(const AttendState& args, int heads, int kv_heads, Device device);

// ---- one array ---------------------------------------------------------------------------------

/// Checks a dense array [extent]; returns null if `t` is not given. With `extent` < 0 any extent is
/// right.
template <Element T>
const T* array_of(const Tensor& t, const char* name, std::int64_t extent, Device device);

/// The number of sequences of a call: the entries of kv_len, or one. Only its shape is read.
int batch_of(const Tensor& kv_len);

/// Checks an array [extent] of any float type.
Floats floats_of(const Tensor& t, const char* name, std::int64_t extent, Device device);
/// Checks dense ALiBi slopes [heads] or [batch, heads] of any float type.
Slopes slopes_of(const Tensor& t, int batch, int heads, Device device);
/// Checks an array [1], [kv_heads] or [batch, kv_heads] of fp32.
ScaleView scales_of(const Tensor& t, const char* name, int batch, int kv_heads, Device device);
/// Checks an array [width, width] of any float type; width is at least `longest_query`.
QqBias qq_bias_of(const Tensor& t, std::int64_t longest_query, Device device);
/// Checks the tables of a rotation, which are both given or neither.
Rope rope_of(const RopeOptions& options, const Tensor& cos, const Tensor& sin, Device device);
/// Checks the indices of `tokens` rows, and their number on each, which are given if and only if
/// `wanted` says what they are.
kernels::KeyIndices indices_of(const Tensor& indices, const Tensor& length,
                               const IndexOptions& wanted, std::int64_t tokens, int kv_heads,
                               Device device);
/// Checks an array [count + 1] of int64.
Documents documents_of(const Tensor& t, int batch, Device device);
Ranges ranges_of(const Tensor& t, int batch, Device device);

}  // namespace longspan

// The small arrays of a call: the caller gives them as tensors, kernels take them as pointers
// (run_arrays.hpp). Between the two stands this check of type, extents, strides and device.
#pragma once

#include "longspan/attention.hpp"
#include "longspan/serving.hpp"
#include "src/run_arrays.hpp"

namespace longspan {

/// Checks the arrays and resolves the shards for rank `rank` of `ranks`. InputError names the array
/// that does not fit.
RunArrays arrays_of(const AttentionArgs& args, const Options& options, int rank, int ranks,
                    Device device);
RunArrays arrays_of(const Append& append, const Options& options, int rank, int ranks,
                    Device device);

/// Of a call over a paged cache, whose rank holds all keys. kv_len must be given.
RunArrays arrays_of(const PagedAttention& args, int heads, int kv_heads, Device device);

/// Of a call over some keys of each sequence, whose shard is resolved.
RunArrays arrays_of(const AttendState& args, int heads, int kv_heads, Device device);

// ---- one array ---------------------------------------------------------------------------------

/// A dense array [extent]; null where `t` is not given. `extent` < 0: any.
template <Element T>
const T* array_of(const Tensor& t, const char* name, std::int64_t extent, Device device);

/// Sequences of a call: as many as kv_len has entries, or one. Only its shape is read.
int batch_of(const Tensor& kv_len);

/// [extent], of any float type.
Floats floats_of(const Tensor& t, const char* name, std::int64_t extent, Device device);
/// [1] or [kv_heads] fp32.
Scales scales_of(const Tensor& t, const char* name, int kv_heads, Device device);
/// [width, width] of any float type; width is at least `longest_query`.
QqBias qq_bias_of(const Tensor& t, std::int64_t longest_query, Device device);
/// [count + 1] int64.
Documents documents_of(const Tensor& t, Device device);

}  // namespace longspan

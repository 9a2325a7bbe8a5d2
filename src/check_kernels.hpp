// What must hold before a call of Kernels runs. Nothing here reads memory of the device: what lies
// in arrays is checked by check_lengths (host) and ServingKernels::check_arrays.
#pragma once

#include "longspan/kernels.hpp"
#include "src/tensor_checks.hpp"

namespace longspan {

/// Sizes that the tensors of a call tell.
struct PagedShape {
  DType dtype;  // of the products
  std::int64_t tokens;
  int heads, kv_heads, head_dim, value_dim;
};

/// Reads shapes and types only. InputError where they have none of the known forms.
PagedShape shape_of(const PagedAttention& args);

/// What the workspace of a call depends on; `slots`: states of each row.
void check_sizes(const PagedAttention& args, const PagedShape& shape, std::int64_t slots);

CacheView check_paged(const PagedAttention& args, const PagedShape& shape, bool needs_out,
                      Device device);
/// out and lse, where out is given.
void check_output(const PagedAttention& args, const PagedShape& shape, Device device);
void check_new_keys(const ContextAttention& args, const PagedShape& shape, Device device);
void check_segments(const Segments& segments, std::int64_t tokens, std::int64_t heads,
                    std::int64_t least_dim, Device device);
void check_reduce(const ReduceSegments& args, Device device);
void check_merge(const MergeAttnStates& args, Device device);
void check_merge(const MergeStates& args, Device device);
CacheView check_append(const AppendKv& args, Device device);

/// The caller's memory, if it is enough.
void check_workspace(const Workspace& workspace, std::size_t needed);

/// Host only: new keys are among the keys of their sequence.
void check_new_lengths(const kernels::Batch& batch, std::int64_t tokens);

}  // namespace longspan

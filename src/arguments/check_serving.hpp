// Checks what must hold before a call of ServingOps, or a merge across ranks, runs. Nothing here
// reads memory of the device: what lies in arrays is checked by check_lengths (host) and
// ServingKernels::check_arrays.
#pragma once

#include "longspan/merge.hpp"
#include "longspan/serving.hpp"
#include "src/arguments/tensor_checks.hpp"
#include "src/arguments/validate.hpp"

namespace longspan {

/// The sizes that the tensors of a call tell.
struct PagedShape {
  DType dtype;  // of the products
  std::int64_t tokens;
  int heads, kv_heads, head_dim, value_dim;
};

/// Reads shapes and types only. Throws InputError where they have none of the known forms.
PagedShape shape_of(const PagedAttention& args);
PagedShape shape_of(const AttendState& args);

/// Checks what the workspace of a call depends on; `slots` is the number of states of each row.
void check_sizes(const Tensor& q, const PagedShape& shape, std::int64_t slots);

Checked check_paged(const PagedAttention& args, const PagedShape& shape, bool needs_out,
                    Device device);
/// Checks out and lse, where out is given.
void check_output(const PagedAttention& args, const PagedShape& shape, Device device);
void check_new_keys(const ContextAttention& args, const PagedShape& shape, Device device);
void check_segments(const Segments& segments, std::int64_t tokens, std::int64_t heads,
                    std::int64_t least_dim, Device device);
/// Checks segments that a call hands out.
void check_handed_out(const SegmentedAttention& args, const PagedShape& shape, Device device);
/// Checks the call, and gives its batch.
kernels::Batch check_reduce(const ReduceSegments& args, Device device);
void check_merge(const MergeAttnStates& args, Device device);
void check_merge(const MergeStates& args, Device device);
void check_merge(const MergeArgs& args, const MergeOptions& options, int ranks, Device device);
Checked check_append(const AppendKv& args, Device device);

Checked check_attend(const AttendState& args, const PagedShape& shape, Device device);
/// Checks the call, and gives the batch of its rows.
kernels::Batch check_finish(const FinishState& args, Device device);
kernels::Batch check_export(const ExportState& args, std::int64_t value_dim, Device device);

/// The bytes of the states of so many rows.
std::size_t check_state_size(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim);

/// Checks that the caller's memory is enough.
void check_workspace(const Workspace& workspace, std::size_t needed);

/// Checks, on the host only, that new keys are among the keys of their sequence.
void check_new_lengths(const kernels::Batch& batch, std::int64_t tokens);

}  // namespace longspan

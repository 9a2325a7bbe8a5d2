// Checks the arguments of a call of ServingOps, or of a merge across ranks, before it runs. Nothing
// here reads memory of the device: check_lengths (host) and ServingKernels::check_arrays check the
// contents of arrays.
#pragma once

#include "longspan/merge.hpp"
#include "longspan/serving.hpp"
#include "src/arguments/tensor_checks.hpp"
#include "src/arguments/validate.hpp"

namespace longspan {

/// The sizes that follow from the tensors of a call.
struct PagedShape {
  DType dtype;  // of the products
  std::int64_t tokens;
  int heads, kv_heads, head_dim, value_dim;
};

/// Reads shapes and types only. Throws InputError if they have none of the known forms.
PagedShape shape_of(const PagedAttention& args);
PagedShape shape_of(const AttendState& args);

/// Checks the sizes that the workspace of a call depends on; `slots` is the number of states of
/// each row.
void check_sizes(const Tensor& q, const PagedShape& shape, std::int64_t slots);

Checked check_paged(const PagedAttention& args, const PagedShape& shape, bool needs_out,
                    Device device);
/// Checks out and lse, if out is given.
void check_output(const PagedAttention& args, const Tensor& out_scale_inv, const PagedShape& shape,
                  Device device);
void check_new_keys(const ContextAttention& args, const PagedShape& shape, Device device);
void check_segments(const Segments& segments, std::int64_t tokens, std::int64_t heads,
                    std::int64_t least_dim, Device device);
/// Checks the segments that a call writes for the caller.
void check_handed_out(const SegmentedAttention& args, const PagedShape& shape, Device device);
/// Checks the call, and returns its batch.
kernels::Batch check_reduce(const ReduceSegments& args, Device device);
void check_merge(const MergeAttnStates& args, Device device);
void check_merge(const MergeStates& args, Device device);
void check_merge(const MergeArgs& args, const MergeOptions& options, int ranks, Device device);
Checked check_append(const AppendKv& args, Device device);

Checked check_attend(const AttendState& args, const PagedShape& shape, Device device);
/// Checks the call, and returns the batch of its rows.
kernels::Batch check_finish(const FinishState& args, Device device);
kernels::Batch check_export(const ExportState& args, std::int64_t value_dim, Device device);

/// The bytes of the states of that many rows.
std::size_t check_state_size(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim);

/// Checks that the caller's memory is large enough.
void check_workspace(const Workspace& workspace, std::size_t needed);

/// Checks, on the host only, that each sequence has at least as many keys as new keys.
void check_new_lengths(const kernels::Batch& batch, std::int64_t tokens);

}  // namespace longspan

// The kernels around attention, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/copy_keys.hpp"
#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/key_indices.hpp"
#include "kernels/move_keys.hpp"
#include "kernels/params.hpp"
#include "src/base/strided_copy.hpp"

namespace longspan::kernels::cuda {

void merge(const MergeParams& params, cudaStream_t stream);

/// The same for sequences of up to `most` queries only; rows of the others are not touched.
void merge_short(const MergeParams& params, int most, cudaStream_t stream);

/// fold_parts and merge in one kernel, for results that need no other state: the splits of short
/// sequences become their rows of the result.
void fold_parts_finished(const AttendParams& p, const WorkPlan& plan, const MergeParams& m,
                         cudaStream_t stream);
void map_rows(const MapParams& params, cudaStream_t stream);
void place_rows(const PlaceParams& params, cudaStream_t stream);
void rotate_rows(const RotateParams& params, cudaStream_t stream);
void key_starts(const KeyStartParams& params, cudaStream_t stream);
void row_starts(const RowStartParams& params, cudaStream_t stream);
void copy_keys(const CopyKeysParams& params, cudaStream_t stream);
void compact_keys(const CompactParams& params, cudaStream_t stream);
void move_keys(const MoveKeysParams& params, cudaStream_t stream);
void merge_outputs(const MergeOutputsParams& params, cudaStream_t stream);
void pack_outputs(const PackOutputsParams& params, cudaStream_t stream);
/// Copies blocks that do not overlap.
void copy_rows(std::span<const StridedCopy> copies, cudaStream_t stream);
void pack_states(const PackStatesParams& params, cudaStream_t stream);
void export_segments(const ExportSegmentsParams& params, cudaStream_t stream);
void reduce_segments(const ReduceSegmentsParams& params, cudaStream_t stream);
void append(const AppendParams& params, cudaStream_t stream);
void cut_context(const ContextCutParams& params, cudaStream_t stream);
void check_arrays(const CheckParams& params, cudaStream_t stream);

}  // namespace longspan::kernels::cuda

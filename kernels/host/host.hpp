// The host kernels, which backend.cpp puts together. Each does its work before it returns.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/copy_keys.hpp"
#include "kernels/digest.hpp"
#include "kernels/epilogue.hpp"
#include "kernels/gradient_params.hpp"
#include "kernels/host/thread_pool.hpp"
#include "kernels/key_indices.hpp"
#include "kernels/move_keys.hpp"
#include "kernels/params.hpp"
#include "src/base/strided_copy.hpp"

namespace longspan::kernels::host {

std::size_t attend_scratch(const AttendParams& bounds, int threads);
void attend(const AttendParams& params, ThreadPool& pool, const BetweenTiles& between);
/// Attention of fp64, in fp64 throughout. It ends in results: a state has no fp64.
void attend_fp64(const AttendParams& params, const MergeParams& result, ThreadPool& pool,
                 const BetweenTiles& between);
std::size_t fp64_scratch(const AttendParams& bounds, int threads);
std::size_t gradient_scratch(const GradientParams& bounds, int threads);
void attend_gradients(const GradientParams& params, ThreadPool& pool, const BetweenTiles& between);
void add_sums(float* to, const float* from, std::int64_t count, ThreadPool& pool);
void widen_gradients(const WidenGradientsParams& params, ThreadPool& pool);
void row_terms(const RowTermParams& params, ThreadPool& pool);
/// The same of products of fp64.
void attend_gradients_fp64(const GradientParams& params, ThreadPool& pool,
                           const BetweenTiles& between);
std::size_t gradient_scratch_fp64(const GradientParams& bounds, int threads);
void add_sums(double* to, const double* from, std::int64_t count, ThreadPool& pool);
void row_terms_fp64(const RowTermParams& params, ThreadPool& pool);
void store_gradients_fp64(const StoreGradientParams& params, ThreadPool& pool);
void sink_gradients(const SinkGradientParams& params, ThreadPool& pool);
void store_gradients(const StoreGradientParams& params, ThreadPool& pool);
void add_to_first_columns(const AddColumnsParams& params, ThreadPool& pool);
void turn_back_sums(const TurnBackParams& params, ThreadPool& pool);
void turn_back_keys(const TurnBackKeysParams& params, ThreadPool& pool);
void merge(const MergeParams& params, ThreadPool& pool);
void map_rows(const MapParams& params);
void place_rows(const PlaceParams& params, ThreadPool& pool);
void rotate_rows(const RotateParams& params, ThreadPool& pool);
void key_starts(const KeyStartParams& params);
void row_starts(const RowStartParams& params);
void copy_keys(const CopyKeysParams& params, ThreadPool& pool);
void compact_keys(const CompactParams& params, ThreadPool& pool);
void move_keys(const MoveKeysParams& params, ThreadPool& pool);
void merge_outputs(const MergeOutputsParams& params, ThreadPool& pool);
void pack_outputs(const PackOutputsParams& params, ThreadPool& pool);
void copy_rows(std::span<const StridedCopy> copies, ThreadPool& pool);
void pack_states(const PackStatesParams& params, ThreadPool& pool);
void export_segments(const ExportSegmentsParams& params, ThreadPool& pool);
void reduce_segments(const ReduceSegmentsParams& params, ThreadPool& pool);
void append(const AppendParams& params, ThreadPool& pool);
void cut_context(const ContextCutParams& params);
void check_arrays(const CheckParams& params);
void digest(const DigestParams& params);

}  // namespace longspan::kernels::host

// Imports and exports states, on one rank.
//
//     attend_state   attend, from the state in memory or from an empty one
//     finish_state   the merge of one state
//     export_state   the state as one segment
#include <limits>

#include "src/base/device_guard.hpp"
#include "src/base/trace.hpp"
#include "src/serving/serving_impl.hpp"
#include "src/serving/workspace.hpp"

namespace longspan {
namespace {

AttendState with_batch_rows(const AttendState& args) {
  AttendState flat = args;
  flat.q = batch_rows(args.q, "q");
  return flat;
}

/// Returns the same arguments with sizes only: pointers and strides are not read.
AttendState with_flat_shape(const AttendState& args) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const Tensor& q = args.q;
  const auto counts = [](std::int64_t n) { return n >= 0 && n <= kMost; };
  AttendState flat = args;
  if (q.dims != 4 || !counts(q.shape[0]) || !counts(q.shape[2])) return flat;
  flat.q.dims = 3;
  flat.q.shape = {q.shape[0] * q.shape[2], q.shape[1], q.shape[3]};
  return flat;
}

kernels::StateSlots slot_of(const AttentionState& state, std::int64_t rows, std::int64_t dim) {
  return {static_cast<std::byte*>(state.data), rows, static_cast<int>(dim), 1};
}

kernels::AttendParams size_params(const AttendState& a, const PagedShape& shape) {
  kernels::AttendParams p = size_params(a, a.k.dtype, shape);
  p.shard.rank = a.rank;
  p.shard.ranks = a.ranks;
  p.indices = bounds_of(a.index, p.kv_heads);
  return p;
}

CallWorkspace lay_out(const kernels::Backend& backend, const AttendState& a,
                      const PagedShape& shape, void* base) {
  check_sizes(a.q, shape, 1);
  kernels::AttendParams p = size_params(a, shape);
  p.resume = true;  // needs more memory, so that one workspace serves all calls of a chain
  return CallWorkspace::lay_out_scratch(base, backend.attend_scratch(p), p.batch.size);
}

/// Describes the attention of a call, without the workspace.
kernels::AttendParams attend_params(const AttendState& a, const PagedShape& shape,
                                    const Checked& call) {
  kernels::AttendParams p = size_params(a, shape);
  set_arrays(p, a.q, call.arrays);
  set_cache(p, call.cache);
  p.shard = call.arrays.keys;
  p.batch.key_pitch = call.cache.pages ? 0 : call.cache.pitch;
  p.state = slot_of(a.state, p.tokens * p.heads, p.value_dim);
  p.resume = a.resume;
  return p;
}

}  // namespace

void ServingOps::attend_state(const AttendState& given, Stream stream) const {
  const trace::Range range("longspan attend_state");
  const DeviceGuard guard(impl_->gpu());
  const AttendState a = with_batch_rows(given);
  const PagedShape shape = shape_of(a);
  const Checked call = check_attend(a, shape, impl_->device());
  const CacheView& cache = call.cache;
  const kernels::Backend& backend = *impl_->backend;
  check_workspace(a.workspace, lay_out(backend, a, shape, nullptr).bytes);
  const CallWorkspace memory = lay_out(backend, a, shape, a.workspace.data);
  kernels::AttendParams p = attend_params(a, shape, call);
  p.scratch = memory.scratch;
  p.scratch_bytes = memory.scratch_bytes;
  backend.check(p);
  if (impl_->on_host()) impl_->check_sequences(p, cache, a.max_kv_len);
  if (cache.packed && p.batch.size > 1) {
    backend.key_starts({p.shard, p.batch.kv_len, cache.pitch, p.batch.size, memory.key_start},
                       stream);
    p.batch.key_start = memory.key_start;
  }
  backend.attend(p, stream);
}

void ServingOps::finish_state(const FinishState& a, Stream stream) const {
  const trace::Range range("longspan finish_state");
  const DeviceGuard guard(impl_->gpu());
  FinishState flat = a;
  flat.out = batch_rows(a.out, "out");
  flat.lse = batch_rows(a.lse, "lse");
  kernels::MergeParams p;
  p.batch = check_finish(flat, impl_->device());
  p.tokens = count_rows(flat.out);
  p.heads = static_cast<int>(flat.out.shape[flat.out.dims - 2]);
  p.states = slot_of(a.state, p.tokens * p.heads, flat.out.shape[flat.out.dims - 1]);
  p.sinks = floats_of(a.sinks, "sinks", p.heads, impl_->device());
  p.dtype = flat.out.dtype;
  p.out_scale = {static_cast<const float*>(a.out_scale.data)};
  p.out = token_rows_of(flat.out);
  p.lse = token_lse_of(flat.lse);
  impl_->backend->merge(p, stream);
}

void ServingOps::export_state(const ExportState& a, Stream stream) const {
  const trace::Range range("longspan export_state");
  const DeviceGuard guard(impl_->gpu());
  const std::int64_t dim = a.value_dim > 0 ? a.value_dim : a.output.shape[3];
  kernels::ExportSegmentsParams p;
  p.batch = check_export(a, dim, impl_->device());
  p.tokens = a.output.shape[0];
  p.heads = static_cast<int>(a.output.shape[1]);
  p.parts.count = 1;
  p.states = slot_of(a.state, p.tokens * p.heads, dim);
  p.to = {static_cast<float*>(a.output.data), static_cast<float*>(a.max.data),
          static_cast<float*>(a.expsum.data), 1, static_cast<int>(a.output.stride[2])};
  impl_->backend->export_segments(p, stream);
}

std::size_t ServingOps::state_bytes(std::int64_t tokens, std::int64_t heads,
                                    std::int64_t value_dim) {
  return check_state_size(tokens, heads, value_dim);
}

std::size_t ServingOps::workspace_bytes(const AttendState& given) const {
  const DeviceGuard guard(impl_->gpu());
  const AttendState a = with_flat_shape(given);
  return lay_out(*impl_->backend, a, shape_of(a), nullptr).bytes;
}

void ServingOps::check(const AttendState& given, Stream stream) const {
  const DeviceGuard guard(impl_->gpu());
  const AttendState a = with_batch_rows(given);
  const PagedShape shape = shape_of(a);
  const Checked call = check_attend(a, shape, impl_->device());
  const kernels::AttendParams p = attend_params(a, shape, call);
  // The table of keys first, since it determines the others; on a GPU it cannot be read here.
  if (impl_->on_host()) return impl_->check_sequences(p, call.cache, a.max_kv_len);
  impl_->check_and_wait(checks_of(p, call.cache.keys), stream);
}

}  // namespace longspan

// Builds the calls of serving engines from the backend's functions.
//
//     segmented_attention   attend -> (export) -> merge
//     context_attention     the sequence cut at its context, as between two ranks: attend the
//                           cache, attend the new rows, merge
//     the others            one kernel each
#include "longspan/serving.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "src/arguments/check_serving.hpp"
#include "src/arguments/faults.hpp"
#include "src/arguments/validate.hpp"
#include "src/base/device_guard.hpp"
#include "src/base/trace.hpp"
#include "src/serving/serving_impl.hpp"
#include "src/serving/workspace.hpp"

namespace longspan {
namespace {

/// The number of keys that fit a row of the block table.
std::int64_t most_keys(const PagedAttention& a) {
  static constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t page = a.k_cache.shape[a.k_cache.dims == 5 ? 3 : 1];
  const auto in_range = [](std::int64_t n) { return std::clamp<std::int64_t>(n, 0, kMost); };
  const std::int64_t columns = a.block_table.dims == 2 ? a.block_table.shape[1] : 0;
  return in_range(in_range(columns) * in_range(page));
}

/// Describes the attention of a call by its sizes only.
kernels::AttendParams size_params(const PagedAttention& a, const PagedShape& shape) {
  kernels::AttendParams p = size_params(a, a.k_cache.dtype, shape);
  if (a.max_kv_len == 0) p.max_kv_len = most_keys(a);
  return p;
}

/// Describes the attention of a call, without the workspace.
kernels::AttendParams attend_params(const PagedAttention& a, const PagedShape& shape,
                                    const RunArrays& arrays) {
  kernels::AttendParams p = size_params(a, shape);
  set_arrays(p, a.q, arrays);
  return p;
}

/// Describes the parts of a context: the cache as rank 0 of 2, the new rows as rank 1. `all` is the
/// attention of the call.
kernels::ContextParams context_params(const ContextAttention& a, const PagedShape& shape,
                                      const kernels::AttendParams& all, const std::int64_t* ranges,
                                      std::int64_t* key_start) {
  kernels::ContextParams p;
  p.key_start = key_start;
  p.cached = all;
  p.cached.batch.skip_decode = a.skip_decode;
  if (a.attention.max_kv_len == 0)
    p.cached.max_kv_len += shape.tokens;  // new keys need no entry in the table
  p.cached.shard = Shard::ranges(0, 0, 2, ranges);
  p.fresh = p.cached;
  p.fresh.shard.rank = 1;
  p.fresh.slot = 1;
  p.fresh.kv_dtype = shape.dtype;
  p.fresh.k_scale = p.fresh.v_scale = {};
  p.fresh.batch.key_start = key_start;
  return p;
}

/// Whether the cache holds the keys of the new tokens too.
bool keys_are_cached(const ContextAttention& a) {
  const bool has_k = a.k.dims > 0, has_v = a.v.dims > 0;
  require(has_k == has_v,
          "{} is given without {}; give both, or neither where the cache holds all keys",
          has_k ? "k" : "v", has_k ? "v" : "k");
  return !has_k;
}
SegmentedAttention of_cache_alone(const ContextAttention& a) {
  return {.attention = a.attention, .skip_decode = a.skip_decode};
}

void set_new_rows(kernels::AttendParams& p, const ContextAttention& a) {
  static_cast<kernels::Rows&>(p.k) = rows_of(a.k);
  static_cast<kernels::Rows&>(p.v) = rows_of(a.v);
}

kernels::MergeParams merge_params(const PagedAttention& a, const RunArrays& arrays,
                                  const kernels::AttendParams& attended) {
  kernels::MergeParams p;
  p.states = attended.state;
  p.heads = attended.heads;
  p.sinks = arrays.sinks;
  p.batch = attended.batch;
  p.tokens = attended.tokens;
  p.dtype = a.out.dtype;
  p.out_scale = {arrays.out_scale};
  p.out = rows_of(a.out);
  p.lse = lse_of(a.lse.tensor);
  return p;
}

/// The floats of a checked array.
const float* floats(const Tensor& t) { return static_cast<const float*>(t.data); }

/// Sets what both merges of finished outputs share: the location of the result, and how parts are
/// read.
template <class Args>
kernels::MergeOutputsParams merged_outputs(const Args& a, LogBase base) {
  kernels::MergeOutputsParams p;
  p.base = base;
  p.nan_is_empty = a.nan_is_empty;
  p.tokens = a.out.shape[0];
  p.heads = static_cast<int>(a.out.shape[1]);
  p.dim = static_cast<int>(a.out.shape[2]);
  p.dtype = a.out.dtype;
  p.out_scale = {floats(a.out_scale)};
  p.out = rows_of(a.out);
  p.lse = lse_of(a.out_lse.tensor);
  return p;
}

int count_of(const Segments& s) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  return s.output.dims == 4
             ? static_cast<int>(std::clamp<std::int64_t>(s.output.shape[2], 0, kMost))
             : 0;
}

kernels::KeyParts parts_of(const Segments& s) { return {count_of(s), s.keys, s.tile}; }

kernels::SegmentView view_of(const Segments& s) {
  return {static_cast<float*>(s.output.data), static_cast<float*>(s.max.data),
          static_cast<float*>(s.expsum.data), count_of(s), static_cast<int>(s.output.stride[2])};
}

kernels::AppendParams append_params(const AppendKv& a, const Checked& call) {
  const CacheView& cache = call.cache;
  kernels::AppendParams p;
  p.dtype = a.k.dtype;
  p.kv_dtype = a.of_kv();
  p.tokens = a.k.shape[0];
  p.kv_heads = static_cast<int>(a.k.shape[1]);
  p.head_dim = static_cast<int>(a.k.shape[2]);
  p.value_dim = is_latent_row(p.kv_dtype)
                    ? row_format_of(p.kv_dtype).value_dim
                    : static_cast<int>(a.v_cache.shape[a.k_cache.dims == 5 ? 2 : 3]);
  p.new_k = rows_of(a.k);
  if (a.v) p.new_v = rows_of(a.v);
  set_cache(p, cache);
  p.slots = static_cast<const std::int64_t*>(a.slots.data);
  p.k_scale = call.arrays.k_scale;
  p.v_scale = call.arrays.v_scale;
  return p;
}

kernels::CheckParams append_checks(const AppendKv& a, const CacheView& cache) {
  kernels::CheckParams p;
  p.geometry.tokens = a.k.shape[0];
  p.pages = cache.pages;
  p.is_append = true;
  p.slots = static_cast<const std::int64_t*>(a.slots.data);
  p.slot_count = cache.keys;
  return p;
}

kernels::CheckParams reduce_checks(const ReduceSegments& a, const kernels::Batch& batch) {
  kernels::CheckParams p;
  p.geometry.tokens = a.out.shape[0];
  p.geometry.batch = batch;
  p.parts = parts_of(a.segments);
  return p;
}

/// Checks starts and lengths, on the host only, before they are used to count; no keys are read.
void check_batch_lengths(const kernels::Batch& batch, std::int64_t tokens) {
  CacheView any;
  any.packed = true;
  any.keys = std::numeric_limits<std::int64_t>::max();
  check_lengths(batch, tokens, {}, any, 0);
}

CallWorkspace lay_out(const kernels::Backend& backend, const SegmentedAttention& a,
                      const PagedShape& shape, void* base) {
  check_sizes(a.attention.q, shape, std::max(1, count_of(a.segments)));
  kernels::AttendParams p = size_params(a.attention, shape);
  p.parts = parts_of(a.segments);
  p.batch.skip_decode = a.skip_decode;
  return CallWorkspace::lay_out(base, std::max(1, p.parts.count), p.tokens * p.heads, p.value_dim,
                                backend.attend_scratch(p), 0);
}

CallWorkspace lay_out(const kernels::Backend& backend, const ContextAttention& a,
                      const PagedShape& shape, void* base) {
  check_sizes(a.attention.q, shape, 2);
  const kernels::ContextParams p =
      context_params(a, shape, size_params(a.attention, shape), nullptr, nullptr);
  const std::size_t scratch =
      std::max(backend.attend_scratch(p.cached), backend.attend_scratch(p.fresh));
  return CallWorkspace::lay_out(base, 2, p.cached.tokens * p.cached.heads, p.cached.value_dim,
                                scratch, p.cached.batch.size, backend.context_room(p.cached));
}

template <class Args>
CallWorkspace take_workspace(const kernels::Backend& backend, const Args& a,
                             const PagedShape& shape) {
  check_workspace(a.attention.workspace, lay_out(backend, a, shape, nullptr).bytes);
  return lay_out(backend, a, shape, a.attention.workspace.data);
}

std::size_t words_of_claims(const CacheView& cache) {
  return static_cast<std::size_t>(cache.keys / 32 + 1);
}

}  // namespace

ServingOps::Impl::Impl(Device device, int threads, int gpu) : alone(self(device, gpu)) {
  check_threads(threads);
  const DeviceGuard guard(alone.gpu());
  backend = device == Device::cuda ? kernels::cuda_backend() : kernels::host_backend(threads);
}

void ServingOps::Impl::check_and_wait(kernels::CheckParams p, Stream stream) const {
  FaultBox faults(device());
  p.report = faults.report();
  backend->check_arrays(p, stream);
  comm::transport_of(alone).wait(stream, "check of arrays");
  faults.read();
}

void ServingOps::Impl::check_at_once(kernels::CheckParams p) const {
  kernels::FaultReport found;
  p.report = &found;
  backend->check_arrays(p, {});
  throw_fault(found);
}

void ServingOps::Impl::check_sequences(const kernels::AttendParams& p, const CacheView& cache,
                                       std::int64_t max_kv_len) const {
  check_lengths(p.batch, p.tokens, p.shard, cache, max_kv_len);
  check_at_once(checks_of(p, cache.keys));
}

ServingOps::ServingOps(Device device, int threads, int gpu)
    : impl_(std::make_unique<Impl>(device, threads, gpu)) {}
ServingOps::~ServingOps() = default;
ServingOps::ServingOps(ServingOps&&) noexcept = default;
ServingOps& ServingOps::operator=(ServingOps&&) noexcept = default;

void ServingOps::merge_attn_states(const MergeAttnStates& a, LogBase base, Stream stream) const {
  const trace::Range range("longspan merge_attn_states");
  const DeviceGuard guard(impl_->gpu());
  check_merge(a, impl_->device());
  kernels::MergeOutputsParams p = merged_outputs(a, base);
  p.in_dtype[0] = a.prefix_out.dtype;
  p.in_dtype[1] = a.suffix_out.dtype;
  p.in_scale[0] = floats(a.prefix_scale);
  p.in_scale[1] = floats(a.suffix_scale);
  p.in[0] = rows_of(a.prefix_out);
  p.in[1] = rows_of(a.suffix_out);
  p.in_lse[0] = lse_of(a.prefix_lse.tensor);
  p.in_lse[1] = lse_of(a.suffix_lse.tensor);
  p.with_prefix = a.prefill_tokens_with_context.value_or(-1);
  impl_->backend->merge_outputs(p, stream);
}

void ServingOps::merge_states(const MergeStates& a, LogBase base, Stream stream) const {
  const trace::Range range("longspan merge_states");
  const DeviceGuard guard(impl_->gpu());
  check_merge(a, impl_->device());
  kernels::MergeOutputsParams p = merged_outputs(a, base);
  p.parts = static_cast<int>(a.parts.shape[0]);
  p.in_dtype[0] = p.in_dtype[1] = a.parts.dtype;
  p.in_scale[0] = p.in_scale[1] = floats(a.part_scales);
  p.in[0] = p.in[1] = rows_of(a.parts);
  p.in_lse[0] = p.in_lse[1] = lse_of(a.lses.tensor);
  p.part_stride = a.parts.stride[0];
  p.lse_part_stride = a.lses.tensor.stride[0];
  if (p.parts == 2) {
    p.in[1].data = static_cast<std::byte*>(p.in[0].data) +
                   p.part_stride * static_cast<std::int64_t>(size_of(a.parts.dtype));
    p.in_lse[1].data += p.lse_part_stride;
    if (a.part_scales) ++p.in_scale[1];
  }
  impl_->backend->merge_outputs(p, stream);
}

void ServingOps::Impl::attend_pages(const SegmentedAttention& a, const Tensor& out_scale_inv,
                                    Stream stream) const {
  const PagedAttention& paged = a.attention;
  const PagedShape shape = shape_of(paged);
  const bool hand_out = a.segments.output.dims > 0;
  const auto [cache, arrays] = check_paged(paged, shape, !hand_out, device());
  check_output(paged, out_scale_inv, shape, device());
  if (hand_out) check_handed_out(a, shape, device());

  kernels::AttendParams p = attend_params(paged, shape, arrays);
  set_cache(p, cache);
  p.parts = parts_of(a.segments);
  p.batch.skip_decode = a.skip_decode;
  const CallWorkspace memory = take_workspace(*backend, a, shape);
  p.state = {memory.states, p.tokens * p.heads, p.value_dim, std::max(1, p.parts.count)};
  p.scratch = memory.scratch;
  p.scratch_bytes = memory.scratch_bytes;
  backend->check(p);
  if (on_host()) check_sequences(p, cache, paged.max_kv_len);

  const bool finish = paged.out.dims > 0;
  kernels::MergeParams merge = merge_params(paged, arrays, p);
  if (out_scale_inv) merge.out_scale = {floats(out_scale_inv), true};
  if (!hand_out && finish) {
    backend->attend(p, merge, stream);
    return;
  }
  backend->attend(p, stream);
  if (hand_out)
    backend->export_segments(
        {p.state, p.parts, p.batch, p.shard, p.tokens, p.heads, arrays.sinks, view_of(a.segments)},
        stream);
  if (finish) backend->merge(merge, stream);
}

void ServingOps::segmented_attention(const SegmentedAttention& a, Stream stream) const {
  const trace::Range range("longspan segmented_attention");
  const DeviceGuard guard(impl_->gpu());
  impl_->attend_pages(a, {}, stream);
}

void ServingOps::reduce_segments(const ReduceSegments& a, Stream stream) const {
  const trace::Range range("longspan reduce_segments");
  const DeviceGuard guard(impl_->gpu());
  kernels::ReduceSegmentsParams p;
  p.batch = check_reduce(a, impl_->device());
  p.from = view_of(a.segments);
  p.parts = parts_of(a.segments);
  p.tokens = a.out.shape[0];
  p.heads = static_cast<int>(a.out.shape[1]);
  p.dim = static_cast<int>(a.out.shape[2]);
  p.dtype = a.out.dtype;
  p.out_scale = {floats(a.out_scale)};
  p.out = rows_of(a.out);
  p.lse = lse_of(a.lse.tensor);
  if (impl_->on_host()) {
    check_batch_lengths(p.batch, p.tokens);
    impl_->check_at_once(reduce_checks(a, p.batch));
  }
  impl_->backend->reduce_segments(p, stream);
}

void ServingOps::context_attention(const ContextAttention& a, Stream stream) const {
  const trace::Range range("longspan context_attention");
  const DeviceGuard guard(impl_->gpu());
  if (keys_are_cached(a)) return impl_->attend_pages(of_cache_alone(a), a.out_scale_inv, stream);
  const PagedAttention& paged = a.attention;
  const PagedShape shape = shape_of(paged);
  const auto [cache, arrays] = check_paged(paged, shape, true, impl_->device());
  check_new_keys(a, shape, impl_->device());

  const CallWorkspace memory = take_workspace(*impl_->backend, a, shape);
  kernels::ContextParams context =
      context_params(a, shape, attend_params(paged, shape, arrays), memory.ranges,
                     arrays.batch > 1 ? memory.key_start : nullptr);
  kernels::AttendParams &cached = context.cached, &fresh = context.fresh;
  set_cache(cached, cache);
  set_new_rows(fresh, a);
  for (kernels::AttendParams* p : {&cached, &fresh}) {
    p->state = {memory.states, p->tokens * p->heads, p->value_dim, 2};
    p->scratch = memory.scratch;
    p->scratch_bytes = memory.scratch_bytes;
    impl_->backend->check(*p);
  }
  if (impl_->on_host()) check_batch_lengths(cached.batch, cached.tokens);
  impl_->backend->cut_context({cached.batch, cached.tokens, memory.ranges}, stream);
  if (impl_->on_host()) {
    impl_->check_sequences(cached, cache, paged.max_kv_len);
    check_new_lengths(cached.batch, cached.tokens);
  }

  context.merge = merge_params(paged, arrays, cached);
  if (a.out_scale_inv) context.merge.out_scale = {floats(a.out_scale_inv), true};
  context.room = memory.room;
  context.room_bytes = memory.room_bytes;
  impl_->backend->attend_context(context, stream);
}

void ServingOps::append_kv(const AppendKv& a, Stream stream) const {
  const trace::Range range("longspan append_kv");
  const DeviceGuard guard(impl_->gpu());
  const Checked call = check_append(a, impl_->device());
  if (impl_->on_host()) {
    const std::lock_guard lock(impl_->claims);
    impl_->claimed.assign(words_of_claims(call.cache), 0);
    kernels::CheckParams checks = append_checks(a, call.cache);
    checks.claimed = impl_->claimed.data();
    impl_->check_at_once(checks);
  }
  impl_->backend->append(append_params(a, call), stream);
}

std::size_t ServingOps::workspace_bytes(const SegmentedAttention& a) const {
  const DeviceGuard guard(impl_->gpu());
  return lay_out(*impl_->backend, a, shape_of(a.attention), nullptr).bytes;
}

std::size_t ServingOps::workspace_bytes(const ContextAttention& a) const {
  if (keys_are_cached(a)) return workspace_bytes(of_cache_alone(a));
  const DeviceGuard guard(impl_->gpu());
  return lay_out(*impl_->backend, a, shape_of(a.attention), nullptr).bytes;
}

void ServingOps::check(const PagedAttention& a, Stream stream) const {
  const DeviceGuard guard(impl_->gpu());
  const PagedShape shape = shape_of(a);
  const auto [cache, arrays] = check_paged(a, shape, false, impl_->device());
  kernels::AttendParams p = attend_params(a, shape, arrays);
  set_cache(p, cache);
  impl_->check_and_wait(checks_of(p, cache.keys), stream);
}

void ServingOps::check(const SegmentedAttention& a, Stream stream) const {
  const DeviceGuard guard(impl_->gpu());
  const PagedShape shape = shape_of(a.attention);
  const auto [cache, arrays] = check_paged(a.attention, shape, false, impl_->device());
  if (a.segments.output.dims > 0) check_handed_out(a, shape, impl_->device());
  kernels::AttendParams p = attend_params(a.attention, shape, arrays);
  set_cache(p, cache);
  p.parts = parts_of(a.segments);
  impl_->check_and_wait(checks_of(p, cache.keys), stream);
}

void ServingOps::check(const ReduceSegments& a, Stream stream) const {
  const DeviceGuard guard(impl_->gpu());
  const kernels::Batch batch = check_reduce(a, impl_->device());
  impl_->check_and_wait(reduce_checks(a, batch), stream);
}

void ServingOps::check(const ContextAttention& a, Stream stream) const {
  if (keys_are_cached(a)) return check(a.attention, stream);
  const DeviceGuard guard(impl_->gpu());
  const PagedShape shape = shape_of(a.attention);
  const auto [cache, arrays] = check_paged(a.attention, shape, false, impl_->device());
  const CallWorkspace memory = take_workspace(*impl_->backend, a, shape);
  kernels::AttendParams p =
      context_params(a, shape, attend_params(a.attention, shape, arrays), memory.ranges, nullptr)
          .cached;
  set_cache(p, cache);
  if (impl_->on_host()) check_batch_lengths(p.batch, p.tokens);
  impl_->backend->cut_context({p.batch, p.tokens, memory.ranges}, stream);
  impl_->check_and_wait(checks_of(p, cache.keys), stream);
}

void ServingOps::check(const AppendKv& a, Stream stream) const {
  const DeviceGuard guard(impl_->gpu());
  const CacheView cache = check_append(a, impl_->device()).cache;
  kernels::CheckParams checks = append_checks(a, cache);
  const std::vector<std::uint32_t> none(words_of_claims(cache), 0);
  Buffer claimed(impl_->device(), none.size() * sizeof(std::uint32_t));
  claimed.upload(none.data());
  checks.claimed = static_cast<std::uint32_t*>(claimed.data());
  impl_->check_and_wait(checks, stream);
}

}  // namespace longspan

// The implementation of ServingOps, and what its calls share.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/backend.hpp"
#include "longspan/communicator.hpp"
#include "longspan/serving.hpp"
#include "src/arguments/attend_params.hpp"
#include "src/arguments/check_serving.hpp"

namespace longspan {

struct ServingOps::Impl {
  Communicator alone;  // for waits with its deadline
  std::unique_ptr<kernels::Backend> backend;
  std::mutex claims;                   // calls are const, and may come from several threads
  std::vector<std::uint32_t> claimed;  // host: slots that an append writes; grows to the cache's
                                       // size once

  Impl(Device device, int threads, int gpu);

  Device device() const { return alone.device(); }
  int gpu() const { return alone.gpu(); }
  bool on_host() const { return device() == Device::host; }

  /// Checks the arrays on their device, and waits.
  void check_and_wait(kernels::CheckParams p, Stream stream) const;
  /// Checks them on the host before anything is written.
  void check_at_once(kernels::CheckParams p) const;
  /// Attends the keys of a paged cache alone. `out_scale_inv` may be missing.
  void attend_pages(const SegmentedAttention& a, const Tensor& out_scale_inv, Stream stream) const;
  void check_sequences(const kernels::AttendParams& p, const CacheView& cache,
                       std::int64_t max_kv_len) const;
};

/// Describes the attention of a call by its sizes only, which determine the workspace. max_kv_len
/// is left out if the call leaves it open.
template <class Args>
kernels::AttendParams size_params(const Args& a, DType kv_dtype, const PagedShape& shape) {
  kernels::AttendParams p;
  p.dtype = shape.dtype;
  p.q_dtype = a.q.dtype;
  p.kv_dtype = kv_dtype;
  p.tokens = shape.tokens;
  p.heads = shape.heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim;
  p.value_dim = shape.value_dim;
  p.batch.size = batch_of(a.kv_len);
  set_options(p, a);
  p.max_query_len = a.max_query_len;
  p.max_kv_len = a.max_kv_len;
  return p;
}

}  // namespace longspan

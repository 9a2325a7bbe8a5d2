// Queues attention: the family that serves a kind of sequences has its own launch. Short and long
// sequences use different kernels, and each launch serves its own kind and skips the other, so the
// host need not know lengths that are on the device.
#include "kernels/cuda/dispatch/attend.hpp"

#include <algorithm>
#include <string>

#include "kernels/cuda/cache/gather.hpp"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/combine/resume.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/overlap.hpp"
#include "kernels/cuda/decode/decode_tensor_maps.hpp"
#include "kernels/cuda/dispatch/attend_finished.hpp"
#include "kernels/cuda/dispatch/families.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "kernels/cuda/portable/attend_tf32.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {
namespace {

KernelShape shape_of(const Instance& found, const AttendParams& p, Lengths lengths) {
  const bool is_long = lengths == Lengths::only_long, bf16 = p.dtype == DType::bf16;
  const int dim = found.dim;
  const Loader loader = found.loader;
  switch (found.family) {
    case Family::fp32:
      return attend_fp32(dim, loader);
    case Family::tf32:
      return attend_fp32_tf32(dim);
    case Family::portable: {
      const bool fixed_order = p.invariant || !is_long;  // short queries always are
      return bf16 ? portable_bf16(dim, fixed_order, loader)
                  : portable_fp16(dim, fixed_order, loader);
    }
    case Family::mla:
    case Family::mla_in_order:
      return bf16 ? mla_bf16(found.family) : mla_fp16(found.family);
    default:
      if (loader == Loader::any8)
        return p.kv_dtype == DType::e5m2 ? decode_e5m2(dim, found.rows)
                                         : decode_e4m3(dim, found.rows);
      return bf16 ? decode_bf16(dim, found.rows, loader) : decode_fp16(dim, found.rows, loader);
  }
}

int blocks_of(const KernelShape& shape, int allowed) {
  LONGSPAN_CUDA(
      cudaFuncSetAttribute(shape.kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, allowed));
  int blocks = 0;
  LONGSPAN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, shape.kernel(), shape.threads, static_cast<std::size_t>(shape.shared_bytes)));
  return blocks;
}

void check_scratch(std::size_t needed, std::size_t given) {
  if (needed > given)
    throw InputError("attend needs " + std::to_string(needed) + " bytes of scratch and was given " +
                     std::to_string(given) + ": plan for these tokens, sequences and lengths");
}

/// Queues only the attention: splits stay as they are.
void queue_splits(const AttendParams& p, KernelLaunch& launch, const Gpu& gpu,
                  cudaStream_t stream) {
  check_scratch(launch.bytes, p.scratch_bytes);
  if (launch.plan.works == 0) return;
  if (launch.plan.ticket != nullptr && launch.plan.ticket != p.ticket)
    LONGSPAN_CUDA(cudaMemsetAsync(launch.plan.ticket, 0, sizeof(int), stream));
  const KernelShape& shape = launch.shape;
  LaunchConfig how{dim3(launch.blocks), dim3(shape.threads), stream,
                   static_cast<std::size_t>(launch.shared_bytes)};
  if (shape.decode == nullptr) return launch_kernel(shape.tiled, how, p, launch.plan);
  KvTensorMaps maps{};
  if (gpu.sm90_code)
    maps = shape.maps != nullptr ? shape.maps(p) : kv_tensor_maps(p, shape.box_dim, shape.box_keys);
  how.overlaps = gpu.sm90_code;
  launch_kernel(shape.decode, how, p, launch.plan, maps);
}

/// Queues the attention and the fold of its splits. `finished` is the result of rows that have no
/// other state; null: their states are written.
void queue(const AttendParams& p, KernelLaunch& launch, const MergeParams* finished, const Gpu& gpu,
           cudaStream_t stream) {
  queue_splits(p, launch, gpu, stream);
  if (launch.plan.works == 0) return;
  if (finished != nullptr)
    fold_parts_finished(p, launch.plan, *finished, stream);
  else if (launch.plan.splits > 1 && !p.parts)
    fold_parts(p, launch.plan, stream);
}

/// Queues the attention of the sequences of one kind, into states.
void attend_kind(const AttendParams& p, Lengths lengths, const Gpu& gpu, cudaStream_t stream) {
  if (!may_hold(p, lengths)) return;
  const Kind kind = kind_of(p, lengths, gpu);
  serving(p, kind).attend(p, kind, nullptr, {stream});
}

/// Queues the short sequences that a batch may have besides long ones, up to the rows of the
/// result.
void finish_short(const AttendParams& p, const MergeParams& m, const Gpu& gpu,
                  cudaStream_t stream) {
  if (!may_hold(p, Lengths::only_short)) return;
  const Kind kind = kind_of(p, kinds(p)[0], gpu);
  const CudaFamily& family = serving(p, kind);
  if (family.finishes(p, m) != Ends::in_states && family.attend(p, kind, &m, {stream})) return;
  family.attend(p, kind, nullptr, {stream});
  merge_short(m, kShortQuery, stream);
}

/// Queues a call whose long sequences end in the result by themselves; returns false if they do
/// not, or there are none.
bool finish_long(const AttendParams& p, const MergeParams& m, const Gpu& gpu, cudaStream_t stream) {
  if (!may_hold(p, Lengths::only_long)) return false;
  const Kind kind = kind_of(p, Lengths::only_long, gpu);
  const CudaFamily& family = serving(p, kind);
  if (family.finishes(p, m) != Ends::itself) return false;
  finish_short(p, m, gpu, stream);
  return family.attend(p, kind, &m, {stream});
}

sm90::Finished finished_of(const MergeParams& m) {
  return {m.out, m.lse, m.sinks, m.headers, m.places != nullptr ? *m.places : RowPlaces{}};
}

}  // namespace

Gpu current_gpu() {
  int device = 0;
  LONGSPAN_CUDA(cudaGetDevice(&device));
  const auto value_of = [device](cudaDeviceAttr attribute) {
    int value = 0;
    LONGSPAN_CUDA(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
  };
  // All kernels are built for the same architectures, so one of decode is representative.
  const int ptx_version = ptx_version_of(decode_bf16(128, 1, Loader::plain).kernel());
  return {.multiprocessors = value_of(cudaDevAttrMultiProcessorCount),
          .shared_bytes = value_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          .block_bytes = value_of(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .block_own_bytes = value_of(cudaDevAttrReservedSharedMemoryPerBlock),
          .sm90_code = is_code_of_sm90(ptx_version),
          .hopper_code = sm90::runs_here(),
          .shape = shape_of,
          .blocks = blocks_of};
}

bool attend_hopper(const AttendParams& p, const Kind&, const MergeParams* result, Stream stream) {
  const sm90::Finished finished = result != nullptr ? finished_of(*result) : sm90::Finished{};
  sm90::attend(p, finished, kShortQuery + 1, static_cast<cudaStream_t>(stream.handle));
  return true;
}

bool attend_planned(Family family, const AttendParams& p, const Kind& kind,
                    const MergeParams* result, Stream to) {
  const auto stream = static_cast<cudaStream_t>(to.handle);
  KernelLaunch launch = make_launch(family, p, kind);
  if (result != nullptr && launch.plan.splits == 1) return false;
  const std::size_t aside = bytes_aside(p, launch);
  if (aside == 0) {
    queue(p, launch, result, kind.gpu, stream);
    return true;
  }
  check_scratch(aside + launch.bytes, p.scratch_bytes);
  AttendParams own = p;
  own.resume = false;
  own.state = states_aside(p, kind.lengths, p.scratch);
  own.slot = 0;
  own.scratch = p.scratch + aside;
  own.scratch_bytes = p.scratch_bytes - aside;
  launch = make_launch(family, own, kind);
  queue(own, launch, nullptr, kind.gpu, stream);
  fold_onto(p, kind.lengths, own.state, stream);
  return true;
}

void attend(const AttendParams& p, const Gpu& gpu, cudaStream_t stream) {
  for (const Lengths lengths : kinds(p)) attend_kind(p, lengths, gpu, stream);
}

bool attend_gathered(const GatheredParams& g, const Gpu& gpu, cudaStream_t stream) {
  MergeParams m = g.merge;
  m.states.slots = 1;  // for the short sequences, whose keys are now in one piece
  AttendParams p = g.attend;
  const bool paged16 = p.pages && p.kv_dtype == p.dtype && p.q_dtype == p.dtype;
  p.pages = {};
  p.k = p.v = KvRows(g.room, std::int64_t{p.kv_heads} * p.head_dim, p.head_dim);
  if (!paged16 || p.invariant || p.sees_prefix() || p.queries.ranks > 1 ||
      gather_capacity(p, g.room_bytes) == 0 || !may_hold(p, Lengths::only_long) ||
      serving(p, kind_of(p, Lengths::only_long, gpu)).finishes(p, m) != Ends::itself)
    return false;
  return finish_long(gather_keys(g, stream), m, gpu, stream);
}

bool is_decode(const AttendParams& p) {
  return !p.resume && !p.sees_prefix() && !p.parts && !p.batch.skip_decode &&
         may_hold(p, Lengths::only_short) && !may_hold(p, Lengths::only_long);
}

bool writes_new_keys(const AttendParams& p, const Gpu& gpu) {
  if (!is_decode(p)) return false;
  const CudaFamily& family = serving(p, kind_of(p, Lengths::only_short, gpu));
  return family.writes_new_keys != nullptr && family.writes_new_keys(p);
}

bool attend_finished(const AttendParams& p, const MergeParams& m, const Gpu& gpu,
                     cudaStream_t stream) {
  // If rows start from a state, it covers the other ranks' keys.
  const bool all_keys = p.shard.ranks == 1 || p.resume;
  const bool whole = m.states.slots == 1 && m.rows == nullptr && all_keys;
  if (!whole) return false;
  if (!is_decode(p)) return finish_long(p, m, gpu, stream);
  const Kind kind = kind_of(p, Lengths::only_short, gpu);
  const CudaFamily& family = serving(p, kind);
  return family.finishes(p, m) != Ends::in_states && family.attend(p, kind, &m, {stream});
}

bool takes_arrivals(const AttendParams& p, const MergeParams& m, const Gpu& gpu) {
  static_assert(KeyArrivals::kLeastRows == kShortQuery + 1);
  if (p.arrivals == nullptr || p.sees_prefix() || p.shard.ranks != 1 || m.states.slots != 1 ||
      m.rows != nullptr || !may_hold(p, Lengths::only_long) || may_hold(p, Lengths::only_short))
    return false;
  const CudaFamily& family = serving(p, kind_of(p, Lengths::only_long, gpu));
  return family.takes_arrivals != nullptr && family.takes_arrivals(p) &&
         family.finishes(p, m) == Ends::itself;
}

bool attend_exchanged(const AttendParams& p, const ExchangeParams& e, const Gpu& gpu,
                      cudaStream_t stream) {
  if (!is_decode(p) || e.merge.states.rows != p.tokens * p.heads || push_of(e) != Push::one_trip)
    return false;
  const Kind kind = kind_of(p, Lengths::only_short, gpu);
  KernelLaunch launch = make_launch(serving(p, kind).id, p, kind);
  if (launch.plan.splits == 1) return false;
  queue_splits(p, launch, gpu, stream);
  exchange_parts(launch.plan, e, gpu.multiprocessors, stream);
  return true;
}

}  // namespace longspan::kernels::cuda

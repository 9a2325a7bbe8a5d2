// How a call of attend becomes launches: short and long sequences take different kernels, each
// launch serves its own kind and skips the other, and nothing needs to be known of lengths that
// are still on the device.
#include "kernels/cuda/attend.hpp"

#include <algorithm>
#include <string>

#include "kernels/cuda/attend_sm90.hpp"
#include "kernels/cuda/fixed_order.cuh"
#include "src/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr std::int64_t kMostKeys = std::int64_t{1} << 31;  // of a sequence whose length is unknown
constexpr std::size_t kAlign = 256;

std::size_t align(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// Most query tokens of one sequence of the kind.
std::int64_t most_tokens(const AttendParams& p, Lengths lengths) {
  return lengths == Lengths::only_short ? std::min<std::int64_t>(p.tokens, kShortQuery) : p.tokens;
}

/// Packed rows of a sequence of the kind, were the sequences equal.
std::int64_t mean_rows(const AttendParams& p, Lengths lengths) {
  const std::int64_t tokens = (p.tokens + p.batch.size - 1) / p.batch.size;
  const std::int64_t most = most_tokens(p, lengths);
  return std::min(tokens, most) * (p.heads / p.kv_heads);
}

std::int64_t most_keys(const AttendParams& p) {
  return p.batch.kv_len == nullptr ? p.shard.length : kMostKeys;
}

/// Thread blocks that the GPU holds at a time.
int resident_blocks(const KernelShape& shape, const Gpu& gpu) {
  LONGSPAN_CUDA(cudaFuncSetAttribute(shape.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     shape.shared_bytes));
  int blocks = 0;
  LONGSPAN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, shape.kernel, shape.threads, static_cast<std::size_t>(shape.shared_bytes)));
  return std::max(blocks, 1) * gpu.multiprocessors;
}

/// The power of two that fills the GPU best with `works` pieces each: the smallest within 5 % of
/// the best.
int choose_splits(std::int64_t works, int resident, std::int64_t keys) {
  int best = 1;
  double best_fill = 0;
  for (int splits = 1; splits <= kVirtualRanks; splits *= 2) {
    if (splits > 1 && (works * splits > 4 * resident || splits > segments_of(keys))) break;
    const std::int64_t waves = (works * splits + resident - 1) / resident;
    const double fill =
        static_cast<double>(works * splits) / (static_cast<double>(waves) * resident);
    if (fill > best_fill * 1.05) {
      best_fill = fill;
      best = splits;
    }
  }
  return best;
}

struct Launch {
  KernelShape shape;
  Plan plan;
  int blocks = 0;
  std::size_t bytes = 0;  // of scratch: ticket, stack, parts
};

/// Row tiles of the batch. One sequence: exactly. Several, with lengths on the device: the smaller
/// of two upper bounds. `expected`: tiles that will have work, were the sequences equal.
void plan_tiles(const AttendParams& p, Plan& plan, std::int64_t& expected) {
  const std::int64_t group = p.heads / p.kv_heads, size = p.batch.size;
  const auto tiles_of = [&](std::int64_t rows) {
    return (rows + plan.tile_rows - 1) / plan.tile_rows;
  };
  const std::int64_t packed = p.tokens * group / plan.tile_rows + size;
  const std::int64_t alone = tiles_of(most_tokens(p, plan.lengths) * group);
  if (plan.lengths == Lengths::only_short && size * alone < packed) {
    plan.sequence_tiles = static_cast<int>(alone);
    plan.tiles = static_cast<int>(size * alone);
  } else {
    plan.tiles = static_cast<int>(size == 1 ? std::min(alone, packed) : packed);
  }
  expected = std::min<std::int64_t>(plan.tiles, size * tiles_of(mean_rows(p, plan.lengths)));
}

Launch make_launch(const AttendParams& p, Lengths lengths, const Gpu& gpu) {
  Launch launch{choose_kernel(p, lengths), {}, 0, 0};
  const KernelShape& shape = launch.shape;
  Plan& plan = launch.plan;
  const int resident = resident_blocks(shape, gpu);
  plan.lengths = lengths;
  plan.tile_rows = shape.tile_rows;
  std::int64_t expected = 0;
  plan_tiles(p, plan, expected);
  if (lengths == Lengths::only_short)
    plan.splits = choose_splits(expected * p.kv_heads, resident, most_keys(p));
  plan.works = plan.tiles * p.kv_heads * plan.splits;
  launch.blocks = shape.state_bytes == 0 ? plan.works : std::min(plan.works, resident);

  if (plan.works > launch.blocks) plan.ticket = reinterpret_cast<int*>(p.scratch);
  launch.bytes = kAlign;
  plan.depth = fold_depth(most_keys(p));
  plan.stack = reinterpret_cast<float*>(p.scratch + launch.bytes);
  launch.bytes += align(shape.state_bytes * static_cast<std::size_t>(plan.depth * launch.blocks));
  if (plan.splits > 1) {
    const std::int64_t compact = std::int64_t{p.batch.size} * kShortQuery;
    plan.part_tokens = compact < p.tokens ? kShortQuery : 0;
    plan.parts = {p.scratch + launch.bytes, std::min(compact, p.tokens) * p.heads, p.dim,
                  plan.splits};
    launch.bytes += static_cast<std::size_t>(plan.parts.slot_bytes()) * plan.parts.slots;
  }
  return launch;
}

void queue(const AttendParams& p, Launch& launch, cudaStream_t stream) {
  if (launch.plan.works == 0) return;
  if (launch.plan.ticket != nullptr)
    LONGSPAN_CUDA(cudaMemsetAsync(launch.plan.ticket, 0, sizeof(int), stream));
  void* arguments[] = {const_cast<AttendParams*>(&p), &launch.plan};
  LONGSPAN_CUDA(cudaLaunchKernel(launch.shape.kernel, dim3(launch.blocks),
                                 dim3(launch.shape.threads), arguments,
                                 static_cast<std::size_t>(launch.shape.shared_bytes), stream));
  if (launch.plan.splits > 1) fold_parts(p, launch.plan, stream);
}

}  // namespace

KernelShape choose_kernel(const AttendParams& p, Lengths lengths) {
  if (p.dtype == DType::fp32) return attend_fp32(p.dim);
  const bool bf16 = p.dtype == DType::bf16;
  if (lengths == Lengths::only_long)
    return bf16 ? portable_bf16(p.dim, p.invariant) : portable_fp16(p.dim, p.invariant);
  const std::int64_t rows = mean_rows(p, lengths);
  return bf16 ? decode_bf16(p.dim, rows) : decode_fp16(p.dim, rows);
}

bool may_hold(const AttendParams& p, Lengths lengths) {
  if (p.tokens == 0 || p.batch.size == 0) return false;
  if (p.batch.query_start == nullptr) return serves(lengths, p.tokens);
  return lengths == Lengths::only_short || p.tokens > kShortQuery;
}

std::size_t scratch_bytes(const AttendParams& p, const Gpu& gpu) {
  std::size_t bytes = 0;
  for (const Lengths lengths : {Lengths::only_short, Lengths::only_long})
    if (may_hold(p, lengths)) bytes = std::max(bytes, make_launch(p, lengths, gpu).bytes);
  return bytes;
}

std::size_t scratch_bound(const AttendParams& bounds, const Gpu& gpu) {
  const std::int64_t keys =
      bounds.shard.length > 0 && bounds.batch.kv_len == nullptr ? bounds.shard.length : kMostKeys;
  const auto most = [&](const KernelShape& shape, bool split) {
    const std::size_t resident = static_cast<std::size_t>(resident_blocks(shape, gpu));
    std::size_t bytes = kAlign + align(shape.state_bytes * fold_depth(keys) * resident);
    if (split)  // see choose_splits: at most four pieces a resident block
      bytes +=
          4 * resident * static_cast<std::size_t>(StateSlots::bytes(shape.tile_rows, bounds.dim)) +
          std::size_t{16} * kVirtualRanks;
    return bytes;
  };
  AttendParams few = bounds, many = bounds;  // rows: which decode kernel runs depends on them
  few.tokens = 1;
  many.tokens = std::min<std::int64_t>(bounds.tokens, kShortQuery);
  many.batch.size = 1;
  std::size_t bytes = std::max(most(choose_kernel(few, Lengths::only_short), true),
                               most(choose_kernel(many, Lengths::only_short), true));
  if (bounds.tokens > kShortQuery)
    bytes = std::max(bytes, most(choose_kernel(bounds, Lengths::only_long), false));
  return bytes;
}

void attend(const AttendParams& p, const Gpu& gpu, cudaStream_t stream) {
  for (const Lengths lengths : {Lengths::only_short, Lengths::only_long}) {
    if (!may_hold(p, lengths)) continue;
    // Which kernel takes the sequences of a kind. One with a launch of its own joins here, before
    // the ones that choose_kernel knows; the choice may depend on the layer and the GPU only.
    if (lengths == Lengths::only_long && sm90::accepts(p)) {
      sm90::attend(p, {}, kShortQuery + 1, stream);
      continue;
    }
    Launch launch = make_launch(p, lengths, gpu);
    if (launch.bytes > p.scratch_bytes)
      throw InputError("attend needs " + std::to_string(launch.bytes) +
                       " bytes of scratch and was given " + std::to_string(p.scratch_bytes) +
                       ": plan for these tokens, sequences and lengths");
    queue(p, launch, stream);
  }
}

}  // namespace longspan::kernels::cuda

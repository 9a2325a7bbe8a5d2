// How a call of attend becomes launches: short and long sequences take different kernels, each
// launch serves its own kind and skips the other, and nothing needs to be known of lengths that
// are still on the device.
#include "kernels/cuda/attend.hpp"

#include <algorithm>
#include <string>

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
  std::size_t bytes = 0;
};

Launch make_launch(const AttendParams& p, Lengths lengths, const Gpu& gpu) {
  Launch launch{choose_kernel(p, lengths), {}, 0, 0};
  const KernelShape& shape = launch.shape;
  Plan& plan = launch.plan;
  const int resident = resident_blocks(shape, gpu);
  const std::int64_t rows = most_tokens(p, lengths) * (p.heads / p.kv_heads);
  plan.lengths = lengths;
  plan.tile_rows = shape.tile_rows;
  std::int64_t works = p.kv_heads;
  if (lengths == Lengths::only_short) {
    plan.tiles = static_cast<int>((rows + shape.tile_rows - 1) / shape.tile_rows);
    works *= std::int64_t{plan.tiles} * p.batch.size;
    plan.splits = choose_splits(works, resident, most_keys(p));
    plan.part_tokens = static_cast<int>(most_tokens(p, lengths));
  } else {
    plan.tiles = static_cast<int>(rows / shape.tile_rows) + p.batch.size;
    works *= plan.tiles;
  }
  plan.works = static_cast<int>(works * plan.splits);
  launch.blocks = shape.state_bytes == 0 ? plan.works : std::min(plan.works, resident);

  plan.depth = fold_depth(most_keys(p));
  launch.bytes = align(shape.state_bytes * static_cast<std::size_t>(plan.depth * launch.blocks));
  plan.stack = reinterpret_cast<float*>(p.scratch);
  if (plan.splits > 1) {
    plan.parts = {p.scratch + launch.bytes,
                  std::int64_t{p.batch.size} * plan.part_tokens * p.heads, p.dim, plan.splits};
    launch.bytes += static_cast<std::size_t>(plan.parts.slot_bytes()) * plan.parts.slots;
  }
  return launch;
}

void queue(const AttendParams& p, Launch& launch, cudaStream_t stream) {
  if (launch.plan.works == 0) return;
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
  const std::int64_t rows = most_tokens(p, lengths) * (p.heads / p.kv_heads);
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
  const std::int64_t keys = bounds.shard.length > 0 && bounds.batch.kv_len == nullptr
                                ? bounds.shard.length
                                : kMostKeys;
  const auto most = [&](std::int64_t tokens, Lengths lengths) {
    AttendParams p = bounds;
    p.tokens = tokens;
    const KernelShape shape = choose_kernel(p, lengths);
    const std::size_t resident = static_cast<std::size_t>(resident_blocks(shape, gpu));
    std::size_t bytes = align(shape.state_bytes * fold_depth(keys) * resident);
    if (lengths == Lengths::only_short)  // see choose_splits: at most four pieces a resident block
      bytes += 4 * resident * static_cast<std::size_t>(StateSlots::bytes(shape.tile_rows, p.dim)) +
               std::size_t{16} * kVirtualRanks;
    return bytes;
  };
  std::size_t bytes = 0;
  for (std::int64_t tokens = 1; tokens <= std::min<std::int64_t>(bounds.tokens, kShortQuery);
       ++tokens)
    bytes = std::max(bytes, most(tokens, Lengths::only_short));
  if (bounds.tokens > kShortQuery) bytes = std::max(bytes, most(bounds.tokens, Lengths::only_long));
  return bytes;
}

void attend(const AttendParams& p, const Gpu& gpu, cudaStream_t stream) {
  for (const Lengths lengths : {Lengths::only_short, Lengths::only_long}) {
    if (!may_hold(p, lengths)) continue;
    Launch launch = make_launch(p, lengths, gpu);
    if (launch.bytes > p.scratch_bytes)
      throw InputError("attend needs " + std::to_string(launch.bytes) +
                       " bytes of scratch and was given " + std::to_string(p.scratch_bytes) +
                       ": plan for these tokens, sequences and lengths");
    queue(p, launch, stream);
  }
}

}  // namespace longspan::kernels::cuda

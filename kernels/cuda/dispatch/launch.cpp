#include "kernels/cuda/dispatch/launch.hpp"

#include <algorithm>

#include "kernels/cuda/combine/splits.hpp"
#include "kernels/cuda/common/access.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr std::size_t kAlign = 256;

std::size_t align(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// The most query tokens of one sequence of the kind.
std::int64_t most_tokens(const Geometry& p, Lengths lengths) {
  const std::int64_t most = p.max_query_len > 0 ? std::min(p.tokens, p.max_query_len) : p.tokens;
  return lengths == Lengths::only_long ? most : std::min<std::int64_t>(most, kShortQuery);
}

/// The packed rows of a sequence of the kind, if the sequences were equal.
std::int64_t mean_rows(const Geometry& p, Lengths lengths) {
  const std::int64_t tokens = (p.tokens + p.batch.size - 1) / p.batch.size;
  const std::int64_t most = most_tokens(p, lengths);
  return std::min(tokens, most) * (p.heads / p.kv_heads);
}

/// The number of thread blocks that the GPU holds at a time, and the memory of each.
struct Residence {
  int blocks;        // of the GPU
  int shared_bytes;  // of a block: what the kernel needs, and the rest for its stack
};

Residence residence(const KernelShape& shape, const Gpu& gpu) {
  const int level = static_cast<int>(shape.state_bytes);
  const int most = shape.shared_bytes + shape.near_levels * level;
  const int allowed = std::max(shape.shared_bytes, std::min(most, gpu.block_bytes));
  const int blocks = std::max(gpu.blocks(shape, allowed), 1);
  const int room = std::min(gpu.shared_bytes / blocks - gpu.block_own_bytes, allowed);
  int bytes = shape.shared_bytes;
  for (int i = 0; i < shape.near_levels && bytes + level <= room; ++i) bytes += level;
  return {blocks * gpu.multiprocessors, bytes};
}

/// Orders the pieces after those that resident blocks begin with by the lengths of their sequences.
void order_sequences(const AttendParams& p, int places, WorkPlan& plan) {
  const bool are_tiles = plan.sequence_tiles == 1 && plan.tiles == p.batch.size;
  if (!are_tiles || p.batch.kv_len == nullptr || p.batch.size > kMostSorted) return;
  const int turn = plan.tiles * p.kv_heads, first = places / turn;
  if (p.parts || first >= plan.splits) return;
  plan.by_length = first * turn;
  plan.by_late_works = Divisor(static_cast<std::uint32_t>((plan.splits - first) * p.kv_heads));
}

/// The part of the scratch that calls within the limits use with an instance.
Room room_of(const Instance& instance, const AttendParams& limits, const Kind& kind) {
  const KernelShape shape = kind.gpu.shape(instance, limits, kind.lengths);
  const auto resident = static_cast<std::size_t>(residence(shape, kind.gpu).blocks);
  const std::size_t pieces = (limits.batch.size > 1 ? kSharedPieces : kPieces) * resident;
  const std::size_t depth = fold_depth(most_keys_within(limits));
  // A row that is split has at least two pieces.
  const std::size_t split_rows = pieces / 2 * static_cast<std::size_t>(shape.tile_rows);
  const std::size_t states =
      pieces * static_cast<std::size_t>(StateSlots::bytes(shape.tile_rows, limits.value_dim));
  return {
      kAlign + align(shape.state_bytes * depth * resident) + states + std::size_t{16} * kMostSplits,
      static_cast<std::int64_t>(split_rows) / limits.heads};
}

/// Computes WorkPlan::known.
bool is_known(const AttendParams& p, const WorkPlan& plan) {
  const Batch& batch = p.batch;
  const bool lengths = batch.kv_len == nullptr && batch.query_start == nullptr &&
                       batch.key_start == nullptr && p.shard.table == nullptr;
  return lengths && batch.causal == nullptr && !batch.hides() && !p.documents && !p.ranges &&
         batch.prefix == nullptr && !p.q_scale && !p.k_scale && !p.v_scale &&
         plan.ticket == nullptr && plan.numbers.taken == nullptr;
}

/// Counts the row tiles of the batch: exactly for one sequence; for several, with lengths on the
/// device, the smaller of two upper bounds. `expected` becomes the number of tiles that would have
/// work if the sequences were equal.
void plan_tiles(const AttendParams& p, WorkPlan& plan, std::int64_t& expected) {
  const std::int64_t group = p.heads / p.kv_heads, size = p.batch.size;
  const auto tiles_of = [&](std::int64_t rows) {
    return (rows + plan.tile_rows - 1) / plan.tile_rows;
  };
  const std::int64_t packed = p.tokens * group / plan.tile_rows + size;
  const std::int64_t alone = tiles_of(most_tokens(p, plan.lengths) * group);
  if (plan.lengths != Lengths::only_long && size * alone < packed) {
    plan.sequence_tiles = static_cast<int>(alone);
    plan.tiles = static_cast<int>(size * alone);
  } else {
    plan.tiles = static_cast<int>(size == 1 ? std::min(alone, packed) : packed);
  }
  expected = std::min<std::int64_t>(plan.tiles, size * tiles_of(mean_rows(p, plan.lengths)));
}

}  // namespace

Loader loader_of(const AttendParams& p) {
  if (is_fp8(p.kv_dtype)) return Loader::any8;
  if (is_latent_row(p.kv_dtype)) return Loader::any16;  // of fp32, the only family that reads them
  const auto aligned = [&](const auto& rows) { return is_aligned<8>(rows, p.dtype); };
  const bool in_eights = p.head_dim % 8 == 0 && p.value_dim % 8 == 0;
  const bool plain = in_eights && !p.pages && p.k.dense() && p.v.dense() && p.q_dtype == p.dtype &&
                     !p.bias && !p.dropout && !p.q_scale && !p.k_scale && !p.v_scale &&
                     aligned(p.q) && aligned(p.k) && aligned(p.v);
  return plain ? Loader::plain : Loader::any16;
}

Kind kind_of(const AttendParams& p, Lengths lengths, const Gpu& gpu) {
  return {lengths, loader_of(p), gpu};
}

std::array<Lengths, 2> kinds(const Geometry& p) {
  return {p.batch.skip_decode ? Lengths::short_but_one : Lengths::only_short, Lengths::only_long};
}

bool may_hold(const Geometry& p, Lengths lengths) {
  if (p.tokens == 0 || p.batch.size == 0) return false;
  if (p.batch.query_start == nullptr) return serves(lengths, p.tokens);
  return lengths != Lengths::only_long || most_tokens(p, lengths) > kShortQuery;
}

const Instance* instance_for(Family family, const AttendParams& p, const Kind& kind) {
  // Kernels that read any layout have one instance for all: mla, tf32, and fp32 except for plain
  // rows of fp32, and when it replaces others.
  const bool stands_in = p.dtype != DType::fp32 || p.tf32;
  const bool reads_any = family == Family::tf32 || is_of_mla(family) ||
                         (family == Family::fp32 && (stands_in || kind.loader != Loader::plain));
  return fitting_instance(family, reads_any ? Loader::any16 : kind.loader, p.head_dim, p.value_dim,
                          mean_rows(p, kind.lengths), kind.gpu.block_bytes);
}

KernelLaunch make_launch(Family family, const AttendParams& p, const Kind& kind) {
  const auto [lengths, loader, gpu] = kind;
  KernelLaunch launch{gpu.shape(*instance_for(family, p, kind), p, lengths)};
  const KernelShape& shape = launch.shape;
  WorkPlan& plan = launch.plan;
  const auto [resident, shared_bytes] = residence(shape, gpu);
  launch.shared_bytes = shared_bytes;
  plan.lengths = lengths;
  plan.tile_rows = shape.tile_rows;
  std::int64_t expected = 0;
  plan_tiles(p, plan, expected);
  const std::int64_t works = expected * p.kv_heads;
  plan.by_tiles = Divisor(static_cast<std::uint32_t>(plan.tiles));
  plan.by_sequence_tiles = Divisor(static_cast<std::uint32_t>(std::max(plan.sequence_tiles, 1)));
  plan.by_kv_heads = Divisor(static_cast<std::uint32_t>(p.kv_heads));
  plan.by_group = Divisor(static_cast<std::uint32_t>(p.heads / p.kv_heads));
  plan.by_page = Divisor(static_cast<std::uint32_t>(p.pages.size));
  const bool decodes = shape.decode != nullptr, shared = decodes && p.batch.size > 1;
  const bool one_pass = decodes && shape.state_bytes == 0;
  if (plan_splits(p, works, resident, decodes, one_pass, plan))
    plan.numbers.taken = reinterpret_cast<SplitsTaken*>(p.scratch + kAlign / 2);
  plan.works = plan.tiles * p.kv_heads * plan.splits;
  if (shared) order_sequences(p, resident, plan);
  const bool in_one_wave = decodes || shape.state_bytes != 0;  // blocks take several works
  launch.blocks = in_one_wave ? std::min(plan.works, resident) : plan.works;

  if (plan.works > launch.blocks && (shared || !decodes))
    plan.ticket = decodes && p.ticket ? p.ticket : reinterpret_cast<int*>(p.scratch);
  plan.known = is_known(p, plan);
  launch.bytes = kAlign;
  plan.depth = fold_depth(most_keys(p));
  plan.stack = reinterpret_cast<float*>(p.scratch + launch.bytes);
  launch.bytes += align(shape.state_bytes * static_cast<std::size_t>(plan.depth * launch.blocks));
  if (plan.splits > 1 && !p.parts) {
    // These are the rows of all tokens, or of every sequence's most, if short ones are among long
    // ones.
    const std::int64_t compact = std::int64_t{p.batch.size} * kShortQuery;
    plan.part_tokens = lengths != Lengths::only_long && compact < p.tokens ? kShortQuery : 0;
    const std::int64_t tokens = plan.part_tokens > 0 ? compact : p.tokens;
    plan.parts = {p.scratch + launch.bytes, tokens * p.heads, p.value_dim, plan.splits};
    launch.bytes += static_cast<std::size_t>(plan.parts.slot_bytes()) * plan.parts.slots;
  }
  return launch;
}

StateSlots states_aside(const AttendParams& p, Lengths lengths, std::byte* data) {
  const bool alone = p.batch.size == 1 && lengths != Lengths::only_long;
  const std::int64_t tokens = alone ? std::min<std::int64_t>(p.tokens, kShortQuery) : p.tokens;
  return {data, tokens * p.heads, p.value_dim, p.parts ? p.parts.count : 1};
}

std::size_t bytes_aside(const AttendParams& p, const KernelLaunch& launch) {
  const bool alone = launch.plan.splits == 1 || p.parts;
  if (!p.resume || (launch.shape.resumes && alone)) return 0;
  const StateSlots aside = states_aside(p, launch.plan.lengths, nullptr);
  return align(static_cast<std::size_t>(aside.slot_bytes()) * aside.slots);
}

Room room_of(Family family, const AttendParams& limits, const Kind& kind) {
  AttendParams few = limits, many = limits;  // by rows, because they determine the decode kernel
  if (kind.lengths != Lengths::only_long) {
    few.tokens = 1;
    many.tokens = std::min<std::int64_t>(limits.tokens, kShortQuery);
    many.batch.size = 1;
  }
  const Room a = room_of(*instance_for(family, few, kind), limits, kind);
  const Room b = room_of(*instance_for(family, many, kind), limits, kind);
  return {std::max(a.bytes, b.bytes), std::max(a.split_tokens, b.split_tokens)};
}

std::int64_t most_keys_within(const AttendParams& limits) {
  if (limits.shard.length > 0 && limits.batch.kv_len == nullptr) return limits.shard.length;
  return limits.max_kv_len > 0 ? limits.max_kv_len : kMostKeys;
}

std::size_t room_aside(const AttendParams& limits, std::int64_t tokens) {
  AttendParams some = limits;
  some.tokens = std::min(limits.tokens, tokens);
  const StateSlots states = states_aside(some, Lengths::only_long, nullptr);
  return align(static_cast<std::size_t>(states.slot_bytes()) * states.slots);
}

}  // namespace longspan::kernels::cuda

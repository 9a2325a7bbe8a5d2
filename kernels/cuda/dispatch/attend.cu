// Turns a call of attend into launches. Short and long sequences take different kernels, and each
// launch serves its own kind and skips the other, so nothing needs to be known of lengths that are
// still on the device.
#include "kernels/cuda/dispatch/attend.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "kernels/cuda/cache/gather.hpp"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/combine/resume.hpp"
#include "kernels/cuda/combine/splits.hpp"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/fixed_order.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/decode/decode_order.cuh"
#include "kernels/cuda/decode/decode_tensor_maps.hpp"
#include "kernels/cuda/dispatch/attend_finished.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "kernels/cuda/portable/attend_tf32.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr std::size_t kAlign = 256;

std::size_t align(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// The kinds that one call serves, with a launch each.
std::array<Lengths, 2> kinds(const Geometry& p) {
  return {p.batch.skip_decode ? Lengths::short_but_one : Lengths::only_short, Lengths::only_long};
}

/// The most query tokens of one sequence of the kind.
std::int64_t most_tokens(const Geometry& p, Lengths lengths) {
  const std::int64_t most = p.max_query_len > 0 ? std::min(p.tokens, p.max_query_len) : p.tokens;
  return lengths == Lengths::only_long ? most : std::min<std::int64_t>(most, kShortQuery);
}

/// The packed rows of a sequence of the kind, were the sequences equal.
std::int64_t mean_rows(const Geometry& p, Lengths lengths) {
  const std::int64_t tokens = (p.tokens + p.batch.size - 1) / p.batch.size;
  const std::int64_t most = most_tokens(p, lengths);
  return std::min(tokens, most) * (p.heads / p.kv_heads);
}

/// How many thread blocks the GPU holds at a time, and what each takes.
struct Residence {
  int blocks;        // of the GPU
  int shared_bytes;  // of a block: what the kernel needs, and what is left for its stack
};

Residence residence(const KernelShape& shape, const Gpu& gpu) {
  const int level = static_cast<int>(shape.state_bytes);
  const int most = shape.shared_bytes + shape.near_levels * level;
  const int allowed = std::max(shape.shared_bytes, std::min(most, gpu.block_bytes));
  LONGSPAN_CUDA(
      cudaFuncSetAttribute(shape.kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, allowed));
  int blocks = 0;
  LONGSPAN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, shape.kernel(), shape.threads, static_cast<std::size_t>(shape.shared_bytes)));
  blocks = std::max(blocks, 1);
  const int room = std::min(gpu.shared_bytes / blocks - gpu.block_own_bytes, allowed);
  int bytes = shape.shared_bytes;
  for (int i = 0; i < shape.near_levels && bytes + level <= room; ++i) bytes += level;
  return {blocks * gpu.multiprocessors, bytes};
}

/// Lets the pieces beyond those that places begin with come by the lengths of their sequences.
void order_sequences(const AttendParams& p, int places, Plan& plan) {
  const bool are_tiles = plan.sequence_tiles == 1 && plan.tiles == p.batch.size;
  if (!are_tiles || p.batch.kv_len == nullptr || p.batch.size > kMostSorted) return;
  const int turn = plan.tiles * p.kv_heads, first = places / turn;
  if (p.parts || first >= plan.splits) return;
  plan.by_length = first * turn;
  plan.by_late_works = Divisor(static_cast<std::uint32_t>((plan.splits - first) * p.kv_heads));
}

/// Computes Plan::known.
bool is_known(const AttendParams& p, const Plan& plan) {
  const Batch& batch = p.batch;
  const bool lengths = batch.kv_len == nullptr && batch.query_start == nullptr &&
                       batch.key_start == nullptr && p.shard.table == nullptr;
  return lengths && batch.causal == nullptr && !p.documents && !p.q_scale && !p.k_scale &&
         !p.v_scale && plan.ticket == nullptr && plan.numbers.taken == nullptr;
}

struct Launch {
  KernelShape shape;
  Plan plan;
  int blocks = 0;
  int shared_bytes = 0;   // of a block
  std::size_t bytes = 0;  // of scratch: ticket, stack, parts
};

/// Counts the row tiles of the batch: exactly for one sequence; for several, with lengths on the
/// device, the smaller of two upper bounds. `expected` becomes the number of tiles that would have
/// work if the sequences were equal.
void plan_tiles(const AttendParams& p, Plan& plan, std::int64_t& expected) {
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

Launch make_launch(const AttendParams& p, Lengths lengths, const Gpu& gpu) {
  Launch launch{choose_kernel(p, lengths, loader_of(p), gpu)};
  const KernelShape& shape = launch.shape;
  Plan& plan = launch.plan;
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
  if (plan_splits(p, works, resident, decodes, plan))
    plan.numbers.taken = reinterpret_cast<SplitsTaken*>(p.scratch + kAlign / 2);
  plan.works = plan.tiles * p.kv_heads * plan.splits;
  if (shared) order_sequences(p, resident, plan);
  launch.blocks = shape.state_bytes == 0 ? plan.works : std::min(plan.works, resident);

  if (plan.works > launch.blocks && (shared || !decodes))
    plan.ticket = decodes && p.ticket ? p.ticket : reinterpret_cast<int*>(p.scratch);
  plan.known = is_known(p, plan);
  launch.bytes = kAlign;
  plan.depth = fold_depth(most_keys(p));
  plan.stack = reinterpret_cast<float*>(p.scratch + launch.bytes);
  launch.bytes += align(shape.state_bytes * static_cast<std::size_t>(plan.depth * launch.blocks));
  if (plan.splits > 1 && !p.parts) {
    // These are the rows of all tokens, or of every sequence's most, where short ones are among
    // long ones.
    const std::int64_t compact = std::int64_t{p.batch.size} * kShortQuery;
    plan.part_tokens = lengths != Lengths::only_long && compact < p.tokens ? kShortQuery : 0;
    const std::int64_t tokens = plan.part_tokens > 0 ? compact : p.tokens;
    plan.parts = {p.scratch + launch.bytes, tokens * p.heads, p.value_dim, plan.splits};
    launch.bytes += static_cast<std::size_t>(plan.parts.slot_bytes()) * plan.parts.slots;
  }
  return launch;
}

void check_scratch(std::size_t needed, std::size_t given) {
  if (needed > given)
    throw InputError("attend needs " + std::to_string(needed) + " bytes of scratch and was given " +
                     std::to_string(given) + ": plan for these tokens, sequences and lengths");
}

/// Queues the attention alone: splits stay as they are.
void queue_splits(const AttendParams& p, Launch& launch, const Gpu& gpu, cudaStream_t stream) {
  check_scratch(launch.bytes, p.scratch_bytes);
  if (launch.plan.works == 0) return;
  if (launch.plan.ticket != nullptr && launch.plan.ticket != p.ticket)
    LONGSPAN_CUDA(cudaMemsetAsync(launch.plan.ticket, 0, sizeof(int), stream));
  const KernelShape& shape = launch.shape;
  LaunchConfig how{dim3(launch.blocks), dim3(shape.threads), stream,
                   static_cast<std::size_t>(launch.shared_bytes)};
  if (shape.decode == nullptr) return launch_kernel(shape.tiled, how, p, launch.plan);
  KvTensorMaps maps{};
  if (gpu.sm90_code) maps = kv_tensor_maps(p, shape.box_dim, shape.box_keys);
  how.overlaps = gpu.sm90_code;
  launch_kernel(shape.decode, how, p, launch.plan, maps);
}

/// Queues the attention and the fold of its splits. `finished` says where the rows end when they
/// have no other state; where it is null, their states are written.
void queue(const AttendParams& p, Launch& launch, const MergeParams* finished, const Gpu& gpu,
           cudaStream_t stream) {
  queue_splits(p, launch, gpu, stream);
  if (launch.plan.works == 0) return;
  if (finished != nullptr)
    fold_parts_finished(p, launch.plan, *finished, stream);
  else if (launch.plan.splits > 1 && !p.parts)
    fold_parts(p, launch.plan, stream);
}

/// Whether the kernel for long queries that has a launch of its own takes them.
bool is_hoppers(const AttendParams& p, Lengths lengths) {
  return lengths == Lengths::only_long && sm90::accepts(p);
}

/// The bytes of the states that go aside, ahead of this launch's scratch. They do so where the rows
/// begin from a state and the kernel cannot: in decode kernels, and with splits, which another
/// kernel folds.
std::size_t bytes_aside(const AttendParams& p, const Launch& launch) {
  const bool alone = launch.plan.splits == 1 || p.parts;
  if (!p.resume || (launch.shape.resumes && alone)) return 0;
  const StateSlots aside = states_aside(p, nullptr);
  return align(static_cast<std::size_t>(aside.slot_bytes()) * aside.slots);
}

}  // namespace

Loader loader_of(const AttendParams& p) {
  if (is_fp8(p.kv_dtype)) return Loader::any8;
  const auto aligned = [&](const auto& rows) { return is_aligned<8>(rows, p.dtype); };
  const bool plain = !p.pages && p.k.dense() && p.v.dense() && p.q_dtype == p.dtype && !p.bias &&
                     !p.q_scale && !p.k_scale && !p.v_scale && aligned(p.q) && aligned(p.k) &&
                     aligned(p.v);
  return plain ? Loader::plain : Loader::any16;
}

KernelShape choose_kernel(const AttendParams& p, Lengths lengths, Loader loader, const Gpu& gpu) {
  const bool is_fp32 = p.dtype == DType::fp32, bf16 = p.dtype == DType::bf16;
  const bool is_long = lengths == Lengths::only_long, square = is_square(p.head_dim, p.value_dim);
  const Family family = is_fp32              ? (p.tf32 ? Family::tf32 : Family::fp32)
                        : is_long || !square ? Family::portable
                                             : Family::decode;
  // For fp32 the loader that takes anything takes fp8 too, and for tf32 there is no other.
  const bool takes_any = family == Family::tf32 || (is_fp32 && loader != Loader::plain);
  const Instance* found = fitting_instance(family, takes_any ? Loader::any16 : loader, p.head_dim,
                                           p.value_dim, mean_rows(p, lengths), gpu.block_bytes);
  if (found == nullptr)
    throw Unsupported("head_dim " + std::to_string(p.head_dim) + " and value_dim " +
                      std::to_string(p.value_dim) + " in " + name(p.dtype) +
                      ": a thread block of this GPU may have " + std::to_string(gpu.block_bytes) +
                      " bytes of shared memory, and no " + name(family) +
                      " kernel for these needs so few: use smaller ones, another GPU, or device "
                      "host");
  const int dim = found->dim;
  switch (found->family) {
    case Family::fp32:
      return attend_fp32(dim, found->loader);
    case Family::tf32:
      return attend_fp32_tf32(dim);
    case Family::portable: {
      const bool fixed_order = p.invariant || !is_long;  // short queries always are
      return bf16 ? portable_bf16(dim, fixed_order, loader)
                  : portable_fp16(dim, fixed_order, loader);
    }
    default:
      if (loader == Loader::any8)
        return p.kv_dtype == DType::e5m2 ? decode_e5m2(dim, found->rows)
                                         : decode_e4m3(dim, found->rows);
      return bf16 ? decode_bf16(dim, found->rows, loader) : decode_fp16(dim, found->rows, loader);
  }
}

void check_fits(const AttendParams& p, const Gpu& gpu) {
  if (gpu.block_bytes >= kEnoughBytes || p.batch.size == 0) return;
  for (const Loader loader : {Loader::plain, Loader::any16, Loader::any8})
    for (const Lengths lengths : {Lengths::only_short, Lengths::only_long})
      choose_kernel(p, lengths, loader, gpu);
}

bool may_hold(const Geometry& p, Lengths lengths) {
  if (p.tokens == 0 || p.batch.size == 0) return false;
  if (p.batch.query_start == nullptr) return serves(lengths, p.tokens);
  return lengths != Lengths::only_long || most_tokens(p, lengths) > kShortQuery;
}

std::size_t scratch_bytes(const AttendParams& p, const Gpu& gpu) {
  std::size_t bytes = 0;
  for (const Lengths lengths : kinds(p))
    if (may_hold(p, lengths)) {
      const Launch launch = make_launch(p, lengths, gpu);
      const std::size_t aside = is_hoppers(p, lengths) ? 0 : bytes_aside(p, launch);
      bytes = std::max(bytes, aside + launch.bytes);
      if (is_hoppers(p, lengths)) bytes = std::max(bytes, sm90::scratch_bytes(p));
    }
  return bytes;
}

std::size_t scratch_bound(const AttendParams& bounds, const Gpu& gpu) {
  const std::int64_t keys = bounds.shard.length > 0 && bounds.batch.kv_len == nullptr
                                ? bounds.shard.length
                            : bounds.max_kv_len > 0 ? bounds.max_kv_len
                                                    : kMostKeys;
  std::size_t bytes = 0;
  // The tokens whose states may go aside are those of sequences that are short or split. Among
  // several sequences they may stand anywhere; a single one is short as a whole, or split as a
  // whole.
  std::int64_t aside_tokens = bounds.batch.size > 1 ? bounds.tokens : kShortQuery;
  const auto most = [&](const KernelShape& shape) {
    const std::size_t resident = static_cast<std::size_t>(residence(shape, gpu).blocks);
    const std::size_t pieces = (bounds.batch.size > 1 ? kSharedPieces : kPieces) * resident;
    // A row that is split has at least two pieces.
    const std::size_t split_rows = pieces / 2 * static_cast<std::size_t>(shape.tile_rows);
    aside_tokens = std::max(aside_tokens, static_cast<std::int64_t>(split_rows) / bounds.heads);
    bytes = std::max(bytes, kAlign + align(shape.state_bytes * fold_depth(keys) * resident) +
                                pieces * static_cast<std::size_t>(
                                             StateSlots::bytes(shape.tile_rows, bounds.value_dim)) +
                                std::size_t{16} * kMostSplits);
  };
  AttendParams few = bounds, many = bounds;  // by rows, as they decide which decode kernel runs
  few.tokens = 1;
  many.tokens = std::min<std::int64_t>(bounds.tokens, kShortQuery);
  many.batch.size = 1;
  for (const Loader loader : {Loader::plain, Loader::any16, Loader::any8}) {  // as requests differ
    most(choose_kernel(few, Lengths::only_short, loader, gpu));
    most(choose_kernel(many, Lengths::only_short, loader, gpu));
    if (bounds.tokens > kShortQuery) most(choose_kernel(bounds, Lengths::only_long, loader, gpu));
  }
  AttendParams longest = bounds;
  longest.shard.length = keys;
  if (is_hoppers(longest, Lengths::only_long))
    bytes = std::max(bytes, sm90::scratch_bytes(longest));
  if (!bounds.resume) return bytes;
  AttendParams aside = bounds;
  aside.tokens = std::min(bounds.tokens, aside_tokens);
  const StateSlots states = states_aside(aside, nullptr);
  return bytes + align(static_cast<std::size_t>(states.slot_bytes()) * states.slots);
}

namespace {

/// Queues the attention of the sequences of one kind.
void attend_kind(const AttendParams& p, Lengths lengths, const Gpu& gpu, cudaStream_t stream) {
  if (!may_hold(p, lengths)) return;
  // Decides which kernel takes the sequences of a kind. One with a launch of its own is to be added
  // here, before the ones that choose_kernel knows; the choice may depend on the layer and the GPU
  // only.
  if (is_hoppers(p, lengths)) return sm90::attend(p, {}, kShortQuery + 1, stream);
  Launch launch = make_launch(p, lengths, gpu);
  const std::size_t aside = bytes_aside(p, launch);
  if (aside == 0) return queue(p, launch, nullptr, gpu, stream);

  check_scratch(aside + launch.bytes, p.scratch_bytes);
  AttendParams own = p;
  own.resume = false;
  own.state = states_aside(p, p.scratch);
  own.slot = 0;
  own.scratch = p.scratch + aside;
  own.scratch_bytes = p.scratch_bytes - aside;
  launch = make_launch(own, lengths, gpu);
  queue(own, launch, nullptr, gpu, stream);
  fold_onto(p, lengths, own.state, stream);
}

/// Queues a kind whose rows are finished by the fold of the splits; returns false where their keys
/// are not split.
bool queue_finished(const AttendParams& p, Lengths lengths, const MergeParams& m, const Gpu& gpu,
                    cudaStream_t stream) {
  Launch launch = make_launch(p, lengths, gpu);
  if (launch.plan.splits == 1) return false;
  queue(p, launch, &m, gpu, stream);
  return true;
}

/// Queues the short sequences that a batch may have beside long ones, up to the rows of the result.
void finish_short(const AttendParams& p, const MergeParams& m, const Gpu& gpu,
                  cudaStream_t stream) {
  if (!may_hold(p, Lengths::only_short)) return;
  const Lengths lengths = kinds(p)[0];
  const bool compares = m.headers.said != nullptr;  // which a merge does, and the fold does not
  if (!p.resume && !p.parts && !compares && queue_finished(p, lengths, m, gpu, stream)) return;
  attend_kind(p, lengths, gpu, stream);
  merge_short(m, kShortQuery, stream);
}

/// Whether the kernel for long queries can write such a result itself.
bool ends_plainly(const AttendParams& p, const MergeParams& m) {
  return m.dtype == p.dtype && m.out_scale.data == nullptr && is_aligned<8>(m.out, m.dtype);
}

sm90::Finished finished_of(const MergeParams& m) {
  return {m.out, m.lse, m.sinks, m.headers, m.places != nullptr ? *m.places : RowPlaces{}};
}

}  // namespace

void attend(const AttendParams& p, const Gpu& gpu, cudaStream_t stream) {
  for (const Lengths lengths : kinds(p)) attend_kind(p, lengths, gpu, stream);
}

bool attend_gathered(const GatheredParams& g, const Gpu& gpu, cudaStream_t stream) {
  MergeParams m = g.merge;
  m.states.slots = 1;  // for the short sequences, whose keys are in one piece now
  AttendParams p = g.attend;
  const bool paged16 = p.pages && p.kv_dtype == p.dtype && p.q_dtype == p.dtype;
  p.pages = {};
  p.k = p.v = KvRows(g.room, std::int64_t{p.kv_heads} * p.head_dim, p.head_dim);
  if (!paged16 || p.invariant || p.queries.ranks > 1 || gather_capacity(p, g.room_bytes) == 0 ||
      !ends_plainly(p, m) || !sm90::accepts(p) || !may_hold(p, Lengths::only_long))
    return false;
  p = gather_keys(g, stream);
  finish_short(p, m, gpu, stream);
  sm90::attend(p, finished_of(m), kShortQuery + 1, stream);
  return true;
}

bool is_decode(const AttendParams& p) {
  return !p.resume && !p.parts && !p.batch.skip_decode && may_hold(p, Lengths::only_short) &&
         !may_hold(p, Lengths::only_long);
}

bool writes_new_keys(const AttendParams& p) {
  // Each of these keys is seen by a row of its own sequence, so some work tile reads its segment.
  return is_decode(p) && is_square(p.head_dim, p.value_dim) && p.queries.ranks == 1 &&
         p.dtype != DType::fp32 && p.new_v.data != nullptr && loader_of(p) == Loader::plain &&
         !p.documents && p.shard.layout != Layout::listed && is_aligned<8>(p.new_k, p.dtype) &&
         is_aligned<8>(p.new_v, p.dtype);
}

bool attend_finished(const AttendParams& p, const MergeParams& m, const Gpu& gpu,
                     cudaStream_t stream) {
  // Rows that begin from a state have the other ranks' keys in that state.
  const bool all_keys = p.shard.ranks == 1 || p.resume;
  const bool whole = m.states.slots == 1 && m.rows == nullptr && all_keys;
  if (!whole) return false;
  const bool compares = m.headers.said != nullptr;  // which a merge does, and the fold does not
  if (is_decode(p) && !compares && queue_finished(p, Lengths::only_short, m, gpu, stream))
    return true;
  if (!ends_plainly(p, m) || !sm90::accepts(p) || !may_hold(p, Lengths::only_long)) return false;
  if (p.invariant && p.resume) return false;
  finish_short(p, m, gpu, stream);
  sm90::attend(p, finished_of(m), kShortQuery + 1, stream);
  return true;
}

bool takes_arrivals(const AttendParams& p, const MergeParams& m) {
  static_assert(KeyArrivals::kLeastRows == kShortQuery + 1);
  return p.arrivals != nullptr && p.shard.ranks == 1 && m.states.slots == 1 && m.rows == nullptr &&
         ends_plainly(p, m) && may_hold(p, Lengths::only_long) &&
         !may_hold(p, Lengths::only_short) && sm90::takes_arrivals(p);
}

bool attend_exchanged(const AttendParams& p, const ExchangeParams& e, const Gpu& gpu,
                      cudaStream_t stream) {
  if (!is_decode(p) || e.merge.states.rows != p.tokens * p.heads || push_of(e) != Push::one_trip)
    return false;
  Launch launch = make_launch(p, Lengths::only_short, gpu);
  if (launch.plan.splits == 1) return false;
  queue_splits(p, launch, gpu, stream);
  exchange_parts(launch.plan, e, gpu.multiprocessors, stream);
  return true;
}

}  // namespace longspan::kernels::cuda

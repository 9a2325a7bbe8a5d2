// The data of a block of the Hopper kernel: its arguments, its current work tile, and its shared
// memory with the barriers of its pipelines. attend_sm90.cuh has the algorithm.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/common/await_count.cuh"
#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/common/fold_plan.cuh"
#include "kernels/cuda/common/pipeline_state.cuh"
#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "kernels/cuda/hopper/attend_sm90_tile.cuh"
#include "kernels/dropout.hpp"
#include "kernels/gradient_params.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::sm90 {

using cuda::PipelineState;

// ---- arguments -------------------------------------------------------------------------------

/// A score is height * tanh(scale * product). Its forms differ in the range around 0 in which they
/// hold.
struct Softcap {
  float scale;
  float height;    // base 2; 0: no cap
  float near;      // up to this |product| x, tanh is
  float terms[5];  // terms[0] x + terms[1] x^3 + ...
  float reach[3];  // up to these |product| x, scores are
  float third[3];  // third[0] x + third[1] x^3 + ...
  float fifth[5];  // fifth[0] x + fifth[1] x^3 + ...
  float above[3];  // (above[0] x + above[1] x^3 + ...) /
  float below[3];  // (1 + below[0] x^2 + below[1] x^4 + ...)
  float curve;     // the slope of a score, in units of scale, is 1 + curve score^2
};

/// How rows are loaded into shared memory.
enum class Brings : std::uint8_t {
  boxes,     // by TMA
  chunks,    // 16 bytes at a time
  elements,  // one by one
};

/// The fixed order's additional arguments. Rows of any layout get to the same places in shared
/// memory, so the way of loading changes no bit.
struct SegmentSources {
  Brings q, k, v;
  std::byte* stack;  // [blocks, depth] states of a block's rows
  int depth;         // the most states of a block that wait far
};

/// The additional arguments of dq, whose rows are found as those of forward are.
struct GradientSources {
  CUtensorMap dout;      // as q, beside it
  const RowTerm* terms;  // [tokens, heads]
  GradientSums dq;
  bool resume;   // dq starts from what is there
  TokenRows to;  // where dq is stored, rounded; no data: it stays a sum
};

struct KernelParams {
  CUtensorMap q, k, v;  // boxes of [64 rows, 128 bytes] and [kKeys keys, 128 bytes]; if sequences
                        // lie apart, q has the heads of one after those of the other
  AttendParams params;
  Finished finished;
  unsigned slots;       // tiles of query rows over the batch, some of them empty
  unsigned section;     // heads walked together, so that their keys and values stay in L2
  unsigned work_tiles;  // slots x heads
  unsigned own_slots;   // the first slots, whose rows see no key that is still arriving
  int least_rows;       // this launch skips sequences of fewer query rows
  unsigned* next;       // counts the work tiles taken beyond the first of each block
  Softcap softcap;
  CUtensorMap own_k, own_v;   // as k and v, for arrivals.k and v
  KeyArrivals arrivals;       // or none: then all keys have arrived
  cuda::Divisor by_page;      // keys of a page
  SegmentSources sources;     // for the fixed order
  GradientSources gradients;  // for backward
};

/// The counter for each rank's data here, before the run.
__device__ inline std::uint64_t here_before(const KeyArrivals& arrivals) {
  return arrivals ? cuda::arch::load_whole(&arrivals.flags->before) : 0;
}

/// One thread waits until a rank's counter has reached `count`, for TMA too.
__device__ inline void await_rank(const KeyArrivals& arrivals, int rank, std::uint64_t count) {
  cuda::await_count(arrivals.flags->here + rank, count);
  cuda::arch::publish_to_tma();
}

/// One thread waits until every rank has reported its run, including this one, which reports it at
/// the same time.
__device__ inline void await_digests(const KeyArrivals& arrivals) {
  const std::uint64_t before = here_before(arrivals);
  for (int rank = 0; rank < arrivals.ranks; ++rank) await_rank(arrivals, rank, before + 1);
}

/// Whether keys and values are in pages.
template <class T>
__device__ bool has_pages(const KernelParams& call) {
  return T::kPages && call.params.pages;
}

// ---- the work tile ---------------------------------------------------------------------------

/// The positions of a rank's keys of one sequence, if they ascend: the shard's rule in 32 bits.
/// They are two runs of positions (contiguous, ranges, zigzag), or blocks distributed in turn.
struct KeyPositions {
  int start[2], count[2];
  int sequence;
  int block, round;  // block > 0: blocks at start[0], start[0] + round ... below start[1]

  __device__ void find(const Shard& shard, int b, std::int64_t kv_len) {
    sequence = b;
    block = round = count[1] = start[1] = 0;
    if (shard.layout == Layout::ranges) {  // the table has a row for each sequence
      const std::int64_t* own = shard.table + b * (shard.ranks + std::int64_t{1}) + shard.rank;
      start[0] = static_cast<int>(own[0]);
      count[0] = static_cast<int>(own[1] - own[0]);
      return;
    }
    const int keys = static_cast<int>(shard.local_len(kv_len));
    // Blocks may be longer than any sequence: anything past 31 bits is past all positions.
    const auto capped = [](std::int64_t x) { return static_cast<int>(x < INT_MAX ? x : INT_MAX); };
    block = shard.layout == Layout::interleaved ? capped(shard.block)
            : shard.layout == Layout::striped   ? 1
                                                : 0;
    round = capped(std::int64_t{block} * shard.ranks);
    start[0] = block > 0  ? capped(std::int64_t{block} * shard.rank)
               : keys > 0 ? static_cast<int>(shard.position(0, kv_len))
                          : 0;
    // The second run of a zigzag begins in the upper half.
    count[0] =
        shard.layout == Layout::zigzag ? static_cast<int>(shard.before(kv_len / 2, kv_len)) : keys;
    count[1] = keys - count[0];
    start[1] = block > 0      ? static_cast<int>(kv_len)
               : count[1] > 0 ? static_cast<int>(shard.position(count[0], kv_len))
                              : 0;
  }

  /// The number of local keys below `position`.
  __device__ int before(int position) const {
    if (block == 0)
      return min(max(position - start[0], 0), count[0]) +
             min(max(position - start[1], 0), count[1]);
    position = min(max(position, 0), start[1]);
    const int rounds = position / round;
    return rounds * block + min(max(position - rounds * round - start[0], 0), block);
  }
};

/// Local keys [begin, end) of a sequence.
struct RowKeys {
  int begin, end;
};

/// A tile of query rows of one sequence and head, which one block attends from first to last key.
struct WorkTile {
  int sequence;
  int head, kv_head;
  int first_key;              // of the sequence, in k
  int row;                    // of the tile, in its sequence
  int first_row;              // of the tile, in the batch
  int query_row, query_head;  // of the tile, in KernelParams::q
  int rows;                   // of the tile that exist
  RowKeys some;               // what any row of the tile sees
  RowKeys whole;              // what every row sees
  int clear;  // values of local keys below this one may be anything, and are cleared
  int tiles;  // of keys; 0: no work is left
};

/// The positions of a sequence's local keys: runs of `run` keys with `gap` positions between them.
struct KeyRuns {
  int start, run, gap;
  int gaps;  // at most this many

  __device__ int position(int key) const { return start + key + min(key / run, gaps) * gap; }
  /// The number of keys from `key` on whose positions follow each other.
  __device__ int following(int key) const {
    return gap == 0 || key / run >= gaps ? INT_MAX : run - key % run;
  }
};

/// The data of a work tile for ALiBi. A row at position i adds slope * (j - i) to its scores, or
/// -slope * |j - i|: this is small for the keys that count, unlike a distance from the first query.
/// The difference is one number for a row, and the epilogue adds it.
struct AlibiTerms {
  float slope;     // base 2
  float lift;      // base 2; the epilogue adds a row's index among the queries times this
  int index;       // of the work tile's first row; those of its others follow
  int position;    // of that row
  bool two_sided;  // keys are on both sides of the rows, and both get a negative bias
  KeyRuns runs;
};

// ---- shared memory ---------------------------------------------------------------------------

template <int kGroups, int kKeys>
struct AlibiShared {
  AlibiTerms terms[2];
  int positions[kGroups][kKeys];  // of a group's tile if they are not an arithmetic progression
};

/// The additional memory for e4m3: values as loaded by TMA, and the factors of the work tiles. One
/// tile of values is enough: it is free again once it is transposed, long before the consumers are
/// done with it, and a second would cost a tile of 256 columns a quarter of its keys.
template <class T>
struct StoredValues {
  alignas(1024) typename T::Element v[T::kPanels][T::kKeys][T::kPanelElements];
  Barrier full, empty;
  float score_factor[2];  // base 2, of a product
  float value_factor[2];  // of O
};

/// The barriers of tiles that were copied from pages, and are not fenced yet.
template <int kStages>
struct Landed {
  Barrier k[kStages], v[kStages];
};

/// The additional memory of the fixed order.
template <class T>
struct WaitingStates {
  float4 near[T::kQuads][T::kStateThreads];  // the O of the state that waits near
  struct Segment {
    int first_key;  // local
    cuda::FoldStep step;
  } segments[T::kStages];  // whose keys are in the stages of K
  SegmentOrder order[2];   // of the work tiles' sequences
  cuda::PlannedWalk walk;  // of one thread, whose warp has few registers
};

/// What a weight depends on besides products. A row that has no key on any rank gets infinity for
/// its lse: its weights are 0. A row whose lse is not a number, or infinite, gets NaN, and so do
/// its weights.
struct RowFactors {
  float lse;  // base 2
  float d;
};

/// The additional memory of dq with softcap or ALiBi, of a work tile.
template <class T>
struct ScoredRows {
  AlibiTerms alibi;                        // zeros without ALiBi
  int positions[T::kConsumers][T::kKeys];  // as those of AlibiShared
};
/// The same with dropout.
template <class T>
struct DroppedRows {
  KeyRuns runs;
  DropoutRow first;                 // of the work tile's rows
  std::uint32_t row[T::kRows];      // the positions of all
  std::uint64_t kept[T::kRows][2];  // keys of the tile at hand, kKeys / 2 in a word (kept_of)
};
struct NoScoredRows {};
struct NoDroppedRows {};

/// The additional memory of dq: what is beside the queries, and whether some row of the work tile
/// is marked (gradients_sm90.cuh).
template <class T>
struct GradientRows {
  alignas(1024) typename T::Element dout[T::kConsumers][T::kValuePanels][64][T::kPanelElements];
};
/// Its parts are bases: nvcc 13 lays out members without an address of their own in more than one
/// way.
template <class T>
struct GradientMarks : std::conditional_t<T::kScored, ScoredRows<T>, NoScoredRows>,
                       std::conditional_t<T::kDrops, DroppedRows<T>, NoDroppedRows> {
  bool marked;
};

struct NoWaitingStates {};
struct NoGradientRows {};
struct NoGradientMarks {};
struct NoLanded {};
struct NoAlibi {};
struct NoStoredValues {};

template <class T>
struct Shared {
  using Element = typename T::Element;
  alignas(1024) Element q[T::kConsumers][T::kPanels][64][T::kPanelElements];
  alignas(1024) Element k[T::kStages][T::kPanels][T::kKeys][T::kPanelElements];
  alignas(1024) Element v[T::kValueStages][T::kValuePanels][T::kValueRows][T::kPanelElements];
  [[no_unique_address]] std::conditional_t<T::kGradients, GradientRows<T>, NoGradientRows>
      gradients;
  KeyPositions key_positions;
  WorkTile work[2];
  RowKeys rows[2][T::kRows];  // what each row of the work tile sees
  Barrier work_full[2], work_empty[2], work_wanted;
  Barrier q_full[T::kConsumers], q_empty[T::kConsumers];
  Barrier k_full[T::kStages], k_empty[T::kStages];
  Barrier v_full[T::kValueStages], v_empty[T::kValueStages];
  [[no_unique_address]] std::conditional_t<T::kScores == ScoreKind::any,
                                           AlibiShared<T::kConsumers, T::kKeys>, NoAlibi>
      alibi;
  [[no_unique_address]] std::conditional_t<T::kEightBits, StoredValues<T>, NoStoredValues> stored;
  [[no_unique_address]] std::conditional_t<T::kPages, Landed<T::kStages>, NoLanded> landed;
  [[no_unique_address]] std::conditional_t<T::kFixedOrder, WaitingStates<T>, NoWaitingStates>
      waiting;
  [[no_unique_address]] std::conditional_t<T::kGradients, GradientMarks<T>, NoGradientMarks> marks;
};

inline constexpr int kPageWarps = 2;  // that copy keys and values from pages

/// One thread initialises the barriers: each counts the threads that fill its buffer, or that empty
/// it.
template <class T>
__device__ __forceinline__ void init_barriers(const KernelParams& call, Shared<T>& shared) {
  constexpr int kConsumerWarps = 4 * T::kConsumers;
  for (int i = 0; i < 2; ++i) {
    shared.work_full[i].init(32);
    const int producers = has_pages<T>(call) ? kPageWarps + 1 : 1;
    shared.work_empty[i].init(128 * T::kConsumers + producers + T::kTransposers);
  }
  shared.work_wanted.init(1);
  for (int i = 0; i < T::kConsumers; ++i) {
    shared.q_full[i].init(1);
    shared.q_empty[i].init(4);
  }
  for (int i = 0; i < T::kStages; ++i) {
    shared.k_full[i].init(1);
    shared.k_empty[i].init(kConsumerWarps);
    if constexpr (T::kPages) {
      shared.landed.k[i].init(kPageWarps);
      shared.landed.v[i].init(kPageWarps);
    }
  }
  for (int i = 0; i < T::kValueStages; ++i) {
    shared.v_full[i].init(T::kEightBits ? T::kTransposers / 32 : 1);
    shared.v_empty[i].init(kConsumerWarps);
  }
  if constexpr (T::kEightBits) {
    shared.stored.full.init(1);
    shared.stored.empty.init(T::kTransposers / 32);
  }
  publish_barriers();
}

}  // namespace longspan::kernels::sm90

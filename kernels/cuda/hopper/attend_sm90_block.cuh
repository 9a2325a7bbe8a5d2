// What a block of the Hopper kernel has: the shape of its tiles, the item of work that it is on,
// its shared memory, and its place in a ring of stages. attend_sm90.cuh has the algorithm.
#pragma once

#include <type_traits>

#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/arch/store_same.cuh"
#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/common/pipeline_state.cuh"
#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::sm90 {

using cuda::PipelineState;

/// What an instance can make of a product: the scaled product alone; capped; or what the call asks
/// for, ALiBi with or without a cap.
enum class Scores { plain, softcap, any };

/// kDim: a multiple of 16, for e4m3 of 32. kTurns: the consumers take turns at the tensor cores
/// instead of finding their own rhythm. Result: the type of a finished output.
template <class Element_, int kDim_, int kConsumers_, int kKeys_, bool kTurns_ = false,
          Scores kScores_ = Scores::plain, class Result_ = Element_>
struct Tile {
  using Element = Element_;
  using Result = Result_;
  static constexpr int kDim = kDim_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kKeys = kKeys_;
  static constexpr bool kTurns = kTurns_;
  static constexpr Scores kScores = kScores_;
  static constexpr bool kEightBits = sizeof(Element) == 1;  // attend_sm90_fp8.cuh

  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = 2;
  // Panels of 128 bytes: the swizzle.
  static constexpr int kPanelElements = 128 / static_cast<int>(sizeof(Element));
  static constexpr int kPanels = (kDim + kPanelElements - 1) / kPanelElements;
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kStep = 32 / static_cast<int>(sizeof(Element));  // elements of a product
  static constexpr int kThreads = 128 * (kConsumers + 1);

  // Values as the product takes them: [keys, dim] as they came, or e4m3 [columns of O, keys].
  static constexpr int kColumns = kDim + (kEightBits ? 8 : 0);
  static constexpr int kValuePanels = kEightBits ? (kKeys + 127) / 128 : kPanels;
  static constexpr int kValueRows = kEightBits ? kColumns : kKeys;
  static constexpr int kTransposers = kEightBits ? 64 : 0;  // threads

  // Warps that find rows in pages need registers, of which three consumers, or two with wide rows
  // of O, leave too few.
  static constexpr bool kPages = kConsumers == 2 && kDim <= 192 && !kEightBits;

  // Weights are taken from an origin kLift below a maximum, and stay below 2^kSlack.
  static constexpr float kLift = kEightBits ? 8.0f : 0.0f;
  static constexpr float kSlack = kEightBits ? 8.75f : 8.0f;

  // Out of the 64 Ki registers of a multiprocessor.
  static constexpr int kProducerRegisters = kPages ? 72 : kConsumers == 3 && !kEightBits ? 32 : 56;
  static constexpr int kConsumerRegisters = kPages            ? 216
                                            : kConsumers == 2 ? 224
                                            : kEightBits      ? 152
                                                              : 160;
  // More than a thread has at the launch, on average, would never be handed out, and be waited for.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * (65536 / kThreads / 8 * 8));
};

/// Where a rank's keys of one sequence stand, for positions that ascend; the shard's rule in 32
/// bits. Two runs of positions (contiguous, ranges, zigzag), or blocks dealt out in turn.
struct Places {
  int start[2], count[2];
  int sequence;
  int block, round;  // block > 0: blocks at start[0], start[0] + round ... below start[1]

  __device__ void find(const Shard& shard, int b, std::int64_t kv_len) {
    sequence = b;
    block = round = count[1] = start[1] = 0;
    if (shard.layout == Layout::ranges) {  // a row of the table for each sequence
      const std::int64_t* own = shard.table + b * (shard.ranks + std::int64_t{1}) + shard.rank;
      start[0] = static_cast<int>(own[0]);
      count[0] = static_cast<int>(own[1] - own[0]);
      return;
    }
    const int keys = static_cast<int>(shard.local_len(kv_len));
    block = shard.layout == Layout::interleaved ? static_cast<int>(shard.block)
            : shard.layout == Layout::striped   ? 1
                                                : 0;
    round = block * shard.ranks;
    start[0] = block > 0  ? block * shard.rank
               : keys > 0 ? static_cast<int>(shard.position(0, kv_len))
                          : 0;
    // zigzag's second run begins in the upper half
    count[0] =
        shard.layout == Layout::zigzag ? static_cast<int>(shard.before(kv_len / 2, kv_len)) : keys;
    count[1] = keys - count[0];
    start[1] = block > 0      ? static_cast<int>(kv_len)
               : count[1] > 0 ? static_cast<int>(shard.position(count[0], kv_len))
                              : 0;
  }

  /// Local keys below `position`.
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

/// The work of one block at one time: a tile of query rows of one sequence and head.
struct Item {
  int sequence;
  int head, kv_head;
  int first_key;  // of the sequence, in k
  int row;        // of the tile, in its sequence
  int first_row;  // of the tile, in q
  int rows;       // of the tile that exist
  RowKeys some;   // what any row of the tile sees
  RowKeys whole;  // what every row sees
  int clear;      // values of local keys below this one may be anything, and are cleared
  int tiles;      // of keys; 0: the work is done
};

/// The position of each local key of a sequence: runs of `run` keys, `gap` positions between them.
struct Line {
  int start, run, gap;
  int gaps;  // at most so many

  __device__ int position(int key) const { return start + key + min(key / run, gaps) * gap; }
};

/// What ALiBi needs to know of an item. A row at position i adds slope * (j - i) to its scores, or
/// -slope * |j - i|: small for the keys that count, which a distance from the first query would not
/// be. The difference is one number for a row, and is added at its end.
struct AlibiItem {
  float slope;     // base 2
  float lift;      // base 2, a row's index among the queries times this is added at its end
  int index;       // of the item's first row; those of its others follow
  int position;    // of that row
  bool two_sided;  // keys stand on both sides of the rows, and both lose
  Line line;
};

template <int kGroups, int kKeys>
struct AlibiRoom {
  AlibiItem items[2];
  int positions[kGroups][kKeys];  // of a group's tile where they are no arithmetic progression
};

/// What e4m3 needs besides: values as the copy engine brings them, and the factors of the items.
/// One tile of values and no ring: it is free again once it is transposed, long before the
/// consumers are done with it, and a second would cost a tile of 256 columns a quarter of its keys.
template <class T>
struct StoredValues {
  alignas(1024) typename T::Element v[T::kPanels][T::kKeys][T::kPanelElements];
  Barrier full, empty;
  float score_factor[2];  // base 2, of a product
  float value_factor[2];  // of O
};

/// Tiles that were copied out of pages, and are not fenced yet.
template <int kStages>
struct Landed {
  Barrier k[kStages], v[kStages];
};

struct NoLanded {};
struct NoAlibi {};
struct NoStoredValues {};

template <class T>
struct Shared {
  using Element = typename T::Element;
  alignas(1024) Element q[T::kConsumers][T::kPanels][64][T::kPanelElements];
  alignas(1024) Element k[T::kStages][T::kPanels][T::kKeys][T::kPanelElements];
  alignas(1024) Element v[T::kStages][T::kValuePanels][T::kValueRows][T::kPanelElements];
  Places places;
  Item items[2];
  RowKeys rows[2][T::kRows];  // what each row of the item sees
  Barrier item_full[2], item_empty[2], item_wanted;
  Barrier q_full[T::kConsumers], q_empty[T::kConsumers];
  Barrier k_full[T::kStages], k_empty[T::kStages];
  Barrier v_full[T::kStages], v_empty[T::kStages];
  [[no_unique_address]] std::conditional_t<T::kScores == Scores::any,
                                           AlibiRoom<T::kConsumers, T::kKeys>, NoAlibi>
      alibi;
  [[no_unique_address]] std::conditional_t<T::kEightBits, StoredValues<T>, NoStoredValues> stored;
  [[no_unique_address]] std::conditional_t<T::kPages, Landed<T::kStages>, NoLanded> landed;
};

/// A score is height * tanh(scale * product). Forms of it by how far from 0 they reach.
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
};

struct Call {
  CUtensorMap q, k, v;  // boxes of [64 rows, 128 bytes] and [kKeys keys, 128 bytes]
  AttendParams params;
  Finished finished;
  unsigned slots;    // tiles of query rows over the batch, some of them empty
  unsigned section;  // heads walked together, so that their keys and values stay in L2
  unsigned items;    // slots x heads
  int least_rows;    // sequences of fewer query rows are not this launch's
  unsigned* next;    // items beyond the first of each block that are taken
  Softcap softcap;
  cuda::Divisor by_page;  // keys of a page
};

/// Whether keys and values come out of pages.
template <class T>
__device__ bool has_pages(const Call& call) {
  return T::kPages && call.params.pages;
}

/// Tiles before an item's end at which the next one is wanted.
inline constexpr int kWantedEarly = 8;

/// One thread: the item's queries, as soon as its consumers are done with those before.
template <class T>
__device__ void load_queries(const Call& call, Shared<T>& shared, int first_row, int head,
                             std::uint32_t parity) {
  constexpr int kBytes = 64 * T::kPanels * 128;
  const std::uint64_t once = cache_policy<Keep::first_to_go>();
#pragma unroll
  for (int c = 0; c < T::kConsumers; ++c) {
    shared.q_empty[c].wait(parity ^ 1);
    shared.q_full[c].arrive_expecting(kBytes);
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel)
      load_box(shared.q[c][panel], &call.q, panel * T::kPanelElements, first_row + 64 * c, head,
               &shared.q_full[c], once);
  }
}

/// Zeros in the first `keys` keys of a tile of values: memory that no row may see can hold NaN, and
/// 0 NaN is NaN. By kThreads threads, which share the barrier.
template <class T, int kThreads>
__device__ void clear_keys(typename T::Element (&v)[T::kPanels][T::kKeys][T::kPanelElements],
                           int keys, int barrier) {
#pragma unroll 1
  for (int panel = 0; panel < T::kPanels; ++panel)
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < keys * 8; i += kThreads)
      store_same(reinterpret_cast<uint4*>(v[panel])[i], uint4{});
  fence_shared_stores();
  named_sync(barrier, kThreads);
}

}  // namespace longspan::kernels::sm90

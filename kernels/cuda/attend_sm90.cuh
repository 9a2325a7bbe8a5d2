// Attention forward on Hopper, out of three engines that run at once: the copy engine brings tiles
// of keys and values, the tensor cores multiply, the arithmetic units do the softmax.
//
//     S = Q K^T     P = exp2(c S - m)     O = O ratio + P V          (c = scale log2 e)
//
// A block is a warp that finds the work, a warp that loads, and two or three consumer warpgroups of
// 64 query rows each. Q, K and V stand in shared memory (K and V in a ring of stages); S, P and O
// stay in registers. A consumer asks for the scores of the next tile together with the product of
// this one's weights and values, so that its softmax runs beside its own products and beside those
// of the other consumers. Blocks stay and take one piece of work after the other.
//
// Key tiles are walked from the last visible key leftwards, each ending where the one before began:
// no tile reaches past the keys, and under a causal mask only the first tile is cut by the mask.
#pragma once

#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/attend_sm90.hpp"
#include "kernels/params.hpp"

#include <climits>

namespace longspan::kernels::sm90 {

// ---- shapes ----------------------------------------------------------------------------------

/// kDim: a multiple of 16. kTurns: the consumers take turns at the tensor cores instead of finding
/// their own rhythm.
template <class Element_, int kDim_, int kConsumers_, int kKeys_, bool kTurns_ = false>
struct Tile {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kKeys = kKeys_;
  static constexpr bool kTurns = kTurns_;

  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = 2;
  static constexpr int kPanels = (kDim + 63) / 64;  // of 64 elements: the 128-byte swizzle
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kThreads = 128 * (kConsumers + 1);

  // Out of the 64 Ki registers of a multiprocessor.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 224;
};

/// Where a rank's keys of one sequence stand, for positions that ascend; the shard's rule in 32
/// bits. Two runs of positions (contiguous, ranges, zigzag), or blocks dealt out in turn.
struct Places {
  int start[2], count[2];
  int sequence;
  int block, round;  // block > 0: blocks at start[0], start[0] + round ... below start[1]

  __device__ void find(const Shard& shard, std::int64_t kv_len) {
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

template <class T>
struct Shared {
  using Element = typename T::Element;
  alignas(1024) Element q[T::kConsumers][T::kPanels][64][64];
  alignas(1024) Element k[T::kStages][T::kPanels][T::kKeys][64];
  alignas(1024) Element v[T::kStages][T::kPanels][T::kKeys][64];
  Places places;
  Item items[2];
  RowKeys rows[2][T::kRows];  // what each row of the item sees
  Barrier item_full[2], item_empty[2], item_wanted;
  Barrier q_full[T::kConsumers], q_empty[T::kConsumers];
  Barrier k_full[T::kStages], k_empty[T::kStages];
  Barrier v_full[T::kStages], v_empty[T::kStages];
};

struct Call {
  CUtensorMap q, k, v;  // boxes of [64 rows, 64 elements] and [kKeys keys, 64 elements]
  AttendParams params;
  Finished finished;
  unsigned slots;    // tiles of query rows over the batch, some of them empty
  unsigned section;  // heads walked together, so that their keys and values stay in L2
  unsigned items;    // slots x heads
  int least_rows;    // sequences of fewer query rows are not this launch's
  unsigned* next;    // items beyond the first of each block that are taken
};

/// A place in a ring of stages and the parity of its barriers.
template <int kStages>
struct Turn {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- which rows and keys ---------------------------------------------------------------------

/// Sequence b's tiles take the slots from first_slot(b) on; at least as many as it has tiles.
template <int kRows>
__device__ int first_slot(const Batch& batch, int b) {
  return static_cast<int>(batch.first_row(b)) / kRows + b;
}

/// The index-th item: sections of heads, in each the slots from the last (the longest under a
/// causal mask) to the first, in each slot the section's heads. Gives its sequence.
template <class T>
__device__ int find_item(const Call& call, unsigned index, Item& item) {
  const AttendParams& params = call.params;
  const unsigned section_items = call.slots * call.section;
  const unsigned first_head = index / section_items * call.section;
  const unsigned heads = min(call.section, params.heads - first_head);
  const unsigned rest = index % section_items;
  item.head = static_cast<int>(first_head + rest % heads);
  item.kv_head = item.head / (params.heads / params.kv_heads);
  const int slot = static_cast<int>(call.slots - 1 - rest / heads);

  int b = 0;
  for (int above = params.batch.size; above - b > 1;) {
    const int middle = (b + above) / 2;
    (first_slot<T::kRows>(params.batch, middle) <= slot ? b : above) = middle;
  }
  item.row = (slot - first_slot<T::kRows>(params.batch, b)) * T::kRows;
  item.first_row = static_cast<int>(params.batch.first_row(b)) + item.row;
  item.first_key = static_cast<int>(params.batch.first_key(b));
  return b;
}

/// One warp: rows that see no key on this rank get their empty state, or their finished zeros.
template <class T>
__device__ void write_empty(const Call& call, const Item& item) {
  const AttendParams& params = call.params;
  const Finished& finished = call.finished;
  const bool finish = finished.out.data != nullptr;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = 0; row < item.rows; ++row) {
    const std::int64_t token = item.first_row + row, at = token * params.heads + item.head;
    void* to = params.state.o(params.slot, at);
    if (finish) to = finished.out.template at<typename T::Element>(token, item.head);
#pragma unroll 1
    for (int i = lane; i < params.dim / (finish ? 8 : 4); i += 32) static_cast<uint4*>(to)[i] = {};
    if (lane > 0) continue;
    if (!finish)
      params.state.stats(params.slot)[at] = empty_stats();
    else if (finished.lse)
      finished.lse[token * finished.lse_row_stride + item.head * finished.lse_head_stride] =
          finished.sinks ? finished.sinks[item.head] : -INFINITY;
  }
}

/// One warp: finds the next item while the others work on this one, and announces it together with
/// the keys that each of its rows sees. An item is taken only when the loader wants it: a block
/// with long work takes nothing that another block could begin earlier.
template <class T>
__device__ void schedule(const Call& call, Shared<T>& shared) {
  const AttendParams& params = call.params;
  const int lane = threadIdx.x % 32;
  Turn<2> turn;
  if (lane == 0) shared.places.sequence = -1;
  for (unsigned index = blockIdx.x; index < call.items;) {
    shared.item_empty[turn.stage].wait(turn.parity ^ 1);
    Item& item = shared.items[turn.stage];
    int b = 0;
    if (lane == 0) {
      b = find_item<T>(call, index, item);
      if (b != shared.places.sequence)
        shared.places.find(params.shard, params.batch.keys(b, params.shard));
      shared.places.sequence = b;
    }
    b = __shfl_sync(0xffffffff, b, 0);
    __syncwarp();
    const int query_len = static_cast<int>(params.batch.query_len(b, params.tokens));
    const int kv_len = static_cast<int>(params.batch.keys(b, params.shard));
    const int rows = query_len < call.least_rows ? 0 : max(min(query_len - item.row, T::kRows), 0);

    int* const limits = reinterpret_cast<int*>(shared.rows[turn.stage]);
#pragma unroll 1
    for (int i = lane; i < 2 * rows; i += 32) {
      const Interval keys = params.mask.visible(kv_len - query_len + item.row + i / 2, kv_len);
      limits[i] = shared.places.before(static_cast<int>(i % 2 ? keys.end : keys.begin));
    }
    __syncwarp();
    const int keys = rows > 0 ? limits[2 * rows - 1] - limits[0] : 0;
    if (lane == 0) {
      item.rows = rows;
      item.tiles = (keys + T::kKeys - 1) / T::kKeys;
    }
    __syncwarp();
    if (keys > 0) {
      if (lane == 0) {
        item.whole = {limits[2 * rows - 2], limits[1]};
        item.some = {limits[0], limits[2 * rows - 1]};
        // Before the first key of all there is nothing: the copy engine fills in zeros.
        item.clear = item.first_key + limits[0] > 0 ? limits[0] : INT_MIN;
      }
      shared.item_full[turn.stage].arrive();
      turn.next();
    } else {
      write_empty<T>(call, item);
      __syncwarp();  // every lane has read the item before the next takes its place
    }
    if (lane == 0) {
      if (keys > 0) shared.item_wanted.wait(turn.stage ^ 1);  // the stage just announced
      index = gridDim.x + atomicAdd(call.next, 1u);
    }
    index = __shfl_sync(0xffffffff, index, 0);
  }
  shared.item_empty[turn.stage].wait(turn.parity ^ 1);
  if (lane == 0) shared.items[turn.stage].tiles = 0;
  shared.item_full[turn.stage].arrive();
}

// ---- the loader ------------------------------------------------------------------------------

/// One thread: keeps the ring of keys and values filled. Values lag one tile behind keys, as in the
/// consumers.
template <class T>
__device__ void load(const Call& call, Shared<T>& shared) {
  constexpr int kEarly = 8;  // tiles before an item's end at which the next one is wanted
  constexpr int kQBytes = 64 * T::kPanels * 128;
  constexpr int kTileBytes = T::kPanels * T::kPanelBytes;
  const std::uint64_t keys_again = cache_policy<Keep::last_to_go>();
  Turn<2> announced;
  Turn<T::kStages> k, v;
  std::uint32_t q_parity = 0;
  const auto load_tile = [&](auto& stages, const CUtensorMap* map, Barrier* full, Barrier* empty,
                             Turn<T::kStages>& turn, int key, int kv_head) {
    empty[turn.stage].wait(turn.parity ^ 1);
    full[turn.stage].arrive_expecting(kTileBytes);
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel)
      load_box(stages[turn.stage][panel], map, panel * 64, key, kv_head, &full[turn.stage],
               keys_again);
    turn.next();
  };

  for (;; announced.next()) {
    shared.item_full[announced.stage].wait(announced.parity);
    const Item& item = shared.items[announced.stage];
    const int tiles = item.tiles, head = item.head, kv_head = item.kv_head;
    const int first_row = item.first_row;
    int key = item.first_key + item.some.end;
    shared.item_empty[announced.stage].arrive();
    if (tiles == 0) return;
    if (tiles < kEarly) shared.item_wanted.arrive();

    const auto load_k = [&](int at) {
      load_tile(shared.k, &call.k, shared.k_full, shared.k_empty, k, at, kv_head);
    };
    const auto load_v = [&](int at) {
      load_tile(shared.v, &call.v, shared.v_full, shared.v_empty, v, at, kv_head);
    };
    load_k(key -= T::kKeys);
    const std::uint64_t queries_once = cache_policy<Keep::first_to_go>();
#pragma unroll
    for (int c = 0; c < T::kConsumers; ++c) {
      shared.q_empty[c].wait(q_parity ^ 1);
      shared.q_full[c].arrive_expecting(kQBytes);
#pragma unroll
      for (int panel = 0; panel < T::kPanels; ++panel)
        load_box(shared.q[c][panel], &call.q, panel * 64, first_row + 64 * c, head,
                 &shared.q_full[c], queries_once);
    }
    q_parity ^= 1;
    for (int tile = 1; tile < tiles; ++tile) {
      if (tile == tiles + 1 - kEarly) shared.item_wanted.arrive();
      load_k(key - T::kKeys);
      load_v(key);
      key -= T::kKeys;
    }
    load_v(key);
  }
}

// ---- the consumers' steps --------------------------------------------------------------------

/// S = Q K^T, asynchronously. q, k: panels of 64 elements of the head's dimension.
template <class T>
__device__ void multiply_qk(float (&s)[T::kKeys / 2], const void* q, const void* k) {
  const std::uint64_t a = opaque(operand(q, 64 * 128)), b = operand(k, T::kPanelBytes);
#pragma unroll
  for (int step = 0; step < T::kDim / 16; ++step)
    Product<T::kKeys>::template shared<typename T::Element, false>(
        s, advance(a, step / 4 * 64 * 128 + step % 4 * 32),
        advance(b, step / 4 * T::kPanelBytes + step % 4 * 32), step > 0);
}

/// O += P V, asynchronously.
template <class T>
__device__ void multiply_pv(float (&o)[T::kDim / 2], const std::uint32_t (&p)[T::kKeys / 16][4],
                            const void* v) {
  const std::uint64_t b = operand(v, T::kPanelBytes);
#pragma unroll
  for (int step = 0; step < T::kKeys / 16; ++step)
    Product<T::kDim>::template registers<typename T::Element, true>(
        o, p[step], advance(b, step * 16 * 128), true);
}

/// Hides the keys of the tile at local key `first` that a row does not see. rows: of the item;
/// row: the thread's first.
template <int kCount>
__device__ void hide(float (&s)[kCount], int first, const RowKeys* rows, int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowKeys seen = rows[row + 8 * h];
    const int column = first + 2 * static_cast<int>(threadIdx.x % 4) - seen.begin;
    const unsigned count = seen.end - seen.begin;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      if (static_cast<unsigned>(column + i / 4 * 8) >= count) s[i] = -INFINITY;
      if (static_cast<unsigned>(column + i / 4 * 8 + 1) >= count) s[i + 1] = -INFINITY;
    }
  }
}

/// The two rows of a thread. Exponentials are taken from an origin, which is a maximum that the row
/// has seen; it moves only when a score exceeds it by more than kSlack, so that p stays below
/// 2^kSlack and O is hardly ever rescaled.
struct Rowwise {
  static constexpr float kSlack = 8.0f;

  float max[2] = {-INFINITY, -INFINITY};  // of the quad's columns, base 2
  float origin[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this thread's columns

  /// s becomes p; gives the ratios by which what came before shrinks.
  template <int kCount>
  __device__ void softmax(float (&s)[kCount], float c, float (&ratio)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int i = 4; i < kCount; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = __fmul_rn(fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)), c);
      max[h] = fmaxf(max[h], top);
      const float moved = top > origin[h] + kSlack ? top : origin[h];
      const float from = moved == -INFINITY ? 0.0f : moved;  // nothing visible yet
      ratio[h] = exp2_fast(origin[h] - from);
      origin[h] = moved;

      float part = 0;
#pragma unroll
      for (int i = 2 * h; i < kCount; i += 4) {
        s[i] = exp2_fast(fmaf(s[i], c, -from));
        s[i + 1] = exp2_fast(fmaf(s[i + 1], c, -from));
        part += s[i] + s[i + 1];
      }
      sum[h] = fmaf(sum[h], ratio[h], part);
    }
  }

  /// Of the whole row, from its origin.
  __device__ Stats stats(int h) const {
    float whole = sum[h] + __shfl_xor_sync(0xffffffff, sum[h], 1);
    whole += __shfl_xor_sync(0xffffffff, whole, 2);
    return {origin[h], whole};
  }
  /// From the origin to the maximum, at which a state stands.
  __device__ float to_max(int h) const {
    return max[h] == -INFINITY ? 1.0f : exp2_fast(origin[h] - max[h]);
  }
};

__device__ inline std::uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline std::uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

/// A thread's scores are, in pairs, just what it must hold of P as the next product's operand.
template <class Element, int kCount>
__device__ void round_to(std::uint32_t (&p)[kCount / 8][4], const float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) p[i / 8][i / 2 % 4] = pack(s[i], s[i + 1], Element{});
}

template <int kCount>
__device__ void shrink(float (&o)[kCount], const float (&ratio)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= ratio[i / 2 % 2];
}

/// Zeros in the first `keys` keys of a tile of values: memory that no row may see can hold NaN, and
/// 0 NaN is NaN. Both consumers write the same zeros.
template <class T>
__device__ void clear_values(typename T::Element (&v)[T::kPanels][T::kKeys][64], int keys,
                             int barrier) {
#pragma unroll 1
  for (int panel = 0; panel < T::kPanels; ++panel)
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < keys * 8; i += 128)
      reinterpret_cast<uint4*>(v[panel])[i] = uint4{};
  fence_shared_stores();
  named_sync(barrier, 128);
}

// ---- what a consumer hands out ---------------------------------------------------------------

template <class T>
__device__ void write_state(const Call& call, const Item& item, int row, const Rowwise& rows, int h,
                            const float (&o)[T::kDim / 2]) {
  const Stats stats = rows.stats(h);
  if (row >= item.rows) return;
  const StateSlots& state = call.params.state;
  const std::int64_t at =
      static_cast<std::int64_t>(item.first_row + row) * call.params.heads + item.head;
  const int t = threadIdx.x % 4;
  const float factor = rows.to_max(h);
  if (t == 0) state.stats(call.params.slot)[at] = {rows.max[h], stats.sum * factor};
  float* to = state.o(call.params.slot, at);
#pragma unroll
  for (int j = 0; j < T::kDim / 8; ++j)
    if (8 * j < call.params.dim)
      *reinterpret_cast<float2*>(to + 8 * j + 2 * t) =
          float2{o[4 * j + 2 * h] * factor, o[4 * j + 2 * h + 1] * factor};
}

/// Four lanes of a quad hold a row's columns in pairs. They swap pairs until each holds eight
/// columns in a row, so that every store is 16 bytes.
__device__ inline uint4 gather_eight(const std::uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  std::uint32_t x[4], y[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, odd ? w[i] : w[i + 1], 1);
    x[i] = odd ? other : w[i];
    x[i + 1] = odd ? w[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, high ? x[i] : x[i + 2], 2);
    y[i] = high ? other : x[i];
    y[i + 2] = high ? x[i + 2] : other;
  }
  return {y[0], y[1], y[2], y[3]};
}

template <class T>
__device__ void write_finished(const Call& call, const Item& item, int row, const Rowwise& rows,
                               int h, const float (&o)[T::kDim / 2]) {
  const Finished& finished = call.finished;
  const bool exists = row < item.rows;
  Stats stats = rows.stats(h);
  const std::int64_t at = item.first_row + row;
  float shrunk = 1.0f;
  if (finished.sinks) {
    const Fold sunk = fold(stats, sink_stats(finished.sinks[item.head]));
    shrunk = sunk.take == Fold::second_high ? sunk.ratio : 1.0f;
    stats = sunk.stats;
  }
  const Finish finish = longspan::finish(stats);
  const float factor = is_empty(stats) ? 0.0f : shrunk / stats.sum;
  const int t = threadIdx.x % 4;
  if (exists && t == 0 && finished.lse)
    finished.lse[at * finished.lse_row_stride + item.head * finished.lse_head_stride] = finish.lse;

  using Element = typename T::Element;
  Element* to = finished.out.template at<Element>(at, item.head);
#pragma unroll
  for (int j = 0; j < T::kDim / 8; j += 4) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = j + i < T::kDim / 8 ? 4 * (j + i) + 2 * h : 0;  // past the last: not stored
      pairs[i] = pack(o[pair] * factor, o[pair + 1] * factor, Element{});
    }
    const uint4 eight = gather_eight(pairs);
    const int column = 8 * (j + t);
    if (exists && column < call.params.dim) *reinterpret_cast<uint4*>(to + column) = eight;
  }
}

// ---- a consumer ------------------------------------------------------------------------------

template <class T>
__device__ void consume(const Call& call, Shared<T>& shared, int group) {
  using Element = typename T::Element;
  constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + T::kConsumers;
  const int lane = threadIdx.x % 32;
  const int row = 64 * group + 16 * (threadIdx.x / 32 % 4) + lane / 4;  // and row + 8
  const float c = call.params.score.scale * kLog2E;

  float s[T::kKeys / 2], o[T::kDim / 2], ratio[2];
  std::uint32_t p[T::kKeys / 16][4];
  Rowwise rows;
  RowKeys whole{};    // keys that every row of the tile sees
  int clear = 0;      // keys of the values below this one are cleared
  int first = 0;      // local key at which the tile of s begins
  Turn<2> announced;  // the item
  Turn<T::kStages> k, v;
  std::uint32_t q_parity = 0;

  const auto release = [&](Barrier& empty) {
    if (lane == 0) empty.arrive();
  };
  const auto wait_turn = [&] {
    if (T::kTurns) named_sync(kTurnBarrier + group, 256);
  };
  const auto pass_turn = [&] {
    if (T::kTurns) named_arrive(kTurnBarrier + (group + 1) % T::kConsumers, 256);
  };
  if (group == T::kConsumers - 1) pass_turn();  // the first consumer begins

  const auto wait_keys = [&] { shared.k_full[k.stage].wait(k.parity); };
  const auto begin_scores = [&] {  // S = Q K^T
    wgmma_begin();
    multiply_qk<T>(s, shared.q[group], shared.k[k.stage]);
    wgmma_commit();
  };
  const auto begin_values = [&] {  // O += P V
    shared.v_full[v.stage].wait(v.parity);
    if (first < clear) clear_values<T>(shared.v[v.stage], clear - first, kGroupBarrier + group);
    wgmma_begin();
    multiply_pv<T>(o, p, shared.v[v.stage]);
    wgmma_commit();
  };
  const auto end_scores = [&](bool last) {  // last: of its item
    pin(s);
    release(shared.k_empty[k.stage]);
    k.next();
    if (last) release(shared.q_empty[group]);
  };
  const auto end_values = [&] {
    pin(o);
    release(shared.v_empty[v.stage]);
    v.next();
  };
  const auto softmax = [&] {
    first -= T::kKeys;
    if (first < whole.begin || first + T::kKeys > whole.end)
      hide(s, first, shared.rows[announced.stage], row);
    rows.softmax(s, c, ratio);
  };
  const auto next_weights = [&] {
    round_to<Element>(p, s);
    if (__any_sync(0xffffffff, ratio[0] != 1.0f || ratio[1] != 1.0f)) shrink(o, ratio);
  };
  const auto write = [&](int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (call.finished.out.data)
        write_finished<T>(call, shared.items[stage], row + 8 * h, rows, h, o);
      else
        write_state<T>(call, shared.items[stage], row + 8 * h, rows, h, o);
    }
    shared.item_empty[stage].arrive();
  };
  const auto begin_item = [&] {
    const Item& item = shared.items[announced.stage];
    first = item.some.end;
    whole = item.whole;
    clear = item.clear;
    rows = Rowwise{};
#pragma unroll
    for (int i = 0; i < T::kDim / 2; ++i) o[i] = 0;
  };
  const auto wait_item = [&] {  // gives its tiles
    shared.item_full[announced.stage].wait(announced.parity);
    return shared.items[announced.stage].tiles;
  };

  int tiles = wait_item();
  if (tiles == 0) return;
  shared.q_full[group].wait(q_parity);
  wait_keys();
  begin_scores();
  wgmma_wait<0>();
  for (;;) {
    end_scores(tiles == 1);
    begin_item();
    softmax();
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
      // The wait for P V stands here and not after the softmax: ptxas moves a wait up to the head
      // of its basic block, and so P V runs beside the softmax, which lies in the block before.
      wgmma_wait<0>();
      if (tile > 1) end_values();
      next_weights();
      wait_keys();
      wait_turn();
      begin_scores();
      begin_values();
      pass_turn();
      wgmma_wait<1>();
      end_scores(tile + 1 == tiles);
      softmax();
    }
    wgmma_wait<0>();
    if (tiles > 1) end_values();
    next_weights();

    // The last values of this item and the first scores of the next run together. After the last
    // item the scores are of no use, but ptxas wants no branch around them.
    const int done = announced.stage;
    announced.next();
    begin_values();
    tiles = wait_item();
    if (tiles > 0) {
      q_parity ^= 1;
      shared.q_full[group].wait(q_parity);
      wait_keys();
    }
    begin_scores();
    wgmma_wait<0>();
    end_values();
    write(done);
    if (tiles == 0) return;
  }
}

// ---- the kernel ------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) attend_kernel(const __grid_constant__ Call call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // builds for other GPUs hold an empty kernel that nobody launches
  extern __shared__ __align__(1024) std::byte memory[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(memory);

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * T::kConsumers;
    prefetch_map(&call.q);
    prefetch_map(&call.k);
    prefetch_map(&call.v);
    for (int i = 0; i < 2; ++i) {
      shared.item_full[i].init(32);
      shared.item_empty[i].init(128 * T::kConsumers + 1);
    }
    shared.item_wanted.init(1);
    for (int i = 0; i < T::kConsumers; ++i) {
      shared.q_full[i].init(1);
      shared.q_empty[i].init(4);
    }
    for (int i = 0; i < T::kStages; ++i) {
      shared.k_full[i].init(1);
      shared.k_empty[i].init(kConsumerWarps);
      shared.v_full[i].init(1);
      shared.v_empty[i].init(kConsumerWarps);
    }
    publish_barriers();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    give_registers<T::kProducerRegisters>();
    if (threadIdx.x / 32 == 1) schedule<T>(call, shared);
    if (threadIdx.x == 0) load<T>(call, shared);
  } else {
    take_registers<T::kConsumerRegisters>();
    consume<T>(call, shared, warpgroup - 1);
  }
#endif
}

}  // namespace longspan::kernels::sm90

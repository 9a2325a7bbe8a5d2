// dk and dv on Hopper: a block owns keys of one kv head, by which the rows stream that see some of
// them, of all query heads of its group (gradients_sm90.cuh).
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/gradients/first_token.cuh"
#include "kernels/cuda/gradients/plan.hpp"
#include "kernels/cuda/hopper/gradients_sm90.cuh"
#include "kernels/cuda/hopper/gradients_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

struct KeyGradientParams {
  CUtensorMap q, dout;  // boxes of [kRows rows, 128 bytes]
  CUtensorMap k, v;     // boxes of [64 keys, 128 bytes]
  GradientParams params;
  int tiles;    // of owned keys over the batch; an upper bound
  int section;  // kv heads walked together, so that their rows stay in L2
  Softcap softcap;
};

/// docs/notes/hopper-backward.md has the measurements.
template <class Element_, int kDim_, int kRows_, int kStages_, bool kScored_ = false,
          bool kDrops_ = false>
struct KeyGradientTile {
  using Element = Element_;
  static constexpr bool kScored = kScored_;  // with softcap, ALiBi
  static constexpr bool kDrops = kDrops_;    // with dropout
  static constexpr int kDim = kDim_;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 64 * kConsumers;  // owned
  static constexpr int kRows = kRows_;           // that stream by at a time
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  // A consumer that requests more registers than all warps have at the launch would wait forever.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * (65536 / kThreads / 8 * 8));
};

/// The owned keys, and what streams by.
struct OwnedKeys {
  cuda::Sequence sequence;
  KeyPositions positions;
  int kv_head;
  int first;               // local key
  int count;               // 0: nothing to do
  int begin, end;          // rows of the sequence that see some
  int all_begin, all_end;  // those that see all
  RowKeys seen;            // the keys that some row sees, counted from the first owned one

  /// The tiles of rows of a head.
  __device__ int tiles(int rows) const { return (max(end - begin, 0) + rows - 1) / rows; }
};

/// What is known of a tile of rows.
template <int kRows>
struct KeyRowTile {
  alignas(8) float lse[kRows], d[kRows];  // RowFactors; they are loaded in pairs
  float infinite_d[kRows];                // of a marked tile: D where it is not finite, else 0
  RowKeys keys[kRows];                    // what each row sees, counted from the first owned key
  int count;
  bool cut;     // some row does not see all owned keys; `keys` are not set otherwise
  bool marked;  // one of them is (gradients_sm90.cuh)
};

/// The additional memory of a tile of rows with softcap or ALiBi. `lse` of the tile takes the bias
/// of the first owned key away, and the others' are slope * offset higher.
template <class T>
struct ScoredRowTile {
  AlibiTerms alibi;      // of the rows' head, from the first row of the sequence on
  float from[T::kRows];  // lse without any bias
  int position[T::kRows];
};
/// The same with dropout: which rows keep the weights of a key.
template <class T>
struct DroppedRowTile {
  std::uint32_t kept[T::kKeys][T::kRows / 32];
};
struct NoScoredRowTile {};
struct NoDroppedRowTile {};

template <class T>
struct KeyRowTileOf : KeyRowTile<T::kRows>,
                      std::conditional_t<T::kScored, ScoredRowTile<T>, NoScoredRowTile>,
                      std::conditional_t<T::kDrops, DroppedRowTile<T>, NoDroppedRowTile> {};

template <class T>
struct KeyGradientShared {
  using Element = typename T::Element;
  alignas(1024) TilePanels<Element, T::kPanels, 64> k[T::kConsumers], v[T::kConsumers];
  alignas(1024) TilePanels<Element, T::kPanels, T::kRows> q[T::kStages], dout[T::kStages];
  KeyRowTileOf<T> rows[T::kStages];
  static_assert(sizeof(rows[0]) % 8 == 0 && alignof(KeyRowTileOf<T>) % 8 == 0);
  OwnedKeys work;
  NanBits nan[2][128 * T::kConsumers];  // of dk and dv, of each consumer thread
  Barrier own_full, full[T::kStages], empty[T::kStages];
  int position[T::kScored ? T::kKeys : 1];  // of the owned keys
};

/// One thread finds the owned keys of a block. Blocks are ordered in sections of heads, in each the
/// tiles from the first (which the most rows see under a causal mask) to the last.
template <class T>
__device__ void find_owned(const KeyGradientParams& call, int index, OwnedKeys& work) {
  const GradientParams& p = call.params;
  const int first_head = index / (call.section * call.tiles) * call.section;
  const int heads = min(call.section, p.kv_heads - first_head);
  const int of_section = index % (call.section * call.tiles), tile = of_section / heads;
  work.kv_head = first_head + of_section % heads;
  const auto first_tile = [&](int b) { return cuda::first_key_sum(p, b) / T::kKeys + b; };
  const int b = last_start(p.batch.size, std::int64_t{tile}, first_tile);
  const auto own = static_cast<int>(tile - first_tile(b));
  work.sequence = cuda::sequence_of(p, b);
  work.first = own * T::kKeys;
  const std::int64_t left = work.sequence.local_len - work.first;
  work.count = own < 0 || left < 0 ? 0 : static_cast<int>(min(left, std::int64_t{T::kKeys}));
  if (work.count > 0) work.positions.find(p.shard, b, work.sequence.kv_len);
}

/// A warpgroup loads owned keys, or values, from the `first` one on. Those that nobody sees are 0.
template <class Element, int kPanels>
__device__ void load_owned_rows(TilePanels<Element, kPanels, 64>& tile, const OwnedKeys& work,
                                const KvRows& from, int dim, int first) {
  const int thread = static_cast<int>(threadIdx.x % 128);
#pragma unroll 1
  for (int i = thread; i < 64 * kPanels * 8; i += 128) {
    const int row = i / (kPanels * 8), chunk = i % (kPanels * 8), key = first + row;
    uint4 words{};
    if (key >= work.seen.begin && key < work.seen.end && 8 * chunk < dim)
      words = *reinterpret_cast<const uint4*>(
          from.template at<Element>(work.sequence.first_key + work.first + key, work.kv_head) +
          8 * chunk);
    *reinterpret_cast<uint4*>(&tile[chunk / 8][row][(chunk % 8 ^ row % 8) * 8]) = words;
  }
}

/// Stores a thread's part of the sums of 64 owned keys, of which it has `own` and own + 8, as sums
/// or rounded.
template <class Element, int kDim>
__device__ __forceinline__ void store_owned(const float (&sums)[kDim / 2], float factor,
                                            const GradientParams& params, const OwnedKeys& work,
                                            int own, const GradientSums& to,
                                            const TokenRows& rounded) {
  const std::int64_t first = cuda::first_key_sum(params, work.sequence.index) + work.first;
  if (params.stores)
    return store_rounded<Element, kDim>(sums, factor, to.dim, [&](int h) -> Element* {
      const int key = own + 8 * h;
      if (key >= work.count) return nullptr;
      const std::int64_t place =
          params.stores.place(work.sequence.index, work.first + key, first + key);
      return place < 0 ? nullptr : rounded.template at<Element>(place, work.kv_head);
    });
  store_sums<kDim>(sums, factor, GradientSums::padded(to.dim), params.resume_keys,
                   [&](int h) -> float* {
                     const int key = own + 8 * h;
                     return key < work.count ? to.at(work.kv_head, first + key) : nullptr;
                   });
}

/// Warps that find the rows which see some owned key, and keep the pipeline filled.
template <class T>
class KeyGradientProducer {
 public:
  __device__ __forceinline__ KeyGradientProducer(const KeyGradientParams& call,
                                                 KeyGradientShared<T>& shared)
      : call_(call),
        p_(call.params),
        shared_(shared),
        work_(shared.work),
        lane_(static_cast<int>(threadIdx.x % 32)),
        group_(p_.heads / p_.kv_heads),
        again_(cache_policy<Keep::last_to_go>()) {}

  /// Four warps find which rows see the owned keys: each a bound. What rows see ascends.
  __device__ __forceinline__ void find_rows() const {
    const int bound = static_cast<int>(threadIdx.x / 32), end = work_.first + work_.count;
    const std::int64_t tokens = p_.batch.query_len(work_.sequence.index, p_.tokens);
    const auto found = static_cast<int>(cuda::first_token(tokens, [&](std::int64_t token) {
      const RowKeys seen = seen_by(token);
      return bound == 0   ? seen.end > work_.first
             : bound == 1 ? seen.begin >= end
             : bound == 2 ? seen.end >= end
                          : seen.begin > work_.first;
    }));
    if (lane_ > 0) return;
    int& to = bound == 0   ? work_.begin
              : bound == 1 ? work_.end
              : bound == 2 ? work_.all_begin
                           : work_.all_end;
    to = found;
  }

  /// A warpgroup finds the positions of the owned keys.
  __device__ __forceinline__ void find_positions() const {
    static_assert(T::kKeys == 128);
    if constexpr (T::kScored)
      shared_.position[threadIdx.x] =
          runs_of(work_.positions).position(work_.first + static_cast<int>(threadIdx.x));
  }

  /// Which keys some row sees.
  __device__ __forceinline__ void find_seen() const {
    RowKeys seen{0, 0};
    if (work_.begin < work_.end) {
      const auto from_own = [&](int key) { return min(max(key - work_.first, 0), work_.count); };
      seen = {from_own(seen_by(work_.begin).begin), from_own(seen_by(work_.end - 1).end)};
    }
    work_.seen = seen;
  }

  /// Each warp fills a stage. Finding what rows see takes longer than the products of a tile.
  __device__ __forceinline__ void run() {
    static_assert(T::kStages <= 4);
    const int stage = static_cast<int>(threadIdx.x / 32);
    if (stage >= T::kStages) return;
    const int of_head = work_.tiles(T::kRows), tiles = of_head * group_;
    std::uint32_t parity = 1;
#pragma unroll 1
    for (int i = stage; i < tiles; i += T::kStages) {
      shared_.empty[stage].wait(parity);
      const int head = i / of_head;
      load(stage, work_.kv_head * group_ + head, work_.begin + (i - head * of_head) * T::kRows);
      parity ^= 1;
    }
  }

  /// A tile that is not whole is loaded by the consumers: only the device knows where keys end.
  __device__ __forceinline__ void load_owned() {
    if (work_.count < T::kKeys) return;
    constexpr int kBytes = 2 * T::kConsumers * T::kPanels * 64 * 128;
    const auto key = static_cast<int>(work_.sequence.first_key) + work_.first;
    const std::uint64_t once = cache_policy<Keep::first_to_go>();
    shared_.own_full.arrive_expecting(kBytes);
    for (int c = 0; c < T::kConsumers; ++c)
      for (int panel = 0; panel < T::kPanels; ++panel) {
        load_box(shared_.k[c][panel], &call_.k, panel * 64, key + 64 * c, work_.kv_head,
                 &shared_.own_full, once);
        load_box(shared_.v[c][panel], &call_.v, panel * 64, key + 64 * c, work_.kv_head,
                 &shared_.own_full, once);
      }
  }

 protected:
  /// The local keys that a row sees.
  __device__ __forceinline__ RowKeys seen_by(std::int64_t token) const {
    const cuda::Sequence& sequence = work_.sequence;
    const std::int64_t position = sequence.context_len + p_.query_index(sequence.index, token);
    const Interval seen = cuda::visible_in_order(p_, sequence.index, position, sequence.kv_len);
    return {work_.positions.before(static_cast<int>(seen.begin)),
            work_.positions.before(static_cast<int>(seen.end))};
  }

  /// A warp finds what is known of a tile of rows.
  __device__ __forceinline__ void find_terms(int stage, int head, int token) {
    auto& rows = shared_.rows[stage];
    const int count = min(work_.end - token, T::kRows);
    const bool cut =
        count < T::kRows || token < work_.all_begin || token + T::kRows > work_.all_end;
    const auto first_row = static_cast<int>(work_.sequence.first_row) + token;
    const AlibiTerms alibi = find_alibi(stage, head);
    bool marks = false;
#pragma unroll 1
    for (int i = lane_; i < T::kRows; i += 32) {
      RowTerm term{-INFINITY, 0.0f, 0.0f};
      bool marked = false;
      if (i < count) term = p_.terms[std::int64_t{first_row + i} * p_.heads + head];
      RowFactors factors = factors_of(term, marked);
      factors.lse -= kWeightExponent<typename T::Element>;
      marks = marks || (marked && i < count);
      if constexpr (T::kScored) factors.lse = lower(stage, i, alibi, token, factors.lse, term);
      rows.lse[i] = factors.lse;
      const bool infinite = !is_finite(factors.d);
      rows.d[i] = infinite ? 0.0f : factors.d;
      rows.infinite_d[i] = infinite ? factors.d : 0.0f;
      if (!cut) continue;
      RowKeys keys{0, 0};
      if (i < count) {
        const RowKeys seen = seen_by(token + i);
        const auto from_own = [&](int key) { return min(max(key - work_.first, 0), T::kKeys); };
        keys = {from_own(seen.begin), from_own(seen.end)};
      }
      rows.keys[i] = keys;
    }
    marks = __any_sync(0xffffffff, marks);
    if (lane_ == 0) {
      rows.count = count;
      rows.cut = cut;
      rows.marked = marks;
    }
    draw(stage, head, token);
    __syncwarp();
  }
  /// Where a tile of rows is in the maps.
  struct Place {
    int row, head;
  };
  __device__ __forceinline__ Place place_of(int head, int token) const {
    if (p_.q.gap.rows > 0) return {token, work_.sequence.index * p_.heads + head};
    return {static_cast<int>(work_.sequence.first_row) + token, head};
  }

  __device__ __forceinline__ void load(int stage, int head, int token) {
    find_terms(stage, head, token);
    if (lane_ > 0) return;
    constexpr int kBytes = 2 * T::kPanels * T::kRows * 128;
    const auto [row, of_map] = place_of(head, token);
    Barrier& full = shared_.full[stage];
    full.arrive_expecting(kBytes);
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel) {
      load_box(shared_.q[stage][panel], &call_.q, panel * 64, row, of_map, &full, again_);
      load_box(shared_.dout[stage][panel], &call_.dout, panel * 64, row, of_map, &full, again_);
    }
  }

  /// The index of a token among the queries of its sequence.
  __device__ __forceinline__ int index_of(int token) const {
    return static_cast<int>(p_.query_index(work_.sequence.index, token));
  }
  __device__ __forceinline__ AlibiTerms find_alibi(int stage, int head) const {
    AlibiTerms alibi{};
    if constexpr (T::kScored) {
      alibi = alibi_of(p_, work_.positions, work_.sequence.index, head,
                       static_cast<int>(work_.sequence.context_len), 0);
      if (lane_ == 0) shared_.rows[stage].alibi = alibi;
    }
    return alibi;
  }
  /// Returns what row i counts its weights from, which has the bias of the first owned key.
  __device__ __forceinline__ float lower(int stage, int i, const AlibiTerms& alibi, int token,
                                         float lse, const RowTerm& term) const {
    if constexpr (T::kScored) {
      ScoredRowTile<T>& scored = shared_.rows[stage];
      const int index = index_of(min(token + i, work_.end - 1));
      const int position = static_cast<int>(work_.sequence.context_len) + index;
      const float from = lowered(lse, term, alibi.lift, index);
      scored.position[i] = position;
      scored.from[i] = from;
      return fmaf(alibi.slope, static_cast<float>(position - shared_.position[0]), from);
    }
    return lse;
  }
  /// Draws the dropout of a tile: a lane has a row.
  __device__ __forceinline__ void draw(int stage, int head, int token) const {
    if constexpr (T::kDrops) {
      const KeyRuns runs = runs_of(work_.positions);
      const int context_len = static_cast<int>(work_.sequence.context_len);
      const PhiloxKey key = p_.dropout.key();
#pragma unroll 1
      for (int rows = 0; rows < T::kRows; rows += 32) {
        const int index = index_of(min(token + rows + lane_, work_.end - 1));
        const DropoutRow row = p_.dropout.row(key, work_.sequence.index, head, context_len + index);
#pragma unroll 1
        for (int own = 0; own < T::kKeys; own += 32)
          shared_.rows[stage].kept[own + lane_][rows / 32] = transpose_bits(
              static_cast<std::uint32_t>(kept_of(p_.dropout, row, runs, work_.first + own, 32)));
      }
    }
  }

  const KeyGradientParams& call_;
  const GradientParams& p_;
  KeyGradientShared<T>& shared_;
  OwnedKeys& work_;
  const int lane_, group_;
  const std::uint64_t again_;
};

/// A thread of a consumer warpgroup. Its arrays are beside it (attend_sm90_consumer.cuh says why).
template <class T>
class KeyGradientConsumer {
  using Element = typename T::Element;
  static constexpr int kGroupBarrier = 1, kBothBarrier = kGroupBarrier + T::kConsumers;

 public:
  struct Fragments {
    float (&s)[T::kRows / 2];              // scores, weights, dS; of 64 keys and kRows rows
    float (&g)[T::kRows / 2];              // dP
    std::uint32_t (&p)[T::kRows / 16][4];  // weights, rounded
    std::uint32_t (&w)[T::kRows / 16][4];  // dS, rounded
    float (&dk)[T::kDim / 2];
    float (&dv)[T::kDim / 2];
  };

  __device__ __forceinline__ KeyGradientConsumer(const Fragments& fragments,
                                                 const KeyGradientParams& call,
                                                 KeyGradientShared<T>& shared, int group)
      : s(fragments.s),
        g(fragments.g),
        p(fragments.p),
        w(fragments.w),
        dk(fragments.dk),
        dv(fragments.dv),
        call_(call),
        shared_(shared),
        group_(group),
        lane_(static_cast<int>(threadIdx.x % 32)),
        key_(64 * group + 16 * static_cast<int>(threadIdx.x / 32 % 4) + lane_ / 4),
        factor_(call.params.score.scale * kLog2E) {}

  __device__ __forceinline__ void run() {
    const int tiles = shared_.work.tiles(T::kRows) * (call_.params.heads / call_.params.kv_heads);
#pragma unroll
    for (int i = 0; i < T::kDim / 2; ++i) dk[i] = dv[i] = 0;
    nan(Sums::dk) = nan(Sums::dv) = 0;
    load_owned();  // also if nobody sees them: no block may end while they are on their way
    if (tiles > 0) {
      pin(dk);
      pin(dv);
      begin_tile();
      begin_products();
#pragma unroll 1
      for (int left = tiles;;) {
        add_products();
        if (--left == 0) break;
        begin_tile();  // its wait ends a basic block: see RowGradientConsumer
        // P is free for the scores of the next tile. Sums that may be scaled have to be complete,
        // or ptxas serialises all products.
        wgmma_wait<SumScales<Element>::kAny ? 0 : 1>();
        pin(dv);
        if constexpr (SumScales<Element>::kAny) pin(dk);
        begin_products();
      }
      wgmma_wait<0>();
      pin(dk);
      pin(dv);
    }
    scales_.end(dk);
    set_nan(dk, nan(Sums::dk));
    set_nan(dv, nan(Sums::dv));
    store(Sums::dk);
    store(Sums::dv);
  }

 private:
  enum class Sums { dk, dv };

  /// Which of a thread's elements keep their weights.
  struct Kept {
    static constexpr int kWords = T::kRows / 32;
    std::uint32_t words[2][kWords];

    __device__ __forceinline__ Kept(const KeyGradientShared<T>& shared, int stage, int key,
                                    int lane) {
      if constexpr (T::kDrops)
#pragma unroll
        for (int i = 0; i < 2 * kWords; ++i)
          words[i / kWords][i % kWords] =
              shared.rows[stage].kept[key + i / kWords * 8][i % kWords] >> 2 * (lane % 4);
    }
    __device__ __forceinline__ bool of(int i) const {
      return !T::kDrops || (words[i / 2 % 2][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1) != 0;
    }
  };

  /// Waits for the next tile of rows, which then has no element that must not be multiplied.
  __device__ __forceinline__ void begin_tile() {
    shared_.full[at_.stage].wait(at_.parity);
    const auto& rows = shared_.rows[at_.stage];
    if (uniform(rows.count < T::kRows)) {
      clear_rows(shared_.q[at_.stage], rows.count, T::kRows - rows.count);
      clear_rows(shared_.dout[at_.stage], rows.count, T::kRows - rows.count);
      fence_shared_stores();
      named_sync(kGroupBarrier + group_, 128);
    }
    if (uniform(rows.marked)) spread();
  }
  __device__ __forceinline__ NanBits& nan(Sums of) {
    return shared_.nan[of == Sums::dk ? 0 : 1][threadIdx.x - 128];
  }
  /// Both consumers come here, for the same tiles.
  __device__ void spread() {
    const auto& rows = shared_.rows[at_.stage];
    const auto sees = [&](int h, int i) {
      const RowKeys& seen = rows.keys[i];
      const int key = key_ + 8 * h;
      const bool has = !rows.cut || (key >= seen.begin && key < seen.end);
      return has && rows.lse[i] != INFINITY;
    };
    nan(Sums::dk) |= nan_of<T::kDim>(shared_.q[at_.stage], rows.count, sees);
    nan(Sums::dv) |= nan_of<T::kDim>(shared_.dout[at_.stage], rows.count, sees);
    named_sync(kBothBarrier, 256);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    clear_infinite<256>(shared_.q[at_.stage], thread);
    clear_infinite<256>(shared_.dout[at_.stage], thread);
    fence_shared_stores();
    named_sync(kBothBarrier, 256);
  }

  __device__ __forceinline__ void begin_products() {  // S = K Q^T, dP = V dout^T
    wgmma_begin();
    multiply_rows<T::kDim>(s, shared_.k[group_], shared_.q[at_.stage]);
    wgmma_commit();
    multiply_rows<T::kDim>(g, shared_.v[group_], shared_.dout[at_.stage]);
    wgmma_commit();
    stage_ = at_.stage;
    at_.advance();
  }

  /// From products to sums in flight. The products of dP run beside the exponentials.
  __device__ __forceinline__ void add_products() {
    float2 lse[T::kRows / 8], d[T::kRows / 8];
    load_terms(lse, shared_.rows[stage_].lse);  // before they are needed
    wgmma_wait<1>();                            // S, and the sums of the tile before
    pin(s);
    pin(dk);
    pin(dv);
    __syncwarp();  // every lane has read the terms
    if (sums_ >= 0 && lane_ == 0) shared_.empty[sums_].arrive();
    weigh(lse);
    load_terms(d, shared_.rows[stage_].d);
    wgmma_begin();
    multiply_weights<T::kDim>(dv, p, shared_.dout[stage_]);
    wgmma_commit();
    wgmma_wait<1>();  // dP
    pin(g);
    differentiate(d);
    wgmma_begin();
    multiply_weights<T::kDim>(dk, w, shared_.q[stage_]);
    wgmma_commit();
    sums_ = stage_;
  }
  /// The terms of the rows that a thread has in its scores.
  __device__ __forceinline__ void load_terms(float2 (&terms)[T::kRows / 8],
                                             const float (&from)[T::kRows]) const {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
      terms[j] = *reinterpret_cast<const float2*>(&from[8 * j + 2 * (lane_ % 4)]);
  }
  /// s becomes weights, which are also rounded.
  __device__ __forceinline__ void weigh(const float2 (&lse)[T::kRows / 8]) {
    if constexpr (T::kScored) {
      weigh_scores(lse);
    } else {
#pragma unroll
      for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[4 * j + e] =
              exp2_fast(fmaf(s[4 * j + e], factor_, -(e % 2 == 0 ? lse[j].x : lse[j].y)));
      }
      if (shared_.rows[stage_].cut) mask();
      round_weights<Element>(p, s);
    }
  }
  /// s becomes weights times the slopes of their scores; the weights are rounded.
  __device__ __forceinline__ void weigh_scores(const float2 (&lse)[T::kRows / 8]) {
    const auto& rows = shared_.rows[stage_];
    const AlibiTerms& alibi = rows.alibi;
    const Softcap& cap = call_.softcap;
    const Kept kept(shared_, stage_, key_, lane_);
    const auto round = [&](int i, const float(&weight)[2]) {
      p[i / 8][i / 2 % 4] =
          pack(kept.of(i) ? weight[0] : 0.0f, kept.of(i + 1) ? weight[1] : 0.0f, Element{});
    };
    const bool simple = !uniform(rows.cut || alibi.two_sided);
    const unsigned most = simple && cap.height != 0.0f ? find_most(s, 64) : UINT_MAX;
    if (simple && (cap.height == 0.0f || reaches(cap, 2, most))) {
      float bias[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        bias[h] =
            alibi.slope * static_cast<float>(shared_.position[key_ + 8 * h] - shared_.position[0]);
      with_near_form(cap, factor_, most, [&](const auto& form) {
        weigh_by(
            s, form,
            [&](int i) { return (i % 2 == 0 ? lse[i / 4].x : lse[i / 4].y) - bias[i / 2 % 2]; },
            round);
      });
      return;
    }
    // Weights of keys that a row does not see are 0, whatever its terms are.
    with_form(cap, factor_, [&](const auto& form) {
      const int own[2] = {shared_.position[key_], shared_.position[key_ + 8]};
      weigh_by(
          s, form,
          [&](int i) {
            const int row = row_of(i);
            const auto distance = static_cast<float>(own[i / 2 % 2] - rows.position[row]);
            return rows.from[row] - bias_of(alibi, distance);
          },
          [&](int i, float(&weight)[2]) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (rows.cut && !sees(rows.keys[row_of(i + e)], i / 2 % 2)) weight[e] = 0.0f;
            round(i, weight);
          });
    });
  }
  /// The row of the tile of element i.
  __device__ __forceinline__ int row_of(int i) const { return i / 4 * 8 + 2 * (lane_ % 4) + i % 2; }
  __device__ __forceinline__ bool sees(const RowKeys& seen, int h) const {
    return static_cast<unsigned>(key_ + 8 * h - seen.begin) <
           static_cast<unsigned>(seen.end - seen.begin);
  }
  /// dP of weights that were dropped becomes 0, and that of others larger.
  __device__ __forceinline__ void drop() {
    const Kept kept(shared_, stage_, key_, lane_);
    const float scale = call_.params.dropout.scale;
#pragma unroll
    for (int i = 0; i < T::kRows / 2; ++i) g[i] = kept.of(i) ? g[i] * scale : 0.0f;
  }

  /// Weights of keys that a row does not see are 0, whatever its terms are.
  __device__ __forceinline__ void mask() {
    const auto& rows = shared_.rows[stage_];
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const RowKeys seen = rows.keys[8 * j + 2 * (lane_ % 4) + e];
        const unsigned count = seen.end - seen.begin;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (static_cast<unsigned>(key_ + 8 * h - seen.begin) >= count)
            s[4 * j + 2 * h + e] = 0.0f;
      }
  }
  /// Weights become dS, rounded.
  __device__ __forceinline__ void differentiate(const float2 (&d)[T::kRows / 8]) {
    if constexpr (T::kDrops) drop();
    if (uniform(shared_.rows[stage_].marked)) add_infinite();
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * j + e] *= g[4 * j + e] - (e % 2 == 0 ? d[j].x : d[j].y);
    scales_.apply(s, dk);
    round_weights<Element>(w, s);
  }

  /// D of a marked row that is not finite counts for the keys that the row sees.
  __device__ __forceinline__ void add_infinite() {
    const auto& rows = shared_.rows[stage_];
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (s[4 * j + e] != 0.0f) g[4 * j + e] -= rows.infinite_d[8 * j + 2 * (lane_ % 4) + e % 2];
  }

  /// Waits for the owned keys, or loads those of a tile that is not whole. Keys that nobody sees
  /// may be anything, and become 0.
  __device__ __forceinline__ void load_owned() {
    const OwnedKeys& work = shared_.work;
    if (work.count == T::kKeys) {
      shared_.own_full.wait(0);
      if (work.seen.begin <= 0 && work.seen.end >= T::kKeys) return;
      const int from = 64 * group_, begin = min(max(work.seen.begin - from, 0), 64),
                end = min(max(work.seen.end - from, 0), 64);
      clear_rows(shared_.k[group_], 0, begin);
      clear_rows(shared_.v[group_], 0, begin);
      clear_rows(shared_.k[group_], end, 64 - end);
      clear_rows(shared_.v[group_], end, 64 - end);
    } else {
      load_owned_rows(shared_.k[group_], work, call_.params.k, call_.params.head_dim, 64 * group_);
      load_owned_rows(shared_.v[group_], work, call_.params.v, call_.params.value_dim, 64 * group_);
    }
    fence_shared_stores();
    named_sync(kGroupBarrier + group_, 128);
  }

  __device__ __forceinline__ void store(Sums which) const {
    const GradientParams& params = call_.params;
    constexpr float kOfWeight = 1.0f / (1 << kWeightExponent<Element>);
    const float kept = T::kDrops ? params.dropout.scale : 1.0f;
    if (which == Sums::dk)
      store_owned<Element, T::kDim>(dk, params.score.scale * kOfWeight, params, shared_.work, key_,
                                    params.dk, params.stores.dk);
    else
      store_owned<Element, T::kDim>(dv, kept * kOfWeight, params, shared_.work, key_, params.dv,
                                    params.stores.dv);
  }

  float (&s)[T::kRows / 2];
  float (&g)[T::kRows / 2];
  std::uint32_t (&p)[T::kRows / 16][4];
  std::uint32_t (&w)[T::kRows / 16][4];
  float (&dk)[T::kDim / 2];
  float (&dv)[T::kDim / 2];
  const KeyGradientParams& call_;
  KeyGradientShared<T>& shared_;
  const int group_, lane_;
  const int key_;       // of the owned ones; the thread's second key is key_ + 8
  const float factor_;  // base 2, from a product to a score
  PipelineState<T::kStages> at_;
  int stage_ = 0;  // of the last products
  int sums_ = -1;  // of the sums in flight
  SumScales<Element> scales_;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    key_gradients_kernel(const __grid_constant__ KeyGradientParams call) {
  if constexpr (kHasWgmma) {
    std::byte* const memory = shared_by_1024;
    KeyGradientShared<T>& shared = *reinterpret_cast<KeyGradientShared<T>*>(memory);
    if (threadIdx.x == 0) {
      find_owned<T>(call, static_cast<int>(blockIdx.x), shared.work);
      shared.own_full.init(1);
      for (int i = 0; i < T::kStages; ++i) {
        shared.full[i].init(1);
        shared.empty[i].init(4 * T::kConsumers);
      }
      publish_barriers();
    }
    __syncthreads();
    if (shared.work.count == 0) return;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // known to be uniform
    KeyGradientProducer<T> producer(call, shared);
    if (threadIdx.x == 0) producer.load_owned();
    if (warpgroup == 0) producer.find_rows();
    if (warpgroup == 0) producer.find_positions();
    __syncthreads();
    if (threadIdx.x == 0) producer.find_seen();
    __syncthreads();
    if (warpgroup == 0) {
      give_registers<T::kProducerRegisters>();
      producer.run();
    } else {
      take_registers<T::kConsumerRegisters>();
      float s[T::kRows / 2], g[T::kRows / 2], dk[T::kDim / 2], dv[T::kDim / 2];
      std::uint32_t p[T::kRows / 16][4], w[T::kRows / 16][4];
      KeyGradientConsumer<T>({s, g, p, w, dk, dv}, call, shared, warpgroup - 1).run();
    }
  }
}

}  // namespace longspan::kernels::sm90

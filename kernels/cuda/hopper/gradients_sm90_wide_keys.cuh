// dk and dv on Hopper of heads wider than 128. One warpgroup has no room for both sums of 64 keys,
// so that two divide the work, not the keys (gradients_sm90_keys.cuh divides the keys):
//
//     consumer   products of a tile of rows       weighs
//     values     S = K Q^T,     dv += P dout      P = exp2(S - lse)
//     keys       dP = V dout^T, dk += dS Q        dS = P (dP - D)
//
// Both have the same number of products, and each keeps its weights in registers. P goes through
// shared memory, in fp32: a thread of one and the thread of the other with the same number have the
// same elements. The sums of a tile and the next scores are multiplied while the other consumer
// weighs, so the second follows the first by the time of its exponentials.
//
// Queries and dout of a tile become free at different times, and have barriers of their own. What
// is known of rows is found a few tiles ahead, as it takes longer than to load them.
#pragma once

#include "kernels/cuda/hopper/gradients_sm90_keys.cuh"

namespace longspan::kernels::sm90 {

/// docs/notes/hopper-backward.md has the measurements.
template <class Element_, int kDim_, int kValueDim_, int kRows_, int kStages_>
struct WideKeyTile {
  using Element = Element_;
  static constexpr bool kScored = false, kDrops = false;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  static constexpr int kPanels = kDim / 64, kValuePanels = kValueDim / 64;
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 64;      // owned
  static constexpr int kRows = kRows_;  // that stream by at a time
  static constexpr int kStages = kStages_;
  // The next products run beside the arithmetic of a tile, while the sums of the one before it do.
  static constexpr bool kAhead = kStages > 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
};

template <class Element, int kDim, int kValueDim, int kRows, int kStages>
struct KeyGradientShared<WideKeyTile<Element, kDim, kValueDim, kRows, kStages>> {
  static constexpr int kPanels = kDim / 64, kValuePanels = kValueDim / 64;
  alignas(1024) TilePanels<Element, kPanels, 64> k;
  alignas(1024) TilePanels<Element, kValuePanels, 64> v;
  alignas(1024) TilePanels<Element, kPanels, kRows> q[kStages];
  alignas(1024) TilePanels<Element, kValuePanels, kRows> dout[kStages];
  static constexpr int kFinders = 3, kFound = 2 * kFinders;  // warps, and tiles that they know
  float4 weights[kRows / 8][128];  // P: every four elements of each thread
  KeyRowTile<kRows> rows[kFound];
  OwnedKeys work;
  Barrier own_full;
  Barrier rows_full[kFound], rows_empty[kFound];
  Barrier q_full[kStages], q_empty[kStages];
  Barrier dout_full[kStages], dout_empty[kStages];
  Barrier weighed[4], taken[4];  // P of a warp of each consumer

  __device__ void init_barriers() {
    own_full.init(1);
    for (int i = 0; i < kStages; ++i) {
      q_full[i].init(1);
      dout_full[i].init(1);
      q_empty[i].init(8);
      dout_empty[i].init(8);
    }
    for (int i = 0; i < 4; ++i) {
      weighed[i].init(1);
      taken[i].init(1);
    }
    for (int i = 0; i < kFound; ++i) {
      rows_full[i].init(1);
      rows_empty[i].init(8);
    }
    publish_barriers();
  }
};

template <class T>
class WideKeyProducer : public KeyGradientProducer<T> {
  using Base = KeyGradientProducer<T>;

 public:
  __device__ __forceinline__ WideKeyProducer(const KeyGradientParams& call,
                                             KeyGradientShared<T>& shared)
      : Base(call, shared) {}

  /// A warp loads tiles, and the others find what is known of them.
  __device__ __forceinline__ void run() {
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp > 0)
      find(warp - 1);
    else if (this->lane_ == 0)
      load();
  }

  __device__ __forceinline__ void load_owned() {
    const OwnedKeys& work = this->work_;
    auto& shared = this->shared_;
    if (work.count < T::kKeys) return;
    const auto key = static_cast<int>(work.sequence.first_key) + work.first;
    const std::uint64_t once = cache_policy<Keep::first_to_go>();
    shared.own_full.arrive_expecting((T::kPanels + T::kValuePanels) * 64 * 128);
    for (int panel = 0; panel < T::kPanels; ++panel)
      load_box(shared.k[panel], &this->call_.k, panel * 64, key, work.kv_head, &shared.own_full,
               once);
    for (int panel = 0; panel < T::kValuePanels; ++panel)
      load_box(shared.v[panel], &this->call_.v, panel * 64, key, work.kv_head, &shared.own_full,
               once);
  }

 private:
  struct Tile {
    int head, token;
  };
  __device__ __forceinline__ int tiles() const {
    return this->work_.tiles(T::kRows) * this->group_;
  }
  __device__ __forceinline__ Tile tile(int i) const {
    const int of_head = this->work_.tiles(T::kRows), of_group = i / of_head;
    return {this->work_.kv_head * this->group_ + of_group,
            this->work_.begin + (i - of_group * of_head) * T::kRows};
  }

  __device__ __forceinline__ void find(int finder) {
    auto& shared = this->shared_;
    std::uint32_t parity = 1;
    int slot = finder;
#pragma unroll 1
    for (int i = finder; i < tiles(); i += shared.kFinders) {
      shared.rows_empty[slot].wait(parity);
      this->find_terms(slot, tile(i).head, tile(i).token);
      if (this->lane_ == 0) shared.rows_full[slot].arrive();
      slot += shared.kFinders;
      if (slot < shared.kFound) continue;
      slot = finder;
      parity ^= 1;
    }
  }

  /// dout is free before the queries are.
  __device__ __forceinline__ void load() {
    auto& shared = this->shared_;
    PipelineState<T::kStages> at;
#pragma unroll 1
    for (int i = 0; i < tiles(); ++i, at.advance()) {
      const auto place = this->place_of(tile(i).head, tile(i).token);
      shared.dout_empty[at.stage].wait(at.parity ^ 1);
      load(shared.dout[at.stage], &this->call_.dout, place, shared.dout_full[at.stage]);
      shared.q_empty[at.stage].wait(at.parity ^ 1);
      load(shared.q[at.stage], &this->call_.q, place, shared.q_full[at.stage]);
    }
  }
  template <int kPanels>
  __device__ __forceinline__ void load(TilePanels<typename T::Element, kPanels, T::kRows>& tile,
                                       const CUtensorMap* map, const typename Base::Place& place,
                                       Barrier& full) {
    full.arrive_expecting(kPanels * T::kRows * 128);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      load_box(tile[panel], map, panel * 64, place.row, place.head, &full, this->again_);
  }
};

/// A thread of the consumer of values, or of that of keys. Its arrays are beside it
/// (attend_sm90_consumer.cuh says why).
template <class T, bool kValues>
class WideKeyConsumer {
  using Element = typename T::Element;
  using SharedMemory = KeyGradientShared<T>;
  static constexpr int kSumDim = kValues ? T::kValueDim : T::kDim;
  static constexpr int kProductDim = kValues ? T::kDim : T::kValueDim;
  static constexpr int kGroupBarrier = kValues ? 1 : 2, kBothBarrier = 3;

 public:
  struct Fragments {
    float (&s)[T::kRows / 2];              // products: S or dP, of 64 keys
    float (&x)[T::kRows / 2];              // scores and weights, or dS
    std::uint32_t (&w)[T::kRows / 16][4];  // weights or dS, rounded
    float (&sums)[kSumDim / 2];            // dv or dk
    volatile NanBits (&nan)[nan_words(kSumDim)];
  };

  __device__ __forceinline__ WideKeyConsumer(const Fragments& fragments,
                                             const KeyGradientParams& call, SharedMemory& shared)
      : s(fragments.s),
        x(fragments.x),
        w(fragments.w),
        sums(fragments.sums),
        nan(fragments.nan),
        call_(call),
        shared_(shared),
        thread_(static_cast<int>(threadIdx.x % 128)),
        lane_(thread_ % 32),
        key_(16 * (thread_ / 32) + lane_ / 4),
        factor_(call.params.score.scale * kLog2E) {}

  __device__ __forceinline__ void run() {
    const int tiles = shared_.work.tiles(T::kRows) * (call_.params.heads / call_.params.kv_heads);
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (int i = 0; i < nan_words(kSumDim); ++i) nan[i] = 0;
    load_owned();  // also if nobody sees them: no block may end while they are on their way
    if (tiles > 0) {
      pin(sums);
      begin_tile();
      begin_products();
      take_products<0>();
#pragma unroll 1
      for (int left = tiles - 1; left > 0; --left) {
        if constexpr (!T::kAhead) finish_tile<0>();
        begin_tile();
        begin_products();
        if constexpr (T::kAhead) {
          finish_tile<1>();
          take_products<1>();
        } else {
          wgmma_wait<1>();
          end_sums();
          take_products<0>();
        }
      }
      finish_tile<0>();
      wgmma_wait<0>();
      pin(sums);
    }
    set_all_nan(sums, nan);
    store();
  }

 private:
  /// Where a tile of rows is, and what is known of it.
  struct Tile {
    int stage, rows;
    std::uint32_t parity;  // of the stage
  };

  /// What products read, what sums read, and the owned keys or values.
  __device__ __forceinline__ auto& streamed(int stage) {
    if constexpr (kValues)
      return shared_.q[stage];
    else
      return shared_.dout[stage];
  }
  __device__ __forceinline__ auto& summed(int stage) {
    if constexpr (kValues)
      return shared_.dout[stage];
    else
      return shared_.q[stage];
  }
  __device__ __forceinline__ auto& owned() {
    if constexpr (kValues)
      return shared_.k;
    else
      return shared_.v;
  }
  __device__ __forceinline__ Barrier& products_empty(int stage) {
    return kValues ? shared_.q_empty[stage] : shared_.dout_empty[stage];
  }
  __device__ __forceinline__ Barrier& sums_empty(int stage) {
    return kValues ? shared_.dout_empty[stage] : shared_.q_empty[stage];
  }

  /// Waits for the next tile of rows, which then has no element that must not be multiplied.
  __device__ __forceinline__ void begin_tile() {
    shared_.rows_full[known_.stage].wait(known_.parity);
    shared_.q_full[at_.stage].wait(at_.parity);
    const auto& rows = shared_.rows[known_.stage];
    if constexpr (!kValues) shared_.dout_full[at_.stage].wait(at_.parity);
    if (uniform(rows.count < T::kRows || rows.marked)) clean();
  }
  __device__ void clean() {
    const auto& rows = shared_.rows[known_.stage];
    shared_.dout_full[at_.stage].wait(at_.parity);
    if (rows.count < T::kRows) {
      clear_rows(shared_.q[at_.stage], rows.count, T::kRows - rows.count);
      clear_rows(shared_.dout[at_.stage], rows.count, T::kRows - rows.count);
      fence_shared_stores();
      named_sync(kGroupBarrier, 128);
    }
    if (rows.marked) spread();
  }
  /// Both consumers come here, for the same tiles.
  __device__ void spread() {
    const auto& rows = shared_.rows[known_.stage];
    const auto sees = [&](int h, int i) {
      const RowKeys& seen = rows.keys[i];
      const int key = key_ + 8 * h;
      const bool has = !rows.cut || (key >= seen.begin && key < seen.end);
      return has && rows.lse[i] != INFINITY;
    };
    add_nan<kSumDim>(nan, summed(at_.stage), rows.count, sees);
    named_sync(kBothBarrier, 256);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    clear_infinite<256>(shared_.q[at_.stage], thread);
    clear_infinite<256>(shared_.dout[at_.stage], thread);
    fence_shared_stores();
    named_sync(kBothBarrier, 256);
  }

  __device__ __forceinline__ void begin_products() {
    wgmma_begin();
    multiply_rows<kProductDim>(s, owned(), streamed(at_.stage));
    wgmma_commit();
    next_ = {at_.stage, known_.stage, at_.parity};
    at_.advance();
    known_.advance();
  }
  /// Waits for the products of a tile, of which kNewer groups are newer, and begins its arithmetic.
  template <int kNewer>
  __device__ __forceinline__ void take_products() {
    const auto& rows = shared_.rows[next_.rows];
    float2 terms[T::kRows / 8];
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) terms[j] = pair_of(kValues ? rows.lse : rows.d, j);
    wgmma_wait<kNewer>();
    pin(s);
    if (lane_ == 0) products_empty(next_.stage).arrive();
    now_ = next_;
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float term = e % 2 == 0 ? terms[j].x : terms[j].y, product = s[4 * j + e];
        x[4 * j + e] = kValues ? fmaf(product, factor_, -term) : product - term;
      }
  }
  /// Weighs a tile, waits for the sums of the one before, of which kNewer groups are newer, and
  /// begins its own. A wait for the other consumer ends a basic block: see RowGradientConsumer.
  template <int kNewer>
  __device__ __forceinline__ void finish_tile() {
    if constexpr (kValues)
      weigh();
    else
      differentiate();
    turn_ ^= 1;
    wgmma_wait<kNewer>();
    end_sums();
    round_weights<Element>(w, x);
    if constexpr (kValues) shared_.dout_full[now_.stage].wait(now_.parity);
    wgmma_begin();
    multiply_weights<kSumDim>(sums, w, summed(now_.stage));
    wgmma_commit();
    sums_ = now_.stage;
  }
  __device__ __forceinline__ void end_sums() {
    pin(sums);
    if (sums_ >= 0 && lane_ == 0) sums_empty(sums_).arrive();
    sums_ = -1;
  }

  /// x becomes weights, which are passed to the consumer of keys.
  __device__ __forceinline__ void weigh() {
    const auto& rows = shared_.rows[now_.rows];
#pragma unroll
    for (float& one : x) one = exp2_fast(one);
    if (rows.cut) mask();
    shared_.taken[thread_ / 32].wait(turn_ ^ 1);
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
      shared_.weights[j][thread_] = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    __syncwarp();
    if (lane_ == 0) {
      shared_.weighed[thread_ / 32].arrive();
      shared_.rows_empty[now_.rows].arrive();
    }
  }
  /// The terms of the two rows of every eight that a thread has.
  __device__ __forceinline__ float2 pair_of(const float (&terms)[T::kRows], int j) const {
    return *reinterpret_cast<const float2*>(&terms[8 * j + 2 * (lane_ % 4)]);
  }
  /// Weights of keys that a row does not see are 0, whatever its terms are.
  __device__ __forceinline__ void mask() {
    const auto& rows = shared_.rows[now_.rows];
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const RowKeys seen = rows.keys[8 * j + 2 * (lane_ % 4) + e];
        const unsigned count = seen.end - seen.begin;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (static_cast<unsigned>(key_ + 8 * h - seen.begin) >= count)
            x[4 * j + 2 * h + e] = 0.0f;
      }
  }

  /// x, which is dP - D, becomes dS.
  __device__ __forceinline__ void differentiate() {
    shared_.weighed[thread_ / 32].wait(turn_);
    if (uniform(shared_.rows[now_.rows].marked)) add_infinite();
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float4 p = shared_.weights[j][thread_];
      x[4 * j] *= p.x;
      x[4 * j + 1] *= p.y;
      x[4 * j + 2] *= p.z;
      x[4 * j + 3] *= p.w;
    }
    __syncwarp();
    if (lane_ == 0) {
      shared_.taken[thread_ / 32].arrive();
      shared_.rows_empty[now_.rows].arrive();
    }
  }
  /// D of a marked row that is not finite counts for the keys that the row sees.
  __device__ __forceinline__ void add_infinite() {
    const auto& rows = shared_.rows[now_.rows];
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float4 p = shared_.weights[j][thread_];
      const float2 d = pair_of(rows.infinite_d, j);
      if (p.x != 0.0f) x[4 * j] -= d.x;
      if (p.y != 0.0f) x[4 * j + 1] -= d.y;
      if (p.z != 0.0f) x[4 * j + 2] -= d.x;
      if (p.w != 0.0f) x[4 * j + 3] -= d.y;
    }
  }

  /// Waits for the owned keys or values, or loads those of a tile that is not whole. Those that
  /// nobody sees may be anything, and become 0.
  __device__ __forceinline__ void load_owned() {
    const OwnedKeys& work = shared_.work;
    if (work.count == T::kKeys) {
      shared_.own_full.wait(0);
      if (work.seen.begin <= 0 && work.seen.end >= T::kKeys) return;
      clear_rows(owned(), 0, work.seen.begin);
      clear_rows(owned(), work.seen.end, T::kKeys - work.seen.end);
    } else if constexpr (kValues) {
      load_owned_rows(owned(), work, call_.params.k, call_.params.head_dim, 0);
    } else {
      load_owned_rows(owned(), work, call_.params.v, call_.params.value_dim, 0);
    }
    fence_shared_stores();
    named_sync(kGroupBarrier, 128);
  }

  __device__ __forceinline__ void store() const {
    const GradientParams& params = call_.params;
    store_owned<Element, kSumDim>(sums, kValues ? 1.0f : params.score.scale, params, shared_.work,
                                  key_, kValues ? params.dv : params.dk,
                                  kValues ? params.stores.dv : params.stores.dk);
  }

  float (&s)[T::kRows / 2];
  float (&x)[T::kRows / 2];
  std::uint32_t (&w)[T::kRows / 16][4];
  float (&sums)[kSumDim / 2];
  volatile NanBits (&nan)[nan_words(kSumDim)];
  const KeyGradientParams& call_;
  SharedMemory& shared_;
  const int thread_, lane_;
  const int key_;       // of the owned ones; the thread's second key is key_ + 8
  const float factor_;  // base 2, from a product to a score
  PipelineState<T::kStages> at_;
  PipelineState<SharedMemory::kFound> known_;
  std::uint32_t turn_ = 0;  // parity of the tile's number
  Tile next_{}, now_{};     // of the last products, and of x
  int sums_ = -1;           // of the sums in flight
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    wide_key_gradients_kernel(const __grid_constant__ KeyGradientParams call) {
  if constexpr (kHasWgmma) {
    std::byte* const memory = shared_by_1024;
    KeyGradientShared<T>& shared = *reinterpret_cast<KeyGradientShared<T>*>(memory);
    if (threadIdx.x == 0) {
      find_owned<T>(call, static_cast<int>(blockIdx.x), shared.work);
      shared.init_barriers();
    }
    __syncthreads();
    if (shared.work.count == 0) return;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // known to be uniform
    WideKeyProducer<T> producer(call, shared);
    if (threadIdx.x == 0) producer.load_owned();
    if (warpgroup == 0) producer.find_rows();
    __syncthreads();
    if (threadIdx.x == 0) producer.find_seen();
    __syncthreads();
    if (warpgroup == 0) {
      give_registers<T::kProducerRegisters>();
      producer.run();
    } else if (warpgroup == 1) {
      take_registers<T::kConsumerRegisters>();
      float s[T::kRows / 2], x[T::kRows / 2], sums[T::kValueDim / 2];
      std::uint32_t w[T::kRows / 16][4];
      volatile NanBits nan[nan_words(T::kValueDim)];
      WideKeyConsumer<T, true>({s, x, w, sums, nan}, call, shared).run();
    } else {
      take_registers<T::kConsumerRegisters>();
      float s[T::kRows / 2], x[T::kRows / 2], sums[T::kDim / 2];
      std::uint32_t w[T::kRows / 16][4];
      volatile NanBits nan[nan_words(T::kDim)];
      WideKeyConsumer<T, false>({s, x, w, sums, nan}, call, shared).run();
    }
  }
}

}  // namespace longspan::kernels::sm90

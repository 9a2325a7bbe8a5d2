// dq on Hopper: forward's work tiles of query rows, with dout beside q, by which keys and values
// stream (gradients_sm90.cuh).
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/hopper/attend_sm90_consumer.cuh"
#include "kernels/cuda/hopper/attend_sm90_producer.cuh"
#include "kernels/cuda/hopper/attend_sm90_scheduler.cuh"
#include "kernels/cuda/hopper/gradients_sm90.cuh"
#include "kernels/cuda/hopper/gradients_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

/// docs/notes/hopper-backward.md has the measurements.
inline constexpr TileShape kRowGradients64{
    .dim = 64, .consumers = 2, .keys = 128, .ping_pong = false};
inline constexpr TileShape kRowGradients128{
    .dim = 128, .consumers = 2, .keys = 96, .ping_pong = false};

template <class Element, TileShape kShape, int kKeyStages = 3, int kValueStages_ = 3,
          bool kScored_ = false, bool kDrops_ = false>
struct RowGradientTile : TileTraits<Element, kShape> {
  static constexpr bool kScored = kScored_;  // with softcap, ALiBi
  static constexpr bool kDrops = kDrops_;    // with dropout
  static constexpr bool kPages = false;
  static constexpr bool kGradients = true;
  static constexpr int kStages = kKeyStages;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
};

/// A warp keeps the pipelines filled, and finds the factors of rows.
template <class T>
class RowGradientProducer {
 public:
  __device__ __forceinline__ RowGradientProducer(const KernelParams& call, Shared<T>& shared)
      : call_(call),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x % 32)),
        again_(cache_policy<Keep::last_to_go>()) {}

  __device__ __forceinline__ void run() {
    std::uint32_t q_parity = 0;
    for (PipelineState<2> work;; work.advance()) {
      shared_.work_full[work.stage].wait(work.parity);
      const WorkTile tile = shared_.work[work.stage];
      __syncwarp();
      if (lane_ == 0) shared_.work_empty[work.stage].arrive();
      if (tile.tiles == 0) return;
      if (lane_ == 0 && tile.tiles < kWantedEarly) shared_.work_wanted.arrive();
      int key = tile.first_key + tile.some.end;
      load_keys(tile, key -= T::kKeys);
      load_rows(tile, q_parity);
      q_parity ^= 1;
#pragma unroll 1
      for (int i = 1; i < tile.tiles; ++i) {
        if (lane_ == 0 && i == tile.tiles + 1 - kWantedEarly) shared_.work_wanted.arrive();
        load_keys(tile, key -= T::kKeys);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_rows(const WorkTile& tile, std::uint32_t parity) {
    for (int c = 0; c < T::kConsumers; ++c) shared_.q_empty[c].wait(parity ^ 1);
    const GradientSources& from = call_.gradients;
    find_scores(tile);
    bool marks = false;
    for (int row = lane_; row < T::kRows; row += 32) {
      const std::int64_t token = tile.first_row + row;
      if (row >= tile.rows) break;
      bool marked;
      factors_of(from.terms[token * call_.params.heads + tile.head], marked);
      marks = marks || marked;
    }
    marks = __any_sync(0xffffffff, marks);
    if (lane_ == 0) shared_.marks.marked = marks;
    __syncwarp();
    if (lane_ > 0) return;
    constexpr int kBytes = 64 * (T::kPanels + T::kValuePanels) * 128;
    const std::uint64_t once = cache_policy<Keep::first_to_go>();
#pragma unroll
    for (int c = 0; c < T::kConsumers; ++c) {
      shared_.q_full[c].arrive_expecting(kBytes);
#pragma unroll
      for (int panel = 0; panel < T::kPanels; ++panel)
        load_box(shared_.q[c][panel], &call_.q, panel * 64, tile.query_row + 64 * c,
                 tile.query_head, &shared_.q_full[c], once);
#pragma unroll
      for (int panel = 0; panel < T::kValuePanels; ++panel)
        load_box(shared_.gradients.dout[c][panel], &from.dout, panel * 64, tile.query_row + 64 * c,
                 tile.query_head, &shared_.q_full[c], once);
    }
  }

  /// What the weights of a work tile need besides the terms of its rows.
  __device__ __forceinline__ void find_scores(const WorkTile& tile) {
    if constexpr (!T::kScored && !T::kDrops) return;
    const AttendParams& params = call_.params;
    const int b = tile.sequence;
    const auto kv_len = static_cast<int>(params.batch.keys(b, params.shard));
    const auto context_len = static_cast<int>(params.first_position(b, kv_len));
    KeyPositions keys;
    keys.find(params.shard, b, kv_len);
    if constexpr (T::kScored)
      if (lane_ == 0)
        shared_.marks.alibi = alibi_of(params, keys, b, tile.head, context_len,
                                       static_cast<int>(params.query_index(b, tile.row)));
    if constexpr (T::kDrops) {
      DroppedRows<T>& dropped = shared_.marks;
      if (lane_ == 0) {
        dropped.runs = runs_of(keys);
        dropped.first = params.dropout.row(params.dropout.key(), b, tile.head, 0);
      }
      for (int row = lane_; row < T::kRows; row += 32)
        dropped.row[row] = static_cast<std::uint32_t>(
            context_len + (row < tile.rows ? params.query_index(b, tile.row + row) : 0));
    }
  }

  __device__ __forceinline__ void load_keys(const WorkTile& tile, int key) {
    load(shared_.k[k_.stage], &call_.k, shared_.k_full[k_.stage], shared_.k_empty[k_.stage], k_,
         tile.kv_head, key);
    load(shared_.v[v_.stage], &call_.v, shared_.v_full[v_.stage], shared_.v_empty[v_.stage], v_,
         tile.kv_head, key);
  }
  template <int kPanels, int kStages>
  __device__ __forceinline__ void load(TilePanels<typename T::Element, kPanels, T::kKeys>& tile,
                                       const CUtensorMap* map, Barrier& full, Barrier& empty,
                                       PipelineState<kStages>& state, int kv_head, int key) {
    if (lane_ == 0) {
      empty.wait(state.parity ^ 1);
      full.arrive_expecting(kPanels * T::kPanelBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        load_box(tile[panel], map, panel * 64, key, kv_head, &full, again_);
    }
    state.advance();
  }

  const KernelParams& call_;
  Shared<T>& shared_;
  const int lane_;
  const std::uint64_t again_;
  PipelineState<T::kStages> k_;
  PipelineState<T::kValueStages> v_;
};

/// A thread of a consumer warpgroup. Its arrays are beside it (attend_sm90_consumer.cuh says why).
template <class T>
class RowGradientConsumer {
  using Element = typename T::Element;
  static constexpr int kGroupBarrier = 1, kAllBarrier = kGroupBarrier + T::kConsumers;
  static constexpr bool kLateValues = T::kValueStages == 1;
  static_assert(!(kLateValues && T::kDrops));

 public:
  struct Fragments {
    float (&s)[T::kKeys / 2];              // scores, weights, dS
    float (&g)[T::kKeys / 2];              // dP
    std::uint32_t (&w)[T::kKeys / 16][4];  // dS, rounded
    float (&dq)[T::kDim / 2];
    volatile NanBits (&nan)[nan_words(T::kDim)];  // sums of the work tile
  };

  __device__ __forceinline__ RowGradientConsumer(const Fragments& fragments,
                                                 const KernelParams& call, Shared<T>& shared,
                                                 int group)
      : s(fragments.s),
        g(fragments.g),
        w(fragments.w),
        dq(fragments.dq),
        nan(fragments.nan),
        call_(call),
        shared_(shared),
        group_(group),
        lane_(static_cast<int>(threadIdx.x % 32)),
        row_(64 * group + 16 * static_cast<int>(threadIdx.x / 32 % 4) + lane_ / 4),
        factor_(call.params.score.scale * kLog2E) {}

  __device__ __forceinline__ void run() {
    std::uint32_t q_parity = 0;
    for (;; work_.advance()) {
      shared_.work_full[work_.stage].wait(work_.parity);
      const WorkTile& tile = shared_.work[work_.stage];
      const int tiles = tile.tiles;
      if (tiles == 0) return;
      whole_ = tile.whole;
      clear_ = tile.clear;
      first_key_ = tile.some.end - T::kKeys;
      if constexpr (!T::kScored) find_factors(tile);
      shared_.q_full[group_].wait(q_parity);
      if constexpr (T::kScored) find_factors(tile);
      q_parity ^= 1;
      marked_ = shared_.marks.marked;
#pragma unroll
      for (int i = 0; i < T::kDim / 2; ++i) dq[i] = 0;
#pragma unroll
      for (int i = 0; i < nan_words(T::kDim); ++i) nan[i] = 0;

      begin_tile();
      begin_products();
      if constexpr (kLateValues)
        attend_late_values(tiles);
      else
        attend(tiles);
      if (lane_ == 0) shared_.q_empty[group_].arrive();
      wgmma_wait<0>();
      end_sums();
      scales_.end(dq);
      set_all_nan(dq, nan);
      store(tile);
      shared_.work_empty[work_.stage].arrive();
    }
  }

 private:
  /// Both loops begin when the products of the first tile's scores do, and end when those of the
  /// last tile's sums do.
  __device__ __forceinline__ void attend(int tiles) {
    draw();
    wgmma_wait<0>();
    pin(s);
    pin(g);
    weigh();
    take();
#pragma unroll 1
    for (int i = 1; i < tiles; ++i) {
      first_key_ -= T::kKeys;
      begin_tile();
      begin_products();
      begin_sums();
      draw();
      wgmma_wait<2>();
      pin(s);
      exponentiate();
      // ptxas moves a wait for products to the start of its basic block. Waits for the next tile
      // end blocks, so that the products run beside the arithmetic before them.
      if (i + 1 < tiles) shared_.k_full[k_.stage].wait(k_.parity);
      wgmma_wait<1>();
      pin(g);
      differentiate();
      if (i + 1 < tiles) shared_.v_full[v_.stage].wait(v_.parity);
      wgmma_wait<0>();
      end_sums();
      take();
    }
    begin_sums();
  }
  /// With one stage of values, dP comes last.
  __device__ __forceinline__ void attend_late_values(int tiles) {
    wgmma_wait<0>();
    pin(s);
    pin(g);
    weigh();
    take();
#pragma unroll 1
    for (int i = 1; i < tiles; ++i) {
      first_key_ -= T::kKeys;
      begin_tile();
      begin_scores();
      begin_sums();
      begin_gradients();
      wgmma_wait<2>();
      pin(s);
      exponentiate();
      if (i + 1 < tiles) shared_.k_full[k_.stage].wait(k_.parity);
      wgmma_wait<1>();
      end_sums();
      wgmma_wait<0>();
      pin(g);
      differentiate();
      take();
    }
    begin_sums();
  }

  /// A row's terms come from memory while its queries are on their way.
  __device__ __forceinline__ void find_factors(const WorkTile& tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      RowTerm term{-INFINITY, 0.0f, 0.0f};
      const std::int64_t row = row_ + 8 * h, token = tile.first_row + row;
      if (row < tile.rows) term = call_.gradients.terms[token * call_.params.heads + tile.head];
      bool marked;
      factors_[h] = factors_of(term, marked);
      if constexpr (T::kScored) {
        const AlibiTerms& alibi = shared_.marks.alibi;
        factors_[h].lse = lowered(factors_[h].lse, term, alibi.lift, alibi.index + row_ + 8 * h);
      }
    }
  }
  /// Waits for the next tile, whose values then have no element that must not be multiplied.
  __device__ __forceinline__ void begin_tile() {
    shared_.k_full[k_.stage].wait(k_.parity);
    if (!kLateValues || uniform(first_key_ < clear_ || (marked_ && is_cut())))
      shared_.v_full[v_.stage].wait(v_.parity);
    if (first_key_ < clear_) {
      clear_rows(shared_.k[k_.stage], 0, min(clear_ - first_key_, T::kKeys));
      clear_rows(shared_.v[v_.stage], 0, min(clear_ - first_key_, T::kKeys));
      fence_shared_stores();
      named_sync(kGroupBarrier + group_, 128);
    }
    if (uniform(marked_ && is_cut())) spread();
  }
  __device__ __forceinline__ bool is_cut() const {
    return first_key_ < whole_.begin || first_key_ + T::kKeys > whole_.end;
  }
  /// All consumers come here, for the same tiles.
  __device__ void spread() {
    const RowKeys* const rows = shared_.rows[work_.stage];
    const auto sees = [&](int h, int key) {
      const RowKeys& seen = rows[row_ + 8 * h];
      return first_key_ + key >= seen.begin && first_key_ + key < seen.end;
    };
    named_sync(kAllBarrier, 128 * T::kConsumers);  // all have their products of the tiles before
    add_nan<T::kDim>(nan, shared_.k[k_.stage], T::kKeys, sees);
    named_sync(kAllBarrier, 128 * T::kConsumers);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    clear_infinite<128 * T::kConsumers>(shared_.k[k_.stage], thread);
    clear_infinite<128 * T::kConsumers>(shared_.v[v_.stage], thread);
    fence_shared_stores();
    named_sync(kAllBarrier, 128 * T::kConsumers);
  }

  __device__ __forceinline__ void begin_products() {  // S = Q K^T, dP = dout V^T
    begin_scores();
    begin_gradients();
  }
  __device__ __forceinline__ void begin_scores() {
    wgmma_begin();
    multiply_rows<T::kDim>(s, shared_.q[group_], shared_.k[k_.stage]);
    wgmma_commit();
  }
  __device__ __forceinline__ void begin_gradients() {
    if constexpr (kLateValues) {
      shared_.v_full[v_.stage].wait(v_.parity);
      wgmma_begin();
    }
    multiply_rows<T::kValueDim>(g, shared_.gradients.dout[group_], shared_.v[v_.stage]);
    wgmma_commit();
    before_ = k_.stage;
    k_.advance();
  }
  /// dq += dS K, of the tile that was taken last.
  __device__ __forceinline__ void begin_sums() {
    wgmma_begin();
    multiply_weights<T::kDim>(dq, w, shared_.k[taken_]);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_sums() {
    pin(dq);
    if (lane_ == 0) shared_.k_empty[taken_].arrive();
  }
  __device__ __forceinline__ void mask(float value) {
    if (is_cut()) mask_scores(s, value, first_key_, shared_.rows[work_.stage], row_);
  }
  /// s becomes weights, times the slopes of their scores.
  __device__ __forceinline__ void exponentiate() {
    if constexpr (T::kScored) {
      weigh_scores();
      mask(0.0f);
    } else {
      mask(-INFINITY);
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i)
        s[i] = exp2_fast(fmaf(s[i], factor_, -factors_[i / 2 % 2].lse));
    }
  }
  __device__ __forceinline__ void weigh_scores() {
    const Softcap& cap = call_.softcap;
    const AlibiTerms& terms = shared_.marks.alibi;
    const AlibiTile tile = find_tile<T>(terms, first_key_, 64 * group_);
    const auto none = [](int, float(&)[2]) {};
    const int t = lane_ % 4, own = terms.position + row_;
    if (tile.straight) {
      const unsigned most = cap.height == 0.0f || uniform(is_cut())
                                ? UINT_MAX
                                : find_most(s, shared_.work[work_.stage].rows - row_);
      const int distance = tile.from + tile.step * 2 * t - own;
      const float stride = tile.slope * static_cast<float>(tile.step);
      const float from[2] = {factors_[0].lse - tile.slope * static_cast<float>(distance),
                             factors_[1].lse - tile.slope * static_cast<float>(distance - 8)};
      with_form(cap, factor_, most, [&](const auto& form) {
        weigh_by(
            s, form, [&](int i) { return fmaf(-stride, i / 4 * 8.0f + i % 2, from[i / 2 % 2]); },
            none);
      });
    } else {
      int(&positions)[T::kKeys] = shared_.marks.positions[group_];
      find_positions(terms.runs, positions, first_key_, kGroupBarrier + group_);
      with_form(cap, factor_, [&](const auto& form) {
        weigh_by(
            s, form,
            [&](int i) {
              const int key = positions[i / 4 * 8 + 2 * t + i % 2], h = i / 2 % 2;
              return factors_[h].lse - bias_of(terms, static_cast<float>(key - own - 8 * h));
            },
            none);
      });
    }
  }
  /// A warp draws the dropout of its rows for the next tile, beside the products.
  __device__ __forceinline__ void draw() {
    if constexpr (T::kDrops) {
      DroppedRows<T>& dropped = shared_.marks;
      const int row = row_ - lane_ / 4 + lane_ % 16, half = lane_ / 16;
      DropoutRow of_row = dropped.first;
      of_row.row = dropped.row[row];
      __syncwarp();  // the bits of the tile before are read
      dropped.kept[row][half] = kept_of(call_.params.dropout, of_row, dropped.runs,
                                        first_key_ + half * (T::kKeys / 2), T::kKeys / 2);
      __syncwarp();
    }
  }
  /// dP of weights that were dropped becomes 0, and that of others larger.
  __device__ __forceinline__ void drop() {
    const float scale = call_.params.dropout.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint64_t kept = shared_.marks.kept[row_ + 8 * h][half] >> 2 * (lane_ % 4);
#pragma unroll
        for (int n = 0; n < T::kKeys / 16; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& gradient = g[4 * (half * (T::kKeys / 16) + n) + 2 * h + e];
            gradient = (kept >> (8 * n + e) & 1) != 0 ? gradient * scale : 0.0f;
          }
      }
  }
  __device__ __forceinline__ void differentiate() {
    if (lane_ == 0) shared_.v_empty[v_.stage].arrive();
    v_.advance();
    if constexpr (T::kDrops) drop();
    if (uniform(marked_ && is_cut())) {
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i)
        s[i] = s[i] == 0.0f ? 0.0f : s[i] * (g[i] - factors_[i / 2 % 2].d);
    } else {
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i) s[i] *= g[i] - factors_[i / 2 % 2].d;
    }
  }
  __device__ __forceinline__ void weigh() {
    exponentiate();
    differentiate();
  }
  __device__ __forceinline__ void take() {
    scales_.apply(s, dq);
    round_weights<Element>(w, s);
    taken_ = before_;
  }

  __device__ __forceinline__ void store(const WorkTile& tile) const {
    const GradientSources& to = call_.gradients;
    if (to.to.data != nullptr)
      return store_rounded<Element, T::kDim>(
          dq, call_.params.score.scale, to.dq.dim, [&](int h) -> Element* {
            const int row = row_ + 8 * h;
            if (row >= tile.rows) return nullptr;
            return to.to.template at<Element>(std::int64_t{tile.first_row} + row, tile.head);
          });
    const int group = call_.params.heads / call_.params.kv_heads;
    const int of_group = tile.head - tile.kv_head * group;
    store_sums<T::kDim>(dq, call_.params.score.scale, GradientSums::padded(to.dq.dim), to.resume,
                        [&](int h) -> float* {
                          const int row = row_ + 8 * h;
                          if (row >= tile.rows) return nullptr;
                          return to.dq.at(tile.kv_head,
                                          std::int64_t{tile.first_row + row} * group + of_group);
                        });
  }

  float (&s)[T::kKeys / 2];
  float (&g)[T::kKeys / 2];
  std::uint32_t (&w)[T::kKeys / 16][4];
  float (&dq)[T::kDim / 2];
  volatile NanBits (&nan)[nan_words(T::kDim)];
  const KernelParams& call_;
  Shared<T>& shared_;
  const int group_, lane_, row_;
  const float factor_;  // base 2, from a product to a score
  RowFactors factors_[2];
  SumScales<Element> scales_;
  bool marked_ = false;
  RowKeys whole_{};
  int clear_ = 0;
  int first_key_ = 0;
  int before_ = 0, taken_ = 0;  // stages of the last products, and of the keys of w
  PipelineState<2> work_;
  PipelineState<T::kStages> k_;
  PipelineState<T::kValueStages> v_;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    row_gradients_kernel(const __grid_constant__ KernelParams call) {
  if constexpr (kHasWgmma) {
    std::byte* const memory = shared_by_1024;
    Shared<T>& shared = *reinterpret_cast<Shared<T>*>(memory);
    if (threadIdx.x == 0) {
      prefetch_map(&call.q);
      prefetch_map(&call.k);
      prefetch_map(&call.v);
      prefetch_map(&call.gradients.dout);
      init_barriers<T>(call, shared);
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // known to be uniform
    if (warpgroup == 0) {
      give_registers<T::kProducerRegisters>();
      const unsigned warp = threadIdx.x / 32;
      if (warp == 0) RowGradientProducer<T>(call, shared).run();
      if (warp == 1) Scheduler<T>(call, shared).run();
    } else {
      take_registers<T::kConsumerRegisters>();
      float s[T::kKeys / 2], g[T::kKeys / 2], dq[T::kDim / 2];
      std::uint32_t w[T::kKeys / 16][4];
      volatile NanBits nan[nan_words(T::kDim)];
      RowGradientConsumer<T>({s, g, w, dq, nan}, call, shared, warpgroup - 1).run();
    }
  }
}

}  // namespace longspan::kernels::sm90

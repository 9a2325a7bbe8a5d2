// The consumers' main loop for 16-bit elements. A warpgroup issues the scores of the next tile
// together with the product of this one's weights and values, so that its softmax runs beside its
// own products.
#pragma once

#include <climits>

#include "kernels/cuda/hopper/attend_sm90_consumer.cuh"

namespace longspan::kernels::sm90 {

/// O += P V, asynchronously; with `add` false O = P V.
template <class T>
__device__ void multiply_pv(float (&o)[T::kValueDim / 2],
                            const std::uint32_t (&p)[T::kKeys / 16][4], const void* v,
                            bool add = true) {
  const std::uint64_t b = operand(v, T::kPanelBytes);
#pragma unroll
  for (int step = 0; step < T::kKeys / 16; ++step)
    Product<T::kValueDim>::template registers<typename T::Element, true>(
        o, p[step], advance(b, step * 16 * 128), add || step > 0);
}

template <class T>
class Consumer16Bit : Consumer<T> {
  using Base = Consumer<T>;
  using Base::begin_scores, Base::end_scores, Base::is_cut, Base::mask, Base::release_values;
  using Base::call, Base::shared, Base::group, Base::row, Base::work, Base::v;
  using Base::s, Base::p, Base::o, Base::ratio, Base::softmax, Base::first_key;
  using Base::wait_turn, Base::wait_work, Base::wait_queries, Base::wait_keys, Base::wait_values;

 public:
  __device__ __forceinline__ Consumer16Bit(const Fragments<T>& fragments, const KernelParams& call,
                                           Shared<T>& shared, int group)
      : Base(fragments, call, shared, group), factor_(score_factor<T>(call)) {}

  __device__ __forceinline__ void run() {
    if (group == T::kConsumers - 1) pass_turn();  // the first consumer begins
    int tiles = wait_work();
    if (tiles == 0) return;
    wait_queries();
    wait_keys();
    begin_scores();
    wgmma_wait<0>();
    for (;;) {
      end_scores(tiles == 1);
      begin_work();
      find_bias();
      make_weights();
#pragma unroll 1
      for (int tile = 1; tile < tiles; ++tile) {
        // The wait for P V is here and not after the softmax: ptxas moves a wait to the start of
        // its basic block. P V thus runs beside the softmax, which is in the block before.
        wgmma_wait<0>();
        if (tile > 1) end_values();
        take_weights();
        wait_keys();
        wait_turn();
        begin_scores();
        begin_values();
        pass_turn();
        find_bias();
        wgmma_wait<1>();
        end_scores(tile + 1 == tiles);
        make_weights();
      }
      wgmma_wait<0>();
      if (tiles > 1) end_values();
      take_weights();

      // The last values of this work tile and the first scores of the next run together. After the
      // last work tile the scores are unused, but ptxas wants no branch around them.
      const int done = work.stage;
      work.advance();
      begin_values();
      tiles = this->wait_next_work();
      begin_scores();
      wgmma_wait<0>();
      end_values();
      this->epilogue(done);
      if (tiles == 0) return;
    }
  }

 private:
  __device__ __forceinline__ void pass_turn() { Base::pass_turn(Base::turn_barrier_of_next()); }

  __device__ __forceinline__ void begin_work() {
    Base::begin_work();
    clear_ = shared.work[work.stage].clear;
    if (call.params.resume) {  // the loads are in flight during the first softmax
#pragma unroll
      for (int h = 0; h < 2; ++h)
        load_state<T>(call, shared, work.stage, row + 8 * h, softmax, h, o);
      __syncwarp();  // rows diverge at an empty state
    }
  }

  __device__ __forceinline__ void begin_values() {  // O += P V
    wait_values();
    if (first_key < clear_)  // every consumer writes the same zeros
      clear_keys<T, 128>(shared.v[v.stage], clear_ - first_key, Base::kGroupBarrier + group);
    wgmma_begin();
    multiply_pv<T>(o, p, shared.v[v.stage]);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_values() {
    pin(o);
    release_values();
  }

  /// Determines the bias of the next tile while its products are in flight.
  __device__ __forceinline__ void find_bias() {
    if constexpr (T::kScores == ScoreKind::any)
      bias_ = find_tile<T>(shared.alibi.terms[work.stage], first_key - T::kKeys, 64 * group);
  }

  /// s becomes the weights of the next tile to the left.
  __device__ __forceinline__ void make_weights() {
    first_key -= T::kKeys;
    if constexpr (T::kScores == ScoreKind::plain)
      weigh_products();
    else if constexpr (T::kScores == ScoreKind::softcap)
      weigh_capped();
    else
      weigh_biased();
  }
  __device__ __forceinline__ void weigh_products() {
    mask(-INFINITY);
    softmax.update(s, factor_, ratio);
  }
  __device__ __forceinline__ void weigh_capped() {
    const Softcap& cap = call.softcap;
    const int existing = rows_from_own();
    float top[2];
    const unsigned most = uniform(is_cut()) ? UINT_MAX : find_most(s, existing, top);
    if (reaches(cap, 0, most)) return softmax.update_below(s, top, Polynomial<3>{cap.third}, ratio);
    if (reaches(cap, 1, most)) return softmax.update_below(s, top, Polynomial<5>{cap.fifth}, ratio);
    if (reaches(cap, 2, most)) return softmax.update_below(s, top, Quotient{cap}, ratio);
    cap_in_place(existing);
    weigh_products();
  }
  __device__ __forceinline__ void weigh_biased() {
    const int existing = rows_from_own();
    float factor = factor_;
    if (is_capped<T>(call)) cap_or_scale(factor, existing);
    float less = 0;
    add_alibi<T>(s, factor, shared.alibi.terms[work.stage], bias_, shared.alibi.positions[group],
                 first_key, row, Base::kGroupBarrier + group, less);
    mask(-INFINITY);
    softmax.update_less(s, less, bias_.below, ratio);
  }

  /// s becomes scores, whose factor is 1, or tanh, whose factor is applied later.
  __device__ __forceinline__ void cap_or_scale(float& factor, int existing) {
    const Softcap& cap = call.softcap;
    const unsigned most = uniform(is_cut()) ? UINT_MAX : find_most(s, existing);
    if (reaches(cap, 2, most)) factor = 1.0f;
    if (reaches(cap, 0, most))
      scale_by(s, Polynomial<3>{cap.third});
    else if (reaches(cap, 1, most))
      scale_by(s, Polynomial<5>{cap.fifth});
    else if (reaches(cap, 2, most))
      scale_by(s, Quotient{cap});
    else
      cap_in_place(existing);
  }
  __device__ __forceinline__ void cap_in_place(int existing) {
    mask(0.0f);
    cap_scores(s, call.softcap, existing);
  }
  /// Rows of the work tile from the thread's first on.
  __device__ __forceinline__ int rows_from_own() const {
    return shared.work[work.stage].rows - row;
  }

  /// P is rounded, and O is rescaled to the origin of its exponentials.
  __device__ __forceinline__ void take_weights() {
    round_weights<typename T::Element>(p, s);
    if (__any_sync(0xffffffff, ratio[0] != 1.0f || ratio[1] != 1.0f)) rescale(o, ratio);
  }

  const float factor_;  // base 2, from a product, or its tanh, to a score
  int clear_ = 0;       // keys of the values below this one are cleared
  [[no_unique_address]] std::conditional_t<T::kScores == ScoreKind::any, AlibiTile, NoAlibi>
      bias_{};
};

}  // namespace longspan::kernels::sm90

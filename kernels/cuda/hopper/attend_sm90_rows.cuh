// The query rows of a consumer thread of the Hopper kernel: the state that they may begin from,
// their softmax from tile to tile, and at the end their state or their finished result. A thread
// has two rows, of each 2 columns in 8.
#pragma once

#include "kernels/cuda/hopper/attend_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

// ---- a tile of scores ----------------------------------------------------------------------

/// S = Q K^T, asynchronously. q, k: panels of 128 bytes of the head's dimension.
template <class T>
__device__ void multiply_qk(float (&s)[T::kKeys / 2], const void* q, const void* k) {
  const std::uint64_t a = opaque(operand(q, 64 * 128)), b = operand(k, T::kPanelBytes);
#pragma unroll
  for (int step = 0; step < T::kDim / T::kStep; ++step)
    Product<T::kKeys>::template shared<typename T::Element, false>(
        s, advance(a, step / 4 * 64 * 128 + step % 4 * 32),
        advance(b, step / 4 * T::kPanelBytes + step % 4 * 32), step > 0);
}

/// `value` for the keys of the tile at local key `first` that a row does not see. rows: of the
/// item; row: the thread's first.
template <int kCount>
__device__ void hide(float (&s)[kCount], float value, int first, const RowKeys* rows, int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowKeys seen = rows[row + 8 * h];
    const int column = first + 2 * static_cast<int>(threadIdx.x % 4) - seen.begin;
    const unsigned count = seen.end - seen.begin;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      if (static_cast<unsigned>(column + i / 4 * 8) >= count) s[i] = value;
      if (static_cast<unsigned>(column + i / 4 * 8 + 1) >= count) s[i + 1] = value;
    }
  }
}

// ---- softmax ---------------------------------------------------------------------------------

/// The two rows of a thread. Exponentials are taken from an origin, which lies kLift below a
/// maximum that the row has seen; it moves only when a score exceeds it by more than kSlack, so
/// that p stays below 2^kSlack and O is hardly ever rescaled.
template <class T>
struct Rowwise {
  float max[2] = {-INFINITY, -INFINITY};  // of the quad's columns, base 2
  float origin[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this thread's columns

  /// Row h meets a tile whose largest score, base 2, is `top`. Gives the origin of its exponentials
  /// and the ratio by which what came before shrinks.
  __device__ float meet(int h, float top, float& ratio) {
    max[h] = fmaxf(max[h], top);
    const float moved = top > origin[h] + T::kSlack ? top - T::kLift : origin[h];
    const float from = moved == -INFINITY ? 0.0f : moved;  // nothing visible yet
    ratio = exp2_fast(origin[h] - from);
    origin[h] = moved;
    return from;
  }

  /// s of row h becomes p: exp2(s factor(s) - from).
  template <int kCount, class Factor>
  __device__ void weigh(float (&s)[kCount], int h, const Factor& factor, float from, float ratio) {
    float part = 0;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], factor(s[i]), -from));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], factor(s[i + 1]), -from));
      part += s[i] + s[i + 1];
    }
    sum[h] = fmaf(sum[h], ratio, part);
  }

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
      const float from = meet(h, top, ratio[h]);
      weigh(s, h, Constant{c}, from, ratio[h]);
    }
  }

  /// The same for products whose largest are known.
  template <int kCount, class Factor>
  __device__ void softmax_below(float (&s)[kCount], const float (&top)[2], const Factor& factor,
                                float (&ratio)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float from = meet(h, top[h] * factor(top[h]), ratio[h]);
      weigh(s, h, factor, from, ratio[h]);
    }
  }

  /// The same for scores in base 2, of which those of the second row are too high by `less`. below:
  /// as for find_tops.
  template <int kCount>
  __device__ void softmax_less(float (&s)[kCount], float less, bool below, float (&ratio)[2]) {
    float top[2];
    find_tops(s, below, top);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float high = h == 0 ? 0.0f : less;
      const float from = meet(h, top[h] - high, ratio[h]);
      weigh(s, h, Constant{1.0f}, from + high, ratio[h]);
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

// ---- what a consumer takes in and hands out --------------------------------------------------

/// An empty state becomes the one that stands at the row, if that is none. Its maximum is the row's
/// origin, and its sum one thread's of the four. Reads just what this thread writes in write_state,
/// and max and sum, which the first of the four writes there.
template <class T>
__device__ void read_state(const Call& call, const Shared<T>& shared, int stage, int row,
                           Rowwise<T>& rows, int h, float (&o)[T::kDim / 2]) {
  const Item& item = shared.items[stage];
  if (row >= item.rows) return;
  const StateSlots& state = call.params.state;
  const std::int64_t at =
      static_cast<std::int64_t>(item.first_row + row) * call.params.heads + item.head;
  const Stats stats = state.stats(call.params.slot)[at];
  if (is_empty(stats)) return;
  const int t = threadIdx.x % 4;
  rows.max[h] = rows.origin[h] = lowered<T>(stats.max, shared, stage, row);
  rows.sum[h] = t == 0 ? stats.sum : 0.0f;
  const float* from = state.o(call.params.slot, at);
#pragma unroll
  for (int j = 0; j < T::kDim / 8; ++j)
    if (8 * j < call.params.head_dim) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 8 * j + 2 * t);
      o[4 * j + 2 * h] = pair.x;
      o[4 * j + 2 * h + 1] = pair.y;
    }
}

/// What makes O of a row, beside what makes its sum: the scale of quantised values, and, where
/// weights were rounded to e4m3, that O is of the rounded weights and the sum of the exact ones.
/// sum: the row's.
template <class T>
__device__ float value_factor(const Shared<T>& shared, int stage, float sum, int h,
                              const float (&o)[T::kColumns / 2]) {
  if constexpr (T::kEightBits) {
    const float rounded = o[T::kDim / 2 + 2 * h];
    return shared.stored.value_factor[stage] * (rounded == 0.0f ? 1.0f : sum / rounded);
  } else {
    return 1.0f;
  }
}

template <class T>
__device__ void write_state(const Call& call, const Shared<T>& shared, int stage, int row,
                            const Rowwise<T>& rows, int h, const float (&o)[T::kColumns / 2]) {
  const Item& item = shared.items[stage];
  const Stats stats = rows.stats(h);
  if (row >= item.rows) return;
  const StateSlots& state = call.params.state;
  const std::int64_t at =
      static_cast<std::int64_t>(item.first_row + row) * call.params.heads + item.head;
  const int t = threadIdx.x % 4;
  const float factor = rows.to_max(h);
  if (t == 0)
    state.stats(call.params.slot)[at] = {lifted<T>(rows.max[h], shared, stage, row),
                                         stats.sum * factor};
  const float of_o = factor * value_factor<T>(shared, stage, stats.sum, h, o);
  float* to = state.o(call.params.slot, at);
#pragma unroll
  for (int j = 0; j < T::kDim / 8; ++j)
    if (8 * j < call.params.head_dim)
      *reinterpret_cast<float2*>(to + 8 * j + 2 * t) =
          float2{o[4 * j + 2 * h] * of_o, o[4 * j + 2 * h + 1] * of_o};
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
__device__ void write_finished(const Call& call, const Shared<T>& shared, int stage, int row,
                               const Rowwise<T>& rows, int h, const float (&o)[T::kColumns / 2]) {
  const Item& item = shared.items[stage];
  const Finished& finished = call.finished;
  const bool exists = row < item.rows;
  Stats stats = rows.stats(h);
  const float of_o = value_factor<T>(shared, stage, stats.sum, h, o);
  stats.max = lifted<T>(stats.max, shared, stage, row);
  const std::int64_t at = item.first_row + row;
  float shrunk = 1.0f;
  if (finished.sinks) {
    const Fold sunk = fold(stats, sink_stats(finished.sinks[item.head]));
    shrunk = sunk.take == Fold::second_high ? sunk.ratio : 1.0f;
    stats = sunk.stats;
  }
  const Finish finish = longspan::finish(stats);
  const float factor = is_empty(stats) ? 0.0f : of_o * shrunk / stats.sum;
  const int t = threadIdx.x % 4;
  if (exists && t == 0 && finished.lse)
    finished.lse[at * finished.lse_row_stride + item.head * finished.lse_head_stride] = finish.lse;

  using Result = typename T::Result;
  Result* to = finished.out.template at<Result>(at, item.head);
#pragma unroll
  for (int j = 0; j < T::kDim / 8; j += 4) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = j + i < T::kDim / 8 ? 4 * (j + i) + 2 * h : 0;  // past the last: not stored
      pairs[i] = pack(o[pair] * factor, o[pair + 1] * factor, Result{});
    }
    const uint4 eight = gather_eight(pairs);
    const int column = 8 * (j + t);
    if (exists && column < call.params.head_dim) *reinterpret_cast<uint4*>(to + column) = eight;
  }
}

}  // namespace longspan::kernels::sm90

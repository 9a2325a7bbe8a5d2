// The products of backward, in vectors (gradient_params.hpp has the mathematics).
//
//     S = Q K^T,  P = exp2(S - lse),  dP = dO V^T,  dX = scale P (dP - D)
//     dV += P^T dO,  dK += dX^T Q,  dQ += dX K
//
// The products are those of fp32, or of bf16 (gradient_bf16-inl.hpp).
//
// Dropout has factors Z: then Z dP replaces dP, and Z P the P of dV.
// A weight is selected, never multiplied: a key that a row does not see gives exactly nothing,
// whatever the tensors hold there.
#include "kernels/host/gradient_tile.hpp"

#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/gradient_tile.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/host/bias-inl.hpp"
#include "kernels/host/dropout-inl.hpp"
#include "kernels/host/gradient_bf16-inl.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/multiply-inl.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

void add_sums(float* a, const float* b, std::int64_t n) {
  const Lanes d;
  for (std::int64_t i = 0; i < n; i += kLanes)
    hn::StoreU(hn::Add(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, a + i);
}

/// The left side of a product that is added to its result: a[r, k] = data[r * row + k * depth].
struct Left {
  const float* data;
  std::ptrdiff_t row;
  std::ptrdiff_t depth;
};

template <int kRows, int kVecs>
HWY_INLINE void add_product_block(Left a, Matrix b, int depth, float* c, std::ptrdiff_t c_stride) {
  multiply_in_registers<kRows, kVecs>(
      [&](int r, int k) HWY_ATTR { return a.data[r * a.row + k * a.depth]; }, b, depth,
      [&](int r, int v, Vec sum) HWY_ATTR {
        const Lanes d;
        float* const to = c + r * c_stride + v * kLanes;
        hn::StoreU(hn::Add(hn::LoadU(d, to), sum), d, to);
      });
}

/// C += A B; columns is a multiple of 16. Blocks of columns are outermost, so that a block of B
/// stays in the L1 cache.
HWY_NOINLINE inline void add_product(Left a, Matrix b, int depth, float* c, std::ptrdiff_t c_stride,
                                     int rows, int columns) {
  constexpr int kWide = kVectors * kLanes;
  for (int n = 0; n < columns;) {
    const bool wide = n + kWide <= columns;
    for (int r = 0; r < rows; r += kBlockRows) {
      const Left block{a.data + r * a.row, a.row, a.depth};
      float* const to = c + r * c_stride + n;
      with_rows<kBlockRows>(std::min(kBlockRows, rows - r), [&]<int kRows>() {
        if (wide)
          add_product_block<kRows, kVectors>(block, {b.at(0, n), b.stride}, depth, to, c_stride);
        else
          add_product_block<kRows, 1>(block, {b.at(0, n), b.stride}, depth, to, c_stride);
      });
    }
    n += wide ? kWide : kLanes;
  }
}

/// The same, but skips what is multiplied by 0: infinity and NaN in B then reach only the rows of C
/// that have a weight for them.
HWY_NOINLINE inline void add_seen_product(Left a, Matrix b, int depth, float* c,
                                          std::ptrdiff_t c_stride, int rows, int columns) {
  const Lanes d;
  HWY_ALIGN float sums[kMaxHeadDim + 16];
  for (int r = 0; r < rows; ++r) {
    std::fill_n(sums, columns, 0.0f);
    for (int k = 0; k < depth; ++k) {
      const float factor = a.data[r * a.row + k * a.depth];
      if (factor == 0.0f) continue;
      for (int n = 0; n < columns; n += kLanes)
        hn::Store(hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, b.at(k, n)), hn::Load(d, sums + n)),
                  d, sums + n);
    }
    add_sums(c + r * c_stride, sums, columns);
  }
}

/// The products of a tile and a segment in fp32.
class Fp32Products {
 public:
  Fp32Products(const GradientParams& p, const Tile& tile, const PackedQueryRows& rows,
               const PackedKeyRows& keys, const GradientSpace& space)
      : p_(p),
        rows_(rows),
        keys_(keys),
        space_(space),
        tile_rows_(tile.rows),
        columns_(GradientSums::padded(p.head_dim)),
        value_columns_(GradientSums::padded(p.value_dim)) {}

  /// S, and then P, of a row; and dP, and then dX.
  float* scores(int r) const { return space_.weights + r * kSegment; }
  float* dx(int r) const { return space_.dx + r * kSegment; }

  /// S and dP of some rows, and keys of a panel.
  void multiply_rows(int first, int rows, int panel, int begin, int columns) const {
    multiply({space_.q + first * columns_, columns_},
             {space_.keys + panel * p_.head_dim + begin - panel, kPanel}, p_.head_dim,
             scores(first) + begin, kSegment, rows, columns);
    multiply({space_.dout + first * value_columns_, value_columns_},
             {space_.values + panel * p_.value_dim + begin - panel, kPanel}, p_.value_dim,
             dx(first) + begin, kSegment, rows, columns);
  }
  /// After the weights of some rows are there for keys `any`.
  void keep_weights(int, int, Range) const {}
  void add_to_dq(int first, int rows, Range keys, float* dq) const {
    add(keys_.finite, {dx(first) + keys.begin, kSegment, 1},
        {space_.key_rows + keys.begin * columns_, columns_}, keys.end - keys.begin, dq, rows,
        columns_);
  }
  void add_to_keys(Range any, float* dk, float* dv) const {
    const int count = any.end - any.begin;
    add(rows_.finite, {scores(0) + any.begin, 1, kSegment}, {space_.dout, value_columns_},
        tile_rows_, dv + any.begin * value_columns_, count, value_columns_);
    add(rows_.finite, {dx(0) + any.begin, 1, kSegment}, {space_.q, columns_}, tile_rows_,
        dk + any.begin * columns_, count, columns_);
  }

 private:
  static void add(bool finite, Left a, Matrix b, int depth, float* c, int rows, int columns) {
    if (finite)
      add_product(a, b, depth, c, columns, rows, columns);
    else
      add_seen_product(a, b, depth, c, columns, rows, columns);
  }

  const GradientParams& p_;
  const PackedQueryRows& rows_;
  const PackedKeyRows& keys_;
  const GradientSpace& space_;
  const int tile_rows_, columns_, value_columns_;
};

template <class Products>
class TileGradient {
 public:
  TileGradient(const GradientParams& p, const Tile& tile, const PackedQueryRows& rows,
               const PackedKeyRows& keys, const GradientSpace& space)
      : p_(p),
        tile_(tile),
        keys_(keys),
        space_(space),
        visible_(p, tile),
        products_(p, tile, rows, keys, space),
        dropout_(p, tile),
        head_columns_(GradientSums::padded(p.head_dim)) {}

  void operator()(const TileSums& sums) {
    const Range any = aligned(visible_.keys(keys_.segment, 0, tile_.rows - 1));
    if (any.begin == any.end) return;
    SegmentBias bias(p_, tile_);
    if (p_.bias) bias.start(keys_.segment);
    if (p_.dropout) dropout_.start(keys_.segment);
    const bool of_biases = sums.slopes != nullptr || sums.qq != nullptr;
    for (int first = 0; first < tile_.rows; first += kBlockRows) {
      const int rows = std::min(kBlockRows, tile_.rows - first);
      const Range keys = aligned(visible_.keys(keys_.segment, first, first + rows - 1));
      if (keys.begin < keys.end) multiply_block_of_rows(first, rows, keys);
      for (int r = first; r < first + rows; ++r) {
        if (keys.begin < keys.end) {
          weigh(r, keys, bias, of_biases ? ds_ : nullptr);
          if (sums.slopes != nullptr) sums.slopes[r] += bias.slope_gradient(r, keys, ds_);
          if (sums.qq != nullptr) bias.add_qq_gradient(r, keys, ds_, sums.qq, p_.biases.qq_stride);
        }
        fill_around(products_.scores(r), keys, any);
        fill_around(products_.dx(r), keys, any);
      }
      products_.keep_weights(first, rows, any);
      if (sums.dq == nullptr || keys.begin == keys.end) continue;
      products_.add_to_dq(first, rows, keys, sums.dq + first * head_columns_);
    }
    if (sums.dk != nullptr) products_.add_to_keys(any, sums.dk, sums.dv);
  }

 private:
  /// Zeros in `all`, except for `keys`.
  static void fill_around(float* row, Range keys, Range all) {
    if (keys.begin == keys.end) {
      std::fill(row + all.begin, row + all.end, 0.0f);
      return;
    }
    std::fill(row + all.begin, row + keys.begin, 0.0f);
    std::fill(row + keys.end, row + all.end, 0.0f);
  }

  /// S and dP of some rows and keys.
  void multiply_block_of_rows(int first, int rows, Range keys) {
    for (int panel = 0; panel < kSegment; panel += kPanel) {
      const int begin = std::max(keys.begin, panel), end = std::min(keys.end, panel + kPanel);
      if (begin >= end) continue;
      products_.multiply_rows(first, rows, panel, begin, end - begin);
    }
  }

  /// Turns a row's S into P, with dropout Z P, and its dP into dX; dS goes to `biased` [128],
  /// unless that is null.
  void weigh(int r, Range keys, SegmentBias& bias, float* biased) {
    const Lanes d;
    const int group = p_.heads / p_.kv_heads;
    const std::int64_t row = tile_.first + r;
    const RowTerm term = p_.terms[(tile_.sequence.first_row + row / group) * p_.heads +
                                  tile_.kv_head * group + row % group];
    float* const s = products_.scores(r);
    float* const ds = products_.dx(r);
    float* const slope = space_.slope + r * kSegment;
    const bool capped = p_.score.softcap != 0.0f;
    float factor = p_.score.scale * kLog2E;
    if (capped) {
      const Vec to_cap = hn::Set(d, p_.score.scale / p_.score.softcap);
      const Vec height = hn::Set(d, p_.score.softcap * kLog2E), one = hn::Set(d, 1.0f);
      for (int j = keys.begin; j < keys.end; j += kLanes) {
        const Vec t = tanh(hn::Mul(hn::Load(d, s + j), to_cap));
        hn::Store(hn::Mul(t, height), d, s + j);
        hn::Store(hn::NegMulAdd(t, t, one), d, slope + j);
      }
      factor = 1.0f;
    } else if (p_.bias) {
      for (int j = keys.begin; j < keys.end; j += kLanes)
        hn::Store(hn::Mul(hn::Load(d, s + j), hn::Set(d, factor)), d, s + j);
      factor = 1.0f;
    }
    if (p_.bias) bias.add(tile_.kv_head, r, keys, s);
    visible_.hide(keys_.segment, r, keys, s);

    const Vec minus_infinity = hn::Set(d, -infinity()), zero = hn::Zero(d);
    const Vec lse = hn::Set(d, term.lse == -infinity() ? infinity() : term.lse);
    const Vec lse_low = hn::Set(d, term.lse_low);
    const Vec row_d = hn::Set(d, term.d), times = hn::Set(d, factor);
    const Vec scale = hn::Set(d, p_.score.scale), most = hn::Set(d, 126.0f);
    const float* const kept = p_.dropout ? dropout_.factors(tile_.kv_head, r, keys) : nullptr;
    for (int j = keys.begin; j < keys.end; j += kLanes) {
      const Vec score = hn::Load(d, s + j);
      Vec x = hn::Sub(hn::MulSub(score, times, lse), lse_low);
      x = hn::IfThenElse(hn::Gt(x, most), most, x);  // an lse that does not belong to the scores
      const Vec p = hn::IfThenElse(hn::Eq(score, minus_infinity), zero, exp2(x));
      Vec of_weight = hn::Load(d, ds + j), weight = p;
      if (kept != nullptr) {
        const Vec z = hn::Load(d, kept + j);
        of_weight = SegmentDropout::kept(z, of_weight);
        weight = SegmentDropout::kept(z, p);
      }
      const Vec of_score = hn::Mul(p, hn::Sub(of_weight, row_d));
      if (biased != nullptr)
        hn::Store(hn::IfThenElse(hn::Eq(p, zero), zero, of_score), d, biased + j);
      Vec dx = hn::Mul(of_score, scale);
      if (capped) dx = hn::Mul(dx, hn::Load(d, slope + j));
      hn::Store(weight, d, s + j);
      hn::Store(hn::IfThenElse(hn::Eq(p, zero), zero, dx), d, ds + j);
    }
  }

  const GradientParams& p_;
  const Tile& tile_;
  const PackedKeyRows& keys_;
  const GradientSpace& space_;
  const VisibleRows<kGradientRows> visible_;
  const Products products_;
  SegmentDropout dropout_;
  const int head_columns_;
  HWY_ALIGN float ds_[kSegment];  // of one row
};

void gradient_tile(const GradientParams& p, const Tile& tile, const PackedQueryRows& rows,
                   const PackedKeyRows& keys, const GradientSpace& space, const TileSums& sums) {
#if LONGSPAN_HOST_BF16_DOT
  if (by_bf16(p)) return TileGradient<Bf16Products>(p, tile, rows, keys, space)(sums);
#endif
  TileGradient<Fp32Products>(p, tile, rows, keys, space)(sums);
}

bool compiles_bf16_gradients() { return LONGSPAN_HOST_BF16_DOT != 0; }

/// Widens a row, and pads it to `columns` with zeros. Returns whether all of it is finite.
template <class T>
HWY_INLINE bool widen_padded(const T* from, int dim, int columns, float* to) {
  widen(from, dim, to);
  std::fill(to + dim, to + columns, 0.0f);
  return is_finite_row(to, columns);
}

void pack_gradient_keys(const GradientParams& p, const Sequence& s, int kv_head,
                        const Segment& segment, const GradientSpace& space, PackedKeyRows& packed) {
  packed = {segment, true};
  KeyRows rows;
  rows.clear();
  rows.find(p, s, kv_head, segment.first, 0, segment.keys);
#if LONGSPAN_HOST_BF16_DOT
  if (by_bf16(p)) return pack_gradient_keys_bf16(p, rows, space, packed);
#endif
  const Range all = aligned({0, segment.keys});
  const int columns = GradientSums::padded(p.head_dim);
  with_type(p.kv_dtype, [&]<class T>(const T*) {
    pack_keys<T>(p.k, rows.k(), all, p.head_dim, space.keys);
    pack_keys<T>(p.v, rows.v(), all, p.value_dim, space.values);
    for (int j = 0; j < all.end; ++j) {
      float* const to = space.key_rows + j * columns;
      if (j < segment.keys)
        packed.finite &=
            widen_padded(reinterpret_cast<const T*>(rows.k()[j]), p.head_dim, columns, to);
      else
        std::fill_n(to, columns, 0.0f);
    }
  });
}

void pack_gradient_rows(const GradientParams& p, const Tile& tile, const GradientSpace& space,
                        PackedQueryRows& packed) {
  packed.finite = true;
#if LONGSPAN_HOST_BF16_DOT
  if (by_bf16(p)) return pack_gradient_rows_bf16(p, tile, space, packed);
#endif
  const int columns = GradientSums::padded(p.head_dim);
  const int value_columns = GradientSums::padded(p.value_dim);
  with_type(p.q_dtype, [&]<class T>(const T*) {
    for_each_row(p, tile, [&](int r, std::int64_t token, std::int64_t head) {
      packed.finite &=
          widen_padded(p.q.at<T>(token, head), p.head_dim, columns, space.q + r * columns);
    });
  });
  with_type(p.dout_dtype, [&]<class T>(const T*) {
    for_each_row(p, tile, [&](int r, std::int64_t token, std::int64_t head) {
      packed.finite &= widen_padded(p.dout.at<T>(token, head), p.value_dim, value_columns,
                                    space.dout + r * value_columns);
    });
  });
}

void widen_gradients(const WidenGradientsParams& p, std::int64_t begin, std::int64_t end) {
  with_type(p.dtype, [&]<class T>(const T*) {
    for (std::int64_t token = begin; token < end; ++token)
      for (int head = 0; head < p.heads; ++head) {
        const std::int64_t row = token * p.heads + head;
        widen(p.dout.at<T>(token, head), p.value_dim, p.to + row * p.value_dim);
        p.to_lse[row] = p.dlse.data != nullptr ? *p.dlse.at(token, head) : 0.0f;
      }
  });
}

/// D of a row in the making.
struct RowTermInputs {
  RowTerm* term = nullptr;
  float dlse = 0;
  HWY_ALIGN float out[kMaxHeadDim + 16], dout[kMaxHeadDim + 16];
};

/// Makes D of `count` rows at once, whose chains of sums do not wait for each other. A chain is
/// that of multiply: where a row sees one key, D is then dP to the bit, and dS is 0 as it must be.
template <int kRows>
HWY_NOINLINE void sum_products(RowTermInputs (&rows)[kRows], int count, int value_dim) {
  const hn::CappedTag<float, 1> one;
  float sums[kRows] = {};
  for (int c = 0; c < value_dim; ++c) {
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r)
      sums[r] = hn::GetLane(hn::MulAdd(hn::Set(one, rows[r].dout[c]), hn::Set(one, rows[r].out[c]),
                                       hn::Set(one, sums[r])));
  }
  for (int r = 0; r < count; ++r) rows[r].term->d = sums[r] - rows[r].dlse;
}

void row_terms(const RowTermParams& p, std::int64_t begin, std::int64_t end) {
  constexpr int kRows = 8;
  RowTermInputs rows[kRows] = {};
  int count = 0;
  for (std::int64_t token = begin; token < end; ++token) {
    for (int head = 0; head < p.heads; ++head) {
      const float natural = *p.lse.at(token, head);
      RowTerm& term = p.terms[token * p.heads + head];
      term = row_term(natural, 0.0f);
      if (natural == -infinity()) continue;  // it sees nothing, and its dout may hold anything
      RowTermInputs& row = rows[count++];
      row.term = &term;
      row.dlse = p.dlse.data != nullptr ? *p.dlse.at(token, head) : 0.0f;
      with_type(p.out_dtype,
                [&]<class T>(const T*) { widen(p.out.at<T>(token, head), p.value_dim, row.out); });
      with_type(p.dout_dtype, [&]<class T>(const T*) {
        widen(p.dout.at<T>(token, head), p.value_dim, row.dout);
      });
      if (count < kRows) continue;
      sum_products(rows, count, p.value_dim);
      count = 0;
    }
  }
  sum_products(rows, count, p.value_dim);
}

void store_gradients(const StoreGradientParams& p, int kv_head, std::int64_t begin,
                     std::int64_t end) {
  with_type(p.dtype, [&]<class T>(const T* type) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t place = p.place(row);
      if (place < 0) continue;
      const float* const from = p.sums.at(kv_head, row);
      T* const to = p.to.at<T>(place / p.group, kv_head * p.group + place % p.group);
      if (p.accumulate) {
        HWY_ALIGN float old[kPanel];
        for (int first = 0; first < p.sums.dim; first += kPanel) {
          const int count = std::min(kPanel, p.sums.dim - first);
          widen(to + first, count, old);
          for (int c = 0; c < count; ++c)
            to[first + c] = from_float(old[c] + from[first + c], type);
        }
      } else {
        // Which of the zeros a sum is must not depend on the zeros that were added to it.
        for (int c = 0; c < p.sums.dim; ++c) to[c] = from_float(from[c] + 0.0f, type);
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(compiles_bf16_gradients);
HWY_EXPORT(gradient_tile);
HWY_EXPORT(pack_gradient_keys);
HWY_EXPORT(pack_gradient_rows);
HWY_EXPORT(add_sums);
HWY_EXPORT(widen_gradients);
HWY_EXPORT(row_terms);
HWY_EXPORT(store_gradients);

bool has_bf16_gradients() {
  static const bool has = has_avx512_bf16();
  return has && HWY_DYNAMIC_DISPATCH(compiles_bf16_gradients)();
}
bool by_bf16(const GradientParams& p) {
  return p.bf16_products && p.q_dtype == DType::bf16 && p.kv_dtype == DType::bf16 &&
         p.dout_dtype == DType::bf16 && has_bf16_gradients();
}

void gradient_tile(const GradientParams& p, const Tile& tile, const PackedQueryRows& rows,
                   const PackedKeyRows& keys, const GradientSpace& space, const TileSums& sums) {
  HWY_DYNAMIC_DISPATCH(gradient_tile)(p, tile, rows, keys, space, sums);
}
void pack_gradient_keys(const GradientParams& p, const Sequence& s, int kv_head,
                        const Segment& segment, const GradientSpace& space, PackedKeyRows& packed) {
  HWY_DYNAMIC_DISPATCH(pack_gradient_keys)(p, s, kv_head, segment, space, packed);
}
void pack_gradient_rows(const GradientParams& p, const Tile& tile, const GradientSpace& space,
                        PackedQueryRows& packed) {
  HWY_DYNAMIC_DISPATCH(pack_gradient_rows)(p, tile, space, packed);
}
void add_sums(float* a, const float* b, std::int64_t n) { HWY_DYNAMIC_DISPATCH(add_sums)(a, b, n); }
void widen_gradients(const WidenGradientsParams& p, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(widen_gradients)(p, begin, end);
}
void row_terms(const RowTermParams& p, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(row_terms)(p, begin, end);
}
void store_gradients(const StoreGradientParams& p, int kv_head, std::int64_t begin,
                     std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(store_gradients)(p, kv_head, begin, end);
}

}  // namespace longspan::kernels::host
#endif

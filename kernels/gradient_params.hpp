// The parameters of backward. With x = scale q.k, s = bias + softcap tanh(x / softcap),
// p = exp(s - lse) and D = sum(dout * out) - dlse of a row,
//
//     dS = p (dout.v - D),   dX = scale dS (1 - tanh(x / softcap)^2)
//     dq = sum over keys dX k,   dk = sum over rows dX q,   dv = sum over rows p dout
//
// The keys and values of a kv head get the sums over the rows of all query heads of its group. The
// method is that of FlashAttention-2 (Dao, arXiv 2307.08691): scores are made anew from q, k and
// lse.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/attend_params.hpp"
#include "kernels/batch_rows.hpp"
#include "kernels/params.hpp"
#include "kernels/tensors.hpp"
#include "longspan/order.hpp"
#include "longspan/starts.hpp"
#include "longspan/state.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// What backward needs of a row besides its tensors.
struct RowTerm {
  float lse = 0;      // in base 2; -inf: the row sees nothing
  float lse_low = 0;  // what the rounding of lse left, so that a weight loses no more than the
                      // natural lse has lost
  float d = 0;        // D
};

/// The terms of a row with a natural lse. If it sees nothing, its D may be anything.
LONGSPAN_HD inline RowTerm row_term(float lse, float d) {
  if (lse == -infinity()) return {-infinity(), 0.0f, 0.0f};
  const double exact = lse * 1.4426950408889634;
  const auto high = static_cast<float>(exact);
  return {high, static_cast<float>(exact - high), d};
}

/// The same of products of fp64. The lse is natural.
struct WideRowTerm {
  double lse = 0;
  double d = 0;
};

/// The bytes of the terms of `rows` rows of a head.
constexpr std::int64_t row_term_bytes(DType dtype, std::int64_t rows) {
  return rows *
         static_cast<std::int64_t>(dtype == DType::fp64 ? sizeof(WideRowTerm) : sizeof(RowTerm));
}

/// Makes the terms of all rows of a batch.
struct RowTermParams {
  DType out_dtype = DType::fp32;
  DType dout_dtype = DType::fp32;
  std::int64_t tokens = 0;
  int heads = 1;
  int value_dim = 0;
  TokenRows out;             // [tokens, heads, value_dim]
  TokenRows dout;            // [tokens, heads, value_dim]
  TokenLse lse;              // [tokens, heads], natural
  TokenLse dlse;             // [tokens, heads]; null: no gradient came with the lse
  RowTerm* terms = nullptr;  // [tokens, heads]; of WideRowTerm if out is fp64
};

/// Adds up the gradients of the sinks over the rows of a batch: to[h] = -sum exp(sink - lse) D.
/// Sums are float64, rounded once; in the fixed order, those of each virtual rank are, and fold.
struct SinkGradientParams {
  Batch batch;    // rows past its last sequence do not count
  Shard queries;  // of the rows
  std::int64_t tokens = 0;
  int heads = 1;
  bool invariant = false;          // in the fixed order
  Floats sinks;                    // [heads]
  const RowTerm* terms = nullptr;  // [tokens, heads]
  float* to = nullptr;             // [heads]

  /// The rows that sequence b has here.
  LONGSPAN_HD std::int64_t rows_of(int b) const { return batch.query_len(b, tokens); }
  /// How they fold in the fixed order.
  LONGSPAN_HD SegmentOrder order(int b) const {
    Geometry rows;
    rows.batch = batch;
    rows.queries = queries;
    rows.tokens = tokens;
    return queries.for_sequence(b).order(rows.whole_query_len(b));
  }
  /// The part of row t of sequence b, with the sink of the head in base 2.
  LONGSPAN_HD double part(double sink, int b, std::int64_t t, std::int64_t head) const {
    const RowTerm& term = terms[(batch.first_row(b) + t) * heads + head];
    if (term.lse == -infinity()) return 0;
    return -exp2(sink - term.lse - term.lse_low) * static_cast<double>(term.d);
  }
};

/// Sums in fp32, with a kv head's rows one after another, so that a head is one dense block:
/// [kv_heads, rows, padded(dim)]. Rows of queries are packed: token * group + head of the group.
/// Sums of products of fp64 are in fp64, of the same shape.
struct GradientSums {
  float* data = nullptr;
  std::int64_t rows = 0;  // of a kv head, over the batch
  int dim = 0;

  LONGSPAN_HD static int padded(int dim) { return (dim + 15) / 16 * 16; }
  LONGSPAN_HD static std::int64_t bytes(std::int64_t rows, int kv_heads, int dim,
                                        DType products = DType::fp32) {
    return rows * kv_heads * padded(dim) * element_bytes(products);
  }
  LONGSPAN_HD static constexpr int element_bytes(DType products) {
    return products == DType::fp64 ? 8 : 4;
  }
  LONGSPAN_HD float* at(int kv_head, std::int64_t row) const {
    return data + (kv_head * rows + row) * padded(dim);
  }
  double* wide_at(int kv_head, std::int64_t row) const {
    return reinterpret_cast<double*>(data) + (kv_head * rows + row) * padded(dim);
  }
};

/// Where sums of the gradients of biases are added up, in fp32: they are never cleared here.
struct BiasSums {
  float* slopes = nullptr;        // [batch, heads], or [heads] for all sequences; null: not wanted
  std::int64_t slope_stride = 0;  // from one sequence to the next; 0: [heads]
  float* qq = nullptr;            // [width, width] of QqBias; null: not wanted
  std::int64_t qq_stride = 0;     // from one row to the next
};

/// Where kernels store the gradients of a block that has all rows and keys, with their one
/// rounding: in tensors of its type.
struct GradientStores {
  TokenRows dq;      // [tokens, heads, head_dim]; no data: gradients stay sums
  TokenRows dk, dv;  // [keys, kv_heads, dim]
  std::int64_t capacity =
      0;  // dk and dv are [batch, capacity, ...]; 0: their rows are those of sums

  LONGSPAN_HD explicit operator bool() const { return dq.data != nullptr; }
  /// The row of dk and dv for a key of sequence b, which is row `sum` of the sums; -1: none.
  LONGSPAN_HD std::int64_t place(int b, std::int64_t key, std::int64_t sum) const {
    if (capacity == 0) return sum;
    return key < capacity ? b * capacity + key : -1;
  }
};

/// Adds up the gradients of a block of rows and a block of keys: those of AttendParams. Every row
/// and key of the blocks is written, with zeros where nothing is seen. fp8 and pages are refused.
struct GradientParams : AttendParams {
  TokenRows dout;  // [tokens, heads, value_dim] of dout_dtype
  DType dout_dtype = DType::fp32;
  const RowTerm* terms = nullptr;  // [tokens, heads]; of WideRowTerm for fp64
  GradientSums dq;                 // [kv_heads, tokens * group, head_dim]; no data: not wanted
  GradientSums dk;                 // [kv_heads, keys on this rank, head_dim]; no data: not wanted
  GradientSums dv;                 // [kv_heads, keys on this rank, value_dim], with dk
  const std::int64_t* key_sum_start = nullptr;  // [batch] first row of each sequence in dk and dv;
                                                // null: as in k and v
  bool resume_rows = false;                     // dq starts from what is there, otherwise from zero
  bool resume_keys = false;                     // the same for dk and dv
  BiasSums biases;                              // slopes only with dq
  GradientStores stores;  // only if the backend stores_gradients: sums may then be anything
};

/// Adds sums to the first columns of others, row by row: to[.., c] += from[.., c].
struct AddColumnsParams {
  GradientSums to;    // [kv_heads, rows, dim]
  GradientSums from;  // the same with fewer columns, or as many
  int kv_heads = 1;
  DType dtype = DType::fp32;  // of the products; fp64: the sums are fp64
};

/// Widens the gradients of the results of a batch to fp32, dense.
struct WidenGradientsParams {
  DType dtype = DType::fp32;  // of dout
  std::int64_t tokens = 0;
  int heads = 1;
  int value_dim = 0;
  TokenRows dout;           // [tokens, heads, value_dim]
  TokenLse dlse;            // [tokens, heads]; null: zeros
  float* to = nullptr;      // [tokens, heads, value_dim]
  float* to_lse = nullptr;  // [tokens, heads]
};

/// Rotates sums of dq back: the gradients of rotated query rows become those of the rows before
/// their rotation. Rows past the last sequence stay as they are.
struct TurnBackParams {
  RotateParams rows;  // as they were rotated; `from` and `to` are not used
  GradientSums sums;  // [kv_heads, tokens * group, head_dim]
};

/// The keys of a batch on one rank, as their rows follow one another in sums of gradients. The
/// device may have room for more than there are.
struct SummedKeys {
  Batch batch;
  Shard shard;
  const std::int64_t* start = nullptr;  // [batch] first row of each sequence; null: one sequence

  struct Key {
    int sequence = -1;       // -1: the row is past the last key
    std::int64_t index = 0;  // among the rank's keys of the sequence
  };
  LONGSPAN_HD Key at(std::int64_t row) const {
    const std::int64_t* const starts = start;
    const int b =
        starts == nullptr ? 0 : last_start(batch.size, row, [starts](int i) { return starts[i]; });
    const std::int64_t index = row - (starts == nullptr ? 0 : starts[b]);
    if (index >= shard.for_sequence(b).local_len(batch.keys(b, shard))) return {};
    return {b, index};
  }
  /// The position of a key in its sequence.
  LONGSPAN_HD std::int64_t position(const Key& key) const {
    return shard.for_sequence(key.sequence).position(key.index, batch.keys(key.sequence, shard));
  }
};

/// The same for sums of dk, whose keys were rotated before the run.
struct TurnBackKeysParams {
  Rope rope;
  SummedKeys keys;
  int kv_heads = 1;
  GradientSums sums;
};

/// Rounds sums to their type and stores them.
struct StoreGradientParams {
  GradientSums sums;
  std::int64_t count = 0;     // the first rows of each kv head; rows to store
  DType dtype = DType::fp32;  // of the gradient: fp32, fp16 or bf16; or fp64, as its sums then are
  int kv_heads = 1;
  int group = 1;            // query heads of a kv head; 1 for the gradients of keys and values
  TokenRows to;             // [rows / group, kv_heads * group, dim]
  bool accumulate = false;  // adds to what is there, before the one rounding
  Batch batch;              // rows of queries past its last sequence are not written
  bool of_keys = false;     // the rows are `keys`
  SummedKeys keys;
  std::int64_t capacity = 0;  // of keys: `to` is [batch, capacity, ...]; 0: its rows are those of
                              // the sums
  RunHeaders headers;         // of the data that made the sums: if ranks differ, a GPU writes
                              // nothing

  /// The row of `to` for a row of the sums; -1: it is not written.
  LONGSPAN_HD std::int64_t place(std::int64_t row) const {
    if (!of_keys) return in_batch(batch, row / group) ? row : -1;
    const SummedKeys::Key key = keys.at(row);
    if (key.sequence < 0) return -1;
    return GradientStores{.capacity = capacity}.place(key.sequence, key.index, row);
  }
};

}  // namespace longspan::kernels

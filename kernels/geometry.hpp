// The problem of an attention without any locations: sizes and types, the sequences of a batch,
// which rank holds which of their rows and keys, and how scores are made. The position of a query
// row in its sequence is computed only here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dropout.hpp"
#include "kernels/visible.hpp"
#include "longspan/mask.hpp"
#include "longspan/score_terms.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// The sequences of a batch. Null arrays describe one sequence of `shard.length` keys.
struct Batch {
  int size = 1;
  const std::int32_t* query_start = nullptr;  // [size + 1], or null when size is 1
  const std::int32_t* kv_len = nullptr;       // [size], or null when size is 1
  const std::int64_t* key_start = nullptr;    // [size] first local key of each sequence; or null
  const std::uint8_t* causal = nullptr;       // [size] in place of Mask::causal; or null
  bool skip_decode = false;    // sequences of one query are left out: nothing is written for them
  std::int64_t key_pitch = 0;  // without key_start: sequence b begins at local key b * key_pitch
  // [size + 1] rows of the queries on all ranks, if AttendParams::queries gives this rank a share
  // of each sequence's; or null when size is 1
  const std::int32_t* whole_query_start = nullptr;
  const std::int32_t* left_padding = nullptr;  // [size] first keys that no row sees; or null
  const std::int32_t* prefix = nullptr;        // [size] in place of Mask::prefix; or null
  // [size] used query rows on all ranks, the first ones of a sequence; or null: all. The others see
  // nothing.
  const std::int32_t* used_rows = nullptr;

  LONGSPAN_HD std::int64_t first_row(int b) const { return query_start ? query_start[b] : 0; }
  LONGSPAN_HD std::int64_t query_len(int b, std::int64_t tokens) const {
    return query_start ? query_start[b + 1] - query_start[b] : tokens;
  }
  LONGSPAN_HD std::int64_t keys(int b, const Shard& shard) const {
    return kv_len ? kv_len[b] : shard.length;
  }
  LONGSPAN_HD std::int64_t first_key(int b) const {
    return key_start ? key_start[b] : b * key_pitch;
  }
  /// The prefix of sequence b; `most` is that of the mask.
  LONGSPAN_HD std::int64_t prefix_of(int b, std::int64_t most) const {
    return prefix == nullptr || prefix[b] > most ? most : prefix[b];
  }
  LONGSPAN_HD std::int64_t padding(int b) const { return left_padding ? left_padding[b] : 0; }
  /// Whether a row may see less of a sequence than the mask lets it.
  LONGSPAN_HD bool hides() const { return left_padding != nullptr || used_rows != nullptr; }
  LONGSPAN_HD bool skips(std::int64_t query_len) const { return skip_decode && query_len == 1; }
};

/// The numbers of Score for products of fp64.
struct WideScore {
  double scale = 1.0;
  double softcap = 0.0;
};

struct Geometry {
  DType dtype = DType::fp32;     // of the products: fp32, fp16 or bf16; on CPUs also fp64
  DType q_dtype = DType::fp32;   // dtype, or fp8
  DType kv_dtype = DType::fp32;  // dtype, or fp8
  std::int64_t tokens = 0;       // query rows on this rank
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 0;   // of queries and keys
  int value_dim = 0;  // of values, states and results

  Batch batch;
  Shard shard;
  Shard queries;  // the rank's share of a sequence's query rows; with one rank, all. Without
                  // whole_query_start, `length` is the number of rows of the one sequence on all
                  // ranks. It is not `listed`: the rows of a tile ascend
  Mask mask;
  Documents documents;       // of each sequence
  Ranges ranges;             // of each sequence, whose tokens see each other
  bool only_prefix = false;  // CUDA: rows see only what Mask::prefix adds; otherwise only the rest
  Score score;
  WideScore wide_score;  // the same, for fp64
  Bias bias;
  Dropout dropout;
  bool invariant = false;          // keep the fixed order also for long queries
  bool tf32 = false;               // fp32 products may be rounded to tf32
  bool fp8_products = false;       // e4m3 q, k and v may be multiplied without conversion, with
                                   // weights rounded to e4m3; scales are then positive
  bool bf16_products = false;      // the host may make bf16 products with the CPU's own
                                   // instructions, with weights rounded to bf16
  std::int64_t max_kv_len = 0;     // no sequence is longer; 0: unknown. It bounds only scratch
  std::int64_t max_query_len = 0;  // no sequence has more queries; 0: unknown. Kernels for longer
                                   // ones are not launched

  LONGSPAN_HD bool is_causal(int b) const {
    return batch.causal != nullptr ? batch.causal[b] != 0 : mask.causal;
  }
  /// Whether no row of sequence b sees a key after its own position.
  LONGSPAN_HD bool sees_no_later_key(int b) const { return is_causal(b) && !ranges; }
  /// The query rows of sequence b on all ranks.
  LONGSPAN_HD std::int64_t whole_query_len(int b) const {
    if (queries.ranks == 1) return batch.query_len(b, tokens);
    const std::int32_t* start = batch.whole_query_start;
    return start != nullptr ? start[b + 1] - start[b] : queries.length;
  }
  /// Those that are used: the first ones.
  LONGSPAN_HD std::int64_t used_query_len(int b) const {
    return batch.used_rows != nullptr ? batch.used_rows[b] : whole_query_len(b);
  }
  /// The index among the rows on all ranks of the rank's row `token` of sequence b. It
  /// ascends with `token`.
  LONGSPAN_HD std::int64_t query_index(int b, std::int64_t token) const {
    return queries.ranks == 1 ? token : sharded_query_index(*this, b, token);
  }
  /// The position in the sequence of the first query row of sequence b, on any rank.
  LONGSPAN_HD std::int64_t first_position(int b, std::int64_t kv_len) const {
    return mask.first_row(used_query_len(b), kv_len);
  }
  /// The position in the sequence of the rank's row `token` of sequence b.
  LONGSPAN_HD std::int64_t query_position(int b, std::int64_t token, std::int64_t kv_len) const {
    return first_position(b, kv_len) + query_index(b, token);
  }
  /// Which positions the queries of sequence b see.
  LONGSPAN_HD MaskRule mask_rule(int b, std::int64_t kv_len) const {
    const std::int64_t padding = batch.padding(b);
    const bool lower_right = mask.alignment == Alignment::lower_right;
    MaskRule rule{mask,
                  documents.for_sequence(b),
                  kv_len,
                  lower_right ? kv_len : used_query_len(b),
                  padding < kv_len ? padding : kv_len,
                  ranges.for_sequence(b)};
    rule.mask.causal = is_causal(b);
    rule.mask.prefix = batch.prefix_of(b, mask.prefix);
    return rule;
  }
  /// Whether rows may see two intervals: their prefix is not part of the other one.
  bool sees_prefix() const { return mask.sees_prefix_apart(); }
  /// The positions that the query at `position` of sequence b sees. For CUDA, whose kernels take
  /// one interval: with a prefix one of two, as `only_prefix` says. Both ends ascend with the row.
  LONGSPAN_HD Interval visible(int b, std::int64_t position, std::int64_t kv_len) const {
    const MaskRule rule = mask_rule(b, kv_len);
    return only_prefix ? rule.early(position) : rule.late(position);
  }

 private:
  // It takes the geometry by reference, to use few registers at the call.
  LONGSPAN_HD_APART static std::int64_t sharded_query_index(const Geometry& g, int b,
                                                            std::int64_t token) {
    return g.queries.for_sequence(b).position(token, g.whole_query_len(b));
  }
};

}  // namespace longspan::kernels

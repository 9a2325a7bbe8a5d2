// What is told to the kernels that fold states, or finished parts, into a result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_params.hpp"
#include "kernels/geometry.hpp"
#include "kernels/row_places.hpp"
#include "kernels/tensors.hpp"
#include "longspan/element.hpp"
#include "longspan/order.hpp"
#include "longspan/state.hpp"
#include "longspan/types.hpp"
#include "src/base/put_flags.hpp"

namespace longspan::kernels {

/// The last step of a result: out = value / scale, or value * scale.
struct OutScale {
  const float* data = nullptr;  // [1]; null: none
  bool inverse = false;         // multiply

  LONGSPAN_HD float operator()(float value) const {
    return data == nullptr ? value : inverse ? value * *data : value / *data;
  }
};

/// What every rank says of its run (digest.hpp), gathered beside the states, or finished parts, of
/// the run. Where one says something else than this rank, they are of different runs: a merge then
/// writes no result, and reports it. On the host the transport compares, and no merge looks at
/// them.
struct RunHeaders {
  const std::uint64_t* said = nullptr;  // [ranks]; null: nothing is compared
  int rank = 0;
  int ranks = 1;
  std::uint32_t run = 0;            // comm::RunName::run
  std::uint64_t* report = nullptr;  // [1] seen by the host, as `reported` says; 0: all is well

  LONGSPAN_HD int differing() const {
    for (int p = 0; p < ranks; ++p)
      if (said[p] != said[rank]) return p;
    return -1;
  }
  /// The report is one word, so that it is read as a whole: the run, and 1 + the rank that differs.
  LONGSPAN_HD static std::uint64_t reported(std::uint32_t run, int differs) {
    return std::uint64_t{run} << 32 | static_cast<std::uint32_t>(differs + 1);
  }
};

/// Turns `slots` states of each row into out and lse. States fold in the order of fold_place,
/// neighbours first; then come the sink, the scale and the one rounding to the output dtype (fp8
/// saturates).
struct MergeParams {
  StateSlots states;
  bool interleaved = false;  // shards are interleaved (fold_place)
  int heads = 1;             // of the result
  int state_heads = 0;       // of the states, where the result has some of them only; 0: `heads`
  int first_head = 0;        // the head of the states that is the first of the result
  Floats sinks;              // [heads], natural units; or null
  const std::int64_t* rows = nullptr;  // [tokens] the token of the state for each token of the
                                       // result, < 0: none; null: the same token
  bool rows_are_same = false;          // `rows` only says which tokens there are: their states have
                                       // the numbers of the result's
  Batch batch;  // with query_start and without `rows`, rows past the last sequence, and of skipped
                // sequences, are not touched
  std::int64_t tokens = 0;    // of the result
  DType dtype = DType::fp32;  // of the result; may be fp8
  OutScale out_scale;
  TokenRows out;       // [tokens, heads, dim]
  TokenLse lse;        // [tokens, heads], natural log; with data null where it is not wanted
  RunHeaders headers;  // of states that were gathered
  // Where the rows end in several ranks' memory, in the host's memory and read by the call; only
  // beside AttendParams::arrivals, where AttentionKernels::takes_arrivals says so. Else null.
  const RowPlaces* places = nullptr;

  /// The row of the state of (token, head), once `rows` has said that there is one.
  LONGSPAN_HD std::int64_t state_row(std::int64_t token, int head) const {
    const std::int64_t from = rows == nullptr || rows_are_same ? token : rows[token];
    return from * (state_heads > 0 ? state_heads : heads) + first_head + head;
  }
};

/// Deals the states of a slot out to `to.slots` parts, a slot for each, in which they travel. A
/// part has some rows or some heads; its states are numbered as those of any slot, its own row *
/// its own heads + its own head.
///
///     by rows     part n has the rows map[n * capacity + i] of the batch (< 0: none), all heads
///     by heads    part n has all rows, and the heads [heads n / parts, heads (n + 1) / parts)
struct PackStatesParams {
  StateSlots from;
  int slot = 0;
  StateSlots to;
  int heads = 1;
  const std::int64_t* map = nullptr;  // [parts, capacity]; null: by heads
  std::int64_t capacity = 0;          // rows of a part at most; by heads all rows

  struct Move {
    int part;
    std::int64_t from, to;  // rows of states; from < 0: there is nothing to move
  };
  LONGSPAN_HD std::int64_t moves() const {
    return capacity * heads * (map != nullptr ? to.slots : 1);
  }
  LONGSPAN_HD Move move(std::int64_t i) const {
    const std::int64_t row = i / heads, head = i % heads;
    if (map != nullptr) {
      const std::int64_t whole = map[row];
      return {static_cast<int>(row / capacity), whole < 0 ? -1 : whole * heads + head,
              row % capacity * heads + head};
    }
    const std::int64_t part = ((head + 1) * to.slots - 1) / heads;
    const std::int64_t first = even_cut(heads, part, to.slots);
    return {static_cast<int>(part), i,
            row * (even_cut(heads, part + 1, to.slots) - first) + head - first};
  }
};

/// Merges finished parts [tokens, heads, dim] with their lse into one. Part n lies n strides behind
/// the first. Neighbours fold first, as in MergeParams; an lse of +inf or -inf is empty, and the
/// rows of an empty part are not read. The merge of finite values is finite, however large they
/// are: where a sum leaves fp32, its terms are scaled before they are added (merge_scaled.hpp).
struct MergeOutputsParams {
  int parts = 2;
  Rows in[2];  // with parts == 2, prefix and suffix; else in[0] is the first part, and of the
               // pairs that follow here [0] holds for all parts
  DType in_dtype[2] = {DType::fp32, DType::fp32};  // may be fp8
  const float* in_scale[2] = {nullptr, nullptr};  // with parts == 2, [1] each; else [0] is [parts].
                                                  // A stored x stands for x * scale; null: 1
  LseView in_lse[2];
  std::int64_t part_stride = 0;      // between parts, in elements; parts > 2
  std::int64_t lse_part_stride = 0;  // the same for the lse
  LogBase base = LogBase::e;         // of every lse, and of the result's too
  bool nan_is_empty = false;
  std::int64_t with_prefix = -1;  // with parts == 2, tokens from here on copy the suffix and its
                                  // lse, whatever they are, and their prefix is not read; -1: none
  std::int64_t tokens = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;  // of the result; may be fp8
  OutScale out_scale;
  Rows out;            // may be in[0]
  LseView lse;         // with data null where it is not wanted; may be in_lse[0]
  RunHeaders headers;  // of parts that were gathered

  /// The index of one of two parts, or of the first of many.
  LONGSPAN_HD int side(int part) const { return parts == 2 ? part : 0; }
  LONGSPAN_HD DType dtype_of(int part) const { return in_dtype[side(part)]; }
  LONGSPAN_HD float scale_of(int part) const {
    const float* scale = in_scale[side(part)];
    return scale == nullptr ? 1.0f : scale[parts == 2 ? 0 : part];
  }
  /// Whether the suffix of a token stands alone. It is copied then, and so is its lse.
  LONGSPAN_HD bool copies_suffix(std::int64_t token) const {
    return parts == 2 && with_prefix >= 0 && token >= with_prefix;
  }
  /// Whether part `part` of a token is merged: a suffix that stands alone has no prefix.
  LONGSPAN_HD bool is_there(int part, std::int64_t token) const {
    return part < parts && !(part == 0 && copies_suffix(token));
  }
  /// What a part of a token counts for, by its lse. One that is copied counts alone, even where its
  /// lse is infinite or NaN.
  LONGSPAN_HD Stats stats_of(float came, std::int64_t token) const {
    return copies_suffix(token) ? Stats{0.0f, 1.0f} : part_stats(came, nan_is_empty);
  }
  LONGSPAN_HD float lse_of(int part, std::int64_t token, int head) const {
    return parts == 2 ? *in_lse[part].at(token, head)
                      : in_lse[0].at(token, head)[part * lse_part_stride];
  }
  LONGSPAN_HD const std::byte* row_of(int part, std::int64_t token, int head) const {
    const Rows& rows = in[side(part)];
    const std::int64_t first = rows.offset(token, head) + (parts == 2 ? 0 : part * part_stride);
    return static_cast<const std::byte*>(rows.data) +
           first * static_cast<std::int64_t>(size_of(dtype_of(part)));
  }
};

/// Copies rows [tokens, heads, dim], finished ones or queries, and an lse bit by bit to where they
/// travel from, or from there to where they belong.
struct PackOutputsParams {
  std::int64_t tokens = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;
  TokenRows from;
  TokenRows to;
  TokenLse from_lse;
  TokenLse to_lse;  // with data null where it is not wanted
  // What a map is of: where tokens go (map[t] of `to`), where they come from (map[t] of `from`), or
  // only which there are. Where map[t] < 0 nothing is copied.
  enum class MapOf : std::uint8_t { places, sources, presence };
  const std::int64_t* map = nullptr;  // [tokens]; null: the same tokens in both
  MapOf map_of = MapOf::places;
  Batch batch;         // with query_start, what is not of the batch is not written (MergeParams)
  RunHeaders headers;  // of rows that were gathered
  // Whose attentions put finished rows here: those of all ranks have ended before any is copied.
  PutRanks putters;

  struct Move {
    std::int64_t from, to;  // tokens; to < 0: nothing moves
  };
  LONGSPAN_HD Move move(std::int64_t token) const {
    const std::int64_t other = map != nullptr ? map[token] : token;
    if (other < 0) return {0, -1};
    return {map_of == MapOf::sources ? other : token, map_of == MapOf::places ? other : token};
  }

  std::int64_t row_bytes() const {
    return std::int64_t{dim} * static_cast<std::int64_t>(size_of(dtype));
  }
  /// The widest word, up to 16 bytes, that divides all rows and the addresses that they begin at.
  int word() const {
    const auto bytes = [&](std::int64_t elements) {
      return static_cast<std::uintptr_t>(elements) * size_of(dtype);
    };
    std::uintptr_t all = static_cast<std::uintptr_t>(row_bytes()) | bytes(from.gap.elements) |
                         bytes(to.gap.elements);
    for (const Rows* rows : {static_cast<const Rows*>(&from), static_cast<const Rows*>(&to)})
      all |= reinterpret_cast<std::uintptr_t>(rows->data) | bytes(rows->row_stride) |
             bytes(rows->head_stride);
    for (int word = 16; word > 1; word /= 2)
      if (all % static_cast<std::uintptr_t>(word) == 0) return word;
    return 1;
  }
};

/// States per segment as serving engines hold them: o [tokens, heads, segments, dim] unnormalised,
/// max and expsum [tokens, heads, segments] in natural units. They are dense but for the padded
/// dim.
struct SegmentView {
  float* output = nullptr;
  float* max = nullptr;
  float* expsum = nullptr;
  int segments = 1;
  int padded_dim = 0;  // distance of rows of `output`; at least dim
};

/// The state that `max` and `expsum` of a segment stand for, in natural units. A max of -inf is an
/// empty segment, whatever its sum: engines leave 1 there where a window left no key. So is a sum
/// of 0, whatever its max.
LONGSPAN_HD inline Stats segment_stats(float max, float expsum) {
  if (max == -infinity() || expsum == 0.0f) return empty_stats();
  return {max, expsum};
}

/// Turns StateSlots [segments] into SegmentView. Segment 0 takes the sink. Segments past the end of
/// a sequence (parts.of(s) is empty) are not written; segment 0 always is, for the sink's sake.
struct ExportSegmentsParams {
  StateSlots states;
  KeyParts parts;
  Batch batch;
  Shard shard;
  std::int64_t tokens = 0;
  int heads = 1;
  Floats sinks;
  SegmentView to;
};

/// Turns SegmentView into out and lse. Segments past the end of a sequence are not read, and no
/// sink is added: segment 0 holds it already.
struct ReduceSegmentsParams {
  SegmentView from;
  KeyParts parts;
  Batch batch;
  Shard shard;
  std::int64_t tokens = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;  // of the result; may be fp8
  OutScale out_scale;
  Rows out;
  LseView lse;
};

}  // namespace longspan::kernels

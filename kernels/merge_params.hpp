// The parameters of kernels that fold states, or finished parts, into a result.
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
#include "longspan/storage.hpp"
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

/// Every rank's report of its run (digest.hpp), gathered with the states, or finished parts, of the
/// run. If one differs from this rank's, they are of different runs: a merge then writes no result,
/// and reports it. On the host the transport compares, and merges do not read them.
struct RunHeaders {
  const std::uint64_t* digests = nullptr;  // [ranks]; null: nothing is compared
  int rank = 0;
  int ranks = 1;
  std::uint32_t run = 0;            // comm::RunName::run
  std::uint64_t* report = nullptr;  // [1] read by the host, in the form of `reported`; 0: all is
                                    // well

  LONGSPAN_HD int differing() const {
    for (int p = 0; p < ranks; ++p)
      if (digests[p] != digests[rank]) return p;
    return -1;
  }
  /// The report is one word, so that it is read atomically: the run, and 1 + the rank that differs.
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
  int state_heads = 0;       // of the states, if the result has only some of them; 0: `heads`
  int first_head = 0;        // the head of the states that is the result's first
  Floats sinks;              // [heads], natural units; or null
  const std::int64_t* rows = nullptr;  // [tokens] the token of the state for each token of the
                                       // result, < 0: none; null: the same token
  bool rows_are_same = false;          // `rows` only tells which tokens exist: the indices of their
                                       // states are those of the result
  Batch batch;  // with query_start and without `rows`, rows past the last sequence, and of skipped
                // sequences, are not touched
  std::int64_t tokens = 0;    // of the result
  DType dtype = DType::fp32;  // of the result; may be fp8. fp64 is only for host::attend_fp64
  OutScale out_scale;
  TokenRows out;       // [tokens, heads, dim]
  TokenLse lse;        // [tokens, heads], natural log; data is null if it is not wanted
  RunHeaders headers;  // of gathered states
  // Destinations of rows in several ranks' memory, in host memory and read by the call; only with
  // AttendParams::arrivals, if AttentionKernels::takes_arrivals allows it. Otherwise null.
  const RowPlaces* places = nullptr;

  /// The row of the state of (token, head), if `rows` has one.
  LONGSPAN_HD std::int64_t state_row(std::int64_t token, int head) const {
    const std::int64_t from = rows == nullptr || rows_are_same ? token : rows[token];
    return from * (state_heads > 0 ? state_heads : heads) + first_head + head;
  }
};

/// Distributes the states of a slot over `to.slots` parts, a slot for each, for sending. A part has
/// some rows or some heads; its states are numbered like those of any slot, its own row * its own
/// heads + its own head.
///
///     by rows     part n has the rows map[n * capacity + i] of the batch (< 0: none), all heads
///     by heads    part n has all rows, and the heads [heads n / parts, heads (n + 1) / parts)
struct PackStatesParams {
  StateSlots from;
  int slot = 0;
  StateSlots to;
  int heads = 1;
  const std::int64_t* map = nullptr;  // [parts, capacity]; null: by heads
  std::int64_t capacity = 0;          // most rows of a part; by heads all rows

  struct RowMove {
    int part;
    std::int64_t from, to;  // rows of states; from < 0: nothing to move
  };
  LONGSPAN_HD std::int64_t moves() const {
    return capacity * heads * (map != nullptr ? to.slots : 1);
  }
  LONGSPAN_HD RowMove move(std::int64_t i) const {
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

/// Merges finished parts [tokens, heads, dim] with their lse into one. Part n is n strides after
/// the first. Neighbours fold first, as in MergeParams; an lse of +inf or -inf is empty, and the
/// rows of an empty part are not read. The merge of finite values is finite, however large they
/// are: if a sum exceeds fp32, its terms are scaled before they are added (merge_scaled.hpp).
struct MergeOutputsParams {
  int parts = 2;
  Rows in[2];  // with parts == 2, prefix and suffix; otherwise in[0] is the first part, and [0] of
               // the following pairs applies to all parts
  DType in_dtype[2] = {DType::fp32, DType::fp32};  // may be fp8
  const float* in_scale[2] = {nullptr, nullptr};   // with parts == 2, [1] each; otherwise [0] is
                                                  // [parts]. A stored x stands for x * scale; null:
                                                  // 1
  LseView in_lse[2];
  std::int64_t part_stride = 0;      // between parts, in elements; parts > 2
  std::int64_t lse_part_stride = 0;  // the same for the lse
  LogBase base = LogBase::e;         // of every lse, including the result's
  bool nan_is_empty = false;
  std::int64_t with_prefix = -1;  // with parts == 2, tokens from here on copy the suffix and its
                                  // lse, whatever they are, and their prefix is not read; -1: none
  std::int64_t tokens = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;  // of the result; may be fp8
  OutScale out_scale;
  Rows out;            // may be in[0]
  LseView lse;         // data is null if it is not wanted; may be in_lse[0]
  RunHeaders headers;  // of gathered parts

  /// The index of one of two parts, or of the first of many.
  LONGSPAN_HD int side(int part) const { return parts == 2 ? part : 0; }
  LONGSPAN_HD DType dtype_of(int part) const { return in_dtype[side(part)]; }
  LONGSPAN_HD float scale_of(int part) const {
    const float* scale = in_scale[side(part)];
    return scale == nullptr ? 1.0f : scale[parts == 2 ? 0 : part];
  }
  /// Whether a token has only a suffix. It is then copied, with its lse.
  LONGSPAN_HD bool copies_suffix(std::int64_t token) const {
    return parts == 2 && with_prefix >= 0 && token >= with_prefix;
  }
  /// Whether part `part` of a token is merged: a token with only a suffix has no prefix.
  LONGSPAN_HD bool is_there(int part, std::int64_t token) const {
    return part < parts && !(part == 0 && copies_suffix(token));
  }
  /// The weight of a token's part, from its lse. A copied part counts alone, even if its lse is
  /// infinite or NaN.
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

/// Copies rows [tokens, heads, dim], finished ones or queries, and an lse bit by bit into a send
/// buffer, or from a receive buffer to their places.
struct PackOutputsParams {
  std::int64_t tokens = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;
  TokenRows from;
  TokenRows to;
  TokenLse from_lse;
  TokenLse to_lse;  // data is null if it is not wanted
  // Meaning of a map: the destination of tokens (map[t] of `to`), their source (map[t] of `from`),
  // or only which exist. If map[t] < 0 nothing is copied.
  enum class MapOf : std::uint8_t { places, sources, presence };
  const std::int64_t* map = nullptr;  // [tokens]; null: the same tokens in both
  MapOf map_of = MapOf::places;
  Batch batch;         // with query_start, rows outside the batch are not written (MergeParams)
  RunHeaders headers;  // of gathered rows
  // The ranks whose attentions put finished rows here: all of them have ended before any row is
  // copied.
  PutRanks putters;

  struct RowMove {
    std::int64_t from, to;  // tokens; to < 0: nothing moves
  };
  LONGSPAN_HD RowMove move(std::int64_t token) const {
    const std::int64_t other = map != nullptr ? map[token] : token;
    if (other < 0) return {0, -1};
    return {map_of == MapOf::sources ? other : token, map_of == MapOf::places ? other : token};
  }

  std::int64_t row_bytes() const { return storage_of(dtype).row_bytes(dim); }
  /// The widest word, up to 16 bytes, that divides all rows and their start addresses.
  int word() const {
    const auto bytes = [format = storage_of(dtype)](std::int64_t elements) {
      return static_cast<std::uintptr_t>(format.bytes(elements));
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

/// States per segment as serving engines store them: o [tokens, heads, segments, dim] unnormalised,
/// max and expsum [tokens, heads, segments] in natural units. They are dense except for the padded
/// dim.
struct SegmentView {
  float* output = nullptr;
  float* max = nullptr;
  float* expsum = nullptr;
  int segments = 1;
  int padded_dim = 0;  // distance of rows of `output`; at least dim
};

/// The state of a segment from its `max` and `expsum`, in natural units. A max of -inf means an
/// empty segment, whatever its sum: engines leave a sum of 1 if a window left no key. A sum of 0
/// means empty too, whatever its max.
LONGSPAN_HD inline Stats segment_stats(float max, float expsum) {
  if (max == -infinity() || expsum == 0.0f) return empty_stats();
  return {max, expsum};
}

/// Turns StateSlots [segments] into SegmentView. Segment 0 takes the sink. Segments past the end of
/// a sequence (parts.of(s) is empty) are not written, except segment 0, which is always written for
/// the sink.
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

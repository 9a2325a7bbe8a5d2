// What a kernel is told: plain data, passed by value, every pointer with its shape. Host and CUDA
// kernels take the same structs.
//
// Names: tokens = query rows over the batch, heads, kv_heads, dim, kv_len, ranks; group = heads /
// kv_heads. A "row" of a state is one (token, head), numbered token * heads + head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "longspan/mask.hpp"
#include "longspan/score.hpp"
#include "longspan/shard.hpp"
#include "longspan/state.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// A tensor [n, heads, dim] whose innermost dimension is dense. Strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  template <class T>
  LONGSPAN_HD T* at(std::int64_t row, std::int64_t head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

/// Keys or values, contiguous or in pages. A key's row of one head lies in chunks of `chunk`
/// elements: element d stands at
///     page * page_stride + row * row_stride + head * head_stride
///     + d / chunk * chunk_stride + d % chunk * dim_stride.
/// Dense rows: chunk_stride = chunk, dim_stride = 1. K in x-packed pages [pages, kv_heads, dim / x,
/// page, x]: chunk = x, row_stride = x. V in [pages, kv_heads, dim, page]: dim_stride = page.
struct KvRows : Rows {
  std::int64_t page_stride = 0;
  int chunk = 8;
  std::int64_t chunk_stride = 8;
  std::int64_t dim_stride = 1;

  KvRows() = default;
  LONGSPAN_HD KvRows(void* memory, std::int64_t row, std::int64_t head) : Rows{memory, row, head} {}

  LONGSPAN_HD bool dense() const { return chunk_stride == chunk && dim_stride == 1; }
  /// Offset of element d in its row, in elements.
  LONGSPAN_HD std::int64_t column(int d) const {
    return d / chunk * chunk_stride + d % chunk * dim_stride;
  }
};

/// Where the pages of a sequence are: local key i of sequence b lies in row i % page_size of page
/// table[b * row_stride + i / page_size * column_stride]. Entries that no visible key needs may
/// hold anything and are not read.
struct Pages {
  const std::int32_t* table = nullptr;  // [batch, columns]; null: the keys are contiguous
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
  std::int64_t columns = 0;
  std::int64_t count = 0;  // pages in the cache, for checks
  int size = 1;            // keys in a page

  LONGSPAN_HD explicit operator bool() const { return table != nullptr; }
  LONGSPAN_HD std::int64_t page(int b, std::int64_t local_key) const {
    return table[b * row_stride + local_key / size * column_stride];
  }
};

/// States of `rows` rows in `slots` equal slots, which lie `slot_bytes` apart: one slot per rank,
/// or per split of a rank's keys. A slot is Stats [rows], then o [rows, dim] in fp32.
struct StateSlots {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  int dim = 0;
  int slots = 1;

  LONGSPAN_HD static std::int64_t stats_bytes(std::int64_t rows) {
    return (rows * 8 + 15) / 16 * 16;
  }
  LONGSPAN_HD static std::int64_t bytes(std::int64_t rows, int dim) {
    return stats_bytes(rows) + rows * dim * 4;
  }
  LONGSPAN_HD std::int64_t slot_bytes() const { return bytes(rows, dim); }
  LONGSPAN_HD Stats* stats(int slot) const {
    return reinterpret_cast<Stats*>(data + slot * slot_bytes());
  }
  LONGSPAN_HD float* o(int slot) const {
    return reinterpret_cast<float*>(data + slot * slot_bytes() + stats_bytes(rows));
  }
  LONGSPAN_HD float* o(int slot, std::int64_t row) const { return o(slot) + row * dim; }
};

/// The sequences of a batch. Null arrays describe the one sequence of `shard.length` keys.
struct Batch {
  int size = 1;
  const std::int32_t* query_start = nullptr;  // [size + 1], or null when size is 1
  const std::int32_t* kv_len = nullptr;       // [size], or null when size is 1
  const std::int64_t* key_start = nullptr;    // [size] first local key of each sequence; or null
  const std::uint8_t* causal = nullptr;       // [size] in place of Mask::causal; or null
  bool skip_decode = false;    // sequences of one query are left out: nothing of theirs is written
  std::int64_t key_pitch = 0;  // without key_start: sequence b begins at local key b * key_pitch
  // [size + 1] rows of the queries on all ranks, where AttendParams::queries says that this rank
  // has a share of each sequence's; or null when size is 1
  const std::int32_t* whole_query_start = nullptr;

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
  LONGSPAN_HD bool skips(std::int64_t query_len) const { return skip_decode && query_len == 1; }
};

/// A cut of each sequence's local keys into `count` parts, each with a state of its own: part s
/// goes to slot AttendParams::slot + s. Outside the fixed order: a cut may go through a segment,
/// which then folds in two halves. count = 0: no cut, one state.
struct KeyParts {
  int count = 0;
  std::int64_t keys = 0;  // in a part; 0: as many tiles of `tile` keys as give `count` parts
  int tile = 16;

  LONGSPAN_HD explicit operator bool() const { return count > 0; }
  LONGSPAN_HD std::int64_t size(std::int64_t local_len) const {
    if (keys > 0) return keys;
    const std::int64_t round = static_cast<std::int64_t>(count) * tile;
    return (local_len + round - 1) / round * tile;
  }
  /// Local keys of part s.
  LONGSPAN_HD Interval of(int s, std::int64_t local_len) const {
    const std::int64_t each = size(local_len), begin = s * each, end = begin + each;
    return {begin < local_len ? begin : local_len, end < local_len ? end : local_len};
  }
};

/// One rank's keys -> one partial state per row (slot `slot` of `state`). Every row of the batch is
/// written, empty ones as empty states; rows past the last sequence, and of skipped sequences, are
/// not touched. Products are of `dtype`: what is stored as fp8 is converted to it (exactly), unless
/// fp8_products allows otherwise.
///
/// A rank may have a share of the query rows (`queries`), as it has of the keys: masks and biases
/// go by where a row stands in its sequence, which query_position says and nothing else.
///
/// With `resume` the rows begin from the states that stand in their slot, and what they end with is
/// merge(that state, the state over this call's keys). A row whose state is empty begins afresh,
/// whatever its max and o are; a row that sees no key keeps its state (an empty one stays empty,
/// and its max and o may stay as they are). The keys of the two must differ; nobody checks that.
/// The state that comes in stands outside of the fixed order's tree (order.hpp): with it bits
/// depend on where the caller cuts the keys into calls, `invariant` or not.
struct AttendParams {
  DType dtype = DType::fp32;     // of the products: fp32, fp16 or bf16
  DType q_dtype = DType::fp32;   // dtype, or fp8
  DType kv_dtype = DType::fp32;  // dtype, or fp8
  std::int64_t tokens = 0;
  int heads = 1;
  int kv_heads = 1;
  int dim = 0;

  Rows q;    // [tokens, heads, dim]
  KvRows k;  // [keys on this rank, kv_heads, dim], or pages
  KvRows v;  // as k
  Pages pages;
  Rows new_k;  // [tokens, kv_heads, dim] of `dtype`: the keys of these rows, which k and v do not
  Rows new_v;  // have yet and get here, ahead of the attention; or null

  Scales q_scale;  // with k_scale: factors of every product, ahead of everything else
  Scales k_scale;
  Scales v_scale;  // of o, in the state

  Batch batch;
  Shard shard;
  Shard queries;  // which of a sequence's query rows the rank has; one rank: all. `length` counts
                  // the rows of the one sequence on all ranks, without whole_query_start. Not
                  // `listed`: the rows of a tile ascend
  Mask mask;
  Documents documents;  // of the one sequence
  Score score;
  Bias bias;
  bool invariant = false;          // keep the fixed order also for long queries
  bool tf32 = false;               // fp32 products may be rounded to tf32
  bool fp8_products = false;       // e4m3 q, k and v may be multiplied as they are, weights rounded
                                   // to e4m3; scales are then positive
  std::int64_t max_kv_len = 0;     // no sequence is longer; 0: unknown. Bounds scratch only
  std::int64_t max_query_len = 0;  // no sequence has more queries; 0: unknown. Kernels of longer
                                   // ones are then not launched

  KeyParts parts;
  StateSlots state;
  int slot = 0;
  bool resume = false;  // rows begin from the states in `slot` (parts: each from its own slot's)

  std::byte* scratch = nullptr;  // AttentionKernels::attend_scratch bytes
  std::size_t scratch_bytes = 0;
  int* ticket = nullptr;  // [1] zero between calls, of one stream at a time; null: part of the
                          // scratch is cleared for each call, which costs a launch

  LONGSPAN_HD bool is_causal(int b) const {
    return batch.causal != nullptr ? batch.causal[b] != 0 : mask.causal;
  }
  /// Query rows of sequence b on all ranks. They are the last positions of the sequence.
  LONGSPAN_HD std::int64_t whole_query_len(int b) const {
    if (queries.ranks == 1) return batch.query_len(b, tokens);
    const std::int32_t* start = batch.whole_query_start;
    return start != nullptr ? start[b + 1] - start[b] : queries.length;
  }
  /// Which of them the rank's row `token` of sequence b is. Ascends with `token`.
  LONGSPAN_HD std::int64_t query_index(int b, std::int64_t token) const {
    return queries.ranks == 1 ? token : sharded_query_index(*this, b, token);
  }
  /// Where the rank's row `token` of sequence b stands in the sequence.
  LONGSPAN_HD std::int64_t query_position(int b, std::int64_t token, std::int64_t kv_len) const {
    return kv_len - whole_query_len(b) + query_index(b, token);
  }
  /// Positions that the query at `position` of sequence b sees.
  LONGSPAN_HD Interval visible(int b, std::int64_t position, std::int64_t kv_len) const {
    Mask rule = mask;
    rule.causal = is_causal(b);
    Interval seen = rule.visible(position, kv_len);
    if (documents) {
      const Interval own = documents.around(position);
      if (own.begin > seen.begin) seen.begin = own.begin;
      if (own.end < seen.end) seen.end = own.end;
    }
    return seen;
  }
  /// The score's scale with those of a quantised q and k.
  LONGSPAN_HD float scale(int kv_head) const {
    return score.scale * q_scale[kv_head] * k_scale[kv_head];
  }

 private:
  // By reference, so that few registers are taken where it is called.
  LONGSPAN_HD_APART static std::int64_t sharded_query_index(const AttendParams& p, int b,
                                                            std::int64_t token) {
    return p.queries.of(b).position(token, p.whole_query_len(b));
  }
};

/// The last step of a result: out = value / scale, or value * scale.
struct OutScale {
  const float* data = nullptr;  // [1]; null: none
  bool inverse = false;         // multiply

  LONGSPAN_HD float operator()(float value) const {
    return data == nullptr ? value : inverse ? value * *data : value / *data;
  }
};

/// What every rank says of its run (digest.hpp), gathered beside the states of the run. Where one
/// says another thing than this rank, the states are of different runs: a merge then writes no
/// result, and reports it.
struct RunHeaders {
  const std::uint64_t* said = nullptr;  // [ranks]; null: nothing is compared
  int rank = 0;
  int ranks = 1;
  std::uint32_t run = 0;            // comm::RunName::run
  std::uint64_t* report = nullptr;  // [1] seen by the host: see `reported`; 0: all is well

  LONGSPAN_HD int differing() const {
    for (int p = 0; p < ranks; ++p)
      if (said[p] != said[rank]) return p;
    return -1;
  }
  /// One word, so that who reads it reads all of it: the run, and 1 + the rank that differs.
  LONGSPAN_HD static std::uint64_t reported(std::uint32_t run, int differs) {
    return std::uint64_t{run} << 32 | static_cast<std::uint32_t>(differs + 1);
  }
};

/// `slots` states of each row -> out and lse. States fold in the order of fold_place, neighbours
/// first; then the sink; then the scale and the one rounding to the output dtype (fp8 saturates).
struct MergeParams {
  StateSlots states;
  bool interleaved = false;  // shards are interleaved: see fold_place
  int heads = 1;
  Floats sinks;                        // [heads], natural units; or null
  const std::int64_t* rows = nullptr;  // [tokens] token of the state for each token of the result,
                                       // < 0: none; null: the same
  Batch batch;                         // with query_start and without `rows`: rows past the last
                                       // sequence, and of skipped sequences, are not touched
  std::int64_t tokens = 0;             // of the result
  DType dtype = DType::fp32;           // of the result; may be fp8
  OutScale out_scale;
  Rows out;              // [tokens, heads, dim]
  float* lse = nullptr;  // [tokens, heads], natural log; or null
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
  RunHeaders headers;  // of states that were gathered
};

/// A strided array [tokens, heads] of fp32.
struct LseView {
  float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  LONGSPAN_HD float* at(std::int64_t row, std::int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
};

/// Finished parts [tokens, heads, dim] with their lse -> one. Part n lies n strides behind the
/// first. Neighbours fold first, as in MergeParams; an lse of +inf or -inf is empty, and the rows
/// of an empty part are not read. The merge of finite values is finite, however large they are:
/// where a sum leaves fp32, its terms are scaled before they are added (merge_scaled.hpp).
struct MergeOutputsParams {
  int parts = 2;
  Rows in[2];  // parts == 2: prefix and suffix; else in[0] is the first part, and what follows here
               // of two is [0] for all
  DType in_dtype[2] = {DType::fp32, DType::fp32};  // may be fp8
  const float* in_scale[2] = {nullptr, nullptr};   // parts == 2: [1] each; else [0] is [parts]. A
                                                   // stored x stands for x * scale; null: 1
  LseView in_lse[2];
  std::int64_t part_stride = 0;      // between parts, in elements; parts > 2
  std::int64_t lse_part_stride = 0;  // likewise of the lse
  LogBase base = LogBase::e;         // of every lse, the result's too
  bool nan_is_empty = false;
  std::int64_t with_prefix = -1;  // parts == 2: tokens from here on copy the suffix, and their
                                  // prefix is not read; -1: none
  std::int64_t tokens = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;  // of the result; may be fp8
  OutScale out_scale;
  Rows out;     // may be in[0]
  LseView lse;  // data null: not wanted; may be in_lse[0]

  /// Which of two parts, or the first of many.
  LONGSPAN_HD int side(int part) const { return parts == 2 ? part : 0; }
  LONGSPAN_HD DType dtype_of(int part) const { return in_dtype[side(part)]; }
  LONGSPAN_HD float scale_of(int part) const {
    const float* scale = in_scale[side(part)];
    return scale == nullptr ? 1.0f : scale[parts == 2 ? 0 : part];
  }
  /// Whether part `part` of a token is merged: a suffix alone has no prefix.
  LONGSPAN_HD bool is_there(int part, std::int64_t token) const {
    return part < parts && !(parts == 2 && part == 0 && with_prefix >= 0 && token >= with_prefix);
  }
  LONGSPAN_HD float lse_of(int part, std::int64_t token, int head) const {
    return parts == 2 ? *in_lse[part].at(token, head)
                      : in_lse[0].at(token, head)[part * lse_part_stride];
  }
  LONGSPAN_HD const std::byte* row_of(int part, std::int64_t token, int head) const {
    const Rows& rows = in[side(part)];
    const std::int64_t first =
        token * rows.row_stride + head * rows.head_stride + (parts == 2 ? 0 : part * part_stride);
    return static_cast<const std::byte*>(rows.data) +
           first * static_cast<std::int64_t>(size_of(dtype_of(part)));
  }
};

/// States per segment as serving engines hold them: o [tokens, heads, segments, dim] unnormalised,
/// max and expsum [tokens, heads, segments], natural units. Dense but for the padded dim.
struct SegmentView {
  float* output = nullptr;
  float* max = nullptr;
  float* expsum = nullptr;
  int segments = 1;
  int padded_dim = 0;  // distance of rows of `output`; at least dim
};

/// What `max` and `expsum` of a segment say, in base 2. A max of -inf is an empty segment, whatever
/// its sum: engines leave 1 there where a window left no key. So is a sum of 0, whatever its max.
LONGSPAN_HD inline Stats segment_stats(float max, float expsum) {
  if (max == -infinity() || expsum == 0.0f) return empty_stats();
  return {max * kLog2E, expsum};
}

/// StateSlots [segments] -> SegmentView. Segment 0 takes the sink. Segments past the end of a
/// sequence (parts.of(s) is empty) are not written; segment 0 always is, for the sink's sake.
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

/// SegmentView -> out and lse. Segments past the end of a sequence are not read, and no sink is
/// added: segment 0 holds it already.
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

/// New keys and values -> this rank's cache. Row t of the batch goes to slot slots[t] = page *
/// page_size + row (< 0: nowhere); without `slots`, to where its sequence's shard and page table
/// put position kv_len - q_len + t, if this rank owns it. Stored as kv_dtype: x / scale, fp8
/// saturating. Slots must differ.
struct AppendParams {
  DType dtype = DType::fp32;     // of the new rows
  DType kv_dtype = DType::fp32;  // of the cache
  std::int64_t tokens = 0;
  int kv_heads = 1;
  int dim = 0;
  Rows new_k;  // [tokens, kv_heads, dim]
  Rows new_v;
  KvRows k;  // the cache; contiguous (slots count rows), or pages
  KvRows v;
  Pages pages;
  const std::int64_t* slots = nullptr;  // [tokens]; or null
  Batch batch;                          // without slots
  Shard shard;                          // without slots
  Scales k_scale;
  Scales v_scale;
};

/// The new keys and values of an attention, as an append of their own.
inline AppendParams append_of(const AttendParams& p) {
  AppendParams append;
  append.dtype = p.dtype;
  append.kv_dtype = p.kv_dtype;
  append.tokens = p.tokens;
  append.kv_heads = p.kv_heads;
  append.dim = p.dim;
  append.new_k = p.new_k;
  append.new_v = p.new_v;
  append.k = p.k;
  append.v = p.v;
  append.pages = p.pages;
  append.batch = p.batch;
  append.shard = p.shard;
  append.k_scale = p.k_scale;
  append.v_scale = p.v_scale;
  return append;
}

/// What is wrong with the arrays of a request. `none` is 0.
enum class Fault : std::int32_t {
  none,
  query_start,  // does not start at 0, descends, or ends past the rows
  kv_len,       // negative
  too_long,     // a sequence has more keys than the cache or its row of the table holds
  page,         // an entry that a visible key needs is not a page
  slot,         // a slot past the cache
  overlap,      // two rows go to one slot
  query_len,    // a sequence has more queries than max_query_len
  qq_width,     // a query is longer than the qq_bias is wide
  segments,     // segments of a given size do not hold all keys of a sequence
};

/// The first fault found: which sequence or token, which column, and the value.
struct FaultReport {
  Fault fault = Fault::none;
  std::int32_t where = 0;
  std::int64_t column = 0;
  std::int64_t value = 0;
};

/// Checks the arrays of an attend (or append) where they lie. `report` keeps the first fault that
/// it was ever given, so that it can be read later.
struct CheckParams {
  AttendParams attend;  // lengths, table, masks; no memory of q, k, v is read
  bool is_append = false;
  const std::int64_t* slots = nullptr;  // [tokens] of an append; or null
  std::int64_t slot_count = -1;         // rows of the cache; -1: unknown
  std::uint32_t* claimed = nullptr;     // [slot_count / 32 + 1] zeros, for overlaps; or null
  FaultReport* report = nullptr;
};

/// Where sharded query rows stand in the whole q. Rank p's i-th row of the batch is row
/// map[p * capacity + i] of the whole, -1 past its last.
struct MapParams {
  Shard shard;  // of the query rows; rank is ignored
  Batch batch;  // query_start of the whole q; kv_len is not read
  int ranks = 1;
  std::int64_t capacity = 0;
  std::int64_t* map = nullptr;  // [ranks, capacity]
};

/// to[map[i]] = from[i] where map[i] is one of `places`; a null map copies. Rows of any size, at
/// any address.
struct PlaceParams {
  const std::byte* from = nullptr;    // [count, row_bytes]
  std::byte* to = nullptr;            // [any, row_bytes]
  const std::int64_t* map = nullptr;  // [count], or null
  std::int64_t count = 0;
  std::int64_t row_bytes = 0;
  // Rows of `to`, where the map came from other ranks and may hold anything.
  std::int64_t places = std::numeric_limits<std::int64_t>::max();
};

/// The widest word, up to 16 bytes, that divides the rows and the addresses that they begin at.
inline int place_word(const PlaceParams& p) {
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(p.from) |
                             reinterpret_cast<std::uintptr_t>(p.to) |
                             static_cast<std::uintptr_t>(p.row_bytes);
  for (int word = 16; word > 1; word /= 2)
    if (all % static_cast<std::uintptr_t>(word) == 0) return word;
  return 1;
}

/// First local key of each sequence when the rank's keys are packed: an exclusive prefix sum of
/// shard.local_len(kv_len[b]).
struct KeyStartParams {
  Shard shard;
  const std::int32_t* kv_len = nullptr;  // [batch]
  std::int64_t capacity = 0;             // > 0: keys are [batch, capacity]; start = b * capacity
  int batch = 0;
  std::int64_t* key_start = nullptr;  // [batch]
};

/// Each sequence cut at its context: ranges[b] = {0, kv_len - q_len, kv_len} (a context below 0 is
/// 0), the table of a Layout::ranges of two "ranks", the cached keys and the new ones.
struct ContextCutParams {
  Batch batch;
  std::int64_t tokens = 0;
  std::int64_t* ranges = nullptr;  // [batch, 3]
};

}  // namespace longspan::kernels

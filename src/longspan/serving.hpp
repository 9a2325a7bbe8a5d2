/// \file
/// The kernels of one device under the names that serving engines use, for one rank's part of a
/// computation: merge of partial results, segmented decode and chunked prefill over a paged cache,
/// and writes into the cache. A layer (attention.hpp) does the same across ranks.
///
///     ServingOps ops(Device::cuda);
///     ops.merge_attn_states({.out = out, .prefix_out = a, .prefix_lse = Lse::heads_tokens(la),
///                            .suffix_out = b, .suffix_lse = Lse::heads_tokens(lb)},
///                           LogBase::e, stream);
///
/// Every call checks its arguments (InputError, Unsupported; nothing is written then), queues on
/// the stream and returns. On the host the work is done when it returns. Nothing is allocated: a
/// call that needs memory takes a Workspace, and workspace_bytes gives its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "longspan/mask.hpp"
#include "longspan/options.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The caller's memory on the device of the kernels, 256-byte aligned.
struct Workspace {
  void* data = nullptr;   ///< may be null if a call needs none
  std::size_t bytes = 0;  ///< at least ServingOps::workspace_bytes of the call
};

/// out = the merge of the partial results over a prefix and a suffix of the keys. Each of the three
/// may have any float type; an fp8 part stands for x * its scale, which is required. Terms are fp32
/// and are scaled before they are added, so finite parts have a finite merge. The one rounding is
/// at the end: fp16 and bf16 overflow to infinity there, fp8 saturates. InputError for shapes,
/// devices and strides that do not fit, a missing scale, and results that overlap themselves, each
/// other, or an input other than the one that they replace.
struct MergeAttnStates {
  Tensor out;         ///< [tokens, heads, dim]; may be prefix_out or suffix_out itself
  Lse out_lse = {};   ///< optional; may be prefix_lse or suffix_lse itself
  Tensor prefix_out;  ///< [tokens, heads, dim]
  Lse prefix_lse;     ///< of the same tokens and heads
  Tensor suffix_out;  ///< [tokens, heads, dim]
  Lse suffix_lse;     ///< like prefix_lse
  std::optional<std::int64_t> prefill_tokens_with_context = {};  ///< tokens from here on copy the
                                                                 ///< suffix and its lse, even if
                                                                 ///< that is infinite or NaN
  Tensor out_scale = {};      ///< [1] fp32, out = result / scale; fp8 needs it
  bool nan_is_empty = false;  ///< a NaN lse counts as empty; else it stays NaN
  Tensor prefix_scale = {};   ///< [1] fp32, a stored x stands for x * scale; fp8 needs it
  Tensor suffix_scale = {};   ///< like prefix_scale
};

/// out = the merge of any number of partial results, neighbours first. Types and errors are as in
/// MergeAttnStates.
struct MergeStates {
  Tensor out;                 ///< [tokens, heads, dim]
  Lse out_lse = {};           ///< optional
  Tensor parts;               ///< [parts, tokens, heads, dim]
  Lse lses;                   ///< [parts, tokens, heads], or [parts, heads, tokens]
  Tensor out_scale = {};      ///< as in MergeAttnStates
  bool nan_is_empty = false;  ///< as in MergeAttnStates
  Tensor part_scales = {};    ///< [parts] fp32, one for each part; fp8 needs it
};

/// The arguments that decode and prefill over a paged cache share, for one rank that holds all
/// keys. Meanings, shapes and types are as in AttentionArgs and Options.
struct PagedAttention {
  Tensor q;                        ///< [tokens, heads, head_dim]
  Tensor k_cache;                  ///< pages (attention.hpp)
  Tensor v_cache;                  ///< pages
  Tensor block_table;              ///< [batch or more, columns] int32
  Tensor query_start = {};         ///< [batch + 1] int32; optional for one sequence
  Tensor kv_len;                   ///< [batch] int32, the new tokens included
  std::int64_t max_kv_len = 0;     ///< no sequence is longer; 0: as many keys as the table can hold
  std::int64_t max_query_len = 0;  ///< no sequence has more queries; 0: unknown

  Tensor out;             ///< [tokens, heads, value_dim]
  Lse lse = {};           ///< natural log; optional
  Tensor out_scale = {};  ///< [1] fp32: out = result / scale; fp8 needs it
  DTypes dtypes = {};     ///< `compute` is the type of q; for a q of fp8 it is fp32, fp16 or bf16.
                       ///< The types of tensors are optional; if given, they must match the tensors

  Mask mask = {.causal = true};  ///< which keys a query sees
  ScoreOptions score = {};       ///< how scores are made from q.k
  Tensor causal = {};            ///< [batch] uint8 in place of mask.causal
  Tensor sinks = {};             ///< [heads], of any float type; optional
  Tensor slopes = {};            ///< [heads] or [batch, heads] ALiBi, of any float type; optional
  Tensor qq_bias = {};           ///< [width, width] between the new tokens (score.hpp); optional
  Tensor q_scale = {};           ///< [1], [kv_heads] or [batch, kv_heads] fp32; fp8 needs it
  Tensor k_scale = {};           ///< like q_scale
  Tensor v_scale = {};           ///< like q_scale
  Workspace workspace = {};      ///< of the call that this belongs to
};

/// States of each segment, fp32, natural units, o unnormalised.
struct Segments {
  Tensor output;          ///< [tokens, heads, segments, padded value_dim]
  Tensor max;             ///< [tokens, heads, segments], maxima of the scores
  Tensor expsum;          ///< [tokens, heads, segments], sums of exp(score - max)
  std::int64_t keys = 0;  ///< keys of a segment; segments * keys cover every sequence. 0: as
                          ///< serving engines cut, ceil(kv_len / (segments * tile)) tiles in each
                          ///< segment
  int tile = 16;          ///< keys in a tile, where `keys` is 0
};

/// Decode and short queries over a paged cache. Without `segments` the keys are split to fill the
/// GPU, in the fixed order. With them, the states of the segments are the result (out is then
/// optional): segment 0 holds the sink, and segments past the end of a sequence are not written.
struct SegmentedAttention {
  PagedAttention attention;  ///< keys and queries
  Segments segments = {};    ///< where the states go; optional
  bool skip_decode = false;  ///< leaves out sequences of one query; not with segments
};

/// Reduces the states of segmented_attention to out. Segments past a sequence's end are never read.
struct ReduceSegments {
  Segments segments;        ///< as segmented_attention wrote them
  Tensor out;               ///< [tokens, heads, value_dim], of any float type
  Lse lse = {};             ///< natural log; optional
  Tensor out_scale = {};    ///< [1] fp32: out = result / scale; fp8 needs it
  Tensor query_start = {};  ///< [batch + 1] int32; optional for one sequence
  Tensor kv_len;            ///< [batch] int32, as in segmented_attention
};

/// Chunked prefill: the first kv_len - q_len keys of a sequence lie in the cache. The last q_len
/// are new and laid out like q. k_scale and v_scale are for the cache. Without k and v the cache
/// holds the new keys too.
struct ContextAttention {
  PagedAttention attention;  ///< queries, and the keys before them
  Tensor k = {};  ///< [tokens, kv_heads, head_dim], of the type of the products; optional
  Tensor v = {};  ///< [tokens, kv_heads, value_dim], of the same type; given as k is
  bool skip_decode = false;   ///< leaves out sequences of one query; their rows stay untouched
  Tensor out_scale_inv = {};  ///< [1] fp32: out = result * scale_inv, in place of out_scale
};

/// Writes new keys and values into a paged cache, each at its slot.
struct AppendKv {
  Tensor k;             ///< [tokens, kv_heads, head_dim]
  Tensor v;             ///< [tokens, kv_heads, value_dim]; left out where v_cache
                        ///< is the first columns of k_cache
  Tensor k_cache;       ///< pages (attention.hpp)
  Tensor v_cache;       ///< pages
  Tensor slots;         ///< [tokens] int64: page * page size + row; < 0: not written
  Tensor k_scale = {};  ///< [1] or [kv_heads] fp32; fp8 caches store x / scale
  Tensor v_scale = {};  ///< like k_scale
  /// Rows of latent keys that carry their scales: k_cache is uint8 [pages, page, 1, bytes], and v
  /// and v_cache are left out. Not given: the type of k_cache.
  std::optional<DType> kv = {};

  /// The type of the cache's rows.
  DType of_kv() const { return kv.value_or(k_cache.dtype); }
};

/// Partial states of the rows [tokens, heads] of an attention, in the caller's memory on the device
/// of the kernels, 256-byte aligned. The contents are opaque. They are valid for calls with the
/// same tokens, heads and value_dim on the same kind of device.
struct AttentionState {
  void* data = nullptr;   ///< read and written
  std::size_t bytes = 0;  ///< at least ServingOps::state_bytes(tokens, heads, value_dim)
};

/// Computes the state of each row over some keys of each sequence. With `resume` the rows continue
/// from the state in memory: the result covers those keys and these, which must be disjoint. Steps
/// of a ring or chunks of the keys then need no merge between them. Every call of a chain gives the
/// same rows; the first is without `resume`. Meanings, shapes and types are as in AttentionArgs and
/// Options.
///
/// Keys of a chunk [begin, end) of one sequence are those of rank 1 of 3 with layout ranges and
/// key_table {0, begin, end, length}. Masks use their positions in the sequence.
struct AttendState {
  AttentionState state;         ///< rows past the last sequence are not touched
  bool resume = false;          ///< continue from the contents of `state`
  Tensor q;                     ///< [tokens, heads, head_dim] or [batch, heads, tokens, head_dim]
  Tensor k;                     ///< contiguous, or pages with a block_table (attention.hpp)
  Tensor v;                     ///< like k
  Tensor block_table = {};      ///< [batch or more, columns] int32
  Tensor query_start = {};      ///< [batch + 1] int32; optional for one sequence
  Tensor kv_len = {};           ///< [batch] int32 keys of the whole sequences
  std::int64_t total_keys = 0;  ///< of the one sequence, where kv_len is not given
  std::int64_t max_kv_len = 0;  ///< no sequence is longer; 0: unknown, which needs more workspace
  std::int64_t max_query_len = 0;  ///< no sequence has more queries; 0: unknown

  Sharding keys = {};     ///< k and v hold the share of `rank` of `ranks`, by this rule
  int rank = 0;           ///< 0 to ranks - 1
  int ranks = 1;          ///< 1: the whole sequences
  Tensor key_table = {};  ///< int64, for layouts ranges and listed

  DTypes dtypes = {};            ///< as in PagedAttention, but without out: a state is fp32
  Mask mask = {.causal = true};  ///< which keys a query sees
  ScoreOptions score = {};       ///< how scores are made from q.k
  Tensor causal = {};            ///< [batch] uint8 in place of mask.causal
  IndexOptions index = {};       ///< with top_k: each row names its keys, and mask has no causal
  Tensor indices = {};           ///< [tokens, columns] or [tokens, kv_heads, columns] int32
  Tensor index_len = {};         ///< [tokens] int32; optional
  Tensor slopes = {};            ///< [heads] or [batch, heads] ALiBi, of any float type; optional
  Tensor qq_bias = {};           ///< [width, width] between the new tokens (score.hpp); optional
  Tensor q_scale = {};           ///< [1], [kv_heads] or [batch, kv_heads] fp32; fp8 needs it
  Tensor k_scale = {};           ///< like q_scale
  Tensor v_scale = {};           ///< like q_scale
  Workspace workspace = {};      ///< at least workspace_bytes of this call
};

/// Turns the state of each row into its result. The sink is merged here, once.
struct FinishState {
  AttentionState state;     ///< read
  Tensor out;               ///< [tokens, heads, value_dim] or [batch, heads, tokens, value_dim], of
                            ///< any float type
  Lse lse = {};             ///< natural log; optional
  Tensor sinks = {};        ///< [heads], of any float type
  Tensor out_scale = {};    ///< [1] fp32: out = result / scale; fp8 needs it
  Tensor query_start = {};  ///< [batch + 1] int32: rows past the last sequence stay untouched.
                            ///< Without it every row is finished
};

/// The state of each row as one segment, fp32 and in natural units, for other libraries' kernels.
/// An empty state has a max of -inf, a sum of 0 and an output of zeros. The sink is not included.
struct ExportState {
  AttentionState state;     ///< read
  Tensor output;            ///< [tokens, heads, 1, padded value_dim], unnormalised
  Tensor max;               ///< [tokens, heads, 1], maxima of the scores
  Tensor expsum;            ///< [tokens, heads, 1], sums of exp(score - max)
  int value_dim = 0;        ///< of the state; 0: as in output
  Tensor query_start = {};  ///< as in FinishState
};

/// The calls on one device.
class ServingOps {
 public:
  /// `threads`: on the host, the most that calls use; 0 takes LONGSPAN_THREADS, or else all cores.
  /// `gpu`: on CUDA, numbered as by cudaSetDevice; below 0 the current one. Calls make it current
  /// while they run. UsageError for a negative number of threads, and for a GPU that does not
  /// exist.
  explicit ServingOps(Device device, int threads = 0, int gpu = -1);
  ~ServingOps();
  /// Takes over the state of `other`, which may then only be assigned to or destroyed.
  ServingOps(ServingOps&&) noexcept;
  /// The same; frees what this object had.
  ServingOps& operator=(ServingOps&&) noexcept;

  /// Merges a prefix and a suffix. `base` is that of every lse given and written; it has no default
  /// on purpose.
  void merge_attn_states(const MergeAttnStates& args, LogBase base, Stream stream = {}) const;
  /// Merges any number of parts. `base` as above.
  void merge_states(const MergeStates& args, LogBase base, Stream stream = {}) const;

  /// Decode and short queries over a paged cache.
  void segmented_attention(const SegmentedAttention& args, Stream stream = {}) const;
  /// Reduces the states that segmented_attention wrote to the result.
  void reduce_segments(const ReduceSegments& args, Stream stream = {}) const;
  /// Chunked prefill over a paged cache and the new keys.
  void context_attention(const ContextAttention& args, Stream stream = {}) const;
  /// Writes new keys and values into a paged cache.
  void append_kv(const AppendKv& args, Stream stream = {}) const;

  /// Computes the state of each row over some keys of each sequence, alone or on top of the state
  /// in memory.
  void attend_state(const AttendState& args, Stream stream = {}) const;
  /// Turns the state of each row into its result.
  void finish_state(const FinishState& args, Stream stream = {}) const;
  /// Writes the state of each row in the form of segments.
  void export_state(const ExportState& args, Stream stream = {}) const;
  /// Bytes of the states of that many rows. InputError or Unsupported for invalid sizes.
  static std::size_t state_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim);

  /// Bytes of `workspace` that a call with these arguments needs. Lengths and pointers are not
  /// read: the size holds for every call of the same shapes.
  std::size_t workspace_bytes(const SegmentedAttention& args) const;
  /// The same for chunked prefill.
  std::size_t workspace_bytes(const ContextAttention& args) const;
  /// The same for attend_state, with and without `resume`.
  std::size_t workspace_bytes(const AttendState& args) const;

  /// Checks lengths and block table on their device, and waits. InputError names the first fault.
  /// On the host every call does this itself.
  void check(const PagedAttention& args, Stream stream = {}) const;
  /// The same, and that segments of a given size cover every sequence.
  void check(const SegmentedAttention& args, Stream stream = {}) const;
  /// The same for lengths only, and that the segments cover every sequence.
  void check(const ReduceSegments& args, Stream stream = {}) const;
  /// The same; it uses the workspace of the call.
  void check(const ContextAttention& args, Stream stream = {}) const;
  /// The same for slots.
  void check(const AppendKv& args, Stream stream = {}) const;
  /// The same; on the host also the table of keys.
  void check(const AttendState& args, Stream stream = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longspan

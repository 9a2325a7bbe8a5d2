/// \file
/// Exact attention over a sequence whose keys and values are sharded across ranks.
///
///     Attention layer(world, {.heads = 32, .kv_heads = 8, .head_dim = 128,
///                             .limits = {.max_tokens = 64}, .keys = {Layout::zigzag}});
///     layer.run({.q = q, .k = k, .v = v, .out = out, .total_keys = 1 << 20}, stream);
///     layer.wait(stream);
///
/// Every rank computes the partial state of its own keys, the states are exchanged, and one merge
/// gives what a single device would have given: out = softmax(score(q k^T)) v.
///
/// A paged cache of keys and values has one of two forms. Its tensors have any strides:
///
///     rows      K [pages, page, kv_heads, head_dim], V [pages, page, kv_heads, value_dim]
///     x-packed  K [pages, kv_heads, head_dim / x, page, x]   x = 16 bytes of elements, as a rule
///               V [pages, kv_heads, value_dim, page]
///
/// In rows, V may be the first columns of K: the same memory and strides with fewer columns, as in
/// a cache of latent keys (MLA). Then new values are never given: they come with the new keys.
///
/// A block table says which page holds the i-th keys of a sequence. In a sharded cache each rank
/// has its own pages and its own table: local key i of a sequence (shard.hpp says which position
/// that is) lies in row i % page of page table[i / page]. Entries that no visible key needs are
/// neither checked nor read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "longspan/communicator.hpp"
#include "longspan/exchange.hpp"
#include "longspan/options.hpp"
#include "longspan/shard.hpp"
#include "longspan/strategy.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// One run. Ranks give the same but for what is their own: keys, values, pages, the strides of q,
/// and where the result goes (docs/contributing/ranks.md has the list); wait(), or on processors
/// run(), throws a UsageError on every rank where they do not. Tensors are views on the layer's
/// device, and their memory must live until the stream has passed them. Lengths and tables are read
/// on the stream, so a captured graph replays with new ones.
///
/// q and out are [tokens, heads, dim], or [batch, heads, tokens, dim] with tokens of each sequence,
/// over memory in any order whose last stride is 1: dense in either order, or with room between
/// sequences. Nothing is copied. Where the sequences of q lie apart, as in a dense [batch, heads,
/// tokens, dim] of several, they are those of query_start; where those of out or lse do, they are
/// as many as those of q, of as many tokens. (On a GPU 16-bit queries with other room between
/// sequences than that of the other heads run on the portable kernel.)
///
/// A run has as many sequences as kv_len has entries; without kv_len it has one, of total_keys
/// keys.
struct AttentionArgs {
  Tensor q;    ///< [tokens, heads, head_dim] or [batch, heads, tokens, head_dim]
  Tensor k;    ///< [keys, kv_heads, head_dim], the rank's own keys, sequence after sequence; or
               ///< [batch, capacity, kv_heads, head_dim], each from the start of its row; with a
               ///< block table, the rank's pages
  Tensor v;    ///< as k, of value_dim. It may be the first columns of k (MLA): the same memory and
               ///< strides, with fewer columns
  Tensor out;  ///< as q, of value_dim; never read. Rows of the batch are written whole,
               ///< others not at all. With Options::results by heads it has the rank's heads alone;
               ///< by rows the rank's rows, [rows, heads, value_dim]
  Lse lse = {};  ///< [tokens, heads] or [batch, tokens, heads], natural log; optional. It has the
                 ///< rows and heads of out

  std::int64_t total_keys = 0;    ///< of the one sequence, on all ranks, where kv_len is not given
  std::int64_t total_tokens = 0;  ///< with sharded queries: rows of the whole q, on all ranks

  Tensor query_start = {};  ///< [batch + 1] int32 rows of q, with sharded queries of the whole q;
                            ///< optional for one sequence
  Tensor kv_len = {};       ///< [batch] int32 keys of the whole sequences, on all ranks
  Tensor block_table = {};  ///< [batch or more, columns] int32 pages of each sequence; optional
  Tensor key_table = {};  ///< int64. Keys of layout ranges: [batch, ranks + 1]; listed: [keys] the
                          ///< position of each of the rank's own keys, and all ranks together list
                          ///< each once, which is checked on processors
  Tensor query_table = {};  ///< likewise of the queries, or of results by rows; ranges: [ranks +
                            ///< 1]; listed: [max_tokens], -1 past the rank's last row (of
                            ///< results a row may be listed by several ranks, or by none)

  Tensor q_scale = {};    ///< [1] or [kv_heads] fp32, of a q of fp8, which must have it
  Tensor k_scale = {};    ///< likewise of k
  Tensor v_scale = {};    ///< likewise of v. Where v is the first columns of k it is k_scale: the
                          ///< same values, on GPUs the same tensor, or left out
  Tensor out_scale = {};  ///< [1] fp32: out = result / out_scale; optional

  /// As in Append: the keys of these rows of q (with sharded queries: of the whole q), on every
  /// rank, so that one call appends and runs. Optional: k and v have them already.
  Tensor new_k = {};
  Tensor new_v = {};  ///< likewise the values; left out where v is the first columns of k

  Tensor sinks = {};         ///< [heads] learned sinks, of any float type; optional
  Tensor slopes = {};        ///< [heads] or [batch, heads] ALiBi, of any float type; optional
  Tensor qq_bias = {};       ///< [width, width] between the new tokens (score.hpp); optional
  Tensor causal = {};        ///< [batch] uint8 in place of Options::mask.causal; optional
  Tensor documents = {};     ///< [count + 1] int64: document d, packed in the one sequence, has the
                             ///< positions [documents[d], documents[d + 1]); optional
  bool skip_decode = false;  ///< sequences of one query are left out, their rows of out and lse
                             ///< untouched
};

/// New keys and values for the cache: those of positions that this rank holds are written. Token t
/// of a sequence of q_len new tokens stands at position kv_len - q_len + t, so kv_len counts the
/// new ones. The cut of a contiguous shard moves as kv_len grows: a cache that grows is
/// interleaved, or has ranges.
struct Append {
  Tensor new_k;  ///< [tokens, kv_heads, head_dim], on every rank
  Tensor new_v;  ///< [tokens, kv_heads, value_dim]; left out where v is the first columns of k
  Tensor k;      ///< the cache, as in AttentionArgs
  Tensor v;      ///< likewise
  std::int64_t total_keys = 0;  ///< of the one sequence, new keys included, without kv_len
  Tensor query_start = {};      ///< [batch + 1] int32 rows of new_k; optional for one sequence
  Tensor kv_len = {};           ///< [batch] int32 keys of the whole sequences, new ones included
  Tensor block_table = {};      ///< as in AttentionArgs
  Tensor key_table = {};        ///< as in AttentionArgs
  Tensor k_scale = {};          ///< [1] or [kv_heads] fp32; a cache of fp8 stores x / scale
  Tensor v_scale = {};          ///< likewise; as in AttentionArgs
};

/// Milliseconds of the last run's phases on this rank; valid after wait().
struct Phases {
  double attend = 0;    ///< attention, with what is appended
  double exchange = 0;  ///< what travels, and what is computed in the same kernel
  double merge = 0;     ///< the merge of states, where it is a kernel of its own
  /// The sum of them.
  double total() const { return attend + exchange + merge; }
};

/// A layer: options that all ranks gave alike, and the memory for its largest run. Runs are
/// collective: all ranks make the same ones in the same order. One layer is used on one stream at a
/// time.
class Attention {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates the
  /// workspace. Throws UsageError, Unsupported (naming what is not supported) or RankError.
  Attention(const Communicator& world, const Options& options);
  ~Attention();
  /// Takes what the other has; the other may then only be assigned to or destroyed.
  Attention(Attention&&) noexcept;
  /// Likewise; what it had is freed.
  Attention& operator=(Attention&&) noexcept;

  /// Queues the work on `stream` and returns: no allocation, no synchronisation, and it can be
  /// captured in a CUDA graph. On the host the work is done when it returns. Throws InputError,
  /// before anything is queued, for tensors that do not fit the options; UsageError for what ranks
  /// give differently, where that is seen at once, or from the run before.
  void run(const AttentionArgs& args, Stream stream = {});

  /// Queues the write of new tokens into this rank's cache, like run: nothing is allocated, waited
  /// for or sent, and it can be captured. InputError, before anything is queued, for tensors that
  /// do not fit the options.
  void append(const Append& tokens, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. The only call that
  /// blocks; errors that arose after queueing appear here, InputError with Debug::check_arrays
  /// among them.
  void wait(Stream stream = {});

  /// As they were given.
  const Options& options() const;
  /// The ranks that it was made on.
  const Communicator& world() const;
  /// The strategy that serves it, "auto" resolved.
  const StrategyInfo& strategy() const;

  /// What this rank holds of a sequence of `length` keys. UsageError where the keys' layout takes a
  /// table.
  Shard shard(std::int64_t length) const;

  /// How states travel in this layer.
  const ExchangeInfo& exchange() const;

  /// Bytes of the workspace on this rank; docs/reference/memory.md explains it.
  std::size_t workspace_bytes() const;

  /// With Debug::profile: where the time of the last run went; zeros without it.
  Phases phases() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes a layer, runs it once and waits. Heads, dims and types come from the tensors, and the
/// limits in `options` need not be given. Collective; throws what these throw.
void attend(const Communicator& world, const AttentionArgs& args, Options options = {});

}  // namespace longspan

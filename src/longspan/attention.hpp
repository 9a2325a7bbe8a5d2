/// \file
/// Exact attention over a sequence whose keys and values are sharded across ranks.
///
///     Attention layer(world, {.heads = 32, .kv_heads = 8, .head_dim = 128,
///                             .limits = {.max_tokens = 64}, .keys = {Layout::zigzag}});
///     layer.run({.q = q, .k = k, .v = v, .out = out, .total_keys = 1 << 20}, stream);
///     layer.wait(stream);
///
/// Every rank computes the partial state of its own keys, the ranks exchange these states, and one
/// merge gives the result of a single device: out = softmax(score(q k^T)) v.
///
/// A paged cache of keys and values has one of two forms. Its tensors may have any strides:
///
///     rows      K [pages, page, kv_heads, head_dim], V [pages, page, kv_heads, value_dim]
///     x-packed  K [pages, kv_heads, head_dim / x, page, x]   x = 16 bytes of elements, as a rule
///               V [pages, kv_heads, value_dim, page]
///
/// In rows, V may be the first columns of K: the same memory and strides with fewer columns, as in
/// a cache of latent keys (MLA). New values are then never given: they come with the new keys.
///
/// A block table says which page holds the i-th keys of a sequence. In a sharded cache each rank
/// has its own pages and its own table. Local key i of a sequence (shard.hpp gives its position)
/// lies in row i % page of page table[i / page]. Entries that no visible key needs are neither
/// checked nor read. In a cache [rows, capacity, kv_heads, head_dim] of which each sequence uses
/// some row, a row is a page: the table has one column.
#pragma once

#include <array>
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

/// One run. Ranks give the same arguments, except for what is a rank's own: keys, values, pages,
/// the strides of q, and where the result goes (docs/contributing/ranks.md has the list). If they
/// differ, wait(), or on CPUs run(), throws a UsageError on every rank. Tensors are views on the
/// layer's device, and their memory must live until the stream has passed them. Lengths and tables
/// are read on the stream, so a captured graph replays with new ones.
///
/// q and out are [tokens, heads, dim], or [batch, heads, tokens, dim] with tokens of each sequence.
/// Their memory may have any order whose last stride is 1: dense in either order, or with gaps
/// between sequences. Nothing is copied. If the sequences of q lie apart, as in a dense [batch,
/// heads, tokens, dim] of several, they must be those of query_start. If those of out or lse lie
/// apart, they must match those of q in number and in tokens. (On a GPU, 16-bit queries run on the
/// portable kernel if a gap between sequences is not just the rows of the other heads.)
///
/// A run has as many sequences as kv_len has entries. Without kv_len it has one, of total_keys
/// keys.
struct AttentionArgs {
  Tensor q;    ///< [tokens, heads, head_dim] or [batch, heads, tokens, head_dim]
  Tensor k;    ///< [keys, kv_heads, head_dim], the rank's own keys, sequence after sequence; or
               ///< [batch, capacity, kv_heads, head_dim], each sequence at the start of its row;
               ///< or, with a block table, the rank's pages
  Tensor v;    ///< like k, with value_dim columns. It may be the first columns of k (MLA): the same
               ///< memory and strides, with fewer columns. Left out, it is that with
               ///< Options::values_in_keys
  Tensor out;  ///< like q, with value_dim columns; never read. Rows of the batch are written whole,
               ///< others not at all. With Options::results by heads it has the rank's heads only;
               ///< by rows the rank's rows, [rows, heads, value_dim]
  Lse lse = {};  ///< [tokens, heads] or [batch, tokens, heads], natural log; optional. It has the
                 ///< rows and heads of out

  std::int64_t total_keys = 0;    ///< of the one sequence, on all ranks, where kv_len is not given
  std::int64_t total_tokens = 0;  ///< with sharded queries: rows of the whole q, on all ranks

  Tensor query_start = {};  ///< [batch + 1] int32 rows of q, with sharded queries of the whole q;
                            ///< optional for one sequence
  Tensor kv_len = {};       ///< [batch] int32 keys of the whole sequences, on all ranks
  Tensor block_table = {};  ///< [batch or more, columns] int32 pages of each sequence; optional
  Tensor key_table = {};  ///< int64. Keys of layout ranges: [batch, ranks + 1]. Listed: [keys], the
                          ///< position of each of the rank's own keys; all ranks together list each
                          ///< position once, which CPUs check
  Tensor query_table = {};  ///< the same for the queries, or for results by rows. Ranges: [ranks +
                            ///< 1]. Listed: [max_tokens], -1 past the rank's last row (several
                            ///< ranks, or none, may list a row of the results)

  Tensor q_scale = {};    ///< [1], [kv_heads] or [batch, kv_heads] fp32, whose last stride is 1, or
                          ///< 0 for one number; required for a q of fp8
  Tensor k_scale = {};    ///< like q_scale, for k
  Tensor v_scale = {};    ///< like q_scale, for v. If v is the first columns of k, it is k_scale:
                          ///< the same values, on GPUs the same tensor, or left out
  Tensor out_scale = {};  ///< [1] fp32: out = result / out_scale; optional

  /// As in Append: the keys of these rows of q (with sharded queries: of the whole q), on every
  /// rank, so that one call appends and runs. Optional; without them k and v already hold these
  /// keys.
  Tensor new_k = {};
  Tensor new_v = {};  ///< the values of new_k; left out where v is the first columns of k

  /// Options::rope by tables, of fp32, fp16 or bf16 and with any row stride: the cosine of pair i
  /// at each position. The positions of the whole sequences, new keys included, must be in it. (On
  /// GPUs a row past its end becomes NaN.) Optional; without it base and scale are used.
  Tensor rope_cos = {};  ///< [positions, rope.dim / 2]
  Tensor rope_sin = {};  ///< the sines, like rope_cos

  Tensor sinks = {};      ///< [heads] learned sinks, of any float type; optional
  Tensor slopes = {};     ///< [heads] or [batch, heads] ALiBi, of any float type; optional
  Tensor qq_bias = {};    ///< [width, width] between the new tokens (score.hpp); optional
  Tensor causal = {};     ///< [batch] uint8 in place of Options::mask.causal; optional
  Tensor documents = {};  ///< [count + 1] or [batch, count + 1] int64: document d, packed in a
                          ///< sequence, has the positions [documents[d], documents[d + 1]) of it.
                          ///< A sequence with fewer documents repeats its end; optional
  Tensor bidirectional = {};  ///< [count, 2] or [batch, count, 2] int64: [begin, end) of ranges of
                              ///< positions whose tokens see each other, whatever the mask says
                              ///< (but see Mask::clamp_ranges): images, or a prefix. They ascend
                              ///< and do not overlap, and may be empty. A row still sees only its
                              ///< own document, and no padding; optional
  Tensor prefix_len = {};     ///< [batch] int32 in place of Options::mask.prefix, which none
                              ///< exceeds; not with documents; optional
  Tensor left_padding = {};   ///< [batch] int32: the first keys of each sequence are padding that
                              ///< nobody sees. They count in kv_len and in positions; optional
  Tensor query_len = {};      ///< [batch] int32: the rows of each sequence of q that are used, its
                              ///< first ones; the last of them has position kv_len - 1. The others
                              ///< see nothing. Optional
  /// With Options::indices: [tokens, columns] int32 keys of each row, or [tokens, kv_heads,
  /// columns] of each row and kv head; at most top_k columns. One that names no key (below 0, past
  /// the end of the sequence, or its left padding) is nobody, and one that is given twice counts
  /// twice. On every rank those of all rows: a rank attends to the keys that it holds
  Tensor indices = {};
  Tensor index_len = {};  ///< [tokens] int32: the first indices of a row that count; below 0 is 0,
                          ///< and past the columns all. Optional
  bool skip_decode = false;  ///< leaves out sequences of one query; their rows of out and lse stay
                             ///< untouched

  /// With Options::dropout: [1] or [2] int64, the seed, and the offset in its numbers (0 if left
  /// out). Not given: the layer takes its own (Attention::dropout_seed). A backward needs the one
  /// of its run.
  Tensor dropout_seed = {};
  Tensor dropout_sequences = {};  ///< [batch] int32 numbers of the sequences in the mask; optional:
                                  ///< 0, 1, ...
};

/// New keys and values for the cache: this rank writes those whose positions it holds. Token t of a
/// sequence of q_len new tokens has position kv_len - q_len + t, so kv_len includes the new ones.
/// The cut of a contiguous shard moves as kv_len grows, so a cache that grows should be
/// interleaved, or have ranges.
struct Append {
  Tensor new_k;  ///< [tokens, kv_heads, head_dim], on every rank
  Tensor new_v;  ///< [tokens, kv_heads, value_dim]; left out where v is the first columns of k
  Tensor k;      ///< the cache, as in AttentionArgs
  Tensor v;      ///< as in AttentionArgs
  std::int64_t total_keys = 0;  ///< of the one sequence, new keys included, without kv_len
  Tensor query_start = {};      ///< [batch + 1] int32 rows of new_k; optional for one sequence
  Tensor kv_len = {};           ///< [batch] int32 keys of the whole sequences, new ones included
  Tensor block_table = {};      ///< as in AttentionArgs
  Tensor key_table = {};        ///< as in AttentionArgs
  Tensor k_scale = {};          ///< as in AttentionArgs; a cache of fp8 stores x / scale
  Tensor v_scale = {};          ///< like k_scale; as in AttentionArgs
  Tensor rope_cos = {};         ///< as in AttentionArgs
  Tensor rope_sin = {};         ///< as in AttentionArgs
};

/// Backward of one run: its arguments, the gradients of its results, and places for the gradients
/// of q, k, v, the sinks and the biases of scores. The method starts from out and lse
/// (FlashAttention-2, Dao, arXiv 2307.08691). Sums over keys, rows, the heads of a group and ranks
/// are fp32, with one rounding at the end.
struct GradientArgs {
  AttentionArgs run;  ///< as the run had them, with out and lse as it left them. lse is needed;
                      ///< fp8, pages, new keys and skip_decode are refused
  Tensor dout;        ///< the gradient of out: its shape; fp32, fp16 or bf16 on all ranks. If every
                      ///< rank has all the queries: as Options::dout says
  Lse dlse = {};      ///< the gradient of lse; optional. It may be given on some ranks only, but
                      ///< for Dout::replicated
  Tensor dq;  ///< gradient of q, before a rotation (Options::rope): its shape, in its type or
              ///< fp32
  Tensor dk;  ///< gradient of k, as the run took it (see dk_before_rope): its shape, in its type or
              ///< fp32; keys past the sequences stay untouched
  Tensor dv;  ///< the same for v. Left out where v is the first columns of k: dk is then the
              ///< gradient of both, with that of v in its first columns
  Tensor dsinks = {};    ///< gradient of the sinks, [heads], over the rows of all ranks; fp32, or
                         ///< fp16 or bf16 like the sinks; optional, on all ranks or on none
  Tensor dslopes = {};   ///< gradient of the slopes, in their shape, over the rows and keys of all
                         ///< ranks; fp32, or fp16 or bf16 like the slopes; optional, as dsinks
  Tensor dqq_bias = {};  ///< the same of qq_bias, [width, width] with any row stride; a width of
                         ///< at most Limits::max_qq_gradient
  bool dk_before_rope = false;  ///< with Options::rope: dk is the gradient of the keys before their
                                ///< rotation by the same angles, which the caller has made; the
                                ///< tables must then have the positions of all keys
  bool accumulate = false;      ///< add to what the gradients hold, before the rounding
};

/// Whether v is the first columns of k, as in a cache of latent keys: the same memory with the same
/// strides.
bool values_in_keys(const Tensor& k, const Tensor& v);

/// Milliseconds of the last run's phases on this rank; valid after wait().
struct Phases {
  double attend = 0;    ///< attention, with the append
  double exchange = 0;  ///< transfers, and what the same kernel computes
  double merge = 0;     ///< the merge of states, if a separate kernel does it
  /// The sum of the three.
  double total() const { return attend + exchange + merge; }
};

/// A layer: options that are the same on all ranks, and the memory for its largest run. Runs are
/// collective: all ranks make the same ones in the same order. Use one layer on one stream at a
/// time.
class Attention {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates the
  /// workspace. Throws UsageError, Unsupported (which names what is not supported) or RankError.
  Attention(const Communicator& world, const Options& options);
  ~Attention();
  /// Takes over the layer of `other`, which may then only be assigned to or destroyed.
  Attention(Attention&&) noexcept;
  /// The same; frees what this object had.
  Attention& operator=(Attention&&) noexcept;

  /// Queues the work on `stream` and returns. It does not allocate or synchronise, and a CUDA graph
  /// can capture it. On the host the work is done when it returns. Throws InputError, before
  /// anything is queued, for tensors that do not fit the options. Throws UsageError for arguments
  /// that differ between ranks: at once if that is known at once, otherwise from the next run.
  void run(const AttentionArgs& args, Stream stream = {});

  /// Queues the backward of a run of this layer, which needs Options::gradients. Like run it is
  /// collective, and allocates nothing. The layer keeps nothing of a run, so several runs may await
  /// their backward, in any order that is the same on all ranks. Every path repeats its own bits.
  /// Throws what run throws, and Unsupported for runs that have no gradients.
  void backward(const GradientArgs& args, Stream stream = {});

  /// Queues the write of new tokens into this rank's cache. Like run, it does not allocate, wait or
  /// send, and a CUDA graph can capture it. Throws InputError, before anything is queued, for
  /// tensors that do not fit the options.
  void append(const Append& tokens, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. It is the only call
  /// that blocks. It throws errors that arose after queueing, also InputError with
  /// Debug::check_arrays.
  void wait(Stream stream = {});

  /// The options as given.
  const Options& options() const;
  /// The ranks of the layer.
  const Communicator& world() const;
  /// The layer's strategy, "auto" resolved.
  const StrategyInfo& strategy() const;

  /// The share of this rank of a sequence of `length` keys. UsageError if the keys' layout needs a
  /// table.
  Shard shard(std::int64_t length) const;

  /// How states travel in this layer.
  const ExchangeInfo& exchange() const;

  /// Bytes of the workspace on this rank; see docs/reference/memory.md.
  std::size_t workspace_bytes() const;

  /// With Options::dropout: the seed and the offset of the last run without a dropout_seed, which
  /// its backward needs. Rank 0 drew the seed when the layer was made; the offset counts such runs,
  /// from 0 on. A graph replays with the ones of its capture: to change them, give a dropout_seed.
  std::array<std::int64_t, 2> dropout_seed() const;

  /// With Debug::profile: the times of the last run's phases; without it zeros.
  Phases phases() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes a layer, runs it once and waits. Heads, dims and types come from the tensors, and
/// `options` need not give the limits. Collective; throws what Attention, run and wait throw.
void attend(const Communicator& world, const AttentionArgs& args, Options options = {});

}  // namespace longspan

/// \file
/// A merge of finished results across ranks, which an engine calls after its own kernels. Every
/// rank gives its part, the result and its log-sum-exp over the keys that it holds, and gets the
/// result over all keys.
///
///     CrossRankMerge merge(world, {.heads = 32, .value_dim = 128, .max_tokens = 64}, LogBase::e);
///     merge.run({.part = out, .part_lse = Lse::tokens_heads(lse), .out = whole}, stream);
///     merge.wait(stream);
///
/// The result is whole on every rank (the same bits on all), or scattered: each rank gets its own
/// heads, as tensor parallelism wants them, and no other heads travel to it. Scattered heads have
/// the same bits as those of the whole result. On P ranks, with T tokens, H heads and elements of b
/// bytes, a rank receives
///
///     whole       (P-1) T H (value_dim b + 4)
///     scattered   (P-1) T H/P (value_dim b + 4)
///
/// bytes, without padding. A layer exchanges its states by itself and does not need this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "longspan/communicator.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// Fixed when a merge is made. All ranks must give the same values, except for `threads`.
struct MergeOptions {
  int heads = 1;                        ///< of the parts
  int value_dim = 64;                   ///< columns of a head; at least 1
  DType dtype = DType::bf16;            ///< of the parts: any float type
  std::optional<DType> out_dtype = {};  ///< of the result: any float type; default dtype
  std::int64_t max_tokens = 1;          ///< most rows of one run, which memory is allocated for
  bool scatter_heads = false;  ///< rank r of P gets the heads [r H/P, (r+1) H/P); P divides heads
  bool nan_is_empty = false;   ///< a part whose lse is NaN counts as empty; else NaN stays NaN
  int threads = 0;  ///< host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores

  /// The type of the result, its default resolved.
  DType of_out() const { return out_dtype.value_or(dtype); }
};

/// One run. Ranks give the same number of tokens, and all or none of them an out_scale. Values,
/// strides, part_scale and whether there is an lse are a rank's own. Tensors are views on the
/// device of the merge, and their memory must live until the stream has passed them.
///
/// part and out are [tokens, heads, value_dim], or [batch, heads, tokens, value_dim] as in
/// AttentionArgs. They may have any strides whose last is 1. lse is [tokens, heads], or [batch,
/// tokens, heads].
struct MergeArgs {
  Tensor part;   ///< this rank's
  Lse part_lse;  ///< in the base of the merge. +inf or -inf means an empty part, whose row is
                 ///< ignored
  Tensor part_scale = {};  ///< [1] fp32, of this rank's part: a stored x stands for x * scale.
                           ///< Required for parts of fp8, refused for others

  Tensor out;    ///< scattered: heads / ranks heads. Written whole. With all heads it may be `part`
                 ///< itself
  Lse lse = {};  ///< of as many heads, in the same base; optional. It may be part_lse itself
  Tensor out_scale = {};  ///< [1] fp32: out = result / out_scale; fp8 must have it. For a whole
                          ///< result it has the same value on all ranks; for scattered heads it is
                          ///< a rank's own
};

/// The merge of finished results over all ranks: options that are the same on all ranks, and the
/// memory for its largest run. Runs are collective.
class CrossRankMerge {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates memory.
  /// `base` is that of every lse given and written; it has no default on purpose. Throws UsageError
  /// (also if the ranks do not divide the scattered heads), Unsupported or RankError.
  CrossRankMerge(const Communicator& world, const MergeOptions& options, LogBase base);
  ~CrossRankMerge();
  /// Takes over the merge of `other`, which may then only be assigned to or destroyed.
  CrossRankMerge(CrossRankMerge&&) noexcept;
  /// The same; frees what this object had.
  CrossRankMerge& operator=(CrossRankMerge&&) noexcept;

  /// Queues the merge on `stream` and returns. It does not allocate or synchronise, and a CUDA
  /// graph can capture it. On the host the work is done when it returns. Parts fold in the order of
  /// the ranks, neighbours first, in fp32. Finite parts have a finite merge, with one rounding at
  /// the end, where fp8 saturates. Throws InputError, before anything is queued, for tensors that
  /// do not fit. Throws UsageError, on every rank, for arguments that differ between ranks: at once
  /// if that is known at once, otherwise from the next run. Use one merge on one stream at a time.
  void run(const MergeArgs& args, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. It throws errors
  /// that arose after queueing.
  void wait(Stream stream = {});

  /// The options as given.
  const MergeOptions& options() const;
  /// The base of every lse given and written.
  LogBase base() const;
  /// The ranks of the merge.
  const Communicator& world() const;

  /// Bytes allocated on this rank; see docs/reference/memory.md.
  std::size_t workspace_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longspan

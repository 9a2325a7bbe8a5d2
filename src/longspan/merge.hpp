/// \file
/// A merge across ranks of finished results: what an engine calls after kernels of its own. Every
/// rank gives its part, the result and its log-sum-exp over the keys that it holds, and gets the
/// result over all keys.
///
///     CrossRankMerge merge(world, {.heads = 32, .value_dim = 128, .max_tokens = 64}, LogBase::e);
///     merge.run({.part = out, .part_lse = Lse::tokens_heads(lse), .out = whole}, stream);
///     merge.wait(stream);
///
/// The result is whole on every rank (the same bits on all), or scattered: each rank gets the heads
/// that are its own, as tensor parallelism wants them, and no other heads travel to it. Scattered
/// heads have the bits of the whole's. On P ranks, with T tokens, H heads and elements of b bytes,
/// a rank receives
///
///     whole       (P-1) T H (value_dim b + 4)
///     scattered   (P-1) T H/P (value_dim b + 4)
///
/// bytes, what is rounded up not counted. Where a layer attends, it exchanges its states by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "longspan/communicator.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// What is fixed when a merge is made. All ranks must give the same values, but for `threads`.
struct MergeOptions {
  int heads = 1;                        ///< of the parts
  int value_dim = 64;                   ///< columns of a head; at least 1
  DType dtype = DType::bf16;            ///< of the parts: any float type
  std::optional<DType> out_dtype = {};  ///< of the result: any float type; default dtype
  std::int64_t max_tokens = 1;          ///< most rows of one run. Memory is allocated for them
  bool scatter_heads = false;  ///< rank r of P gets the heads [r H/P, (r+1) H/P); P divides heads
  bool nan_is_empty = false;   ///< a part whose lse is NaN counts as empty; else NaN stays NaN
  int threads = 0;  ///< host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores

  /// The type of the result, its default resolved.
  DType of_out() const { return out_dtype.value_or(dtype); }
};

/// One run. Ranks give the same number of tokens, and an out_scale on all of them or on none;
/// values, strides, part_scale and whether there is an lse are a rank's own. Tensors are views on
/// the device of the merge, and their memory must live until the stream has passed them.
///
/// part and out are [tokens, heads, value_dim], or [batch, heads, tokens, value_dim] as in
/// AttentionArgs, with any strides whose last is 1; lse [tokens, heads], or [batch, tokens, heads].
struct MergeArgs {
  Tensor part;   ///< this rank's
  Lse part_lse;  ///< in the base of the merge. +inf or -inf is an empty part, whose row does not
                 ///< count
  Tensor part_scale = {};  ///< [1] fp32, of this rank's part: a stored x stands for x * scale.
                           ///< Parts of fp8 must have it, others have none

  Tensor out;    ///< scattered: of heads / ranks heads. Written whole. The result of all
                 ///< heads may be `part` itself
  Lse lse = {};  ///< of as many heads, in the same base; optional. Likewise part_lse itself
  Tensor out_scale = {};  ///< [1] fp32: out = result / out_scale; fp8 must have it. Of the whole it
                          ///< has one value on all ranks; of scattered heads it is a rank's own
};

/// The merge of finished results over all ranks: options that all ranks gave alike, and the memory
/// for its largest run. Runs are collective.
class CrossRankMerge {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates memory.
  /// `base`: of every lse given and written; there is no default on purpose. Throws UsageError
  /// (heads that ranks do not divide among them), Unsupported or RankError.
  CrossRankMerge(const Communicator& world, const MergeOptions& options, LogBase base);
  ~CrossRankMerge();
  /// Takes what the other has; the other may then only be assigned to or destroyed.
  CrossRankMerge(CrossRankMerge&&) noexcept;
  /// Likewise; what it had is freed.
  CrossRankMerge& operator=(CrossRankMerge&&) noexcept;

  /// Queues the merge on `stream` and returns: no allocation, no synchronisation, and it can be
  /// captured in a CUDA graph. On the host the work is done when it returns. Parts fold in the
  /// order of the ranks, neighbours first, in fp32; finite parts have a finite merge, and there is
  /// one rounding at the end, where fp8 saturates. Throws InputError, before anything is queued,
  /// for tensors that do not fit; UsageError, on every rank, for what ranks give differently,
  /// where that is seen at once, or from the run before. One merge is used on one stream at a time.
  void run(const MergeArgs& args, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. Errors that arose
  /// after queueing appear here.
  void wait(Stream stream = {});

  /// As they were given.
  const MergeOptions& options() const;
  /// Of every lse given and written.
  LogBase base() const;
  /// The ranks that it was made on.
  const Communicator& world() const;

  /// Bytes allocated on this rank; docs/reference/memory.md explains it.
  std::size_t workspace_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longspan

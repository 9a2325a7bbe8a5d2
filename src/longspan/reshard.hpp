/// \file
/// Moves a cache of keys and values from one layout to another: other ranks, another rule of
/// sharding, other pages. Disaggregated serving does so between prefill and decode:
///
///     Reshard move(world, {.kv_heads = 8, .head_dim = 128, .dtype = bf16, .lengths = {90000, 17},
///                          .from = {.rule = {Layout::zigzag}, .ranks = 8},
///                          .to = {.rule = {Layout::interleaved, 128}, .first_rank = 8, .ranks =
///                          2}});
///     for (each layer of the model)
///       move.run({.from = {k, v}, .to = {k_pages, v_pages, block_table}}, stream);
///     move.wait(stream);
///
/// A key is sent only if its owner changes. Bytes arrive unchanged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "longspan/communicator.hpp"
#include "longspan/shard.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// The ranks that hold a cache, and how they share the keys of each sequence.
struct CacheRanks {
  Sharding rule = {};                    ///< not `listed`
  int first_rank = 0;                    ///< the shard's rank 0, as a rank of the communicator
  int ranks = 0;                         ///< number of ranks; 0: all from first_rank on
  std::vector<std::int64_t> table = {};  ///< layout ranges: [batch, ranks + 1] positions, as in
                                         ///< Shard; else empty
};

/// Fixed when a Reshard is made. All ranks must give the same values, except for `threads`.
struct ReshardOptions {
  int kv_heads = 1;   ///< of the cache
  int head_dim = 64;  ///< of keys
  /// Of values; default head_dim. 0: the values are the first columns of the keys, as in a cache of
  /// latent keys (MLA), and no v is given.
  std::optional<int> value_dim = {};
  DType dtype = DType::bf16;               ///< of the cache, any float type
  std::vector<std::int64_t> lengths = {};  ///< keys of each sequence, on all ranks
  CacheRanks from = {};                    ///< the ranks that hold the keys
  CacheRanks to = {};  ///< the ranks that get the keys; the same ranks, or others
  int threads = 0;     ///< host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores

  /// value_dim, its default resolved.
  int of_values() const { return value_dim.value_or(head_dim); }
};

/// One rank's part of a cache, in one of the forms of attention.hpp: [keys, kv_heads, dim], the
/// rank's keys sequence after sequence; [batch, capacity, kv_heads, dim]; or, with a block table,
/// pages of any size, in rows or x-packed. A rank that holds no key leaves it out.
struct CacheTensors {
  Tensor k = {};            ///< keys
  Tensor v = {};            ///< values; left out with value_dim 0
  Tensor block_table = {};  ///< [batch or more, columns] int32
};

/// One move: the same keys of one layer of a model. Forms, pages and strides are a rank's own.
/// `from` and `to` may overlap, even swap places: every key is packed before the first is written.
struct ReshardArgs {
  CacheTensors from = {};  ///< read
  CacheTensors to = {};    ///< written; rows that no key goes to are left alone
};

/// Bytes of keys and values that one run moves, as seen by one rank.
struct ReshardTraffic {
  std::uint64_t sent = 0;      ///< to other ranks
  std::uint64_t received = 0;  ///< from other ranks
  std::uint64_t kept = 0;      ///< moved within this rank
};

/// A move of caches of given lengths. When it is made, it works out once which rank sends which
/// keys to which. Runs are collective: all ranks make the same ones in the same order.
class Reshard {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates memory for
  /// what this rank sends, receives and keeps. Throws UsageError, Unsupported (listed keys) or
  /// RankError.
  Reshard(const Communicator& world, const ReshardOptions& options);
  ~Reshard();
  /// Takes over the move of `other`, which may then only be assigned to or destroyed.
  Reshard(Reshard&&) noexcept;
  /// The same; frees what this object had.
  Reshard& operator=(Reshard&&) noexcept;

  /// Queues the move on `stream` and returns. It does not allocate or synchronise, and a CUDA graph
  /// can capture it. On the host the work is done when it returns. Throws InputError, before
  /// anything is queued, for tensors that do not fit. On the host it also throws it for block
  /// tables with an entry that is not a page of the cache, or with one page twice where it is
  /// written. (On a GPU, keys whose entry is not a page are left out.) Throws UsageError or
  /// RankError on every rank if ranks run different Reshards, at once or from the next run; nothing
  /// is written then. Use one Reshard on one stream at a time.
  void run(const ReshardArgs& args, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. It throws errors
  /// that arose after queueing.
  void wait(Stream stream = {});

  /// The options as given.
  const ReshardOptions& options() const;
  /// The ranks of the Reshard.
  const Communicator& world() const;
  /// The bytes that a run moves.
  ReshardTraffic traffic() const;
  /// Bytes allocated on this rank; see docs/reference/memory.md.
  std::size_t workspace_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longspan

/// \file
/// A cache of keys and values moves from one layout to another: other ranks, another rule by which
/// they share the keys, other pages. Disaggregated serving does so between prefill and decode:
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
  int first_rank = 0;                    ///< of those that hold the cache; the shard's rank 0
  int ranks = 0;                         ///< how many do; 0: all from first_rank on
  std::vector<std::int64_t> table = {};  ///< layout ranges: [batch, ranks + 1] positions, as in
                                         ///< Shard; else empty
};

/// What is fixed when a Reshard is made. All ranks must give the same values, but for `threads`.
struct ReshardOptions {
  int kv_heads = 1;   ///< of the cache
  int head_dim = 64;  ///< of keys
  /// Of values; default head_dim. 0: the values are the first columns of the keys, as in a cache of
  /// latent keys (MLA), and no v is given.
  std::optional<int> value_dim = {};
  DType dtype = DType::bf16;               ///< of the cache, any float type
  std::vector<std::int64_t> lengths = {};  ///< keys of each sequence, on all ranks
  CacheRanks from = {};                    ///< who holds the keys
  CacheRanks to = {};  ///< who shall hold them; any of the same ranks, or others
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

/// One move: the same keys of one layer of a model. Forms, pages and strides are a rank's own. The
/// two may lie in one memory, even in each other's place: every key has been packed before the
/// first is written.
struct ReshardArgs {
  CacheTensors from = {};  ///< read
  CacheTensors to = {};    ///< what no key goes to is not written
};

/// Bytes of keys and values that one run moves, as one rank sees it.
struct ReshardTraffic {
  std::uint64_t sent = 0;      ///< to other ranks
  std::uint64_t received = 0;  ///< from other ranks
  std::uint64_t kept = 0;      ///< from this rank's old place to its new one
};

/// A move of caches of given lengths: who sends which keys to whom is worked out once, when it is
/// made. Runs are collective: all ranks make the same ones in the same order.
class Reshard {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates memory for
  /// what this rank sends, receives and keeps. Throws UsageError, Unsupported (listed keys) or
  /// RankError.
  Reshard(const Communicator& world, const ReshardOptions& options);
  ~Reshard();
  /// Takes what the other has; the other may then only be assigned to or destroyed.
  Reshard(Reshard&&) noexcept;
  /// Likewise; what it had is freed.
  Reshard& operator=(Reshard&&) noexcept;

  /// Queues the move on `stream` and returns: no allocation, no synchronisation, and it can be
  /// captured in a CUDA graph. On the host the work is done when it returns. Throws InputError,
  /// before anything is queued, for tensors that do not fit, and on the host for block tables that
  /// name no page of the cache, or one page twice where it is written. (On a GPU keys of entries
  /// that are no page are left out.) Throws UsageError or RankError, on every rank, where ranks
  /// run different Reshards, at once or from the run before; nothing is written then. One
  /// Reshard is used on one stream at a time.
  void run(const ReshardArgs& args, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. Errors that arose
  /// after queueing appear here.
  void wait(Stream stream = {});

  /// As they were given.
  const ReshardOptions& options() const;
  /// The ranks that it was made on.
  const Communicator& world() const;
  /// What a run moves.
  ReshardTraffic traffic() const;
  /// Bytes allocated on this rank; docs/reference/memory.md explains it.
  std::size_t workspace_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longspan

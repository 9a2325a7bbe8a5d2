// Exact attention over a sequence whose keys and values are sharded across ranks.
//
//     Attention layer(world, {.heads = 32, .kv_heads = 8, .dim = 128, .max_tokens = 64});
//     layer.run({.q = q, .k = k, .v = v, .shard = shard, .out = out}, stream);
//     layer.wait(stream);
//
// Every rank computes the partial state of its own keys, the states are exchanged, and one merge
// gives what a single device would have given: out = softmax(score(q k^T)) v.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "longspan/communicator.hpp"
#include "longspan/mask.hpp"
#include "longspan/shard.hpp"
#include "longspan/strategy.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// What is fixed when a layer is made. All ranks must give the same values.
struct Options {
  int heads = 1;
  int kv_heads = 1;  // divides heads: query head h reads kv head h / (heads / kv_heads)
  int dim = 64;      // of a head: 16 to 256 in steps of 8
  DType dtype = DType::bf16;

  Mask mask = {};
  std::optional<float> scale = {};  // default 1 / sqrt(dim)
  float softcap = 0.0f;             // 0: off

  std::int64_t max_tokens = 1;  // most query rows in one run, over the batch; with shard_queries:
                                // most on one rank
  int max_batch = 1;            // most sequences in one run

  /// false: every rank holds all the queries and gets the whole result, bitwise equal on all ranks.
  /// true: every rank holds its own rows of the queries (Request::query_shard) and gets those rows.
  bool shard_queries = false;

  /// Keep the fixed order (order.hpp) also where the fastest path would not: the same bits for 1,
  /// 2, 4 ... 64 ranks. The host and short queries keep it always.
  bool invariant = false;

  std::string strategy = "auto";
  int threads = 0;       // host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores
  bool profile = false;  // time the phases of each run; see Attention::phases
};

/// One run. Tensors and arrays are on the layer's device and must live until the stream has passed
/// them. Lengths and tables are read on the stream, so a captured graph replays with new ones.
struct Request {
  Tensor q;         // [tokens, heads, dim]
  Tensor k;         // [keys, kv_heads, dim], the rank's own keys, sequence after sequence; or
                    // [batch, capacity, kv_heads, dim], each sequence from the start of its row
  Tensor v;         // as k
  Shard shard;      // which keys of a sequence the rank holds; `length` is used when kv_len is null
  Tensor out;       // [tokens, heads, dim]; written whole, never read
  Tensor lse = {};  // [tokens, heads] fp32, natural log; optional

  int batch = 1;
  const std::int32_t* query_start = nullptr;  // [batch + 1] rows of q; null: one sequence. With
                                              // shard_queries: rows of the whole q
  const std::int32_t* kv_len = nullptr;       // [batch] keys of the whole sequences, on all ranks
  const float* sinks = nullptr;               // [heads] learned sinks; optional

  Shard query_shard = {};  // with shard_queries: which rows of each sequence this rank holds;
                           // `length` counts the rows of the whole q. A `listed` table has
                           // max_tokens entries, -1 past the rank's last row
};

/// Milliseconds of the last run's phases on this rank; valid after wait().
struct Phases {
  double attend = 0;
  double exchange = 0;
  double merge = 0;
  double total() const { return attend + exchange + merge; }
};

class Attention {
 public:
  /// Collective. Checks the options and that all ranks gave the same ones, and allocates the
  /// workspace. Throws UsageError, Unsupported (naming what is not supported) or RankError.
  Attention(const Communicator& world, const Options& options);
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) noexcept;

  /// Queues the work on `stream` and returns: no allocation, no synchronisation, and it can be
  /// captured in a CUDA graph. On the host the work is done when it returns. Throws InputError,
  /// before anything is queued, for tensors that do not fit the options.
  void run(const Request& request, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. The only call that
  /// blocks; errors that arose after queueing appear here.
  void wait(Stream stream = {});

  const Options& options() const;
  const Communicator& world() const;
  const StrategyInfo& strategy() const;

  /// Bytes of the workspace on this rank; docs/workspace.md has the formula.
  std::size_t workspace_bytes() const;

  /// With Options::profile: where the time of the last run went.
  Phases phases() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes a layer, runs it once and waits. Heads, dim and dtype come from the tensors, and the sizes
/// in `options` need not be given.
void attend(const Communicator& world, const Request& request, Options options = {});

}  // namespace longspan

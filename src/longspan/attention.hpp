// Exact attention over a sequence whose keys and values are sharded across ranks.
//
//     Attention layer(world, {.heads = 32, .kv_heads = 8, .head_dim = 128, .max_tokens = 64});
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
#include "longspan/element.hpp"
#include "longspan/exchange.hpp"
#include "longspan/kv_cache.hpp"
#include "longspan/mask.hpp"
#include "longspan/score.hpp"
#include "longspan/shard.hpp"
#include "longspan/strategy.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// What is fixed when a layer is made. All ranks must give the same values.
struct Options {
  int heads = 1;
  int kv_heads = 1;   // divides heads: query head h reads kv head h / (heads / kv_heads)
  int head_dim = 64;  // of queries and keys: 8 to 576 in steps of 8 (limits.hpp)
  std::optional<int> value_dim = {};      // of values and results: 8 to 512; default head_dim
  DType dtype = DType::bf16;              // of the products: fp32, fp16 or bf16
  std::optional<DType> query_dtype = {};  // of q; default dtype, or fp8
  std::optional<DType> kv_dtype = {};     // of k and v; default dtype, or fp8
  std::optional<DType> out_dtype = {};    // of out; default dtype, or fp8 with an out_scale
  bool tf32 = false;                      // CUDA: fp32 products may be rounded to tf32
  bool fp8_products = false;  // Hopper: long e4m3 queries may be multiplied with e4m3 keys and
                              // values as they are, weights rounded to e4m3 (docs/features.md).
                              // Faster, some percent of error; scales must be positive

  Mask mask = {};
  std::optional<float> scale = {};  // default 1 / sqrt(head_dim)
  float softcap = 0.0f;             // 0: off
  Alibi alibi = Alibi::context;     // what Request::slopes multiply

  std::int64_t max_tokens = 1;  // most query rows in one run, over the batch; with shard_queries:
                                // most on one rank
  int max_batch = 1;            // most sequences in one run
  std::int64_t max_kv_len = 0;  // no sequence is longer; 0: unknown, which costs workspace
  std::int64_t max_query_len = 0;  // no sequence has more queries in one run (1: plain decode); 0:
                                   // unknown, which costs launches of kernels for long ones

  /// false: every rank holds all the queries and gets the whole result, bitwise equal on all ranks.
  /// true: every rank holds its own rows of the queries (Request::query_shard) and gets those rows.
  bool shard_queries = false;

  /// Keep the fixed order (order.hpp) also where the fastest path would not: the same bits for 1,
  /// 2, 4 ... 64 ranks. The host and short queries keep it always.
  bool invariant = false;

  std::string strategy = "auto";

  Exchange exchange = Exchange::automatic;  // of states, between GPUs; the same bits every way

  int threads = 0;  // host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores
  bool check_arrays = false;  // CUDA: check lengths and block tables on the GPU ahead of the
                              // kernels (which run nevertheless); wait() throws what was found. For
                              // debugging. On the host they are always checked, first
  bool profile = false;       // time the phases of each run; see Attention::phases
};

/// One run. Ranks give the same but for what is their own: keys, values, pages, the strides of q,
/// and where the result goes (docs/architecture.md has the list); wait(), or on processors run(),
/// throws a UsageError on every rank where they do not. Tensors and arrays are on the layer's
/// device and must live until the stream has passed them. Lengths and tables are read on the
/// stream, so a captured graph replays with new ones.
struct Request {
  Tensor q;         // [tokens, heads, head_dim]
  Tensor k;         // [keys, kv_heads, head_dim], the rank's own keys, sequence after sequence; or
                    // [batch, capacity, kv_heads, head_dim], each from the start of its row;
                    // with a block table, the rank's pages (kv_cache.hpp)
  Tensor v;         // as k, of value_dim. It may be the first columns of k (MLA): the same memory
                    // and strides, with fewer columns
  Shard shard;      // which keys of a sequence the rank holds; `length` is used when kv_len is null
  Tensor out;       // [tokens, heads, value_dim]; never read. Rows of the batch are written whole,
                    // others not at all
  Tensor lse = {};  // [tokens, heads] fp32, natural log; optional

  int batch = 1;
  const std::int32_t* query_start = nullptr;  // [batch + 1] rows of q; null: one sequence. With
                                              // shard_queries: rows of the whole q
  const std::int32_t* kv_len = nullptr;       // [batch] keys of the whole sequences, on all ranks
  BlockTable block_table = {};                // this rank's pages of each sequence; optional
  Tensor new_k = {}, new_v = {};              // as in Append: the keys of these rows of q (with
                                  // shard_queries: of the whole q), on every rank: append and run
                                  // in one. Optional: k and v have them already
  Scales q_scale = {}, k_scale = {}, v_scale = {};  // of fp8 tensors, which must have them
  const float* out_scale = nullptr;                 // [1]: out = result / out_scale; optional

  Floats sinks = {};                     // [heads] learned sinks; optional
  Floats slopes = {};                    // [heads] ALiBi; optional
  QqBias qq_bias = {};                   // between the new tokens; optional
  const std::uint8_t* causal = nullptr;  // [batch] in place of Options::mask.causal; optional
  Documents documents = {};              // packed in the one sequence; optional
  bool skip_decode = false;              // sequences of one query are left out, their rows of
                                         // out and lse untouched

  Shard query_shard = {};  // with shard_queries: which rows of each sequence this rank holds;
                           // `length` counts the rows of the whole q. A `listed` table has
                           // max_tokens entries, -1 past the rank's last row
};

/// New keys and values for the cache: those of positions that this rank holds are written. Token t
/// of a sequence of q_len new tokens stands at position kv_len - q_len + t, so kv_len counts the
/// new ones. The cut of a contiguous shard moves as kv_len grows: a cache that grows is
/// interleaved, or has ranges.
struct Append {
  Tensor new_k;  // [tokens, kv_heads, head_dim], on every rank
  Tensor new_v;  // [tokens, kv_heads, value_dim]; left out where v is the first columns of k
  Tensor k;      // the cache, as in Request
  Tensor v;
  BlockTable block_table = {};
  Shard shard;
  int batch = 1;
  const std::int32_t* query_start = nullptr;
  const std::int32_t* kv_len = nullptr;
  Scales k_scale = {}, v_scale = {};  // fp8 stores x / scale
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
  /// before anything is queued, for tensors that do not fit the options; UsageError for what ranks
  /// give differently, where that is seen at once, or from the run before.
  void run(const Request& request, Stream stream = {});

  /// Queues the write of new tokens into this rank's cache, like run: nothing is allocated, waited
  /// for or sent, and it can be captured.
  void append(const Append& tokens, Stream stream = {});

  /// Blocks until the stream is done, at most for the communicator's deadline. The only call that
  /// blocks; errors that arose after queueing appear here, InputError with Options::check_arrays
  /// among them.
  void wait(Stream stream = {});

  const Options& options() const;
  const Communicator& world() const;
  const StrategyInfo& strategy() const;

  /// How states travel in this layer.
  const ExchangeInfo& exchange() const;

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

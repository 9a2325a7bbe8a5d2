/// \file
/// What is fixed when a layer is made, in groups. The calls of serving engines (serving.hpp) take
/// the same groups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "longspan/exchange.hpp"
#include "longspan/mask.hpp"
#include "longspan/score.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// Element types, and how products may be rounded.
struct DTypes {
  DType compute = DType::bf16;      ///< of the products: fp32, fp16 or bf16
  std::optional<DType> query = {};  ///< of q; default compute, or fp8
  std::optional<DType> kv = {};     ///< of k and v; default compute, or fp8
  std::optional<DType> out = {};    ///< of out; default compute, or fp8 with an out_scale
  bool tf32 = false;                ///< CUDA: fp32 products may be rounded to tf32
  bool fp8_products = false;  ///< Hopper: long e4m3 queries may be multiplied with e4m3 keys and
                              ///< values as they are, weights rounded to e4m3 (docs/features.md).
                              ///< Faster, some percent of error; scales must be positive

  /// The type of q, its default resolved.
  DType of_query() const { return query.value_or(compute); }
  /// The type of k and v, its default resolved.
  DType of_kv() const { return kv.value_or(compute); }
  /// The type of out, its default resolved.
  DType of_out() const { return out.value_or(compute); }
};

/// What makes a score of a product of query and key (score.hpp has the formula).
struct ScoreOptions {
  std::optional<float> scale = {};  ///< default 1 / sqrt(head_dim)
  float softcap = 0.0f;             ///< 0: off
  Alibi alibi = Alibi::context;     ///< what ALiBi slopes multiply
};

/// The largest run of a layer. Memory is allocated for it when the layer is made.
struct Limits {
  std::int64_t max_tokens = 1;     ///< most query rows in one run, over the batch; with sharded
                                   ///< queries: most on one rank
  int max_batch = 1;               ///< most sequences in one run
  std::int64_t max_kv_len = 0;     ///< no sequence is longer; 0: unknown, which costs workspace
  std::int64_t max_query_len = 0;  ///< no sequence has more queries in one run (1: plain decode);
                                   ///< 0: unknown, which costs launches of kernels for long ones
  std::int64_t max_workspace = 0;  ///< bytes on a rank, but for the scratch of its kernels; a
                                   ///< strategy that takes more is refused. 0: no limit
};

/// Checks and measurements, which cost time.
struct Debug {
  bool check_arrays = false;  ///< CUDA: check lengths and block tables on the GPU ahead of the
                              ///< kernels (which run nevertheless); wait() throws what was found.
                              ///< On the host they are always checked, first
  bool profile = false;       ///< time the phases of each run; see Attention::phases
};

/// What is fixed when a layer is made. All ranks must give the same values.
struct Options {
  int heads = 1;      ///< of queries, on every rank
  int kv_heads = 1;   ///< divides heads: query head h reads kv head h / (heads / kv_heads)
  int head_dim = 64;  ///< of queries and keys: 8 to 576 in steps of 8 (limits.hpp)
  std::optional<int> value_dim = {};  ///< of values and results: 8 to 512; default head_dim
  DTypes dtypes = {};                 ///< element types
  Mask mask = {};                     ///< which keys a query sees
  ScoreOptions score = {};            ///< what is done to q.k
  Limits limits = {};                 ///< the largest run

  Sharding keys = {};  ///< how the keys of each sequence are dealt out to the ranks
  /// Not given: every rank holds all the queries and gets the whole result, bitwise equal on all
  /// ranks. Given: every rank holds its own rows of the queries, by this rule, and gets those rows.
  std::optional<Sharding> queries = {};

  /// Keep the fixed order (order.hpp) also where the fastest path would not: the same bits for 1,
  /// 2, 4 ... 64 ranks. The host and short queries keep it always.
  bool invariant = false;

  std::string strategy = "auto";            ///< a name of strategies()
  Exchange exchange = Exchange::automatic;  ///< of states, between GPUs; the same bits every way

  int threads = 0;   ///< host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores
  Debug debug = {};  ///< off, as a rule

  /// value_dim, its default resolved.
  int of_values() const { return value_dim.value_or(head_dim); }
};

}  // namespace longspan

/// \file
/// Options that are fixed when a layer is made, in groups. The calls of serving engines
/// (serving.hpp) take the same groups.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "longspan/exchange.hpp"
#include "longspan/mask.hpp"
#include "longspan/order.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// Element types, and how products may be rounded.
struct DTypes {
  DType compute = DType::bf16;      ///< of the products: fp32, fp16 or bf16; on CPUs also fp64
  std::optional<DType> query = {};  ///< of q; default compute, or fp8
  std::optional<DType> kv = {};     ///< of k and v; default compute, or fp8
  std::optional<DType> out = {};    ///< of out; default compute, or fp8 with an out_scale
  bool tf32 = false;                ///< CUDA: fp32 products may be rounded to tf32
  bool fp8_products = false;   ///< Hopper: long e4m3 queries may be multiplied with e4m3 keys and
                               ///< values without conversion, with weights rounded to e4m3
                               ///< (features.md). Faster, some percent of error; scales must be
                               ///< positive
  bool bf16_products = false;  ///< host: bf16 may be multiplied by the CPU's own instructions
                               ///< (AMX; for gradients AVX-512 BF16), with weights rounded to
                               ///< bf16, as GPUs do it. The bits differ from those of CPUs without
                               ///< them (features.md)

  /// The type of q, its default resolved.
  DType of_query() const { return query.value_or(compute); }
  /// The type of k and v, its default resolved.
  DType of_kv() const { return kv.value_or(compute); }
  /// The type of out, its default resolved.
  DType of_out() const { return out.value_or(compute); }

  /// The type of lse: fp32, and fp64 with products of fp64.
  DType of_lse() const { return compute == DType::fp64 ? DType::fp64 : DType::fp32; }

  /// Whether all members are equal.
  bool operator==(const DTypes&) const = default;
};

/// How a score is made from a product of query and key (score.hpp has the formula).
struct ScoreOptions {
  std::optional<double> scale = {};  ///< default 1 / sqrt(head_dim)
  double softcap = 0.0;              ///< 0: off
  Alibi alibi = Alibi::context;      ///< the distance that ALiBi slopes multiply

  /// The scale for heads of that size, its default resolved.
  float scale_of(int head_dim) const {
    return scale ? static_cast<float>(*scale) : 1.0f / std::sqrt(static_cast<float>(head_dim));
  }
  /// The same in fp64.
  double wide_scale_of(int head_dim) const {
    return scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  }

  /// Whether all members are equal.
  bool operator==(const ScoreOptions&) const = default;
};

/// Dropout of attention's weights, for training: a weight is kept with probability 1 - p, times
/// 1 / (1 - p) in fp32 (of fp64: in fp64). Which ones are kept is a function of the seed, the
/// sequence, the head and the positions of query and key alone, never of ranks, strategies or
/// devices (docs/guides/training.md has it in NumPy). lse and a sink have no dropout.
struct DropoutOptions {
  double p = 0;        ///< probability that a weight is dropped, in [0, 1); 0: off
  int first_head = 0;  ///< the number of the layer's first head in the mask, where the heads are a
                       ///< part of a model's (tensor parallel)

  /// Whether all members are equal.
  bool operator==(const DropoutOptions&) const = default;
};

/// RoPE: rotates queries, and new keys as they are appended, by their positions (rope.hpp). Keys
/// that are already in the cache, or given without new_k, are rotated already.
struct RopeOptions {
  int dim = 0;               ///< first elements of a row that are rotated, an even number; 0: off
  bool interleaved = false;  ///< pairs are (2i, 2i + 1), otherwise (i, i + dim / 2)
  float base = 10000.0f;  ///< theta: pair i turns by base^(-2i / dim) for each position. Not read
                          ///< with tables (AttentionArgs::rope_cos), as scale
  float scale = 1.0f;     ///< positions are divided by it

  /// Whether all members are equal.
  bool operator==(const RopeOptions&) const = default;
};

/// Sparse attention by indices, as DeepSeek's: every row names the keys that it sees
/// (AttentionArgs::indices). The indexer that chooses them is the caller's.
struct IndexOptions {
  int top_k = 0;       ///< the most indices of a row; 0: a row sees what the mask says
  bool slots = false;  ///< indices are rows of the rank's own cache, page * page size + row
                       ///< (without pages: rows of k), and each rank gives its own. Otherwise they
                       ///< are positions in the row's sequence, alike on all ranks

  /// Whether all members are equal.
  bool operator==(const IndexOptions&) const = default;
};

/// The largest run of a layer. Memory is allocated for it when the layer is made.
struct Limits {
  std::int64_t max_tokens = 1;      ///< most query rows in one run, over the batch; with sharded
                                    ///< queries: most on one rank
  int max_batch = 1;                ///< most sequences in one run
  std::int64_t max_kv_len = 0;      ///< no sequence is longer; 0: unknown, which needs more
                                    ///< workspace
  std::int64_t max_total_keys = 0;  ///< most keys of all sequences of one run together, over all
                                    ///< ranks; 0: each may have max_kv_len. Strategies that send
                                    ///< keys allocate memory for that many. On GPUs, where only the
                                    ///< device knows lengths, they also send that many
  std::int64_t max_query_len = 0;   ///< no sequence has more queries in one run (1: plain decode);
                                    ///< 0: unknown, which also launches kernels for long ones
  std::int64_t max_workspace = 0;   ///< bytes on a rank, without the scratch of its kernels; a
                                    ///< strategy that needs more is refused. 0: no limit
  std::int64_t max_qq_gradient = 0;  ///< with gradients: the greatest width of a qq_bias whose own
                                     ///< gradient is asked for (GradientArgs::dqq_bias), in
                                     ///< tokens; 0: it is not
  bool dense_keys = false;  ///< k and v of every run are dense, one sequence after another, and the
                            ///< host knows their lengths. ring-kv and gather-kv then send directly
                            ///< from k and v and refuse other runs. ring-kv on GPUs then has one
                            ///< block less

  /// Whether all members are equal.
  bool operator==(const Limits&) const = default;
};

/// Checks and measurements, which take time.
struct Debug {
  bool check_arrays = false;  ///< CUDA: check lengths and block tables on the GPU before the
                              ///< kernels, which still run; wait() throws what was found. Listed
                              ///< tables are read by the host, which waits for the stream, and
                              ///< compared between ranks; run() throws what was found. The host
                              ///< always checks all of this, first
  bool profile = false;       ///< measure the phases of each run; see Attention::phases

  /// Whether all members are equal.
  bool operator==(const Debug&) const = default;
};

/// Which gradient of the results ranks give that all hold all the queries.
enum class Dout : std::uint8_t {
  replicated,  ///< that of the whole loss: the same numbers on all ranks
  partial,     ///< that of the rank's own part of the loss: backward adds up those of all ranks
};

/// "replicated" or "partial"; "no dout" for an invalid number.
constexpr const char* name(Dout dout) {
  constexpr const char* names[] = {"replicated", "partial"};
  return dout <= Dout::partial ? names[static_cast<int>(dout)] : "no dout";
}

/// Which part of the result a rank gets.
enum class ResultPart : std::uint8_t {
  all,    ///< all rows that it may ask for: every row, or with sharded queries its own
  rows,   ///< only its own rows, of all heads
  heads,  ///< only its own heads, of every row
};

/// "all", and so on; "no part" for an invalid number.
constexpr const char* name(ResultPart part) {
  constexpr const char* names[] = {"all", "rows", "heads"};
  return part <= ResultPart::heads ? names[static_cast<int>(part)] : "no part";
}

/// How a result is distributed if every rank holds all the queries.
struct Results {
  ResultPart part = ResultPart::all;  ///< what a rank gets
  Sharding rows = {};                 ///< with part rows: which rows, by the same rules as
                                      ///< Options::queries

  /// Whether all members are equal.
  bool operator==(const Results&) const = default;
};

/// Heads [begin, end).
struct HeadRange {
  int begin = 0;  ///< the first
  int end = 0;    ///< one past the last
  /// The number of heads.
  constexpr int size() const { return end - begin; }
};

/// The heads of the result that a rank gets with ResultPart::heads: contiguous, and as even as
/// possible. If the ranks divide `heads`, the parts are equal, as tensor-parallel engines cut them.
constexpr HeadRange result_heads(int heads, int rank, int ranks) {
  return {static_cast<int>(even_cut(heads, rank, ranks)),
          static_cast<int>(even_cut(heads, std::int64_t{rank} + 1, ranks))};
}

/// Fixed when a layer is made. All ranks must give the same values.
struct Options {
  int heads = 1;      ///< of queries, on every rank
  int kv_heads = 1;   ///< divides heads: query head h reads kv head h / (heads / kv_heads)
  int head_dim = 64;  ///< of queries and keys: any of 1 to 576 (limits.hpp)
  std::optional<int> value_dim = {};  ///< of values and results: any of 1 to 512; default head_dim
  bool values_in_keys = false;  ///< v of every run is the first value_dim columns of k, as latent
                                ///< attention (MLA) keeps it, and may be left out. A key then
                                ///< travels once, with its value. Without this a run may have such
                                ///< a v too, which travels beside k
  DTypes dtypes = {};           ///< element types
  Mask mask = {};               ///< which keys a query sees
  ScoreOptions score = {};      ///< how scores are made from q.k
  RopeOptions rope = {};        ///< how positions rotate q and new keys; off by default
  DropoutOptions dropout = {};  ///< which weights are dropped; none by default
  IndexOptions indices = {};    ///< which keys a row names; none by default
  Limits limits = {};           ///< the largest run

  Sharding keys = {};  ///< how the keys of each sequence are distributed over the ranks
  /// Not given: every rank holds all the queries and gets the whole result, bitwise equal on all
  /// ranks. Given: every rank holds its own rows of the queries, by this rule, and gets the results
  /// of those rows.
  std::optional<Sharding> queries = {};
  /// Without `queries`: which part of the result a rank gets. out and lse have that part only.
  Results results = {};

  /// Keep the fixed order (order.hpp) even if another path is faster: the same bits for 1, 2, 4 ...
  /// 64 ranks. The host and short queries always keep it.
  bool invariant = false;

  /// Allocate what Attention::backward needs, and take a strategy that has it.
  bool gradients = false;
  /// With gradients, and without `queries`: which dout and dlse each rank gives. Partial ones are
  /// added up in fp32, in the order of the ranks.
  Dout dout = Dout::replicated;

  std::string strategy = "auto";  ///< a name of strategies()
  /// For strategies of two levels ("heads+ring-kv"): the number of neighbouring ranks in a node; it
  /// divides the number of ranks. 0: the ranks that share a machine, if every machine has equally
  /// many.
  int ranks_per_node = 0;
  Exchange exchange = Exchange::automatic;  ///< of states, between GPUs; each gives the same bits

  int threads = 0;   ///< host: 0 takes LONGSPAN_THREADS, or this rank's share of the node's cores
  Debug debug = {};  ///< all off by default

  /// value_dim, its default resolved.
  int of_values() const { return value_dim.value_or(head_dim); }

  /// Whether all members are equal.
  bool operator==(const Options&) const = default;
};

}  // namespace longspan

// A strategy decides what travels between ranks: states, queries, or keys. Each is a class in its
// own file in this folder, src/strategy/<name>.cpp, which ends with the function of that name that
// the registry (src/strategy/registry.cpp) finds by itself. Strategies of two levels are composed
// of them (two_level/). Strategies are the same for every backend and name no library.
//
//     make:  lay_out (twice: to count, then for good) -> open
//     run:   Run -> prepare -> Pass -> queue               (nothing allocated, nothing waited for)
//
// A Run holds the arguments of a run, and nothing changes it. A Pass is what the strategy makes of
// it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/params.hpp"
#include "longspan/attention.hpp"
#include "longspan/strategy.hpp"
#include "src/arguments/run_arrays.hpp"
#include "src/base/parts.hpp"

namespace longspan {

/// The phases in which the time of a run is measured, in order.
enum class Phase : int { attend, exchange, merge };

/// A layer as its strategy sees it. All of it outlives the strategy.
struct LayerContext {
  const Options& options;
  const kernels::Backend& kernels;
  comm::Transport& comm;
  kernels::AttendParams bounds;  // the largest run that the options allow, of the rank's own rows
};

/// A run with checked arguments. Nothing changes it after its construction.
struct Run {
  const AttentionArgs& args;
  const RunArrays& arrays;
  Stream stream;

  // This rank's query rows and keys in the caller's memory, without memory for states. With sharded
  // queries only the starts of all ranks' rows are known.
  kernels::AttendParams attend;
  kernels::MergeParams merge;  // into the result, from states that the strategy fills in

  // [ranks] number of keys that each rank lists, which the ranks have exchanged before the run is
  // queued; null if keys are distributed by a rule, and on GPUs.
  const std::int64_t* listed_keys = nullptr;

  bool timed = false;  // on this rank, maybe on no other: transfers must not depend on it
  std::function<void(Phase)> enter;  // marks that the stream has reached the start of a phase

  // [batch + 1] the starts of sequences in this rank's rows, for their rotation, if `attend` has
  // only those of all ranks' rows; otherwise null.
  const std::int32_t* rotated_starts = nullptr;

  /// How this rank's own rows are rotated (Options::rope), without the rows.
  kernels::RotateParams rotation() const {
    kernels::RotateParams p{attend, attend.rope, {}, {}};
    if (rotated_starts != nullptr) p.geometry.batch.query_start = rotated_starts;
    return p;
  }

  /// The geometry with the rows of all ranks, all of which see the keys of this one.
  kernels::Geometry all_rows() const {
    kernels::Geometry g = attend;
    if (g.queries.ranks == 1) return g;
    g.tokens = args.total_tokens;
    g.batch.query_start = arrays.query_start;
    g.batch.whole_query_start = nullptr;
    g.queries = {};
    return g;
  }
};

/// The fp32 gradients of the rows and keys of a rank.
struct Gradients {
  kernels::GradientSums dq, dk, dv;
};

/// A strategy's view of a run: prepare() sets the location of travelling queries and of states, and
/// queue() starts from there.
struct Pass {
  explicit Pass(const Run& of) : run(of), attend(of.attend), merge(of.merge) {}

  const Run& run;
  kernels::AttendParams attend;
  kernels::MergeParams merge;

  // This rank's agreement digest of its run: a kernel writes it to digests[rank], and it travels
  // with the data.
  kernels::RunDigestParams own_digest;
  std::uint64_t* digests = nullptr;  // [ranks]; null: already compared

  // Where a backward adds up the gradients of biases, with the heads of `attend`.
  kernels::BiasSums bias_sums;

  // Whether the rows of all ranks see this rank's keys, not only its own. Pages are then checked
  // for the needs of all of them.
  bool keys_travel = false;

  // Of a backward that is a part of another strategy's: that strategy made the terms of rows
  // [tokens, heads], and takes the gradients in fp32. Otherwise they are stored.
  kernels::RowTerm* terms = nullptr;
  Gradients* to = nullptr;

  /// Sends digests into memory that other GPUs write; the kernel that writes the result compares
  /// them there.
  void compare_in(std::uint64_t* all, int rank) {
    own_digest.to = all + rank;
    digests = all;
    merge.headers.digests = all;
  }
  /// Writes this rank's digest, if the strategy has several ranks to compare.
  void write_own_digest(const kernels::AttentionKernels& with) const {
    if (digests != nullptr) with.write_run_digest(own_digest, run.stream);
  }

  /// Queues the attention and the phase that ends it.
  void attend_to(const kernels::Epilogue& epilogue, Phase last,
                 const kernels::AttentionKernels& with,
                 const kernels::BetweenTiles& between = {}) const {
    kernels::EpilogueBegins begins;
    if (run.timed) begins = [this, last] { run.enter(last); };
    with.attend(attend, epilogue, run.stream, begins, between);
  }
};

class Strategy {
 public:
  virtual ~Strategy() = default;

  /// Takes its parts of the layer's memory. It is called twice: first to count, with a null base.
  virtual void lay_out(Parts& memory) = 0;

  /// Opens what the strategy needs from the communicator, once all ranks have their memory.
  /// Collective. `layer` is the layer's number among those of the communicator. Throws Unsupported
  /// on all ranks or on none.
  virtual void open(std::uint32_t /*layer*/) {}

  /// The return value of Attention::exchange: how data travels.
  virtual ExchangeInfo exchange() const = 0;

  /// The most phases that a run enters, its end included.
  virtual int most_marks() const { return 16; }

  /// Fills in the location of the queries and the states of a run, and queues nothing. Throws
  /// Unsupported for a run that the strategy does not support.
  virtual void prepare(Pass& pass) = 0;

  /// Queues the run. The result is written whole, on every rank.
  virtual void queue(Pass& pass) = 0;

  /// Queues the backward of a run that prepare() was called for, with Options::gradients.
  virtual void backward(Pass& pass, const GradientArgs& args) = 0;
};

/// Whether a table distributes positions, not only a rule.
constexpr bool is_by_table(Layout layout) {
  return layout == Layout::ranges || layout == Layout::listed;
}
constexpr bool is_by_table(const Sharding& dealt) { return is_by_table(dealt.layout); }

/// The queries whose gradients a strategy has on several ranks; on one rank there is no difference.
enum class GradientsOf { sharded_queries, all_queries };

/// What the ranks share, which determines how even their work is.
enum class Balanced { by_keys, by_queries, evenly };

/// The registry's entry for a strategy.
struct StrategyEntry {
  StrategyInfo info;
  int preference;  // the order of the table; "auto" takes the lowest if nothing can be predicted
  /// Whether a layer with such options on `ranks` ranks gives the bits of gather-states, in whose
  /// order a row's keys fold whatever the batch and the layer's limits are.
  bool (*keeps_order)(const Options& options, int ranks);
  GradientsOf gradients;
  bool takes_tables;  // with keys and queries distributed by a table (Layout::ranges and listed) it
                      // supports every run; with a rule all strategies do
  bool sends_rows_back = false;  // in a backward rows travel to the keys
  bool takes_indices = false;    // keys do not travel, so a rank attends to those it holds
  bool takes_fp64 = false;       // it makes results without states, which are fp32
  Balanced (*balanced)(const Options& options);
  /// Why it cannot serve layers with such options on `ranks` ranks; empty if it can.
  std::string (*refusal)(const Options& options, int ranks);
  RunCost (*cost)(const Options& options, int ranks, const RunSize& size, Device device);
  std::unique_ptr<Strategy> (*make)(const LayerContext& layer);
};

/// The strategies of two levels, one within a node and another between nodes.
std::vector<StrategyEntry> two_level_strategies();

/// The same if whole sequences are brought to a rank: the cuts between ranks are then cuts of the
/// tree by which one rank folds a contiguous sequence.
bool folds_as_one_rank(const Options& options, int ranks);

/// Why a strategy that gives whole results, or results by the rows of sharded queries, cannot give
/// what the options ask for; empty if it can.
std::string refuse_parts(const Options& options);

/// Throws Unsupported if the options name an exchange between GPUs that is not possible, with the
/// reason `why`.
void require_exchange(const Options& options, bool is_had, const std::string& why);

/// The bytes of a row of the queries, of a key and its value, and of a row's states, each for all
/// heads.
double query_row_bytes(const Options& options);
double key_row_bytes(const Options& options);
/// The bytes of a value of one head that travels beside its key: 0 if it travels in it.
std::int64_t travelling_value_bytes(const Options& options);
double state_row_bytes(const Options& options);
/// The bytes of the rotated query rows of the largest run, which a layer with RoPE keeps.
double rotated_bytes(const Options& options);
/// The bytes of a slot of states, with `rows` rows of `heads` heads (kernels::StateSlots).
double state_slot_bytes(const Options& options, double rows, int heads);

/// The part of forecast() without times, which need a walk over the sequence: why a strategy cannot
/// serve, why "auto" leaves it out, what it costs.
std::vector<Forecast> consider(const Options& options, int ranks, const RunSize& size,
                               Device device);

/// The entry of a row of strategies().
const StrategyEntry& entry_of(const StrategyInfo& info);

}  // namespace longspan

#include "launcher/options/model_options.hpp"

#include <CLI/CLI.hpp>

#include "launcher/options/numbers.hpp"
#include "launcher/options/spelling.hpp"
#include "longspan/limits.hpp"

namespace longspan::launcher {
namespace {

void add_shape_options(CLI::App& app, ShapeOptions& o, const char* group) {
  const auto number = [&](const char* name, int& value, const std::string& what) {
    return app.add_option(name, value, what)->transform(whole(1, kMostHeads))->group(group);
  };
  number("--heads", o.heads, "Query heads")->capture_default_str();
  number("--kv-heads", o.kv_heads, "Heads of keys and values; divides --heads [--heads]");
  number("--dim", o.dim, dim_text() + " [128 on GPUs, 64 on CPUs]");
  app.add_option("--dtype", o.dtype, "fp32, fp16 or bf16 [bf16 on GPUs, fp32 on CPUs]")
      ->check(one_of({"fp32", "fp16", "bf16"}))
      ->group(group);
}

CLI::Option* add_file_option(CLI::App& app, const char* name, std::string& file, const char* what,
                             const char* group) {
  return app.add_option(name, file, what)->check(file_name())->type_name("FILE")->group(group);
}

}  // namespace

const char* const kScaleFooter = R"(Examples
  mpirun -np 4 longspan bench scale
      prefill, a chunk and a decode step on 1, 2 and 4 ranks, by every strategy;
      > marks the strategy that auto takes, * the fastest
  mpirun -np 2 longspan bench scale --phases prefill --kv 4096 16384 --csv t.csv
      two lengths of prefill, the table as a file too
  mpirun -np 2 longspan bench scale --phases train --kv 4096
      forward and backward, with the bytes and the memory of each strategy)";

const char* const kCalibrateFooter = R"(Examples
  mpirun -np 4 longspan calibrate
      measures for some seconds on four ranks, and saves
  LONGSPAN_MACHINE=here.machine mpirun -np 2 longspan calibrate --dtype fp16
      saves to a file, which longspan reads while that variable names it)";

const char* const kPlanFooter = R"(Examples
  longspan plan --nodes 128 --ranks-per-node 8 --kv 1000000000 --causal
      a billion keys on 1,024 GPUs
  longspan plan --kv 131072 --tokens 1 --heads 64 --kv-heads 8
      one decode step on eight)";

void add_calibrate_options(CLI::App& app, CalibrateOptions& o) {
  add_shape_options(app, o.shape, "What is measured");
  add_file_option(app, "--out", o.out,
                  "Where the constants go [LONGSPAN_MACHINE, or else the user's settings]",
                  "Output (written by rank 0 after success, or not at all)");
}

void add_plan_options(CLI::App& app, PlanOptions& o) {
  const char* cluster = "The cluster";
  app.add_option("--nodes", o.nodes, "Nodes")
      ->transform(whole(1, 65536))
      ->group(cluster)
      ->capture_default_str();
  // The second names are older ones, which the help does not list.
  app.add_option("--ranks-per-node,--gpus-per-node", o.ranks_per_node, "Ranks of a node")
      ->transform(whole(1, 1024))
      ->group(cluster)
      ->capture_default_str();
  add_file_option(app, "--machine", o.machine,
                  "The constants of a rank, as `longspan calibrate` saves them [an H200's]",
                  cluster);
  const char* work = "The attention";
  app.add_option("--kv,--keys", o.kv, "Keys of the sequence")
      ->transform(whole(std::int64_t{1}, std::int64_t{1} << 40))
      ->group(work)
      ->capture_default_str();
  app.add_option("--tokens", o.tokens, "Query rows, at its end [--kv]")
      ->transform(whole(std::int64_t{1}, std::int64_t{1} << 40))
      ->group(work);
  add_shape_options(app, o.shape, work);
  app.add_option("--value-dim", o.value_dim, "Dimension of a value [--dim]")
      ->transform(whole(1, kMaxValueDim))
      ->group(work);
  app.add_flag("--values-in-keys", o.values_in_keys,
               "Values are the first columns of the keys, and travel in them (MLA)")
      ->group(work);
  app.add_flag("--causal", o.mask.causal, "A row sees no key at a position after its own")
      ->group(work);
  app.add_option("--window", o.mask.window,
                 "How many keys a row sees up to its own position, that one included")
      ->transform(whole(std::int64_t{1}, std::int64_t{1} << 40))
      ->group(work);
  add_chunks(app, o.mask, work);
  add_alignment(app, o.mask.alignment, work);
  app.add_option("--top-k", o.top_k, "Sparse attention: how many keys each row names")
      ->transform(whole(1, 1 << 24))
      ->group(work);
  app.add_flag("--backward", o.backward, "Also its backward, for the gradients of q, k and v")
      ->group(work);
  const char* spread = "How it is spread over the ranks";
  app.add_option("--shard", o.shard, shard_text())->group(spread)->capture_default_str();
  app.add_option("--max-workspace", o.max_workspace, "Bytes of workspace on a rank [no limit]")
      ->transform(whole(std::int64_t{1}, std::int64_t{1} << 48))
      ->group(spread);
  add_file_option(app, "--json", o.json, "The plan as a record", "Output");
}

void add_scale_options(CLI::App& app, ScaleOptions& o) {
  const char* work = "What is measured";
  app.add_option("--phases", o.phases,
                 "prefill (as many rows as keys), chunk, decode (one row), train (as prefill, and "
                 "its backward)")
      ->check(one_of({"prefill", "chunk", "decode", "train"}))
      ->group(work)
      ->default_str("prefill chunk decode");
  app.add_option("--kv", o.kv, "Keys of a sequence; several give a row of the table each")
      ->transform(whole(std::int64_t{1}, kMostRows))
      ->group(work);
  app.add_option("--chunk", o.chunk, "Query rows of a chunk")
      ->transform(whole(std::int64_t{1}, kMostRows))
      ->group(work)
      ->capture_default_str();
  app.add_flag("--weak", o.weak,
               "--kv counts the keys of each rank: a sequence has ranks times as many")
      ->group(work);
  app.add_option("--batch", o.batch, "Sequences")
      ->transform(whole(1, 65536))
      ->group(work)
      ->capture_default_str();
  add_shape_options(app, o.shape, work);
  const char* spread = "How it is spread over the ranks";
  app.add_option(
         "--shard", o.shard,
         "How the ranks share the keys, and in prefill the rows: contiguous, zigzag, striped, "
         "interleaved[:block]")
      ->group(spread)
      ->capture_default_str();
  add_ranks_per_node(app, o.ranks_per_node, spread);
  app.add_option(
         "--strategies", o.strategies,
         "Some of those that `longspan run --list-strategies` prints [every one that serves]")
      ->check(one_of(strategy_names()))
      ->group(spread);
  app.add_option("--ranks", o.ranks, "On how many of the ranks [1, 2, 4 ... and all]")
      ->transform(whole(1, 65536))
      ->group(spread);
  const char* measure = "Measuring and checking";
  add_run_counts(app, o, 1, measure);
  app.add_flag("--graph", o.graph,
               "On GPUs: time replays of a CUDA graph, back to back, without what the host does to "
               "launch")
      ->group(measure);
  app.add_option("--check", o.check, "Rows of each run to compare with float64")
      ->transform(whole(std::int64_t{0}, std::int64_t{65536}))
      ->group(measure)
      ->capture_default_str();
  add_file_option(app, "--json", o.json, "The measured records", measure);
  add_file_option(app, "--csv", o.csv, "The table as comma-separated values", measure);
}

}  // namespace longspan::launcher

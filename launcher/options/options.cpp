#include "launcher/options/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>

#include "launcher/options/help.hpp"
#include "launcher/options/numbers.hpp"
#include "launcher/options/read_shard.hpp"
#include "launcher/options/spelling.hpp"
#include "launcher/options/usage.hpp"
#include "launcher/problem/families.hpp"
#include "longspan/limits.hpp"
#include "longspan/option_table.hpp"
#include "longspan/strategy.hpp"
#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

constexpr const char* kAbout =
    "longspan: exact attention over a sequence whose keys and values are sharded\n"
    "across ranks. Start it alone, or on several ranks with mpirun, torchrun or\n"
    "srun.";

constexpr const char* kStatus = R"(Exit status
  0  success
  1  a defect of longspan
  2  usage: an option or a value that is wrong, that does not fit the others,
     that differs between ranks, or that takes more memory than there is
  3  files: one cannot be read, does not fit the others, or cannot be written
  4  not supported by this build, this device or this strategy
  5  wrong result: an error beyond the tolerance
  6  a rank died or gave up
  7  a rank did not arrive in time
  8  CUDA, NCCL or MPI reported an error
)";

constexpr const char* kFooter = R"(Examples
  longspan run --kv 65536 --tokens 256 --causal
  mpirun -np 3 longspan verify --quick
  mpirun -np 4 longspan bench decode

)";

constexpr const char* kMore = R"(
`longspan COMMAND --help` lists the options of a command and its examples;
docs/reference/command.md explains the table.)";

constexpr const char* kRunFooter = R"(Examples
  longspan run --kv 65536 --tokens 256 --causal
      makes its inputs from a seed, runs, and compares 16 rows with float64
  mpirun -np 4 longspan run --q q.npy --k k.npy --v v.npy --causal --out out.npy
      the same on four ranks and on your own arrays [tokens, heads, head_dim]
  mpirun -np 2 longspan run --kv 16384 --tokens 16384 --causal \
      --shard-queries --shard zigzag
      a context-parallel prefill: queries and keys both sharded, even work under
      the causal mask

`longspan --help` lists the exit statuses;
docs/reference/command.md explains the table.)";

constexpr const char* kVerifyFooter = R"(Examples
  longspan verify --quick
      shapes, shards, masks, batches and dtypes, compared with float64
  mpirun -np 3 longspan verify --seed 7
      other random problems, on three ranks
  mpirun -np 2 longspan verify --full --families gradients "same bits"
      many problems of two families)";

constexpr const char* kDecodeFooter = R"(Examples
  mpirun -np 4 longspan bench decode
      the decode step of a model (32 layers on GPUs, 4 on CPUs) over a
      sharded cache that grows, and rank 0 doing it alone
  mpirun -np 2 longspan bench decode --kv 8192 16384 --batch 2
      two lengths, two sequences)";

/// Takes the values of --backend. Only developers of longspan run the command on simulated GPUs, so
/// the help does not list them.
CLI::Validator backend_name() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
#if defined(LONGSPAN_SIMULATED)
        if (text == "simulated") return {};
#else
        if (text == "simulated")
          return "this build has no simulator of GPUs: configure with cmake --preset simulated";
#endif
        return one_of({"auto", "host", "cuda"})(text);
      },
      "");
}

const std::string kValueDimText =
    fmt::format("Dimension of a value: any of 1 to {} [--dim]", kMaxValueDim);

void add_world_options(CLI::App& app, WorldOptions& o) {
  app.add_option("--backend", o.backend,
                 "host, cuda, or auto: cuda where every rank has a GPU of its own")
      ->check(backend_name())
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--exchange",
         [&o](const std::string& text) {
           o.exchange = choice_named<Exchange>(text).value_or(o.exchange);
         },
         "How states travel between GPUs: peer-buffers (each GPU writes into the others' memory), "
         "gather (NCCL), or auto: peer-buffers where the GPUs reach each other. "
         "peer-buffers-apart: the same, in a kernel of its own")
      ->check(one_of(choice_names<Exchange>()))
      ->default_str(name(o.exchange));
  app.add_option("--deadline", o.deadline_s,
                 "Seconds to wait for a rank at any step [LONGSPAN_DEADLINE_S, or else 60]")
      ->check(finite(0.001, 1e6));
  app.add_option("--threads", o.threads,
                 "Host threads of a rank [LONGSPAN_THREADS, or its share of the cores]")
      ->transform(whole(1, kMostThreads));
  app.add_option("--seed", o.seed, "Seed of generated inputs")
      ->transform(whole(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
}

/// Adds a number of the score. Other options have texts of their own.
template <class T>
void add_number([[maybe_unused]] CLI::App& app, [[maybe_unused]] const OptionInfo& option,
                [[maybe_unused]] T& value, [[maybe_unused]] const std::string& group) {
  constexpr bool kPlain = std::is_same_v<T, double>;
  if constexpr (kPlain || std::is_same_v<T, std::optional<double>>)
    app.add_option(option.command, value, option.help)
        ->check(single_precision(kPlain))
        ->group(group);
}

void add_run_options(CLI::App& app, RunOptions& o, std::string& check) {
  const std::string files = "Inputs from files (.npy; fp32, fp16, or bf16 stored as V2)";
  auto* q = app.add_option("--q", o.q, "Queries [tokens, heads, head_dim]")
                ->check(file_name())
                ->type_name("FILE")
                ->group(files);
  auto* k = app.add_option("--k", o.k, "Keys [keys, kv_heads, head_dim]")
                ->check(file_name())
                ->type_name("FILE")
                ->group(files);
  auto* v = app.add_option("--v", o.v, "Values [keys, kv_heads, value_dim]")
                ->check(file_name())
                ->type_name("FILE")
                ->group(files);
  q->needs(k, v);
  k->needs(q);
  v->needs(q);
  app.add_option("--sinks", o.sinks, "Learned sinks [heads], fp32")
      ->check(file_name())
      ->type_name("FILE")
      ->group(files);
  app.add_option("--dtype", o.dtype, "fp32, fp16 or bf16 [what the files hold, or else fp32]")
      ->check(one_of({"fp32", "fp16", "bf16"}))
      ->group(files);
  app.add_option(
         "--qkv-dtype", o.qkv_dtype,
         "The fp8 type in which q, k and v are stored, rounded, with scales of 1: e4m3 or e5m2 "
         "[--dtype]")
      ->check(one_of({"e4m3", "e5m2"}))
      ->group(files);

  const std::string made = "Inputs made from a seed (when no files are given)";
  const auto size = [&](const char* name, auto& value, std::int64_t least, const std::string& what,
                        std::int64_t most = kMostRows) {
    return app.add_option(name, value, what)
        ->transform(whole(least, most))
        ->excludes(q)
        ->group(made)
        ->default_str(value > 0 ? fmt::to_string(value) : "");
  };
  auto* kv = size("--kv", o.kv, 0, "Keys of a sequence");
  auto* tokens = size("--tokens", o.tokens, 0, "Query rows of a sequence, at its end");
  auto* batch = size("--batch", o.batch, 1, "Sequences");
  app.add_option("--lengths", o.lengths,
                 "Tokens of each of several packed sequences: each token is a key and a query row")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->excludes(q, kv, tokens, batch)
      ->group(made);
  size("--heads", o.heads, 1, "Query heads", kMostHeads);
  size("--kv-heads", o.kv_heads, 1, "Heads of keys and values; divides --heads [--heads]",
       kMostHeads);
  size("--dim", o.dim, 1, dim_text(), kMostHeads);
  size("--value-dim", o.value_dim, 1, kValueDimText, kMostHeads);
  app.add_flag("--values-in-keys", o.values_in_keys,
               "Values are the first columns of the keys, as latent attention (MLA) keeps them")
      ->excludes(q)
      ->group(made);

  const std::string attention = "The attention";
  app.add_flag("--causal", o.mask.causal, "A row sees no key at a position after its own")
      ->group(attention);
  app.add_option("--window", o.mask.window,
                 "How many keys a row sees up to its own position, that one included")
      ->transform(whole(std::int64_t{1}, kMostRows))
      ->group(attention);
  app.add_option("--right", o.mask.right, "How many keys a row sees after its own position")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->group(attention);
  app.add_option(
         "--top-k", o.top_k,
         "Sparse attention: each row sees so many keys of its sequence, drawn from the seed")
      ->transform(whole(1, 1 << 24))
      ->group(attention);
  add_chunks(app, o.mask, attention);
  app.add_option("--bidirectional", o.bidirectional,
                 "Ranges of positions in every sequence whose tokens see each other, each by its "
                 "begin and its end, ascending")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->group(attention);
  app.add_option("--documents", o.documents,
                 "Starts of documents in every sequence, ascending, and the end of the last: a row "
                 "sees keys of its own document")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->group(attention);
  app.add_option(
         "--left-padding", o.left_padding,
         "How many of the first keys are padding that no row sees: of each sequence, or one "
         "number for all")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->group(attention);
  add_alignment(app, o.mask.alignment, attention);
  visit_score_options(o.score, [&](const OptionInfo& option, auto& value) {
    if (option.help != nullptr) add_number(app, option, value, attention);
  });
  app.add_option("--alibi", o.alibi,
                 "ALiBi by the distance from the first query row (context), from the row's own "
                 "(query) or its square root (sqrt), with slopes 2^(-8 (h + 1) / heads)")
      ->check(one_of(choice_names<Alibi>()))
      ->group(attention);

  app.add_option(
         "--rope", o.rope.dim,
         "RoPE: the first elements of a query row that its position rotates, an even number; "
         "keys are taken as rotated [none]")
      ->transform(whole(2, kMaxHeadDim))
      ->group(attention);
  app.add_flag("--rope-interleaved", o.rope.interleaved,
               "Rotate the pairs (2i, 2i + 1), not (i, i + rope / 2)")
      ->group(attention);
  app.add_option("--rope-theta", o.rope.base,
                 "Rotate pair i by theta^(-2i / rope) for each position")
      ->check(single_precision(true))
      ->capture_default_str()
      ->group(attention);
  app.add_option("--rope-scale", o.rope.scale, "Divide positions by it before they rotate")
      ->check(single_precision(true))
      ->capture_default_str()
      ->group(attention);

  app.add_option("--dropout", o.dropout.p,
                 "Drop weights with this probability; the mask is a function of seed, sequence, "
                 "head and positions [0]")
      ->check(probability())
      ->group(attention);
  app.add_option("--dropout-seed", o.dropout_seed, "Seed of the mask of --dropout [--seed]")
      ->transform(whole(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()))
      ->group(attention);
  app.add_option("--dropout-first-head", o.dropout.first_head,
                 "Number of the first head in the mask of --dropout [0]")
      ->transform(whole(0, kMostHeads))
      ->group(attention);

  app.add_flag("--fp8-products", o.fp8_products,
               "On Hopper: multiply e4m3, with weights rounded to it. Needs --qkv-dtype e4m3")
      ->group(attention);

  app.add_flag("--bf16-products", o.bf16_products,
               "On CPUs that have instructions for it: multiply bf16, with weights rounded to "
               "it. Needs --dtype bf16")
      ->group(attention);

  const std::string backward = "Its backward (gradients; files are .npy)";
  auto* back = app.add_flag("--backward", o.backward,
                            "Also compute, time and check the gradients of q, k, v and the sinks")
                   ->group(backward);
  const auto gradient = [&](const char* name, std::string& file, const char* what) {
    return app.add_option(name, file, what)
        ->check(file_name())
        ->type_name("FILE")
        ->needs(back)
        ->group(backward);
  };
  gradient("--dout", o.dout, "Gradient of the result, like it; with --q it is needed")->needs(q);
  gradient("--dlse", o.dlse, "Gradient of the log-sum-exp [tokens, heads], fp32 [none]")->needs(q);
  gradient("--dq", o.dq, "Output: gradient of q, in its shape");
  gradient("--dk", o.dk, "Output: gradient of k");
  gradient("--dv", o.dv, "Output: gradient of v");
  gradient("--dsinks", o.dsinks, "Output: gradient of the sinks [heads], fp32");
  app.add_flag("--fp32-gradients", o.fp32_gradients,
               "Gradients of q, k and v in fp32, not in their types")
      ->needs(back)
      ->group(backward);

  const std::string spread = "How it is spread over the ranks";
  app.add_option("--shard", o.shard, shard_text())->group(spread)->capture_default_str();
  app.add_flag("--shard-queries", o.shard_queries,
               "Share query rows and result as the keys; otherwise every rank holds them whole")
      ->group(spread);
  app.add_flag("--invariant", o.invariant, "The same bits for 1, 2, 4 ... 64 ranks on every path")
      ->group(spread);
  app.add_option("--strategy", o.strategy, "What travels: auto, or one of --list-strategies")
      ->check(one_of(strategy_names({"auto"})))
      ->group(spread)
      ->capture_default_str();
  add_ranks_per_node(app, o.ranks_per_node, spread);
  app.add_flag("--explain", o.explain,
               "Print the predicted time of every strategy, or why it cannot be used")
      ->group(spread);

  const std::string measure = "Measuring and checking";
  add_run_counts(app, o, 0, measure);
  app.add_option("--check", check, "Rows to compare with float64: a number, all, or off")
      ->group(measure)
      ->capture_default_str();
  app.add_flag("--write-anyway", o.write_anyway,
               "Write the outputs also where the comparison finds them wrong; the exit status is 5 "
               "all the same")
      ->group(measure);
  app.add_flag("--digest", o.digest, "Print a hash (64 bits) of every bit of the output")
      ->group(measure);

  const std::string output = "Output (written by rank 0 after success, or not at all)";
  app.add_option("--out", o.out, "Result [tokens, heads, value_dim], .npy")
      ->check(file_name())
      ->type_name("FILE")
      ->group(output);
  app.add_option("--lse", o.lse, "Log-sum-exp [tokens, heads], fp32, natural log, .npy")
      ->check(file_name())
      ->type_name("FILE")
      ->group(output);
  app.add_option("--json", o.json, "The measured record")
      ->check(file_name())
      ->type_name("FILE")
      ->group(output);
}

void add_decode_options(CLI::App& app, DecodeOptions& o) {
  const auto number = [&app](const char* name, auto& value, std::int64_t least, std::int64_t most,
                             const std::string& what, const char* group) {
    return app.add_option(name, value, what)
        ->transform(whole(least, most))
        ->group(group)
        ->capture_default_str();
  };
  const char* step = "The step";
  app.add_option("--kv", o.kv,
                 "Keys of a sequence before the first step; several give a row of the table each "
                 "[131072 on GPUs, 16384 on CPUs]")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->group(step);
  app.add_flag("--weak", o.weak,
               "--kv counts the keys of each rank: a sequence has ranks times as many")
      ->group(step);
  number("--tokens", o.tokens, 1, 8, "New tokens of each sequence in a step", step);
  number("--batch", o.batch, 1, 65536, "Sequences", step);
  number("--heads", o.heads, 1, 65536, "Query heads", step);
  number("--kv-heads", o.kv_heads, 1, 65536, "Heads of keys and values; divides --heads", step);
  number("--dim", o.dim, 1, 65536, dim_text(), step);
  app.add_option("--dtype", o.dtype, "fp32, fp16 or bf16")
      ->check(one_of({"fp32", "fp16", "bf16"}))
      ->group(step)
      ->capture_default_str();
  app.add_option("--kv-dtype", o.kv_dtype,
                 "Type of the cache: that of --dtype, e4m3 or e5m2 [--dtype]")
      ->check(one_of({"fp32", "fp16", "bf16", "e4m3", "e5m2"}))
      ->group(step);
  number("--page", o.page, 0, 65536, "Keys in a page of the cache; 0: no pages", step);
  app.add_option("--layers", o.layers,
                 "Layers of the model; in a step each appends and attends once [32 on GPUs, 4 on "
                 "CPUs]")
      ->transform(whole(1, 4096))
      ->group(step);
  app.add_option(
         "--memory", o.memory_gib,
         "GiB for the caches of a GPU, or of all ranks on the host; where not all fit, layers "
         "share caches [from what is free]")
      ->check(finite(0.001, 1e6))
      ->group(step);

  const char* spread = "How it is spread over the ranks";
  app.add_option("--shard", o.shard,
                 "interleaved[:block] or striped: what a growing cache can have")
      ->group(spread)
      ->capture_default_str();
  app.add_flag("--invariant", o.invariant, "The same bits for 1, 2, 4 ... 64 ranks on every path")
      ->group(spread);

  const char* measure = "Measuring and checking";
  app.add_option("--iterations", o.iterations, "Timed steps [30 on GPUs, 5 on CPUs]")
      ->transform(whole(1, 1000000))
      ->group(measure);
  number("--warmup", o.warmup, 1, 1000000, "Steps before these, not timed", measure);
  number("--check", o.check, 0, 65536,
         "Pairs of a sequence and a kv head, in any layer, to compare with float64 before and "
         "after the timed steps",
         measure);
  app.add_flag("--no-alone", o.no_alone,
               "Do not measure the step on rank 0 alone; then there is no efficiency")
      ->group(measure);
  app.add_option("--json", o.json, "The measured record")
      ->check(file_name())
      ->type_name("FILE")
      ->group(measure);
}

/// Makes the help show what to type and the defaults, not CLI11's types and relations.
void simplify_help(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const std::string kind = type.substr(0, type.find(':'));
    if (kind.empty()) continue;  // it is a flag
    const std::string standard = option->get_default_str();
    option->option_text((kind == "INT" || kind == "UINT" ? "N"
                         : kind == "FLOAT"               ? "X"
                         : kind == "TEXT"                ? "NAME"
                                                         : kind) +
                        (standard.empty() ? "" : " [" + standard + "]"));
  }
}

void read_growing_rule(DecodeOptions& o) {
  if (!read_shard(o.shard, {Layout::striped, Layout::interleaved}, o.layout, o.block))
    throw CLI::ValidationError(
        "--shard",
        fmt::format("{} is not one of striped, interleaved, interleaved:BLOCK with a "
                    "block of 1 to {} keys; other layouts move keys when a sequence grows",
                    in_quotes(o.shard), kMostRows));
}

void read_check(RunOptions& o, const std::string& check) {
  if (check == "all") {
    o.check = -1;
  } else if (check == "off") {
    o.check = 0;
  } else if (!read_number(check, o.check) || o.check < 0) {
    throw CLI::ValidationError(
        "--check", fmt::format("{} is neither a number of rows nor all nor off", in_quotes(check)));
  }
}

void check_backward(const RunOptions& o) {
  if (o.backward && !o.q.empty() && o.dout.empty())
    throw CLI::ValidationError("--backward",
                               "of inputs from files it needs --dout, the gradient of the result");
  if (!o.dsinks.empty() && o.sinks.empty())
    throw CLI::ValidationError("--dsinks", "there are no sinks; give them with --sinks");
}

/// Refuses `--out=`, for whose value CLI11 would take the next argument.
void refuse_empty_values(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--") && argument.find('=') == argument.size() - 1)
      throw CLI::ValidationError(argument, "no value follows the =; is a variable not set?");
  }
}

NamedValues values_of(const CLI::App& app) {
  NamedValues values;
  for (const CLI::Option* option : app.get_options())
    values.emplace_back(
        option->get_name(),
        option->count() == 0 ? "not given" : fmt::format("{}", fmt::join(option->results(), " ")));
  return values;
}

}  // namespace

CommandLine parse(int argc, char** argv) {
  using Action = CommandLine::Action;
  CommandLine line;
  CLI::App app(kAbout, "longspan");
  app.formatter(std::make_shared<Help>());
  app.set_version_flag("--version", "longspan " LONGSPAN_VERSION);
  app.require_subcommand(0, 1);

  CLI::App* run = app.add_subcommand("run", "One attention: computed, timed, checked, written");
  bool list_strategies = false;
  std::string check = "16";
  add_run_options(*run, line.run, check);
  run->add_flag("--list-strategies", list_strategies, "Print the table of strategies and end");
  add_world_options(*run, line.world);

  CLI::App* verify = app.add_subcommand("verify", "Many problems, each compared with float64");
  bool quick = false, full = false;
  auto* quick_flag = verify->add_flag("--quick", quick, "Few problems: some seconds");
  verify->add_flag("--full", full, "Larger shapes and many random problems")->excludes(quick_flag);
  std::vector<std::string> families;
  families.reserve(family_makers().size());
  for (const FamilyMaker& maker : family_makers()) families.emplace_back(maker.name);
  verify->add_option("--families", line.verify.families, "Some of the families [all]")
      ->check(one_of(families));
  add_world_options(*verify, line.world);

  CLI::App* bench =
      app.add_subcommand("bench", "Measures the decode step, or how attention scales over ranks");
  bench->require_subcommand(1);
  CLI::App* decode = bench->add_subcommand(
      "decode", "The decode step of a sharded cache: append, attend, exchange, merge");
  add_decode_options(*decode, line.decode);
  add_world_options(*decode, line.world);

  CLI::App* scale = bench->add_subcommand(
      "scale", "Prefill, chunks and decode on more and more ranks, by every strategy");
  add_scale_options(*scale, line.scale);
  add_world_options(*scale, line.world);

  CLI::App* calibrate = app.add_subcommand(
      "calibrate", "Measures the constants by which auto chooses a strategy, and saves them");
  add_calibrate_options(*calibrate, line.calibrate);
  add_world_options(*calibrate, line.world);
  CLI::App* plan = app.add_subcommand(
      "plan", "Predicts the time and memory of every strategy on a cluster; nothing runs");
  add_plan_options(*plan, line.plan);

  CLI::App* reshard = app.add_subcommand(
      "reshard", "A cache from one layout, ranks and pages to others: timed, every byte checked");
  add_reshard_options(*reshard, line.reshard);
  add_world_options(*reshard, line.world);

  CLI::App* info = app.add_subcommand("info", "Version, backends, MPI, NCCL, GPUs, strategies");
  info->add_flag("--features", line.features, "What the kernels of each device can do");
  info->add_flag("--kernels", line.kernels, "Which kernels serve which calls, in order");
  info->add_flag("--options", line.options,
                 "Options of a layer and arguments of a run, and what they are called");
  info->add_flag("--json", line.json, "As JSON");
  CLI::App* env = app.add_subcommand("env", "The environment variables that longspan reads");
  env->add_flag("--json", line.json, "As JSON");

  app.footer(std::string(kFooter) + kStatus + kMore);
  run->footer(kRunFooter);
  verify->footer(kVerifyFooter);
  decode->footer(kDecodeFooter);
  scale->footer(kScaleFooter);
  calibrate->footer(kCalibrateFooter);
  plan->footer(kPlanFooter);
  reshard->footer(kReshardFooter);

  simplify_help(*run);
  simplify_help(*verify);
  simplify_help(*decode);
  simplify_help(*scale);
  simplify_help(*calibrate);
  simplify_help(*plan);
  simplify_help(*reshard);
  try {
    refuse_empty_values(argc, argv);
    app.parse(argc, argv);
    if (*run) {
      read_rule("--shard", line.run.shard, line.run.layout, line.run.block);
      read_check(line.run, check);
      check_backward(line.run);
    }
    if (*decode) read_growing_rule(line.decode);
    if (*plan) read_rule("--shard", line.plan.shard, line.plan.layout, line.plan.block);
    if (*scale) read_rule("--shard", line.scale.shard, line.scale.layout, line.scale.block);
    if (*reshard) read_rules(line.reshard);
  } catch (const CLI::CallForHelp&) {
    line.text = app.help();
    return line;
  } catch (const CLI::CallForVersion&) {
    line.text = "longspan " LONGSPAN_VERSION "\n";
    return line;
  } catch (const CLI::ParseError& error) {
    const std::string command = name_of_command(app);
    line.error = fmt::format("{} (see longspan {}--help)", what_is_wrong(app, error, argc, argv),
                             command.empty() ? "" : command + " ");
    return line;
  }

  if (quick) line.verify.size = VerifyOptions::Size::quick;
  if (full) line.verify.size = VerifyOptions::Size::full;
  for (const auto& [command, action, name] :
       {std::tuple{run, list_strategies ? Action::list_strategies : Action::run, "run"},
        std::tuple{verify, Action::verify, "verify"},
        std::tuple{decode, Action::bench_decode, "bench decode"},
        std::tuple{scale, Action::bench_scale, "bench scale"},
        std::tuple{calibrate, Action::calibrate, "calibrate"},
        std::tuple{plan, Action::plan, "plan"}, std::tuple{reshard, Action::reshard, "reshard"},
        std::tuple{info, Action::info, "info"}, std::tuple{env, Action::env, "env"}}) {
    if (!*command) continue;
    line.action = action;
    line.command = name;
    line.given = values_of(*command);
  }
  if (line.action == Action::say) line.text = app.help();
  return line;
}

}  // namespace longspan::launcher

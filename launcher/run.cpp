#include "launcher/run.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "launcher/demand.hpp"
#include "launcher/elements.hpp"
#include "launcher/explain.hpp"
#include "launcher/judge.hpp"
#include "launcher/npy.hpp"
#include "launcher/output_file.hpp"
#include "launcher/problem.hpp"
#include "launcher/report.hpp"
#include "launcher/speech.hpp"
#include "launcher/world.hpp"

namespace longspan::launcher {
namespace {

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

void take_files(Problem& problem, const RunOptions& o) {
  problem.q = from_file(NpyFile(o.q, o.dtype), "--q");
  problem.k = from_file(NpyFile(o.k, o.dtype), "--k");
  problem.v = from_file(NpyFile(o.v, o.dtype), "--v");
  const Source &q = problem.q, &k = problem.k, &v = problem.v;
  for (const Source* other : {&k, &v})
    require(other->dtype == q.dtype, "{} is {}, but {} is {}; the types must be equal", q.label,
            name(q.dtype), other->label, name(other->dtype));
  require(k.rows == v.rows && k.heads == v.heads,
          "{} and {}: keys and values must have one shape but for the last number", k.label,
          v.label);
  require(q.dim == k.dim, "{} and {}: queries and keys must have one dim (the last number)",
          q.label, k.label);
  require(q.heads % k.heads == 0,
          "{} and {}: the {} heads of the queries are not a multiple of the {} kv heads", q.label,
          k.label, q.heads, k.heads);
  require(std::max(q.rows, k.rows) <= 2147483647, "{} and {}: at most 2^31 - 1 rows are supported",
          q.label, k.label);
  problem.q_lens = {static_cast<std::int32_t>(q.rows)};
  problem.kv_lens = {static_cast<std::int32_t>(k.rows)};
}

void make_inputs(Problem& problem, const RunOptions& o, std::uint64_t seed) {
  const DType dtype = o.dtype.empty() ? fp32 : dtype_named(o.dtype);
  const int kv_heads = o.kv_heads > 0 ? o.kv_heads : o.heads;
  require(o.lengths.size() > 0 || o.tokens <= 2147483647 / o.batch,
          "{} sequences of {} query rows; at most 2^31 - 1 rows are supported", o.batch, o.tokens);
  require_memory_for_batch(o.batch);
  if (o.lengths.empty()) {
    problem.q_lens.assign(o.batch, static_cast<std::int32_t>(o.tokens));
    problem.kv_lens.assign(o.batch, static_cast<std::int32_t>(o.kv));
  } else {
    problem.q_lens.assign(o.lengths.begin(), o.lengths.end());
    problem.kv_lens = problem.q_lens;
  }
  const std::int64_t tokens = problem.tokens(), keys = problem.key_start().back();
  require(tokens <= 2147483647, "{} query rows in the batch; at most 2^31 - 1 are supported",
          tokens);
  problem.q = generated(seed, 0, dtype, tokens, o.heads, o.dim);
  problem.k = generated(seed, 1, dtype, keys, kv_heads, o.dim);
  problem.v = generated(seed, 2, dtype, keys, kv_heads, o.value_dim > 0 ? o.value_dim : o.dim);
}

/// Gives the slopes as published for a power of two of heads (Press et al., arXiv 2108.12409).
std::vector<float> published_slopes(int heads) {
  std::vector<float> slopes;
  slopes.reserve(static_cast<std::size_t>(heads));
  for (int h = 0; h < heads; ++h)
    slopes.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(heads)));
  return slopes;
}

void take_sinks(Problem& problem, const RunOptions& o) {
  const NpyFile file(o.sinks, "fp32");
  require(file.shape() == std::vector<std::int64_t>{problem.q.heads},
          "{} (--sinks) has shape {}; [{}] was expected, one sink for each head of the queries",
          o.sinks, file.shape_text(), problem.q.heads);
  problem.sinks.resize(problem.q.heads);
  file.read(0, problem.sinks.size() * sizeof(float), problem.sinks.data());
}

/// Stores the inputs as fp8 holds them, which is what the oracle sees too.
void store_as(Problem& problem, DType dtype) {
  for (Source* source : {&problem.q, &problem.k, &problem.v})
    *source = quantised(*source, dtype, {1.0f});
  problem.q_scale = problem.k_scale = problem.v_scale = {1.0f};
  problem.options.dtypes.query = problem.options.dtypes.kv = dtype;
}

Problem make_problem(const RunOptions& o, const WorldOptions& world) {
  Problem problem;
  o.q.empty() ? make_inputs(problem, o, world.seed) : take_files(problem, o);
  if (!o.sinks.empty()) take_sinks(problem, o);
  if (!o.alibi.empty()) problem.slopes = published_slopes(problem.q.heads);
  problem.keys = {.layout = o.layout, .block = o.block};
  if (o.shard_queries) problem.queries = problem.keys;
  problem.options = {
      .heads = problem.q.heads,
      .kv_heads = problem.k.heads,
      .head_dim = problem.q.dim,
      .value_dim = problem.v.dim,
      .dtypes = {.compute = problem.q.dtype, .fp8_products = o.fp8_products},
      .mask = o.mask,
      .score = {.scale = o.scale,
                .softcap = o.softcap,
                .alibi = o.alibi == name(Alibi::query) ? Alibi::query : Alibi::context},
      .invariant = o.invariant,
      .strategy = o.strategy,
      .exchange = world.exchange,
      .threads = world.threads,
      .debug = {.profile = true}};
  if (!o.qkv_dtype.empty()) store_as(problem, dtype_named(o.qkv_dtype));
  return problem;
}

/// Refuses names that stand for one file. Two outputs in one file would leave one of them, and an
/// output in the place of an input would destroy what it was made from. Names are compared by what
/// they stand for, as links lead to the same file.
void refuse_equal_files(const RunOptions& o) {
  std::vector<std::tuple<const char*, std::string, std::string>> seen;  // option, name, file
  const auto add = [&](const char* option, const std::string& path, bool output) {
    const std::string file = path.empty() ? std::string() : identity(path);
    if (file.empty()) return;
    for (const auto& [other_option, other_path, other] : seen)
      if (output && other == file)
        throw UsageError(fmt::format("{} {} and {} {} are the same file; name another",
                                     other_option, other_path, option, path));
    seen.emplace_back(option, path, file);
  };
  add("--q", o.q, false);
  add("--k", o.k, false);
  add("--v", o.v, false);
  add("--sinks", o.sinks, false);
  add("--out", o.out, true);
  add("--lse", o.lse, true);
  add("--json", o.json, true);
}

/// Predicts the run by every strategy, and puts the one that "auto" stands for in its place. It is
/// collective.
std::vector<Forecast> settle_strategy(const Communicator& world, Problem& problem) {
  const Options options = problem.layer_options(world.size());
  const Machine machine = shared_machine(world);
  problem.options.strategy = choose_strategy(options, world.size(), machine).name;
  return forecast(options, {.ranks = world.size()}, problem.run_size(world.size()), machine);
}

/// The files that rank 0 writes; none on other ranks.
struct Outputs {
  std::optional<OutputFile> out, lse, json;

  bool take_standard_output() const {
    return (out && out->is_standard_output()) || (lse && lse->is_standard_output()) ||
           (json && json->is_standard_output());
  }

  Outputs(const RunOptions& o, int rank) {
    if (rank != 0) return;
    refuse_equal_files(o);
    const auto prepare = [](std::optional<OutputFile>& file, const std::string& path) {
      if (!path.empty()) file.emplace(path);
    };
    prepare(out, o.out);
    prepare(lse, o.lse);
    prepare(json, o.json);
  }
};

std::vector<Sample> time_runs(const Communicator& world, Trial& trial, const RunOptions& o) {
  for (int i = 0; i < o.warmup; ++i) trial.run();
  world.barrier("start of the timed runs");
  std::vector<Sample> samples;
  for (int i = 0; i < o.iterations; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    trial.run();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    // On a GPU the marks on the stream leave out the host's part of launching and waiting.
    const Phases phases = trial.layer().phases();
    const bool gpu = world.device() == Device::cuda;
    samples.push_back({gpu ? phases.total() : elapsed.count(), phases});
  }
  return samples;
}

/// Writes the whole result on rank 0, gathered piece by piece where it is sharded.
void write_arrays(const Communicator& world, const Problem& problem, const Answer& answer,
                  const RunOptions& o, Outputs& outputs) {
  if (o.out.empty() && o.lse.empty()) return;
  const std::int64_t tokens = problem.tokens();
  const std::int64_t shape[] = {tokens, problem.q.heads, problem.value_dim()};
  const auto header = [](std::optional<OutputFile>& file, const std::string& text) {
    if (file) file->write(text.data(), text.size());
  };
  together(world, "writing of the result", [&] {
    header(outputs.out, npy_header(problem.out_dtype(), shape));
    header(outputs.lse, npy_header(DType::fp32, std::span(shape, 2)));
  });
  const std::int64_t piece = std::max<std::int64_t>(
      1, (std::int64_t{64} << 20) / static_cast<std::int64_t>(problem.out_row_bytes()));
  for (std::int64_t first = 0; first < tokens; first += piece) {
    std::vector<std::int64_t> rows(std::min(piece, tokens - first));
    std::iota(rows.begin(), rows.end(), first);
    const Answer part = gather_rows(world, problem, answer, rows);
    together(world, "writing of the result", [&] {
      if (outputs.out) outputs.out->write(part.out.data(), part.out.size());
      if (outputs.lse) outputs.lse->write(part.lse.data(), part.lse.size() * sizeof(float));
    });
  }
}

}  // namespace

int run(const Communicator& control, const CommandLine& line) {
  const RunOptions& o = line.run;
  const int rank = control.rank();
  std::optional<Problem> problem;
  std::optional<Outputs> outputs;
  together(control, "reading of the inputs", [&] { problem = make_problem(o, line.world); });
  together(control, "opening of the outputs", [&] { outputs.emplace(o, rank); });

  // Where --out /dev/stdout writes to standard output, nothing else goes there.
  std::FILE* const table = outputs->take_standard_output() ? stderr : stdout;

  const Communicator world = world_for(control, line.world);
  const std::vector<Forecast> forecasts = settle_strategy(world, *problem);
  Demand demand;
  together(world, "count of the memory", [&] { demand = demand_of(world, *problem, o.check); });
  require_memory(world, demand);
  std::optional<Trial> trial;
  together(world, "making of the layer", [&] { trial.emplace(world, *problem); });
  Report report = describe(world, *problem, o, trial->layer());
  if (rank == 0 && o.explain) say(explanation(forecasts, problem->options.strategy), table);
  if (rank == 0) say(header(report), table);
  measure(world, *problem, time_runs(world, *trial, o), report);

  const Answer answer = trial->answer();
  const std::uint64_t bits = digest(world, *problem, answer);
  if (o.digest) report.digest = bits;
  if (o.check != 0)
    report.judgement =
        judge(world, *problem, answer, sample_rows(*problem, o.check, line.world.seed));
  if (rank == 0) say(row(report), table);
  const bool wrong = report.judgement && !report.judgement->right;
  if (wrong && !o.write_anyway)
    throw SharedError(ErrorKind::wrong_result,
                      fmt::format("{}; nothing was written (--write-anyway does, --check off does "
                                  "not look)",
                                  complaint(*report.judgement)));

  write_arrays(world, *problem, answer, o, *outputs);
  together(world, "writing of the outputs", [&] {
    if (outputs->json) {
      const std::string text = to_json(report).dump(2) + "\n";
      outputs->json->write(text.data(), text.size());
    }
    for (auto* file : {&outputs->out, &outputs->lse, &outputs->json})
      if (*file) (*file)->commit();
  });
  if (wrong)
    throw SharedError(
        ErrorKind::wrong_result,
        fmt::format("{}; it was written, as --write-anyway asks", complaint(*report.judgement)));
  return 0;
}

}  // namespace longspan::launcher

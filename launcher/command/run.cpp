#include "launcher/command/run.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "launcher/bench/timed_run.hpp"
#include "launcher/io/npy.hpp"
#include "launcher/io/output_file.hpp"
#include "launcher/io/progress.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/judge/judge.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/plan/explain.hpp"
#include "launcher/problem/demand.hpp"
#include "launcher/problem/make_problem.hpp"
#include "launcher/problem/problem.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

/// The files that rank 0 writes; none on other ranks.
struct Outputs {
  std::optional<OutputFile> out, lse, json;

  bool take_standard_output() const {
    return (out && out->is_standard_output()) || (lse && lse->is_standard_output()) ||
           (json && json->is_standard_output());
  }

  Outputs(const RunOptions& o, int rank) {
    if (rank != 0) return;
    refuse_equal_files(std::array<NamedFile, 7>{{{"--q", o.q, false},
                                                 {"--k", o.k, false},
                                                 {"--v", o.v, false},
                                                 {"--sinks", o.sinks, false},
                                                 {"--out", o.out},
                                                 {"--lse", o.lse},
                                                 {"--json", o.json}}});
    const auto prepare = [](std::optional<OutputFile>& file, const std::string& path) {
      if (!path.empty()) file.emplace(path);
    };
    prepare(out, o.out);
    prepare(lse, o.lse);
    prepare(json, o.json);
  }
};

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

/// The problem and its predicted cost: a line before anything that may take long.
std::string outlook(const Problem& problem, const RunOptions& o,
                    const std::vector<Forecast>& forecasts, const Demand& demand) {
  std::int64_t keys = 0;
  for (const std::int64_t kv_len : problem.kv_lens) keys += kv_len;
  double seconds = 0;
  for (const Forecast& f : forecasts)
    if (problem.options.strategy == f.strategy->name) seconds = f.seconds();
  const bool gpu = !demand.device.empty();
  const int runs = o.warmup + o.iterations;
  return fmt::format("# to do: {} query rows, {} keys, {} heads | {} on a {} | {} run{}{}\n",
                     problem.tokens(), keys, problem.q.heads,
                     size_text(static_cast<std::size_t>(total(gpu ? demand.device : demand.host))),
                     gpu ? "GPU" : "rank", runs, runs == 1 ? "" : "s",
                     seconds > 0 ? fmt::format(", predicted {} each", time_text(seconds)) : "");
}

}  // namespace

int run(const Communicator& control, const CommandLine& line) {
  const RunOptions& o = line.run;
  const int rank = control.rank();
  std::optional<Problem> problem;
  std::optional<Outputs> outputs;
  together(control, "reading of the inputs", [&] { problem = make_problem(o, line.world); });
  together(control, "opening of the outputs", [&] { outputs.emplace(o, rank); });

  // With --out /dev/stdout, nothing else is printed on standard output.
  std::FILE* const table = outputs->take_standard_output() ? stderr : stdout;

  const Communicator world = world_for(control, line.world);
  const Prediction predicted = settle_strategy(world, *problem);
  Demand demand;
  together(world, "count of the memory", [&] { demand = demand_of(world, *problem, o.check); });
  require_memory(world, demand);
  tell(
      world,
      [&] {
        return title(world) + outlook(*problem, o, predicted.forecasts, demand) +
               constants_line(predicted.machine);
      },
      table);
  Progress progress(rank == 0);
  progress.print("making the arrays");
  std::optional<Trial> trial;
  together(world, "making of the layer", [&] { trial.emplace(world, *problem); });
  Report report = describe(world, *problem, o, trial->layer());
  report.machine = predicted.machine;
  progress.clear();
  tell(
      world,
      [&] {
        return (o.explain ? explanation(predicted.forecasts, problem->options, world.size()) : "") +
               header(report);
      },
      table);
  measure(world, *problem, time_runs(world, *trial, o.warmup, o.iterations, &progress), report);

  const Answer answer = trial->answer();
  const std::uint64_t bits = digest(world, *problem, answer);
  if (o.digest) report.digest = bits;
  if (o.check != 0) progress.print("comparing with float64");
  if (o.check != 0)
    report.judgement =
        judge(world, *problem, answer, sample_rows(*problem, o.check, line.world.seed));
  progress.clear();
  tell(
      world, [&] { return row(report); }, table);
  const bool wrong = report.judgement && !report.judgement->right;
  if (wrong && !o.write_anyway)
    throw SharedError(ErrorKind::wrong_result,
                      fmt::format("{}; nothing was written (--write-anyway writes it all the same, "
                                  "--check off leaves the comparison out)",
                                  complaint(*report.judgement)));

  write_arrays(world, *problem, answer, o, *outputs);
  together(world, "writing of the outputs", [&] {
    if (outputs->json) {
      const std::string text = json_text(to_json(report));
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

#include "launcher/command/run.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
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
  std::optional<OutputFile> out, lse, dq, dk, dv, dsinks, json;

  std::array<std::optional<OutputFile>*, 7> all() {
    return {&out, &lse, &dq, &dk, &dv, &dsinks, &json};
  }
  bool take_standard_output() {
    for (const auto* file : all())
      if (*file && (*file)->is_standard_output()) return true;
    return false;
  }

  Outputs(const RunOptions& o, int rank) {
    if (rank != 0) return;
    const std::array<NamedFile, 13> files{{{"--q", o.q, false},
                                           {"--k", o.k, false},
                                           {"--v", o.v, false},
                                           {"--sinks", o.sinks, false},
                                           {"--dout", o.dout, false},
                                           {"--dlse", o.dlse, false},
                                           {"--out", o.out},
                                           {"--lse", o.lse},
                                           {"--dq", o.dq},
                                           {"--dk", o.dk},
                                           {"--dv", o.dv},
                                           {"--dsinks", o.dsinks},
                                           {"--json", o.json}}};
    refuse_equal_files(files);
    auto path = files.end() - std::ssize(all());
    for (std::optional<OutputFile>* file : all()) {
      if (!path->path.empty()) file->emplace(path->path);
      ++path;
    }
  }
};

/// A file, and the rows that go into it, which `rows_of` picks from those of an answer.
struct Written {
  std::optional<OutputFile>& file;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::function<std::span<const std::byte>(const Answer&)> rows_of;
};

/// Writes arrays on rank 0, row by row, gathered piece by piece where they are sharded.
void write_rows(const Communicator& world, std::int64_t rows, std::size_t row_bytes,
                std::span<const Written> arrays,
                const std::function<Answer(const std::vector<std::int64_t>&)>& gather) {
  together(world, "writing of the result", [&] {
    for (const Written& array : arrays) {
      const std::string header = npy_header(array.dtype, array.shape);
      if (array.file) array.file->write(header.data(), header.size());
    }
  });
  const std::int64_t piece =
      std::max<std::int64_t>(1, (std::int64_t{64} << 20) / static_cast<std::int64_t>(row_bytes));
  for (std::int64_t first = 0; first < rows; first += piece) {
    std::vector<std::int64_t> numbers(std::min(piece, rows - first));
    std::iota(numbers.begin(), numbers.end(), first);
    const Answer part = gather(numbers);
    together(world, "writing of the result", [&] {
      for (const Written& array : arrays) {
        const std::span<const std::byte> bytes = array.rows_of(part);
        if (array.file) array.file->write(bytes.data(), bytes.size());
      }
    });
  }
}

/// Writes the whole result on rank 0.
void write_arrays(const Communicator& world, const Problem& problem, const Answer& answer,
                  const RunOptions& o, Outputs& outputs) {
  using Bytes = std::span<const std::byte>;
  const std::int64_t tokens = problem.tokens(), keys = problem.key_start().back();
  const std::int64_t heads = problem.q.heads, kv_heads = problem.k.heads;
  const RowBytes bytes(problem);
  const DType gradient = problem.gradient_dtype();
  std::vector<Written> of_rows{{outputs.out,
                                problem.out_dtype(),
                                {tokens, heads, problem.value_dim()},
                                [](const Answer& a) { return Bytes(a.out); }},
                               {outputs.lse, DType::fp32, {tokens, heads}, [](const Answer& a) {
                                  return std::as_bytes(std::span(a.lse));
                                }}};
  if (problem.goes_back())
    of_rows.push_back({outputs.dq, gradient, {tokens, heads, problem.q.dim}, [](const Answer& a) {
                         return Bytes(a.dq);
                       }});
  if (!o.out.empty() || !o.lse.empty() || !o.dq.empty())
    write_rows(world, tokens, std::max(bytes.out, bytes.dq), of_rows,
               [&](const auto& rows) { return gather_rows(world, problem, answer, rows); });
  const Written of_keys[] = {
      {outputs.dk,
       gradient,
       {keys, kv_heads, problem.k.dim},
       [](const Answer& a) { return Bytes(a.dk); }},
      {outputs.dv, gradient, {keys, kv_heads, problem.v.dim}, [](const Answer& a) {
         return Bytes(a.dv);
       }}};
  if (!o.dk.empty() || !o.dv.empty())
    write_rows(world, keys, std::max(bytes.dk, bytes.dv), of_keys, [&](const auto& numbers) {
      return gather_rows(world, problem, answer, {}, numbers);
    });
  const Written of_sinks[] = {{outputs.dsinks, DType::fp32, {heads}, [](const Answer& a) {
                                 return std::as_bytes(std::span(a.dsinks));
                               }}};
  if (!o.dsinks.empty())
    write_rows(world, 1, heads * sizeof(float), of_sinks,
               [&](const auto&) { return gather_rows(world, problem, answer, {}); });
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
        judge(world, *problem, answer, sample_rows(*problem, o.check, line.world.seed),
              sample_keys(*problem, o.check, line.world.seed));
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
    for (auto* file : outputs->all())
      if (*file) (*file)->commit();
  });
  if (wrong)
    throw SharedError(
        ErrorKind::wrong_result,
        fmt::format("{}; it was written, as --write-anyway asks", complaint(*report.judgement)));
  return 0;
}

}  // namespace longspan::launcher

#include "launcher/bench/scale_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>

#include "launcher/bench/peak_memory.hpp"
#include "launcher/bench/scale_report.hpp"
#include "launcher/bench/timed_run.hpp"
#include "launcher/io/output_file.hpp"
#include "launcher/io/progress.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/problem/demand.hpp"
#include "launcher/problem/make_problem.hpp"
#include "launcher/problem/shapes.hpp"
#include "launcher/problem/world.hpp"
#include "longspan/info.hpp"

namespace longspan::launcher {
namespace {

/// One problem of the grid.
struct Case {
  std::string phase;
  std::int64_t kv = 0;  // in weak scaling for each rank
};

/// Whether a phase has as many query rows as keys.
bool has_all_rows(const std::string& phase) { return phase == "prefill" || phase == "train"; }

std::vector<Case> cases_of(const ScaleOptions& o, bool gpu) {
  std::vector<Case> cases;
  for (const std::string& phase : o.phases) {
    std::vector<std::int64_t> lengths = o.kv;
    if (lengths.empty())
      lengths = has_all_rows(phase) ? (gpu ? std::vector<std::int64_t>{8192, 32768, 131072}
                                           : std::vector<std::int64_t>{1024, 4096})
                                    : (gpu ? std::vector<std::int64_t>{32768, 131072, 524288}
                                           : std::vector<std::int64_t>{8192, 32768});
    for (const std::int64_t kv : lengths) cases.push_back({phase, kv});
  }
  return cases;
}

/// 1, 2, 4 ... and all, or the numbers that were asked for.
std::vector<int> ranks_of(const ScaleOptions& o, int all) {
  std::vector<int> ranks = o.ranks;
  if (ranks.empty()) {
    for (int n = 1; n < all; n *= 2) ranks.push_back(n);
    ranks.push_back(all);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.back() > all)
    throw UsageError(fmt::format("--ranks {}: only {} ranks were started", ranks.back(), all));
  return ranks;
}

class ScaleBench {
 public:
  /// Progress in `problems` problems: each is one of the grid on one number of ranks.
  ScaleBench(const Communicator& world, const CommandLine& line, ScaleReport& report,
             std::size_t problems)
      : world_(world),
        line_(line),
        o_(line.scale),
        report_(report),
        total_(problems * strategies().size()) {}

  /// Measures a problem on the first `n` ranks by every strategy. Collective over all.
  void measure(const Case& c, int n, Progress& progress, std::FILE* table) {
    const auto part = world_.split(world_.rank() < n ? 0 : -1);
    const RunOptions options = options_of(c, n);
    std::optional<Problem> problem;
    std::vector<Forecast> forecasts;
    std::vector<ScaleRow> rows;
    const std::size_t count = n == 1 ? 1 : strategies().size();  // alone all strategies do the same
    const auto is_measured = [&](std::size_t i) {
      return n == 1 || is_asked_for(strategies()[i], n);
    };
    together(world_, "making of a problem", [&] {
      if (!part) return;
      problem = make_problem(options, line_.world);
      forecasts = settle_strategy(*part, *problem).forecasts;
      for (std::size_t i = 0; i < count; ++i)
        if (is_measured(i) && forecasts[i].refusal.empty())
          require_memory(*part, demand_by(*part, *problem, strategies()[i].name));
    });
    std::optional<Trial> trial;  // one for all strategies, which differ in its layer
    PeakMemory memory;
    std::vector<Answer> answers;
    std::vector<std::size_t> row_of_answer;
    for (std::size_t i = 0; i < count; ++i) {
      const char* strategy = strategies()[i].name;
      if (!is_measured(i)) continue;
      progress.print(fmt::format("[{}/{}] {} of {} keys on {} ranks by {}", ++measured_, total_,
                                 c.phase, options.kv, n, strategy));
      together(world_, "measurement", [&] {
        if (!part) return;
        rows.push_back(measure(*part, c, options, *problem, forecasts[i], trial, memory));
        if (o_.check == 0 || !rows.back().no.empty()) return;
        if (problem->goes_back()) {  // a judgement of gradients needs all of the answer
          rows.back().check = judge(*part, *problem, trial->answer(), checked_rows(*problem),
                                    sample_keys(*problem, o_.check, line_.world.seed));
          return;
        }
        answers.push_back(gather_rows(*part, *problem, trial->answer(), checked_rows(*problem)));
        row_of_answer.push_back(rows.size() - 1);
      });
    }
    trial.reset();
    together(world_, "comparison with float64", [&] {
      if (answers.empty()) return;
      const auto judged = judge_gathered(*part, *problem, answers, checked_rows(*problem));
      for (std::size_t a = 0; a < judged.size(); ++a) rows[row_of_answer[a]].check = judged[a];
    });
    mark_fastest(rows);
    progress.clear();
    for (ScaleRow& r : rows) compare_with_one_rank(r);
    tell(
        world_,
        [&] {
          std::string text;
          for (const ScaleRow& r : rows) text += row(r);
          return text;
        },
        table);
    report_.rows.insert(report_.rows.end(), rows.begin(), rows.end());
    together(world_, "check of the results", [&] {
      for (const ScaleRow& r : rows)
        if (r.check && !r.check->right)
          throw Error(ErrorKind::wrong_result,
                      fmt::format("{} by {} on {} ranks: {}; nothing was written", r.phase,
                                  r.strategy, r.ranks, complaint(*r.check)));
    });
  }

 private:
  /// On one node, strategies of two levels run only if named.
  bool is_asked_for(const StrategyInfo& strategy, int ranks) const {
    if (o_.strategies.empty()) {
      const int per_node = o_.ranks_per_node;
      return strategy.is_for_nodes_of(per_node > 0 ? per_node : world_.ranks_per_node(), ranks);
    }
    return std::find(o_.strategies.begin(), o_.strategies.end(), strategy.name) !=
           o_.strategies.end();
  }

  RunOptions options_of(const Case& c, int n) const {
    RunOptions options = run_options(o_.shape, world_.device());
    options.kv = o_.weak ? c.kv * n : c.kv;
    options.tokens = has_all_rows(c.phase) ? options.kv
                     : c.phase == "chunk"  ? std::min(o_.chunk, options.kv)
                                           : 1;
    options.batch = o_.batch;
    options.mask.causal = true;
    options.shard = o_.shard;
    options.layout = o_.layout;
    options.block = o_.block;
    options.ranks_per_node = o_.ranks_per_node;
    options.shard_queries = has_all_rows(c.phase) && n > 1;
    options.backward = c.phase == "train";
    options.iterations = o_.iterations;
    options.warmup = o_.warmup;
    return options;
  }

  Demand demand_by(const Communicator& part, Problem problem, const std::string& strategy) const {
    problem.options.strategy = strategy;
    return demand_of(part, problem, o_.check);
  }

  std::vector<std::int64_t> checked_rows(const Problem& problem) const {
    return sample_rows(problem, o_.check, line_.world.seed);
  }

  /// Makes the trial where it is missing, or else gives it a layer of the strategy.
  ScaleRow measure(const Communicator& part, const Case& c, const RunOptions& options,
                   const Problem& settled, const Forecast& f, std::optional<Trial>& trial,
                   PeakMemory& memory) const {
    ScaleRow r{.phase = c.phase,
               .strategy = f.strategy->name,
               .no = f.refusal,
               .not_by_auto = f.reservation,
               .ranks = part.size(),
               .kv = options.kv,
               .tokens = options.tokens,
               .chosen = settled.options.strategy == f.strategy->name};
    if (!r.no.empty()) return r;
    Problem problem = settled;
    problem.options.strategy = r.strategy;
    std::uint64_t before = 0;
    memory.restart();
    try {
      if (trial)
        trial->take_strategy(r.strategy);
      else
        trial.emplace(part, settled, r.strategy);
      before = part.received_bytes();
      trial->run();
    } catch (const Unsupported& error) {  // all ranks refuse alike
      r.no = error.what();
      return r;
    }
    const auto counted = static_cast<double>(part.received_bytes() - before);
    r.counted_bytes = largest(part, {counted}, "gather of bytes")[0];
    Report report = describe(part, problem, options, trial->layer());
    launcher::measure(part, problem,
                      o_.graph ? time_graph(part, *trial, o_.warmup, o_.iterations)
                               : time_runs(part, *trial, o_.warmup, o_.iterations),
                      report);
    r.time = report.time;
    if (problem.goes_back()) {
      for (std::size_t i = 0; i < report.times.size(); ++i)
        report.times[i] += report.backward_times[i];
      r.forward = report.time;
      r.backward = report.backward;
      r.time = spread_of(report.times);
    }
    const std::optional<double> grown = memory.grown();
    if (world_.device() == Device::host && grown)
      r.peak_bytes = largest(part, {*grown}, "gather of memory")[0];
    r.predicted = f.seconds() * 1e3;
    r.balance = f.balance;
    r.attend = report.attend;
    r.exchange = report.exchange;
    r.merge = report.merge;
    r.received_bytes = f.cost.received_bytes + f.cost.backward.received_bytes;
    r.workspace_bytes = report.workspace_bytes;
    r.peer_bytes = report.peer_bytes;
    return r;
  }

  static void mark_fastest(std::vector<ScaleRow>& rows) {
    ScaleRow* best = nullptr;
    for (ScaleRow& r : rows)
      if (r.no.empty() && (!best || r.time.median < best->time.median)) best = &r;
    if (best) best->fastest = true;
  }

  /// Speed-up over ranks: in weak scaling of prefill the work of a rank grows with the ranks.
  void compare_with_one_rank(ScaleRow& r) const {
    if (!r.no.empty()) return;
    for (const ScaleRow& one : report_.rows) {
      if (one.ranks != 1 || one.phase != r.phase || !one.no.empty()) continue;
      if (one.kv * (o_.weak ? r.ranks : 1) != r.kv) continue;
      const auto work = [](const ScaleRow& row) {
        const double rows = static_cast<double>(row.tokens), keys = static_cast<double>(row.kv);
        return rows * (keys - (rows - 1) / 2);  // the visible pairs under a causal mask
      };
      r.efficiency = one.time.median * work(r) / work(one) / r.time.median / r.ranks;
    }
    if (r.ranks == 1) r.efficiency = 1;
  }

  Communicator world_;
  const CommandLine& line_;
  const ScaleOptions& o_;
  ScaleReport& report_;
  std::size_t total_, measured_ = 0;  // problems to measure, and those measured
};

}  // namespace

int bench_scale(const Communicator& control, const CommandLine& line) {
  const ScaleOptions& o = line.scale;
  std::optional<OutputFile> json, csv;
  std::vector<int> counts;
  together(control, "opening of the outputs", [&] {
    counts = ranks_of(o, control.size());
    if (control.rank() != 0) return;
    refuse_equal_files(std::array<NamedFile, 2>{{{"--json", o.json}, {"--csv", o.csv}}});
    if (!o.json.empty()) json.emplace(o.json);
    if (!o.csv.empty()) csv.emplace(o.csv);
  });
  const Communicator world = world_for(control, line.world);
  const bool gpu = world.device() == Device::cuda;
  if (o.graph && !gpu)
    throw SharedError(ErrorKind::usage, "--graph needs GPUs, and these ranks run on CPUs");
  const bool piped = (json && json->is_standard_output()) || (csv && csv->is_standard_output());
  std::FILE* const table = piped ? stderr : stdout;

  ScaleReport report{.backend = name(world.device()),
                     .world = world.describe(),
                     .threads = host_threads(world, line.world.threads),
                     .shape = run_options(o.shape, world.device()),
                     .shard = o.shard,
                     .weak = o.weak,
                     .graph = o.graph,
                     .seed = line.world.seed};
  report.shape.batch = o.batch;
  report.machine = constants_of(world);
  tell(
      world, [&] { return title(world) + constants_line(report.machine) + header(report); }, table);
  const std::vector<Case> cases = cases_of(o, gpu);
  ScaleBench bench(world, line, report, cases.size() * counts.size());
  Progress progress(world.rank() == 0);
  for (const Case& c : cases)
    for (const int n : counts) bench.measure(c, n, progress, table);
  tell(
      world, [&] { return summary(report); }, table);
  together(world, "writing of the outputs", [&] {
    const auto write = [](std::optional<OutputFile>& file, const std::string& text) {
      if (file) file->write(text.data(), text.size());
    };
    write(json, json_text(to_json(report)));
    write(csv, to_csv(report));
    for (auto* file : {&json, &csv})
      if (*file) (*file)->commit();
  });
  return 0;
}

}  // namespace longspan::launcher

#include "launcher/bench/decode_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>

#include "launcher/bench/decode_report.hpp"
#include "launcher/bench/decode_step.hpp"
#include "launcher/bench/timed_run.hpp"
#include "launcher/io/output_file.hpp"
#include "launcher/io/progress.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/problem/demand.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/world.hpp"
#include "longspan/info.hpp"

namespace longspan::launcher {
namespace {

struct Settings {
  DecodeOptions options;
  WorldOptions world;
  int threads = 1;
  double memory = 0;                      // bytes for caches, of a GPU or of the host
  std::chrono::milliseconds deadline{0};  // of the ranks, which may be waiting for one of them

  /// The steps of a run. One step runs before the capture and is checked.
  std::int64_t steps() const { return std::int64_t{1} + options.warmup + options.iterations; }
};

DecodeShape shape_of(const Settings& s, std::int64_t kv) {
  const DecodeOptions& o = s.options;
  DecodeShape shape{.options = {.heads = o.heads,
                                .kv_heads = o.kv_heads,
                                .head_dim = o.dim,
                                .dtypes = {.compute = dtype_named(o.dtype)},
                                .invariant = o.invariant,
                                .exchange = s.world.exchange,
                                .threads = s.threads},
                    .batch = o.batch,
                    .tokens = o.tokens,
                    .layers = o.layers,
                    .page = o.page,
                    .layout = o.layout,
                    .block = o.block,
                    .kv_len = kv,
                    .steps = s.steps(),
                    .seed = s.world.seed};
  if (!o.kv_dtype.empty()) shape.options.dtypes.kv = dtype_named(o.kv_dtype);
  return shape;
}

void check_lengths(const Settings& s, int ranks) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t kv : s.options.kv) {
    const std::int64_t last = kv * (s.options.weak ? ranks : 1) + s.steps() * s.options.tokens;
    if (last > kMost)
      throw UsageError(
          fmt::format("--kv {}: a sequence would have {} keys at the end; at most {} are supported",
                      kv, last, kMost));
  }
}

/// The value of --memory; or else, by the rank with the least free memory, most of a GPU, or half
/// of the host up to 4 GiB.
double memory_for_caches(const Communicator& world, const DecodeOptions& o) {
  constexpr double kGiB = 1 << 30;
  if (o.memory_gib > 0) return o.memory_gib * kGiB;
  double least = std::numeric_limits<double>::infinity();
  const std::string mine = fmt::to_string(free_memory(world.device()));
  for (const std::string& free : world.gather(mine, "look at the free memory"))
    least = std::min(least, std::stod(free));
  return world.device() == Device::cuda ? 0.8 * least : std::min(0.5 * least, 4 * kGiB);
}

/// The results of one run, the same on every rank.
struct Timed {
  std::vector<double> times;  // ms; for each step that of the slowest rank
  double append = 0;          // ms; the median, of the slowest rank
  double own = 0;             // the same, with the attention over own keys
  Judgement check;
  std::uint64_t digest = 0;
  std::size_t workspace_bytes = 0;
  std::string exchange_by;
};

/// Runs the warm-up and the timed steps.
std::vector<double> repeat(const Communicator& world, const Settings& s, DecodeStep& step,
                           DecodeStep::Part part, const Pulse& pulse) {
  const auto replays = step.repeat(part);
  return time_replays(world, *replays, s.options.warmup, s.options.iterations,
                      std::min(world.deadline(), s.deadline), [&] {
                        step.wait();
                        pulse();
                      });
}

double median_of_last(std::vector<double> values, int count) {
  values.erase(values.begin(), values.end() - count);
  return median(std::move(values));
}

/// Checks one step, times many, and checks the last of them. With `split` it also measures the
/// parts of the time.
Timed measure(const Communicator& world, const Settings& s, const DecodeShape& shape, bool split,
              const Pulse& pulse) {
  using Part = DecodeStep::Part;
  std::optional<DecodeStep> step;
  together(world, "making of the caches", [&] { step.emplace(world, shape, pulse); });
  Timed t;
  t.workspace_bytes = step->layer().workspace_bytes();
  t.exchange_by = step->layer().exchange().describe();

  step->queue(Part::whole, step->stream());
  step->wait();
  t.check = step->check(1, s.options.check);
  pulse();
  step->restart(1);
  world.barrier("start of the timed steps");
  t.times = largest(world, repeat(world, s, *step, Part::whole, pulse), "gather of times");
  const Judgement last = step->check(s.steps(), s.options.check);
  t.check = worse(t.check, last);
  t.digest = step->bits();
  if (!split) return t;

  std::vector<double> parts;  // of the appends, then with attention over own keys
  if (world.device() == Device::host) {
    const DecodeStep::Spent spent = step->spent();
    parts = {median_of_last(spent.append, s.options.iterations),
             median_of_last(spent.attend, s.options.iterations)};
    parts[1] += parts[0];
  } else {
    for (const Part part : {Part::read, Part::own}) {
      if (part == Part::own && world.size() == 1) break;
      step->restart(0);  // once before the capture, since kernels are loaded at first use
      step->queue(part, step->stream());
      step->wait();
      parts.push_back(median(repeat(world, s, *step, part, pulse)));
    }
    if (parts.size() == 1) parts.push_back(median(t.times));
    parts[0] = std::max(0.0, parts[1] - parts[0]);
  }
  parts = largest(world, parts, "gather of the parts of a step");
  t.append = parts[0];
  t.own = parts[1];
  return t;
}

/// The number of caches that fit, both for the ranks and for one alone, so that they read memory in
/// the same way. Layers that share a cache must not find it in a GPU's L2. Without --memory they
/// share only where a cache, on 4 GPUs, is hundreds of MB on each, which is many times an L2.
int caches_for(const Settings& s, const DecodeShape& ours, const DecodeShape& alone,
               const Communicator& world, bool with_alone, std::string& not_alone) {
  const double share = world.device() == Device::host ? s.memory / world.size() : s.memory;
  const auto fit = [&](double room, double bytes) {
    return static_cast<int>(std::clamp(room / bytes, 0.0, 1.0 * s.options.layers));
  };
  const int own = std::max(1, fit(share, ours.bytes_of_cache(world.size())));
  if (!with_alone) return own;
  const int whole = fit(s.memory, alone.bytes_of_cache(1));
  if (whole > 0) return std::min(own, whole);
  not_alone =
      fmt::format("one cache of all {} keys takes {}, and there is room for {} (--memory)",
                  alone.kv_len, size_text(static_cast<std::size_t>(alone.bytes_of_cache(1))),
                  size_text(static_cast<std::size_t>(s.memory)));
  return own;
}

void refuse_wrong(const std::optional<Judgement>& check, const char* who) {
  if (!check || check->right) return;
  throw Error(ErrorKind::wrong_result,
              fmt::format("{}{}; nothing was written", who, complaint(*check)));
}

/// Measures the step of one rank that has everything, on rank 0 while the others wait. Collective.
Spread time_alone(const Communicator& world, const Settings& s, const DecodeShape& shape) {
  std::vector<double> times;
  on_first_rank(world, "measurement of one rank alone", [&](const Pulse& pulse) {
    const Timed alone = measure(self(world.device()), s, shape, false, pulse);
    refuse_wrong(alone.check, "on one rank alone ");
    times = alone.times;
  });
  const std::string mine = nlohmann::json(times).dump();
  return spread_of(nlohmann::json::parse(world.gather(mine, "time of one rank alone")[0])
                       .get<std::vector<double>>());
}

DecodeRow measure_row(const Communicator& world, const Settings& s, std::int64_t kv,
                      std::string& exchange_by, Progress& progress) {
  const DecodeOptions& o = s.options;
  const int ranks = world.size();
  DecodeShape ours = shape_of(s, o.weak ? kv * ranks : kv), alone = shape_of(s, kv);
  DecodeRow r;
  r.kv = ours.kv_len;
  r.alone_kv = alone.kv_len;
  const bool with_alone = !o.no_alone && ranks > 1;
  r.caches = caches_for(s, ours, alone, world, with_alone, r.not_alone);
  ours.caches = alone.caches = r.caches;
  Demand demand;
  together(world, "count of the memory", [&] { demand = demand_of(world, ours); });
  require_memory(world, demand);
  r.cache_bytes = ours.cache_bytes(ranks);

  progress.print(fmt::format("decode steps over {} keys: {} of caches, {} steps", ours.kv_len,
                             size_text(r.caches * r.cache_bytes), s.steps()));
  const Timed t = measure(world, s, ours, true, [] {});
  exchange_by = t.exchange_by;
  r.workspace_bytes = t.workspace_bytes;
  r.times = t.times;
  r.time = spread_of(t.times);
  r.append = t.append;
  r.attend = std::max(0.0, t.own - t.append);
  r.exchange = std::max(0.0, r.time.median - t.own);
  const std::int64_t middle = ours.length_after(1 + o.warmup + s.options.iterations / 2);
  const double keys = static_cast<double>(o.batch * ours.shard(0, ranks).max_local_len(middle));
  r.bandwidth = 2 * keys * static_cast<double>(ours.row_bytes()) * o.layers / r.time.median / 1e6;
  if (o.check > 0) r.check = t.check;
  r.digest = t.digest;
  if (!with_alone || !r.not_alone.empty() || (r.check && !r.check->right)) return r;

  progress.print(fmt::format("the same over {} keys on rank 0 alone", alone.kv_len));
  r.alone = time_alone(world, s, alone);
  r.efficiency = r.alone->median / r.time.median / (o.weak ? 1 : ranks);
  return r;
}

}  // namespace

int bench_decode(const Communicator& control, const CommandLine& line) {
  Settings s{line.decode, line.world};
  DecodeOptions& o = s.options;
  std::optional<OutputFile> json;
  together(control, "opening of the outputs", [&] {
    if (control.rank() == 0 && !o.json.empty()) json.emplace(o.json);
  });
  const Communicator world = world_for(control, line.world);
  s.deadline = world.deadline();
  const bool gpu = world.device() == Device::cuda;
  if (o.kv.empty()) o.kv = {gpu ? 131072 : 16384};
  if (o.layers == 0) o.layers = gpu ? 32 : 4;
  if (o.iterations == 0) o.iterations = gpu ? 30 : 5;
  s.threads = host_threads(world, line.world.threads);
  together(world, "check of the lengths", [&] { check_lengths(s, world.size()); });
  s.memory = memory_for_caches(world, o);

  // With --json on standard output, nothing else is printed there.
  std::FILE* const table = json && json->is_standard_output() ? stderr : stdout;

  DecodeReport report{.backend = name(world.device()),
                      .world = world.describe(),
                      .ranks = world.size(),
                      .threads = s.threads,
                      .options = o,
                      .seed = line.world.seed};
  report.machine = constants_of(world);
  tell(
      world, [&] { return title(world) + constants_line(report.machine); }, table);
  Progress progress(world.rank() == 0);
  for (const std::int64_t kv : o.kv) {
    report.rows.push_back(measure_row(world, s, kv, report.exchange_by, progress));
    progress.clear();
    tell(
        world,
        [&] {
          return (report.rows.size() == 1 ? header(report) : "") + row(report, report.rows.back());
        },
        table);
    together(world, "check of the results", [&] { refuse_wrong(report.rows.back().check, ""); });
  }
  together(world, "writing of the outputs", [&] {
    if (!json) return;
    const std::string text = json_text(to_json(report));
    json->write(text.data(), text.size());
    json->commit();
  });
  return 0;
}

}  // namespace longspan::launcher

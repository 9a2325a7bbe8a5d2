#include "launcher/plan/calibrate.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <optional>
#include <set>

#include "launcher/bench/timed_run.hpp"
#include "launcher/io/output_file.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/make_problem.hpp"
#include "launcher/problem/shapes.hpp"
#include "launcher/problem/world.hpp"
#include "longspan/machine.hpp"
#include "longspan/storage.hpp"
#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

/// Seconds of one run: the medians of the slowest rank, and of the exchange on the rank that waits
/// least for late ones.
struct Seconds {
  double attend = 0, exchange = 0, merge = 0, total = 0;
};

class Bench {
 public:
  Bench(const Communicator& world, const CommandLine& line)
      : world_(world), line_(line), gpu_(world.device() == Device::cuda) {}

  bool gpu() const { return gpu_; }

  /// The largest ratio of a measurement's median to its least time: 1 on a machine without other
  /// work.
  double spread() const { return spread_; }

  RunOptions options(std::int64_t tokens, std::int64_t kv, const char* strategy) const {
    RunOptions o = run_options(line_.calibrate.shape, world_.device());
    o.tokens = tokens;
    o.kv = kv;
    o.strategy = strategy;
    return o;
  }

  /// Every rank alone, all at the same time.
  Seconds alone(std::int64_t tokens, std::int64_t kv) const {
    return measure(self(world_.device()), options(tokens, kv, "auto"), line_.world);
  }
  Seconds on(const Communicator& ranks, const RunOptions& o) const {
    return measure(ranks, o, line_.world);
  }
  /// The same with all transfers by collectives.
  Seconds by_collectives(const Communicator& ranks, const RunOptions& o) const {
    WorldOptions world = line_.world;
    world.exchange = Exchange::gather;
    return measure(ranks, o, world);
  }
  /// The model's counts for the same.
  RunCost cost_by_collectives(int ranks, const RunOptions& o) const {
    WorldOptions world = line_.world;
    world.exchange = Exchange::gather;
    const Problem problem = make_problem(o, world);
    return cost_of(problem.layer_options(ranks), ranks, problem.run_size(ranks), world_.device());
  }

 private:
  /// Repeats the run for about a second.
  Seconds measure(const Communicator& ranks, const RunOptions& o, const WorldOptions& world) const {
    const Problem problem = make_problem(o, world);
    Trial trial(ranks, problem);
    world_.barrier("start of a measurement");
    const std::vector<Sample> first = time_runs(ranks, trial, 1, 1);
    const double longest = largest(ranks, first[0].time);
    const int runs = static_cast<int>(std::clamp(800 / std::max(longest, 1e-3), 3.0, 200.0));
    std::array<std::vector<double>, 4> times;
    for (const Sample& s : time_runs(ranks, trial, 1, runs)) {
      const double phases[] = {s.phases.attend, s.phases.exchange, s.phases.merge, s.time};
      for (std::size_t i = 0; i < times.size(); ++i) times[i].push_back(phases[i] * 1e-3);
    }
    const Spread total = spread_of(times[3]);
    spread_ = std::max(spread_, largest(world_, total.median / std::max(total.min, 1e-9)));
    return {largest(world_, median(times[0])), -largest(ranks, -median(times[1])),
            largest(world_, median(times[2])), largest(world_, median(times[3]))};
  }

  static double largest(const Communicator& ranks, double mine) {
    return launcher::largest(ranks, {mine}, "gather of times")[0];
  }

  Communicator world_;
  const CommandLine& line_;
  bool gpu_;
  mutable double spread_ = 1;
};

double key_row_bytes(const RunOptions& o) {
  return 2.0 * o.kv_heads * static_cast<double>(storage_of(dtype_named(o.dtype)).row_bytes(o.dim));
}
double state_row_bytes(const RunOptions& o) { return (4.0 * o.dim + 8) * o.heads; }

/// The node of each rank, by number.
std::vector<int> nodes_of(const Communicator& world) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const std::vector<std::string> hosts = world.gather(host.data(), "names of the nodes");
  std::vector<int> nodes;
  nodes.reserve(hosts.size());
  for (const std::string& one : hosts)
    nodes.push_back(static_cast<int>(std::find(hosts.begin(), hosts.end(), one) - hosts.begin()));
  return nodes;
}

/// The constants of a rank by itself.
void measure_attention(const Bench& bench, Machine& m) {
  const std::int64_t rows = bench.gpu() ? 16384 : 2048, keys = bench.gpu() ? 131072 : 32768;
  const RunOptions o = bench.options(1, keys, "auto");
  m.call_s = std::max(1e-7, bench.alone(1, 128).total);
  const double reading = std::max(1e-9, bench.alone(1, keys).total - m.call_s);
  m.key_bytes_per_s = static_cast<double>(keys) * key_row_bytes(o) / reading;
  const double flops =
      4.0 * o.heads * o.dim * static_cast<double>(rows) * static_cast<double>(rows);
  m.flops_per_s = flops / std::max(1e-9, bench.alone(rows, rows).total - m.call_s);
}

/// The latency and the bytes per second of transfers between these ranks.
struct Link {
  double latency = 0, bytes_per_s = 0;
};

Link measure_link(const Bench& bench, const Communicator& ranks, Machine& m) {
  const int n = ranks.size();
  const std::int64_t keys = std::int64_t{128} * n, rows = bench.gpu() ? 8192 : 2048;
  const RunOptions few = bench.options(1, keys, "gather-states");
  const RunOptions many = bench.options(rows, keys, "gather-states");
  Link link;
  link.latency = std::max(1e-8, bench.by_collectives(ranks, few).exchange);
  const Seconds s = bench.on(ranks, many);
  const double states = static_cast<double>(rows) * state_row_bytes(many);
  link.bytes_per_s = (n - 1) * states / std::max(1e-9, s.exchange - link.latency);
  m.merge_bytes_per_s = n * states / std::max(1e-9, s.merge);
  return link;
}

/// The packing of rows: the time of an exchange with much of it beyond its transfers. Measured with
/// gather-kv on GPUs, which orders what collectives bring, and with heads on CPUs, which do not.
void measure_copies(const Bench& bench, const Communicator& ranks, const Link& link, Machine& m) {
  const int n = ranks.size();
  RunOptions o =
      bench.options(1, bench.gpu() ? 131072 : 16384, bench.gpu() ? "gather-kv" : "heads");
  if (!bench.gpu()) o.heads = o.kv_heads = (o.kv_heads + n - 1) / n * n;  // heads deals them evenly
  const RunCost cost = bench.cost_by_collectives(n, o);
  const double bytes = cost.copied_bytes;
  const double copying = bench.by_collectives(ranks, o).exchange - cost.messages * link.latency -
                         cost.received_bytes / link.bytes_per_s;
  m.copy_bytes_per_s = bytes / std::max(copying, bytes / (4 * m.key_bytes_per_s));
}

/// A small transfer through buffers that GPUs write for each other: the time of a ring of few keys
/// beyond its calls. (A transfer of few states from the kernel that makes them takes less.)
void measure_peers(const Bench& bench, const Communicator& ranks, Machine& m) {
  const int n = ranks.size();
  const std::int64_t keys = std::int64_t{256} * n;
  RunOptions o = bench.options(keys, keys, "ring-kv");
  o.shard_queries = true;
  const double waits = bench.on(ranks, o).total - n * m.call_s;
  m.peer_latency_s = std::max(1e-7, waits / (n - 1));
}

/// How much of a transfer hides: how much less a ring takes than its attention and its transfers
/// one after the other.
void measure_overlap(const Bench& bench, const Communicator& ranks, const Link& link, Machine& m) {
  const std::int64_t keys = bench.gpu() ? 32768 : 2048;
  RunOptions o = bench.options(keys, keys, "ring-kv");
  o.shard_queries = true;
  const int n = ranks.size();
  const double attend = 4.0 * o.heads * o.dim * static_cast<double>(keys) *
                        static_cast<double>(keys) / n / m.flops_per_s;
  const double transfer = (n - 1) * m.peer_latency_s + static_cast<double>(keys) *
                                                           key_row_bytes(o) * (n - 1) / n /
                                                           link.bytes_per_s;
  const double hidden = attend + transfer - bench.on(ranks, o).total;
  m.overlap = std::clamp(hidden / std::min(attend, transfer), 0.0, 1.0);
}

Machine measure(const Communicator& world, const Bench& bench) {
  Machine m = built_in_machine(world.device());
  measure_attention(bench, m);
  if (world.size() == 1) return m;
  const std::vector<int> nodes = nodes_of(world);
  const int own = nodes[static_cast<std::size_t>(world.rank())];
  const bool far = std::set<int>(nodes.begin(), nodes.end()).size() > 1;
  const Communicator inside = *world.split(own);
  Link link;
  if (inside.size() > 1) {
    link = measure_link(bench, inside, m);
    m.latency_s = link.latency;
    m.link_bytes_per_s = link.bytes_per_s;
  }
  if (far) {
    const Link whole = measure_link(bench, world, m);
    // A part of what a rank receives comes from its own node, at the rate measured there.
    const double near = static_cast<double>(inside.size() - 1) / (world.size() - 1);
    const double rest = 1 / whole.bytes_per_s - near / m.link_bytes_per_s;
    m.node_latency_s = whole.latency;
    m.node_link_bytes_per_s = (1 - near) / std::max(rest, 1e-3 / whole.bytes_per_s);
    if (inside.size() == 1) link = whole;
  }
  measure_copies(bench, inside.size() > 1 ? inside : world, link, m);
  m.peer_latency_s = link.latency;
  if (inside.size() > 1 && bench.gpu()) measure_peers(bench, inside, m);
  measure_overlap(bench, inside.size() > 1 ? inside : world, link, m);
  return m;
}

std::string remarks(const Communicator& world, const CommandLine& line) {
  const RunOptions o = run_options(line.calibrate.shape, world.device());
  std::string text =
      fmt::format("# longspan {} calibrate | {} | {}\n# {} heads {}/{} dim {}\n", LONGSPAN_VERSION,
                  name(world.device()), world.describe(), o.dtype, o.heads, o.kv_heads, o.dim);
  if (world.size() == 1) text += "# one rank: what is between ranks is built in, not measured\n";
  return text;
}

/// A larger spread comes from other work, or from more ranks than cores.
constexpr double kLargestSpread = 2;

/// When it was measured, and how evenly.
std::string measured_now(double spread) {
  return fmt::format("{:%F}, spread {:.2f}{}", fmt::gmtime(std::time(nullptr)), spread,
                     spread > kLargestSpread ? ": the machine was busy" : "");
}

}  // namespace

int calibrate(const Communicator& control, const CommandLine& line) {
  const Communicator world = world_for(control, line.world);
  std::optional<OutputFile> file;
  std::string path = line.calibrate.out;
  together(control, "opening of the outputs", [&] {
    if (control.rank() != 0) return;
    if (path.empty()) {
      path = machine_file(world.device());
      if (path.empty())
        throw UsageError(
            "neither LONGSPAN_MACHINE nor XDG_CONFIG_HOME nor HOME is set; name a file with --out");
      std::error_code none;  // the file has the error
      std::filesystem::create_directories(std::filesystem::path(path).parent_path(), none);
    }
    file.emplace(path);
  });
  Machine machine;
  const Bench bench(world, line);
  together(world, "measurement", [&] { machine = measure(world, bench); });
  machine.measured = measured_now(bench.spread());
  // Rank 0's figures are the same on all ranks: the slowest rank's.
  const std::string text = remarks(world, line) + to_text(machine);
  together(world, "writing of the outputs", [&] {
    if (!file) return;
    file->write(text.data(), text.size());
    file->commit();
    if (file->is_standard_output()) return;
    print(text + fmt::format("# saved to {}\n", path));
    if (bench.spread() > kLargestSpread)
      print(
          "# the times differ too much to choose by: measure again when the machine is idle, on no "
          "more ranks than it has cores\n");
  });
  return 0;
}

}  // namespace longspan::launcher

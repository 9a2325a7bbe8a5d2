#include "launcher/command/reshard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "launcher/bench/timed_run.hpp"
#include "launcher/io/output_file.hpp"
#include "launcher/io/speech.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/problem/demand.hpp"
#include "launcher/problem/elements.hpp"
#include "launcher/problem/seeded_cache.hpp"
#include "launcher/problem/world.hpp"
#include "longspan/version.hpp"

namespace longspan::launcher {
namespace {

using nlohmann::ordered_json;

CacheRanks ranks_of(const CacheOptions& o, int world, const char* side) {
  const int ranks = o.ranks > 0 ? o.ranks : world - o.first_rank;
  if (ranks < 1 || o.first_rank > world - ranks)
    throw UsageError(fmt::format("--{0}-first {1} and --{0}-ranks {2}: only {3} ranks were started",
                                 side, o.first_rank, o.ranks, world));
  return {.rule = {o.layout, o.block}, .first_rank = o.first_rank, .ranks = ranks};
}

ReshardOptions options_of(const ReshardCommand& o, int world, int threads) {
  ReshardOptions options{.kv_heads = o.kv_heads,
                         .head_dim = o.dim,
                         .value_dim = o.value_dim < 0 ? o.dim : o.value_dim,
                         .dtype = dtype_named(o.dtype),
                         .lengths = o.lengths,
                         .from = ranks_of(o.from, world, "from"),
                         .to = ranks_of(o.to, world, "to"),
                         .threads = threads};
  if (o.lengths.empty()) options.lengths.assign(static_cast<std::size_t>(o.batch), o.kv);
  return options;
}

/// The caches of this rank, and the move between them.
struct Move {
  ReshardOptions options;
  CacheSources sources;
  SeededCache from, to;

  Move(const Communicator& world, const ReshardCommand& o, const WorldOptions& w,
       const ReshardOptions& given)
      : options(given),
        sources(sources_of(options, w.seed)),
        from(world, options, options.from, o.from.page, w.seed, w.threads),
        to(world, options, options.to, o.to.page, w.seed + 1, w.threads) {}
};

/// The memory of both caches and of the keys that travel, which MPI copies once more; of lists of
/// rows and runs; and, to judge the result, of its copy and the expected one.
Demand demand_of(const Communicator& world, const ReshardCommand& o,
                 const ReshardOptions& options) {
  constexpr double kLists = 56;  // bytes of a row: where its key is, and a run of that one key
  const auto rows = [&](const CacheRanks& ranks, int page) {
    return static_cast<double>(cache_rows(options, ranks, page, world.rank()));
  };
  const double from = rows(options.from, o.from.page), to = rows(options.to, o.to.page);
  const double row = cache_row_bytes(options);
  const Demand::Parts move{{"caches", (from + to) * row}, {"keys that travel", (from + to) * row}};
  const Demand::Parts judge{{"what is compared", 2 * to * row}, {"lists", (from + to) * kLists}};
  if (world.device() == Device::cuda) return {.device = move, .host = judge};
  Demand all{.host = move};
  all.host.insert(all.host.end(), judge.begin(), judge.end());
  all.host.emplace_back("messages", from * row);
  return all;
}

/// The ranks' results.
struct Findings {
  std::vector<ReshardTraffic> traffic;  // [ranks]
  std::vector<std::size_t> workspace;   // [ranks]
  Spread time;                          // ms, of the slowest rank
  std::int64_t wrong = 0;               // rows, of all ranks

  double moved() const {
    return std::accumulate(traffic.begin(), traffic.end(), 0.0, [](double sum, const auto& t) {
      return sum + static_cast<double>(t.received);
    });
  }
  /// For the rank that sends or receives most.
  double busiest() const {
    double most = 0;
    for (const ReshardTraffic& t : traffic)
      most = std::max(most, static_cast<double>(std::max(t.sent, t.received)));
    return most;
  }
  double gb_per_s() const { return time.median > 0 ? busiest() / time.median * 1e-6 : 0; }
};

/// Times the runs; returns for each that of the slowest rank, in milliseconds.
std::vector<double> time_runs(const Communicator& world, Reshard& reshard, const Move& move,
                              const ReshardCommand& o) {
  const ReshardArgs args{move.from.tensors(), move.to.tensors()};
  std::vector<double> mine;
  for (int i = 0; i < o.warmup + o.iterations; ++i) {
    world.barrier("start of a run");
    const auto begin = std::chrono::steady_clock::now();
    reshard.run(args);
    reshard.wait();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    if (i >= o.warmup) mine.push_back(elapsed.count());
  }
  return largest(world, mine, "gather of times");
}

Findings findings_of(const Communicator& world, const Reshard& reshard, const Move& move,
                     const std::vector<double>& times) {
  Findings found{.time = spread_of(times)};
  const ReshardTraffic t = reshard.traffic();
  const std::string mine = fmt::format("{} {} {} {} {}", t.sent, t.received, t.kept,
                                       reshard.workspace_bytes(), move.to.wrong_rows(move.sources));
  for (const std::string& theirs : world.gather(mine, "gather of the findings")) {
    std::istringstream numbers(theirs);
    ReshardTraffic one;
    std::size_t workspace = 0;
    std::int64_t wrong = 0;
    numbers >> one.sent >> one.received >> one.kept >> workspace >> wrong;
    found.traffic.push_back(one);
    found.workspace.push_back(workspace);
    found.wrong += wrong;
  }
  return found;
}

std::string text_of(const CacheOptions& o, const CacheRanks& ranks) {
  return fmt::format("{} on {} from rank {} on, {}", o.shard,
                     ranks.ranks == 1 ? "1 rank" : fmt::format("{} ranks", ranks.ranks),
                     ranks.first_rank,
                     o.page > 0 ? fmt::format("pages of {}", o.page) : "no pages");
}

std::string table(const Communicator& world, const ReshardCommand& o, const ReshardOptions& options,
                  const Findings& found) {
  const std::int64_t keys =
      std::accumulate(options.lengths.begin(), options.lengths.end(), std::int64_t{0});
  std::string text = fmt::format(
      "# longspan {} reshard | {}\n# sequences {} | keys {} | kv heads {} dim {}/{} {}\n# from "
      "{}\n# to   {}\n",
      LONGSPAN_VERSION, world.describe(), options.lengths.size(), keys, options.kv_heads,
      options.head_dim, options.of_values(), name(options.dtype), text_of(o.from, options.from),
      text_of(o.to, options.to));
  text += fmt::format("#{:>5}{:>13}{:>13}{:>13}{:>13}\n", "rank", "sent", "received", "kept",
                      "workspace");
  for (std::size_t rank = 0; rank < found.traffic.size(); ++rank) {
    const ReshardTraffic& t = found.traffic[rank];
    text += fmt::format("{:>6}{:>13}{:>13}{:>13}{:>13}\n", rank, size_text(t.sent),
                        size_text(t.received), size_text(t.kept), size_text(found.workspace[rank]));
  }
  return text + fmt::format("# {} ms | {} moved | {:.3f} GB/s on the busiest rank | {}\n",
                            ms_text(found.time.median),
                            size_text(static_cast<std::size_t>(found.moved())), found.gb_per_s(),
                            found.wrong == 0 ? "every byte right"
                                             : fmt::format("{} rows wrong", found.wrong));
}

ordered_json to_json(const CacheOptions& o, const CacheRanks& ranks) {
  return {{"shard", o.shard},
          {"first_rank", ranks.first_rank},
          {"ranks", ranks.ranks},
          {"page", o.page}};
}

ordered_json record(const Communicator& world, const CommandLine& line,
                    const ReshardOptions& options, const Findings& found) {
  const ReshardCommand& o = line.reshard;
  ordered_json json{{"longspan", LONGSPAN_VERSION},
                    {"world", world.describe()},
                    {"ranks", world.size()},
                    {"lengths", options.lengths},
                    {"kv_heads", options.kv_heads},
                    {"head_dim", options.head_dim},
                    {"value_dim", options.of_values()},
                    {"dtype", name(options.dtype)},
                    {"seed", line.world.seed},
                    {"from", to_json(o.from, options.from)},
                    {"to", to_json(o.to, options.to)},
                    {"time_ms", launcher::to_json(found.time)},
                    {"moved_bytes", found.moved()},
                    {"busiest_bytes", found.busiest()},
                    {"gb_per_s", found.gb_per_s()},
                    {"wrong_rows", found.wrong}};
  for (std::size_t rank = 0; rank < found.traffic.size(); ++rank) {
    const ReshardTraffic& t = found.traffic[rank];
    json["traffic"].push_back({{"sent", t.sent},
                               {"received", t.received},
                               {"kept", t.kept},
                               {"workspace", found.workspace[rank]}});
  }
  return json;
}

}  // namespace

int reshard(const Communicator& control, const CommandLine& line) {
  const ReshardCommand& o = line.reshard;
  std::optional<OutputFile> json;
  ReshardOptions options;
  together(control, "reading of the options", [&] {
    options = options_of(o, control.size(), line.world.threads);
    if (control.rank() == 0 && !o.json.empty()) json.emplace(o.json);
  });
  std::FILE* const out = json && json->is_standard_output() ? stderr : stdout;

  const Communicator world = world_for(control, line.world);
  Demand demand;
  together(world, "count of the memory", [&] { demand = demand_of(world, o, options); });
  require_memory(world, demand);
  std::optional<Move> move;
  together(world, "making of the caches", [&] { move.emplace(world, o, line.world, options); });
  std::optional<Reshard> moving;
  together(world, "making of the reshard", [&] { moving.emplace(world, options); });
  together(world, "filling of the caches", [&] {
    move->from.fill(move->sources);
    move->to.poison();
  });
  const std::vector<double> times = time_runs(world, *moving, *move, o);
  const Findings found = findings_of(world, *moving, *move, times);
  together(world, "writing of the outputs", [&] {
    if (world.rank() != 0) return;
    print(table(world, o, options, found), out);
    if (!json) return;
    const std::string text = json_text(record(world, line, options, found));
    json->write(text.data(), text.size());
    json->commit();
  });
  if (found.wrong > 0)
    throw SharedError(
        ErrorKind::wrong_result,
        fmt::format("{} rows of keys or values are not what they have to be", found.wrong));
  return 0;
}

}  // namespace longspan::launcher

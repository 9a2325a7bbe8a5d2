#include "launcher/problem/demand.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "launcher/bench/replays.hpp"
#include "launcher/judge/judge.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

namespace fs = std::filesystem;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
constexpr double kGiB = 1 << 30;

/// Finds the number behind a word that begins a line, as in "Name: 12 kB" or "name 12".
std::optional<double> entry(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    double value = 0;
    if (words >> word >> value && word == name) return value;
  }
  return std::nullopt;
}

/// The number that a file holds; none for "max", or where there is no such file.
std::optional<double> number_in(const fs::path& path) {
  std::ifstream file(path);
  double value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

/// The bytes that a control group and those above it leave. Pages that only cache files can be
/// reclaimed.
double left_of_groups(const fs::path& root, const std::string& group, const char* limit,
                      const char* used, const char* cached) {
  double left = kUnlimited;
  fs::path folder = root / fs::path(group).relative_path();
  while (true) {
    const auto most = number_in(folder / limit), taken = number_in(folder / used);
    if (most && taken) {
      const double files = entry(folder / "memory.stat", cached).value_or(0);
      left = std::min(left, std::max(0.0, *most - *taken + files));
    }
    if (folder == root || !folder.has_relative_path()) return left;
    folder = folder.parent_path();
  }
}

double left_of_limit() {
  double left = kUnlimited;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty())
      left = std::min(left, left_of_groups("/sys/fs/cgroup", group, "memory.max", "memory.current",
                                           "inactive_file"));
    else if (controllers.find("memory") != controllers.npos)
      left = std::min(left, left_of_groups("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                                           "memory.usage_in_bytes", "total_inactive_file"));
  }
  return left;
}

/// The most that this process may still allocate under ulimit -v. Of its reserved addresses, only
/// those with contents count, since the others can be had.
double left_of_process() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  double reserved = 0, resident = 0;  // pages
  std::ifstream("/proc/self/statm") >> reserved >> resident;
  return std::max(0.0, static_cast<double>(limit.rlim_cur) -
                           resident * static_cast<double>(sysconf(_SC_PAGESIZE)));
}

/// A text that names this node. Ranks with equal texts share their memory.
std::string node() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return boot + " " + host.data();
}

std::string size_of_it(double bytes) { return fmt::format("{:.4g} GiB", bytes / kGiB); }

/// Names the largest two parts.
std::string mostly(const Demand::Parts& parts) {
  Demand::Parts sorted = parts;
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(2, sorted.size()); ++i)
    text +=
        fmt::format("{}{} for {}", i ? ", " : "", size_of_it(sorted[i].second), sorted[i].first);
  return text;
}

constexpr const char* kAdvice =
    "Take fewer or shorter sequences, fewer query rows or fewer heads, or more nodes";

/// The bytes that the oracle takes: the keys and values of some heads in float64, and for some rows
/// weights and, with gradients, the same keys and values in fp32.
double oracle(const Options& o, double kv_len, int threads) {
  const double columns = o.head_dim + o.of_values();
  const double of_row = o.gradients ? 16.0 + columns / 2 : 8.0;
  return kv_len * 8.0 * (columns * heads_at_once(o, kv_len) + of_row * std::max(1, threads));
}

}  // namespace

double available_memory() {
  const auto available = entry("/proc/meminfo", "MemAvailable:");  // in KiB
  return std::min(available ? *available * 1024 : kUnlimited, left_of_limit());
}

double total(const Demand::Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), 0.0,
                         [](double sum, const auto& part) { return sum + part.second; });
}

Demand demand_of(const Communicator& world, const Problem& problem, std::int64_t checked_rows) {
  const Options& o = problem.options;
  const int ranks = world.size();
  double keys = 0, own_rows = 0, longest = 0;
  for (int b = 0; b < problem.batch(); ++b) {
    const std::int64_t kv_len = problem.kv_lens[b], rows = problem.q_lens[b];
    keys += static_cast<double>(problem.keys.on(world.rank(), ranks, kv_len).local_len(kv_len));
    own_rows += static_cast<double>(
        problem.queries ? problem.queries->on(world.rank(), ranks, rows).local_len(rows) : rows);
    longest = std::max(longest, static_cast<double>(kv_len));
  }
  const auto bytes = [](std::size_t row_bytes, double rows) {
    return static_cast<double>(row_bytes) * rows;
  };
  const double key_bytes = bytes(problem.keys_in_memory().row_bytes(), keys);
  const double value_bytes =
      problem.options.values_in_keys ? 0 : bytes(problem.v.row_bytes(), keys);
  const double result = bytes(problem.out_row_bytes() + o.heads * sizeof(float), own_rows);
  const double query_row = static_cast<double>(problem.q.row_bytes());
  const RunCost cost =
      cost_of(problem.layer_options(ranks), ranks, problem.run_size(ranks), world.device());

  Demand demand;
  Demand::Parts tensors{{"keys and values", key_bytes + value_bytes},
                        {"queries", query_row * own_rows},
                        {"results", result},
                        {"the layer's workspace", cost.workspace_bytes}};
  double gradients = 0;
  if (problem.goes_back()) {
    const RowBytes row(problem);
    gradients = bytes(row.dq, own_rows) + bytes(row.dk + row.dv, keys);
    const std::size_t given = problem.dout.row_bytes() + (problem.dlse ? row.lse : 0);
    tensors.emplace_back("gradients", gradients + bytes(given, own_rows));
  }
  const bool gpu = world.device() == Device::cuda;
  (gpu ? demand.device : demand.host) = tensors;
  demand.host.emplace_back(
      "results that are compared and written",
      result + gradients + 24 * own_rows + (problem.goes_back() ? 24 * keys : 0));
  demand.host.emplace_back("lists of the batch", 32.0 * problem.batch());
  if (gpu) demand.host.emplace_back("copies on their way to the GPU", key_bytes);
  if (checked_rows != 0)
    demand.host.emplace_back("the comparison with float64", oracle(o, longest, o.threads));
  return demand;
}

Demand demand_of(const Communicator& world, const DecodeShape& shape) {
  const Options& o = shape.options;
  const double rows = static_cast<double>(shape.rows());
  const auto of_head = static_cast<double>(storage_of(o.dtypes.compute).row_bytes(o.head_dim));
  const double row = o.heads * of_head;
  const double all_rows = rows * shape.layers;
  const double fresh = 2.0 * shape.caches * rows * o.kv_heads * of_head;
  Demand demand;
  Demand::Parts tensors{
      {"caches", shape.caches * shape.bytes_of_cache(world.size())},
      {"queries and results", all_rows * (2 * row + 4.0 * o.heads)},
      {"new tokens", fresh},
      {"the layer's workspace", cost_of(o, world.size(),
                                        {.tokens = rows,
                                         .keys = static_cast<double>(shape.batch) * shape.kv_len,
                                         .sequences = static_cast<double>(shape.batch)},
                                        world.device())
                                    .workspace_bytes}};
  const bool gpu = world.device() == Device::cuda;
  (gpu ? demand.device : demand.host) = tensors;
  demand.host.emplace_back("results that are compared", all_rows * (row + 4.0 * o.heads));
  demand.host.emplace_back(
      "the comparison with float64",
      oracle(o, static_cast<double>(shape.length_after(shape.steps)), o.threads));
  return demand;
}

void require_memory(const Communicator& world, const Demand& demand) {
  using nlohmann::json;
  const bool gpu = world.device() == Device::cuda;
  const double own = total(demand.host), limit = left_of_process();
  const double on_gpu = total(demand.device);
  const double gpu_free = gpu ? static_cast<double>(free_memory(Device::cuda)) : kUnlimited;
  std::string failure;  // known only by this rank
  if (on_gpu > gpu_free)
    failure = fmt::format("this takes {} of the GPU's memory ({}), and {} are free",
                          size_of_it(on_gpu), mostly(demand.device), size_of_it(gpu_free));
  else if (own > limit)
    failure = fmt::format(
        "this takes {} of memory ({}), and the process may have {} more "
        "(ulimit -v)",
        size_of_it(own), mostly(demand.host), size_of_it(limit));

  struct Node {
    int ranks = 0;
    double needed = 0, available = kUnlimited;
  };
  std::map<std::string, Node> nodes;
  std::vector<std::string> failures;
  std::optional<std::string> too_much;
  // Numbers that JSON cannot hold (an unlimited amount) travel as null.
  for (const std::string& text :
       world.gather(json{failure, node(), own, available_memory()}.dump(), "count of the memory")) {
    const json theirs = json::parse(text);
    failures.push_back(theirs[0]);
    Node& one = nodes[theirs[1]];
    ++one.ranks;
    one.needed += theirs[2].get<double>();
    if (!theirs[3].is_null()) one.available = std::min(one.available, theirs[3].get<double>());
    if (one.needed > one.available && !too_much) too_much = theirs[1];
  }
  for (std::size_t rank = 0; rank < failures.size(); ++rank)
    if (!failures[rank].empty())
      throw SharedError(ErrorKind::usage,
                        fmt::format("rank {}: {}. {}", rank, failures[rank], kAdvice));
  if (!too_much) return;
  const Node& one = nodes[*too_much];
  throw SharedError(
      ErrorKind::usage,
      fmt::format("this takes {} of memory on the {} of a node ({} on a rank), and {} are "
                  "available. {}",
                  size_of_it(one.needed),
                  one.ranks > 1 ? fmt::format("{} ranks", one.ranks) : "rank", mostly(demand.host),
                  size_of_it(one.available), kAdvice));
}

void require_memory_for_batch(std::int64_t sequences) {
  const double needed = 32.0 * static_cast<double>(sequences);
  const double available = std::min(available_memory(), left_of_process());
  if (needed > available)
    throw UsageError(
        fmt::format("the lists of {} sequences alone take {} of memory, and {} are "
                    "available. {}",
                    sequences, size_of_it(needed), size_of_it(available), kAdvice));
}

}  // namespace longspan::launcher

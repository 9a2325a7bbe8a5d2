#include "comm/control/environment.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>

#include "longspan/error.hpp"
#include "src/env.hpp"

namespace longspan::comm {
namespace {

constexpr std::uint64_t kMostRanks = 1'000'000;  // as each takes a table entry and gets letters

/// Reads a number that a launcher set, in [low, high]. Job ids are larger than an int holds.
std::optional<std::uint64_t> number(const char* name, std::uint64_t low, std::uint64_t high) {
  const auto text = env_text(name);
  if (!text) return std::nullopt;
  std::uint64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high)
    throw UsageError(
        fmt::format("{}='{}' was set by a launcher, but it is not a whole number from {} to {}.",
                    name, *text, low, high));
  return value;
}

std::optional<int> rank_in(const char* name) { return number(name, 0, kMostRanks - 1); }

std::optional<int> ranks_in(const char* name) { return number(name, 1, kMostRanks); }

std::uint64_t id_in(const char* name) {
  return number(name, 0, std::numeric_limits<std::uint64_t>::max()).value_or(0);
}

/// Makes "gpu07" of "gpu[07-09,12],login": rank 0 runs on the first host of the list.
std::string first_host(const std::string& list) {
  const auto bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  const auto end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

int meeting_port() {
  if (const int port = Env::read().port) return port;
  if (const auto port = number("MASTER_PORT", 1, 65535))
    return static_cast<int>(*port < 65535 ? *port + 1 : *port - 1);
  // Any port will do that all ranks of the step compute alike and other steps do not.
  return 20000 + static_cast<int>((id_in("SLURM_JOB_ID") * 31 + id_in("SLURM_STEP_ID")) % 20000);
}

Launch met(Launcher by, int rank, int size, std::string address) {
  if (rank >= size)
    throw UsageError(
        fmt::format("The launcher set rank {} of {} ranks, which cannot be.", rank, size));
  return {by, rank, size, std::move(address), meeting_port()};
}

}  // namespace

Launch find_launch() {
  const auto address = env_text("MASTER_ADDR");
  const bool has_torch = env_text("RANK") && env_text("WORLD_SIZE") && address;
  const auto of_torch = [&] {
    return met(Launcher::torchrun, *rank_in("RANK"), *ranks_in("WORLD_SIZE"), *address);
  };
  // A job of mpirun may start torchrun, one on each machine: the inner launcher counts.
  if (has_torch && env_text("TORCHELASTIC_RUN_ID")) return of_torch();

  if (const auto ranks = ranks_in("OMPI_COMM_WORLD_SIZE")) return {Launcher::mpirun, 0, *ranks};
  if (const auto ranks = ranks_in("PMI_SIZE")) return {Launcher::mpirun, 0, *ranks};
  if (env_text("PMIX_RANK"))
    return {Launcher::mpirun, 0, ranks_in("SLURM_STEP_NUM_TASKS").value_or(0)};

  if (has_torch) return of_torch();

  // A batch script itself has SLURM_PROCID too; only a step of srun has a number of tasks.
  const auto task = rank_in("SLURM_PROCID"), tasks = ranks_in("SLURM_STEP_NUM_TASKS");
  if (task && tasks) {
    std::string host = address.value_or("");
    if (host.empty()) host = first_host(env_text("SLURM_STEP_NODELIST").value_or(""));
    if (host.empty()) host = env_text("SLURM_LAUNCH_NODE_IPADDR").value_or("");
    if (host.empty() && *tasks > 1)
      throw UsageError(fmt::format(
          "srun started {} tasks, but no variable says where rank 0 is: set MASTER_ADDR.", *tasks));
    return met(Launcher::srun, *task, *tasks, host);
  }
  return {};
}

std::chrono::milliseconds deadline_of(const CommOptions& options) {
  // The same bounds as in the environment: beyond them, times overflow.
  constexpr std::chrono::milliseconds longest = std::chrono::seconds(1'000'000);
  if (options.deadline.count() < 0 || options.deadline > longest)
    throw UsageError(
        fmt::format("A deadline of {} ms was given, but it takes 0 to {} ms; 0 stands for "
                    "LONGSPAN_DEADLINE_S.",
                    options.deadline.count(), longest.count()));
  return options.deadline.count() > 0 ? options.deadline : Env::read().deadline;
}

}  // namespace longspan::comm

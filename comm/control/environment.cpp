#include "comm/control/environment.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "longspan/error.hpp"
#include "src/base/env.hpp"

namespace longspan::comm {
namespace {

constexpr std::uint64_t kMostRanks = 1'000'000;  // as each takes a table entry and gets messages

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
  // Any port that all ranks of the step compute alike, and other steps do not.
  return 20000 + static_cast<int>((id_in("SLURM_JOB_ID") * 31 + id_in("SLURM_STEP_ID")) % 20000);
}

void check_rank(int rank, int size) {
  if (rank >= size)
    throw UsageError(
        fmt::format("The launcher set rank {} of {} ranks, which cannot be.", rank, size));
}

/// The variables that give a process its place among the ranks of a launcher.
struct Variables {
  const char* rank;
  const char* size;
  const char* address = nullptr;  // null: the launcher's ranks meet without it
};
constexpr Variables kTorch{"RANK", "WORLD_SIZE", "MASTER_ADDR"};
constexpr Variables kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
constexpr Variables kMpich{"PMI_RANK", "PMI_SIZE"};
constexpr Variables kSlurm{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
constexpr std::array kAll{kTorch, kOpenMpi, kMpich, kSlurm};

bool has_all(const Variables& of) {
  return env_text(of.rank) && env_text(of.size) && (!of.address || env_text(of.address));
}

std::string list_of(const std::vector<std::string>& names, const char* one, const char* several) {
  return fmt::format("{} {}", fmt::join(names, " and "), names.size() == 1 ? one : several);
}

/// Throws where some of a launcher's variables imply other ranks and others are missing: as a
/// process alone it would compute alone, while the others wait for it.
void refuse_half(const Variables& of) {
  const auto rank = rank_in(of.rank), size = ranks_in(of.size);
  if ((!rank && !size) || has_all(of)) return;
  if (size == 1 && rank.value_or(0) == 0) return;  // with one rank nothing is missing
  std::vector<std::string> set, missing;
  for (const char* name : {of.rank, of.size, of.address}) {
    if (!name) continue;
    const auto text = env_text(name);
    if (text)
      set.push_back(fmt::format("{}={}", name, *text));
    else
      missing.emplace_back(name);
  }
  throw UsageError(fmt::format(
      "{}, but {}: ranks of one job have all of them. Set what is missing on every rank, or remove "
      "the rest for a process alone.",
      list_of(set, "is set", "are set"), list_of(missing, "is not", "are not")));
}

/// Nothing where, by its variables, this launcher of MPI did not start this process.
std::optional<Launch> mpi_launch(const Variables& of) {
  const auto rank = rank_in(of.rank), size = ranks_in(of.size);
  if (!size || (!rank && *size > 1)) return std::nullopt;
  check_rank(rank.value_or(0), *size);
  return Launch{.by = Launcher::mpirun, .rank = rank.value_or(0), .size = *size};
}

Launch met(Launcher by, int rank, int size, std::string address) {
  check_rank(rank, size);
  return {by, rank, size, std::move(address), meeting_port()};
}

}  // namespace

Launch find_launch() {
  const auto of_torch = [&] {
    return met(Launcher::torchrun, *rank_in(kTorch.rank), *ranks_in(kTorch.size),
               *env_text(kTorch.address));
  };
  // A job of mpirun may start torchrun on each machine: the inner launcher counts.
  if (env_text("TORCHELASTIC_RUN_ID")) {
    refuse_half(kTorch);
    if (has_all(kTorch)) return of_torch();
  }

  if (const auto launch = mpi_launch(kOpenMpi)) return *launch;
  if (const auto launch = mpi_launch(kMpich)) return *launch;
  if (const auto rank = rank_in("PMIX_RANK"))
    return {.by = Launcher::mpirun,
            .rank = *rank,
            .size = ranks_in("SLURM_STEP_NUM_TASKS").value_or(0)};

  if (has_all(kTorch)) return of_torch();

  // A batch script itself has SLURM_PROCID=0 too; only a step of srun has a number of tasks.
  const auto task = rank_in(kSlurm.rank), tasks = ranks_in(kSlurm.size);
  if (task && tasks) {
    std::string host = env_text("MASTER_ADDR").value_or("");
    if (host.empty()) host = first_host(env_text("SLURM_STEP_NODELIST").value_or(""));
    if (host.empty()) host = env_text("SLURM_LAUNCH_NODE_IPADDR").value_or("");
    if (host.empty() && *tasks > 1)
      throw UsageError(fmt::format(
          "srun started {} tasks, but no variable says where rank 0 is: set MASTER_ADDR.", *tasks));
    return met(Launcher::srun, *task, *tasks, host);
  }
  for (const Variables& half : {kOpenMpi, kMpich, kTorch}) refuse_half(half);
  if (task.value_or(0) > 0 || tasks) refuse_half(kSlurm);
  return {};
}

std::string launched_rank() {
  for (const Variables& of : kAll) try {
      const auto rank = rank_in(of.rank), size = ranks_in(of.size);
      if (rank && size.value_or(1) > 1)
        return fmt::format("{}={}, {}={}", of.rank, *rank, of.size, *size);
    } catch (const UsageError&) {  // find_launch refuses them
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

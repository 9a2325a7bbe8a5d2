#include "comm/environment.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "longspan/error.hpp"
#include "src/env.hpp"

namespace longspan::comm {
namespace {

std::optional<int> number(const char* name) {
  const auto text = env_text(name);
  if (!text) return std::nullopt;
  int value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < 0)
    throw UsageError(
        fmt::format("{}='{}' was set by a launcher, but it is not a whole number.", name, *text));
  return value;
}

/// "gpu[07-09,12],login" -> "gpu07": rank 0 runs on the first host of the list.
std::string first_host(const std::string& list) {
  const auto bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  const auto end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

int meeting_port() {
  if (const int port = Env::read().port) return port;
  if (const auto port = number("MASTER_PORT")) return *port < 65535 ? *port + 1 : *port - 1;
  // Any port will do that all ranks of the step compute alike and other steps do not.
  return 20000 +
         (number("SLURM_JOB_ID").value_or(0) * 31 + number("SLURM_STEP_ID").value_or(0)) % 20000;
}

Launch met(Launcher by, int rank, int size, std::string address) {
  if (size < 1 || rank >= size)
    throw UsageError(
        fmt::format("The launcher set rank {} of {} ranks, which cannot be.", rank, size));
  return {by, rank, size, std::move(address), meeting_port()};
}

}  // namespace

Launch find_launch() {
  const auto rank = number("RANK"), size = number("WORLD_SIZE");
  const auto address = env_text("MASTER_ADDR");
  const bool has_torch = rank && size && address;
  // A job of mpirun may start torchrun, one on each machine: the inner launcher counts.
  if (has_torch && env_text("TORCHELASTIC_RUN_ID"))
    return met(Launcher::torchrun, *rank, *size, *address);

  if (const auto ranks = number("OMPI_COMM_WORLD_SIZE")) return {Launcher::mpirun, 0, *ranks};
  if (const auto ranks = number("PMI_SIZE")) return {Launcher::mpirun, 0, *ranks};
  if (env_text("PMIX_RANK"))
    return {Launcher::mpirun, 0, number("SLURM_STEP_NUM_TASKS").value_or(0)};

  if (has_torch) return met(Launcher::torchrun, *rank, *size, *address);

  // A batch script itself has SLURM_PROCID too; only a step of srun has a number of tasks.
  const auto task = number("SLURM_PROCID"), tasks = number("SLURM_STEP_NUM_TASKS");
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
  return options.deadline.count() > 0 ? options.deadline : Env::read().deadline;
}

}  // namespace longspan::comm

// The table of environment variables. It drives both the reader and `longspan env`, so that no
// variable can be read without being listed.
#include "src/base/env.hpp"

#include <fmt/format.h>
#include <stdlib.h>

#include <charconv>
#include <cmath>

#include "longspan/error.hpp"
#include "longspan/info.hpp"
#include "longspan/limits.hpp"

namespace longspan {
namespace {

struct Row {
  const char* name;
  const char* standard;
  const char* meaning;
  void (*read)(const char* name, const std::string& text, Env& env) = nullptr;
};

/// Reads the whole of `text` as a number in [low, high].
template <class T>
T number(const char* name, const std::string& text, T low, T high, const char* wanted) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= low && value <= high))
    throw UsageError(fmt::format("{}='{}' was set, but it takes {}.", name, text, wanted));
  return value;
}

void read_deadline(const char* name, const std::string& text, Env& env) {
  const double seconds = number(name, text, 1e-3, 1e6, "seconds from 0.001 to 1000000");
  env.deadline = std::chrono::milliseconds(std::llround(seconds * 1000));
}

void read_threads(const char* name, const std::string& text, Env& env) {
  static_assert(kMostThreads == 4096);
  env.threads = number(name, text, 0, kMostThreads, "a whole number from 0 to 4096");
}

void read_port(const char* name, const std::string& text, Env& env) {
  env.port = number(name, text, 0, 65535, "a port from 0 to 65535");
}

void read_secret(const char* name, const std::string& text, Env& env) {
  constexpr std::size_t kMost = 1024;
  if (text.size() > kMost)  // too long for a message
    throw UsageError(
        fmt::format("{} was set to {} bytes, but it takes at most {}.", name, text.size(), kMost));
  env.secret = text;
}

constexpr Row kRows[] = {
    {"LONGSPAN_DEADLINE_S", "60", "longest wait for another rank, in seconds", read_deadline},
    {"LONGSPAN_THREADS", "0", "host threads; 0: the cores of this process", read_threads},
    {"LONGSPAN_PORT", "MASTER_PORT + 1", "port of rank 0 when ranks meet without MPI", read_port},
    {"LONGSPAN_SECRET", "not set", "who meets rank 0 without MPI must have the same; not shown",
     read_secret},
    {"LONGSPAN_MACHINE", "longspan/<device>.machine in XDG_CONFIG_HOME",
     "file of the constants by which auto chooses a strategy; `longspan calibrate` writes it"},
    {"XDG_CONFIG_HOME", "HOME/.config", "the user's folder of settings"},
    {"HOME", "", "the user's folder"},
    {"NCCL_NVLS_ENABLE", "0", "NCCL's multicast; longspan sets 0 where it is not set"},
    {"OMPI_COMM_WORLD_RANK", "", "set by mpirun of Open MPI: this rank"},
    {"OMPI_COMM_WORLD_SIZE", "", "set by mpirun of Open MPI: use MPI"},
    {"PMI_RANK", "", "set by mpiexec of MPICH: this rank"},
    {"PMI_SIZE", "", "set by mpiexec of MPICH: use MPI"},
    {"PMI_JOBID", "", "set by launchers of MPI: the job, each rank of which is one process"},
    {"PMIX_NAMESPACE", "", "likewise, with PMIx"},
    {"PMIX_RANK", "", "set by launchers with PMIx (srun --mpi=pmix): use MPI"},
    {"TORCHELASTIC_RUN_ID", "", "set by torchrun: RANK and the like go before mpirun's"},
    {"RANK", "", "set by torchrun: this rank"},
    {"WORLD_SIZE", "", "set by torchrun: number of ranks"},
    {"MASTER_ADDR", "first host of the step", "where rank 0 listens"},
    {"MASTER_PORT", "from the job's number", "torchrun's port; longspan takes the next one"},
    {"SLURM_PROCID", "", "set by srun: this rank"},
    {"SLURM_STEP_NUM_TASKS", "", "set by srun: number of ranks"},
    {"SLURM_STEP_NODELIST", "", "set by srun: the hosts of the step"},
    {"SLURM_LAUNCH_NODE_IPADDR", "", "set by srun: used where no other address is known"},
    {"SLURM_JOB_ID", "", "set by Slurm: chooses the port"},
    {"SLURM_STEP_ID", "", "set by srun: chooses the port"},
};

}  // namespace

Env Env::read() {
  Env env;
  for (const Row& row : kRows) {
    if (!row.read) continue;
    if (const auto text = env_text(row.name)) row.read(row.name, *text, env);
  }
  return env;
}

std::optional<std::string> env_text(const char* name) {
  const char* text = getenv(name);
  if (!text || !*text) return std::nullopt;
  return text;
}

bool env_is_set(const char* name) { return getenv(name) != nullptr; }

void env_default(const char* name, const char* value) {
  if (!env_text(name)) setenv(name, value, 1);
}

std::vector<EnvironmentVariable> environment() {
  std::vector<EnvironmentVariable> variables;
  for (const Row& row : kRows) {
    std::string value = env_text(row.name).value_or("");
    if (row.read == read_secret) value = value.empty() ? "not set" : "set";
    variables.push_back({row.name, value, row.standard, row.meaning});
  }
  return variables;
}

}  // namespace longspan

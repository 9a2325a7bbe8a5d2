#include "comm/tcp/hello.hpp"

#include <fmt/format.h>

#include <climits>
#include <cstddef>

#include "comm/control/failure.hpp"
#include "comm/control/wire.hpp"
#include "comm/tcp/frames.hpp"
#include "comm/tcp/key.hpp"
#include "longspan/error.hpp"
#include "longspan/version.hpp"
#include "src/base/env.hpp"

namespace longspan::comm {
namespace {

std::string name_of_run() {
  if (const auto id = env_text("TORCHELASTIC_RUN_ID")) return "torchrun " + *id;
  const auto job = env_text("SLURM_JOB_ID"), step = env_text("SLURM_STEP_ID");
  if (job) return "srun " + *job + "." + step.value_or("");
  return "";
}

}  // namespace

Hello hello_of(const Launch& launch, const std::string& key) {
  // A key identifies ranks of one job better than the launcher's variables.
  Hello hello{LONGSPAN_VERSION, key.empty() ? name_of_run() : "", Env::read().secret + key,
              launch.rank, launch.size};
  if (const std::size_t bytes = to_text(hello).size(); bytes > kMostHello)
    throw UsageError(
        fmt::format("The names that the launcher gave to this run and LONGSPAN_SECRET take {} "
                    "bytes together, and {} are the most: make them shorter.",
                    bytes, kMostHello));
  return hello;
}

std::string to_text(const Hello& hello) {
  return pack(hello.version, hello.run, hello.secret, std::to_string(hello.rank),
              std::to_string(hello.size));
}

Hello hello_from(const std::string& text) {
  auto parts = unpack(text, 5);
  return {std::move(parts[0]), std::move(parts[1]), std::move(parts[2]),
          static_cast<int>(number_from(parts[3], 0, INT_MAX)),
          static_cast<int>(number_from(parts[4], 0, INT_MAX))};
}

std::optional<std::string> objection(const Hello& ours, const Hello& hello) {
  if (!same_secret(ours.secret, hello.secret))
    return fmt::format("LONGSPAN_SECRET differs: {} on rank 0, {} on rank {}.",
                       ours.secret.empty() ? "not set" : "set",
                       hello.secret.empty()  ? "not set"
                       : ours.secret.empty() ? "set"
                                             : "another",
                       hello.rank);
  const auto differs = [&](const char* what, const std::string& own, const std::string& theirs) {
    return fmt::format("{} differs: '{}' on rank 0, '{}' on rank {}.", what, printable(own),
                       printable(theirs), hello.rank);
  };
  if (hello.version != ours.version)
    return differs("The version of longspan", ours.version, hello.version);
  if (hello.run != ours.run) return differs("The run", ours.run, hello.run);
  if (hello.size != ours.size)
    return differs("The number of ranks", std::to_string(ours.size), std::to_string(hello.size));
  if (hello.rank >= ours.size)
    return fmt::format("There is no rank {} among {} ranks.", hello.rank, ours.size);
  return std::nullopt;
}

}  // namespace longspan::comm

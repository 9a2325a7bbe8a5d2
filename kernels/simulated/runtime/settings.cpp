#include "kernels/simulated/runtime/settings.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "src/base/env.hpp"

namespace longspan::simulated {
namespace {

constexpr int kMostGpus = 16;
constexpr std::size_t kStandardMemoryMb = 4096;

/// The number of ranks on this host, from different launchers.
constexpr const char* kRanksOfHost[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                        "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"};

std::string text_of(const char* name) { return env_text(name).value_or(""); }

/// An integer of at least `least`; otherwise `standard`.
template <class T>
T number(std::string_view text, T least, T standard) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) return standard;
  return value;
}

/// A variable of longspan's own that does not parse ends the process: a simulation with other
/// settings would look like a success.
template <class T>
T own_number(const char* name, T least, T standard) {
  const std::string text = text_of(name);
  if (text.empty()) return standard;
  const T value = number<T>(text, least, least - 1);
  if (value < least) {
    std::fprintf(stderr, "%s='%s' is not a whole number from %lld on\n", name, text.c_str(),
                 static_cast<long long>(least));
    std::exit(2);
  }
  return value;
}

int count_gpus() {
  int ranks = 1;
  for (const char* name : kRanksOfHost) {
    ranks = number(text_of(name), 1, 0);
    if (ranks > 0) break;
  }
  return std::min(kMostGpus, own_number("LONGSPAN_SIMULATED_GPUS", 0, std::max(ranks, 1)));
}

/// CUDA_VISIBLE_DEVICES, with only numbers supported here: devices after an invalid one are not
/// visible, as with CUDA.
std::vector<int> visible(int gpus) {
  std::vector<int> seen;
  if (!env_is_set("CUDA_VISIBLE_DEVICES")) {
    for (int g = 0; g < gpus; ++g) seen.push_back(g);
    return seen;
  }
  const std::string text = text_of("CUDA_VISIBLE_DEVICES");
  std::string_view remaining = text;
  while (!remaining.empty()) {
    const std::size_t comma = std::min(remaining.find(','), remaining.size());
    const int gpu = number(remaining.substr(0, comma), 0, -1);
    if (gpu < 0 || gpu >= gpus) break;
    seen.push_back(gpu);
    remaining.remove_prefix(std::min(comma + 1, remaining.size()));
  }
  return seen;
}

Settings read() {
  Settings read;
  read.gpus_of_node = count_gpus();
  read.gpus = visible(read.gpus_of_node);
  // The least is 1, and one less must be representable too: hence not an unsigned type.
  read.memory_bytes = static_cast<std::size_t>(own_number<long long>("LONGSPAN_SIMULATED_MEMORY_MB",
                                                                     1, kStandardMemoryMb))
                      << 20;
  read.loads_lazily = own_number("LONGSPAN_SIMULATED_LAZY_LOADING", 0, 0) != 0;
  const std::string fail = text_of("LONGSPAN_SIMULATED_FAIL_CALL");
  const std::size_t colon = fail.rfind(':');
  if (!fail.empty()) {
    if (colon != std::string::npos)
      read.fail_number = number(std::string_view(fail).substr(colon + 1), 1, 0);
    if (read.fail_number == 0) {
      std::fprintf(stderr, "LONGSPAN_SIMULATED_FAIL_CALL='%s' is not NAME:N\n", fail.c_str());
      std::exit(2);
    }
    read.fail_call = fail.substr(0, colon);
  }
  return read;
}

}  // namespace

const Settings& settings() {
  static const Settings* const all = new Settings(read());  // threads may outlive main
  return *all;
}

}  // namespace longspan::simulated

// Facts about the build and the machine, asked from each library that is part of the build.
#include "longspan/info.hpp"

#include "kernels/host/targets.hpp"
//
#include <fmt/format.h>
#include <hwy/targets.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <sstream>

#include "comm/libraries.hpp"
#include "kernels/backend.hpp"
#include "kernels/features.hpp"
#include "kernels/kernel_family.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "longspan/machine.hpp"
#include "longspan/version.hpp"
#include "src/base/check.hpp"
#include "src/base/cores.hpp"
#include "src/base/env.hpp"
#include "src/base/peer_view.hpp"

#if defined(LONGSPAN_HAVE_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace longspan {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

/// The instruction set that the host kernels use here: the best one that both the build and the CPU
/// have.
std::string instruction_set() {
  const auto targets = static_cast<std::uint64_t>(hwy::SupportedTargets() & HWY_TARGETS);
  return hwy::TargetName(static_cast<std::int64_t>(std::uint64_t{1} << std::countr_zero(targets)));
}

void add_mpi(Rows& rows) {
  if (const auto* mpi = comm::mpi_library()) {
    rows.emplace_back("MPI", mpi->version());
    return;
  }
#if defined(LONGSPAN_HAVE_MPI)
  rows.emplace_back("MPI", "not linked: link longspan::mpi");
#else
  rows.emplace_back("MPI", "not built in: configure with -DLONGSPAN_MPI=ON");
#endif
}

#if defined(LONGSPAN_HAVE_CUDA)
bool reaches(int gpu, int other) {
  int yes = 0;
  return LONGSPAN_CUDA_WORKED(cudaDeviceCanAccessPeer(&yes, gpu, other)) && yes != 0;
}

/// How states can travel between the GPUs of this node (Options::exchange).
std::string exchange_text(int gpus) {
  for (int g = 0; g < gpus; ++g)
    for (int other = 0; other < gpus; ++other)
      if (other != g && !reaches(g, other))
        return fmt::format("gather where GPU {} and GPU {} take part: they do not reach each other",
                           g, other);
  return fmt::format(
      "peer buffers, for up to {} ranks: every GPU reaches every other; decode pushes from its "
      "epilogue",
      PeerView::kMostRanks);
}

void add_gpus(Rows& rows) {
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  rows.emplace_back(
      "CUDA",
      fmt::format("runtime {}.{}, driver {}", runtime / 1000, runtime % 1000 / 10,
                  driver ? fmt::format("{}.{}", driver / 1000, driver % 1000 / 10) : "not found"));
  const auto* nccl = comm::nccl_library();
  rows.emplace_back("NCCL", nccl ? nccl->version() : "not linked: link longspan::nccl");
  const int count = gpu_count();
  rows.emplace_back("GPUs", fmt::to_string(count));
  for (int g = 0; g < count; ++g) {
    cudaDeviceProp p{};
    if (!LONGSPAN_CUDA_WORKED(cudaGetDeviceProperties(&p, g))) continue;
    std::string peers;
    for (int other = 0; other < count; ++other)
      if (other != g && reaches(g, other)) peers += fmt::format(" {}", other);
    rows.emplace_back(
        fmt::format("GPU {}", g),
        fmt::format("{}, sm_{}{}, {} multiprocessors, {:.0f} GiB, reaches GPUs directly:{}", p.name,
                    p.major, p.minor, p.multiProcessorCount,
                    static_cast<double>(p.totalGlobalMem) / (1 << 30),
                    peers.empty() ? " none" : peers));
  }
  if (count > 1) rows.emplace_back("exchange", exchange_text(count));
}
#else
void add_gpus(Rows& rows) {
  rows.emplace_back("CUDA", "not built in: configure with -DLONGSPAN_CUDA=ON");
}
#endif

/// The origin of the constants by which "auto" chooses here.
std::string constants() {
  const auto of = [](Device device) -> std::string {
    try {
      return origin_of(machine_here(device));
    } catch (const Error& error) {
      return error.what();
    }
  };
  if (gpu_count() == 0) return of(Device::host);
  return fmt::format("host: {}; cuda: {}", of(Device::host), of(Device::cuda));
}

}  // namespace

int gpu_count() {
#if defined(LONGSPAN_HAVE_CUDA)
  int count = 0;
  return LONGSPAN_CUDA_WORKED(cudaGetDeviceCount(&count)) ? count : 0;
#else
  return 0;
#endif
}

int host_threads(const Communicator& world, int asked) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string mine = host.data();
  for (const int core : affinity()) mine += fmt::format(" {}", core);
  // All ranks do this always, since ranks may be set up differently.
  const std::vector<std::string> all = world.gather(mine, "cores of ranks on a node");
  if (asked == 0) asked = Env::read().threads;
  if (asked > 0) return asked;
  std::vector<std::vector<int>> cores;  // of the ranks on this node
  int own = 0;
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    std::istringstream words(all[rank]);
    std::string name;
    if (!(words >> name) || name != host.data()) continue;
    if (rank == world.rank()) own = static_cast<int>(cores.size());
    cores.emplace_back(std::istream_iterator<int>(words), std::istream_iterator<int>());
  }
  return fair_share(cores, own, own_quota());
}

std::vector<FeatureInfo> features() {
  std::vector<FeatureInfo> rows;
  for (const kernels::Feature& f : kernels::features())
    if (f.by != nullptr) rows.push_back({f.name, f.meaning, f.by, f.host, f.cuda});
  return rows;
}

std::vector<KernelInfo> kernel_families() {
  constexpr const char* kEnds[] = {"states", "result of split keys", "result"};
  std::vector<KernelInfo> rows;
  for (const kernels::FamilyRow& f : kernels::family_rows())
    rows.push_back({name(f.device), f.words.name, f.words.queries, f.words.heads, f.words.takes,
                    kEnds[static_cast<int>(f.ends)], f.takes_arrivals, f.writes_new_keys});
  return rows;
}

Rows system_info() {
  Rows rows{
      {"longspan", LONGSPAN_VERSION},
      {"compiler", __VERSION__},
      {"host", fmt::format("{}, {} cores", instruction_set(), usable_cores())},
      {"bf16", fmt::format("with bf16_products: products {}", kernels::host_bf16_products(true))}};
  add_mpi(rows);
  add_gpus(rows);
  rows.emplace_back("constants", constants());
  return rows;
}

}  // namespace longspan

#include "comm/nccl/windows.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <vector>

#include "comm/hosts.hpp"
#include "comm/wire.hpp"
#include "src/check.hpp"

namespace longspan::comm {
namespace {

/// Part of the deadline that a kernel waits: the rest is for the roll call that names who is
/// missing.
constexpr double kKernelShare = 0.5;

/// What the device and the host both see.
struct Shared {
  PeerReport report;
  std::uint32_t abort;
};

std::string bus_of_current_gpu() {
  int device = 0;
  std::array<char, 32> bus{};
  LONGSPAN_CUDA(cudaGetDevice(&device));
  LONGSPAN_CUDA(cudaDeviceGetPCIBusId(bus.data(), bus.size(), device));
  return bus.data();
}

/// Why this GPU cannot write the memory of the GPU at `bus`; empty if it can.
std::string obstacle(const std::string& bus) {
  int own = 0, other = 0, reaches = 0;
  LONGSPAN_CUDA(cudaGetDevice(&own));
  if (cudaDeviceGetByPCIBusId(&other, bus.c_str()) != cudaSuccess) {
    cudaGetLastError();
    return fmt::format("the GPU at {} is not visible to every process of the node", bus);
  }
  LONGSPAN_CUDA(cudaDeviceCanAccessPeer(&reaches, own, other));
  return reaches ? "" : fmt::format("no peer access to the GPU at {}", bus);
}

}  // namespace

std::unique_ptr<Windows> Windows::open(Transport& world, std::size_t bytes, std::string& why) {
  why.clear();
  const int ranks = world.size(), rank = world.rank();
  if (ranks < 2 || ranks > PeerView::kMostRanks) {
    why = fmt::format("{} ranks; windows serve 2 to {}", ranks, PeerView::kMostRanks);
    return nullptr;
  }
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const auto places =
      world.gather(pack(host.data(), bus_of_current_gpu()), "where the windows would be");

  std::unique_ptr<Windows> windows(new Windows);
  std::string failure;
  std::byte* own = nullptr;
  cudaIpcMemHandle_t handle{};
  try {
    for (int p = 0; p < ranks && failure.empty(); ++p) {
      const auto place = unpack(places[p]);
      if (place.at(0) != host.data())
        failure = fmt::format("rank {} is on another node", p);
      else if (p != rank)
        failure = obstacle(place.at(1));
    }
    if (failure.empty()) {
      LONGSPAN_CUDA(cudaMalloc(reinterpret_cast<void**>(&own), bytes));
      LONGSPAN_CUDA(cudaMemset(own, 0, bytes));
      LONGSPAN_CUDA(cudaDeviceSynchronize());
      LONGSPAN_CUDA(cudaIpcGetMemHandle(&handle, own));
    }
  } catch (const Error& error) {
    failure = error.what();
  }
  windows->view_.rank = rank;
  windows->view_.ranks = ranks;
  windows->view_.bytes = bytes;
  windows->view_.window[rank] = own;

  // From here on every rank does the same, whatever failed where.
  const std::string bits(reinterpret_cast<const char*>(&handle), sizeof handle);
  const auto handles = world.gather(pack(failure, bits), "handles of the windows");
  for (int p = 0; p < ranks; ++p)
    if (const auto text = unpack(handles[p]).at(0); !text.empty() && why.empty())
      why = fmt::format("rank {}: {}", p, text);
  if (why.empty()) {
    try {
      for (int p = 0; p < ranks; ++p) {
        if (p == rank) continue;
        const std::string peer = unpack(handles[p]).at(1);
        std::memcpy(&handle, peer.data(), sizeof handle);
        void* mapped = nullptr;
        LONGSPAN_CUDA(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess));
        windows->view_.window[p] = static_cast<std::byte*>(mapped);
      }
      Shared* shared = nullptr;
      LONGSPAN_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&shared), sizeof(Shared),
                                  cudaHostAllocPortable | cudaHostAllocMapped));
      std::memset(static_cast<void*>(shared), 0, sizeof(Shared));
      windows->report_ = &shared->report;
      windows->abort_ = &shared->abort;
      LONGSPAN_CUDA(
          cudaMalloc(reinterpret_cast<void**>(&windows->view_.epoch), 2 * sizeof(std::uint32_t)));
      LONGSPAN_CUDA(cudaMemset(windows->view_.epoch, 0, 2 * sizeof(std::uint32_t)));
      LONGSPAN_CUDA(cudaDeviceSynchronize());
      Shared* seen = nullptr;
      LONGSPAN_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&seen), shared, 0));
      windows->view_.report = &seen->report;
      windows->view_.abort = &seen->abort;
    } catch (const Error& error) {
      failure = error.what();
    }
    const auto opened = world.gather(failure, "opening of the windows");
    for (int p = 0; p < ranks; ++p)
      if (!opened[p].empty() && why.empty()) why = fmt::format("rank {}: {}", p, opened[p]);
  }
  windows->view_.deadline_ns = static_cast<std::uint64_t>(
      kKernelShare * 1e6 * static_cast<double>(world.deadline().count()));
  if (!why.empty()) return nullptr;
  return windows;
}

Windows::~Windows() {
  if (aborted_) return;  // a peer may still write here: the process keeps the memory
  for (int p = 0; p < view_.ranks; ++p)
    if (p != view_.rank && view_.window[p] != nullptr) cudaIpcCloseMemHandle(view_.window[p]);
  cudaFree(view_.window[view_.rank]);
  cudaFree(view_.epoch);
  if (report_ != nullptr) cudaFreeHost(report_);
}

void Windows::abort() noexcept {
  aborted_ = true;
  if (abort_ != nullptr) *static_cast<volatile std::uint32_t*>(abort_) = 1;
}

}  // namespace longspan::comm

#include "src/layer/layer_memory.hpp"

#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"

namespace longspan {
namespace {

/// Turns one rank's failure into a failure of all: a step that can fail on some ranks only (memory)
/// must not leave the others waiting in the next one.
void settle(const Communicator& world, const std::string& failure, const std::string& step) {
  const std::vector<std::string> all = world.gather(failure, step);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty())
      throw BackendError(fmt::format("{} failed on rank {}: {}", step, rank, all[rank]));
}

/// Keeps memory until the process ends. A receive whose sender stopped halfway cannot be cancelled,
/// and MPI continues to write when the sender does, even after the run has failed and the layer is
/// gone.
void keep_for_good(Buffer memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<Buffer>;  // never destroyed, and neither is the memory
                                                      // it holds
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

std::unique_ptr<kernels::Backend> make_kernels(const Communicator& world, int threads) {
  if (world.device() == Device::cuda) return kernels::cuda_backend();
  return kernels::host_backend(host_threads(world, threads));
}

LayerMemory::~LayerMemory() {
  if (world_.size() == 1 || world_.device() != Device::host) return;
  try {
    comm::transport_of(world_).check("end of the layer");
  } catch (...) {
    try {
      keep_for_good(std::move(memory_));
    } catch (...) {  // no memory for the list: the vector is unchanged, and the buffer is freed
    }
  }
}

void LayerMemory::allocate(const std::function<void(Parts&)>& lay_out,
                           const std::function<void()>& also) {
  Parts count;
  lay_out(count);
  std::string failure;
  try {
    memory_ = Buffer(world_.device(), count.bytes);
    also();
  } catch (const std::exception& error) {
    failure = fmt::format("{} bytes: {}", count.bytes, error.what());
  }
  settle(world_, failure, "allocation of the workspace");
  Parts parts{static_cast<std::byte*>(memory_.data())};
  lay_out(parts);
}

}  // namespace longspan

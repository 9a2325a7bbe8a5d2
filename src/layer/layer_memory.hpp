// What every layer of several ranks has: kernels on the device of its world, and one allocation
// that either all ranks get or none.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/communicator.hpp"
#include "src/base/parts.hpp"

namespace longspan {

/// Makes kernels on the current GPU, or on CPUs with at most `threads` threads (0: this rank's
/// share).
std::unique_ptr<kernels::Backend> make_kernels(const Communicator& world, int threads);

class LayerMemory {
 public:
  explicit LayerMemory(const Communicator& world) : world_(world) {}
  ~LayerMemory();
  LayerMemory(const LayerMemory&) = delete;
  LayerMemory& operator=(const LayerMemory&) = delete;

  /// Passes `lay_out` the parts of the memory; it is called twice, the first time to count. `also`
  /// allocates anything else that may fail on some ranks only. Collective: if anything failed on
  /// one rank, every rank throws a BackendError that names it.
  void allocate(const std::function<void(Parts&)>& lay_out, const std::function<void()>& also);

  std::size_t bytes() const { return memory_.bytes(); }

 private:
  Communicator world_;
  Buffer memory_;
};

}  // namespace longspan

// Python's Communicator: a communicator with the layers that attend() keeps for it.
//
// One thread at a time uses a communicator (longspan/communicator.hpp): a thread that works on it
// holds lock(), which is taken without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "longspan/communicator.hpp"
#include "python/src/plans.hpp"

namespace longspan::python {

namespace nb = nanobind;

class Comm {
 public:
  explicit Comm(Communicator world);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  /// UsageError where it is closed, or was inherited by a fork.
  const Communicator& world() const;
  KeptLayers& kept_layers() { return *kept_layers_; }

  /// Without the GIL: work(world), while no other thread works on it.
  template <class Work>
  auto alone(Work&& work) {
    const Communicator all = world();  // close() may come first
    const std::shared_ptr<std::mutex> mutex = mutex_;
    const nb::gil_scoped_release released;
    const std::lock_guard lock(*mutex);
    return work(all);
  }

  /// Ends its layers and leaves the communicator. A second call does nothing.
  void close();
  /// For the child of a fork: threads of layers, and connections, belong to the parent.
  void forked();

 private:
  std::optional<Communicator> world_;
  const char* gone_ = "it has been closed";
  std::unique_ptr<KeptLayers> kept_layers_ = std::make_unique<KeptLayers>();
  std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
};

/// The default of a call: this process alone, on the device of its arrays. Kept.
nb::object default_comm(Device device, int gpu);

/// `given`, or the default for `device`. TypeError for anything but a Communicator.
nb::object comm_or_default(nb::handle given, Device device, int gpu);
Comm& comm_of(nb::handle given);

void bind_communicators(nb::module_& m);

}  // namespace longspan::python

// The public interface of a transport, and the choice of one.
#include "longspan/communicator.hpp"

#include <memory>
#include <mutex>

#include "comm/control/control.hpp"
#include "comm/control/environment.hpp"
#include "comm/control/wire.hpp"
#include "comm/gpu.hpp"
#include "comm/libraries.hpp"
#include "comm/self.hpp"
#include "comm/tcp/control.hpp"
#include "comm/tcp/exchange.hpp"
#include "comm/tcp/transport.hpp"
#include "longspan/error.hpp"
#include "src/base/device_guard.hpp"

namespace longspan {

Communicator::Communicator(std::shared_ptr<comm::Transport> transport)
    : transport_(std::move(transport)) {}

comm::Transport& comm::transport_of(const Communicator& communicator) {
  return *communicator.transport_;
}

int Communicator::rank() const { return transport_->rank(); }
int Communicator::size() const { return transport_->size(); }
Device Communicator::device() const { return transport_->device(); }
int Communicator::gpu() const { return transport_->gpu(); }
void Communicator::make_current() const { set_current_gpu(gpu()); }
std::chrono::milliseconds Communicator::deadline() const { return transport_->deadline(); }
int Communicator::ranks_per_node() const { return transport_->ranks_per_node(); }
std::string Communicator::describe() const { return transport_->describe(); }

std::vector<std::string> Communicator::gather(const std::string& mine,
                                              const std::string& step) const {
  const DeviceGuard guard(gpu());
  return transport_->gather(mine, comm::printable(step));  // printable, because messages show it
}

std::optional<Communicator> Communicator::split(int color, int key) const {
  const DeviceGuard guard(gpu());
  auto child = transport_->split(color, key);
  if (!child) return std::nullopt;
  return Communicator(std::move(child));
}

std::uint64_t Communicator::received_bytes() const { return transport_->received_bytes(); }
void Communicator::abort(const std::string& why) const noexcept { transport_->abort(why); }

void Communicator::on_wait(std::function<bool()> gives_up) const {
  transport_->on_wait(std::move(gives_up));
}

namespace {

Communicator alone(const CommOptions& options) {
  const auto deadline = comm::deadline_of(options);
  if (options.device == Device::cuda) return Communicator(comm::gpu_self(deadline, options.gpu));
  return Communicator(std::make_shared<comm::SelfTransport>(deadline));
}

Communicator over_mpi(const CommOptions& options, int size) {
  if (comm::mpi_library() != nullptr) return comm::mpi_library()->from_mpirun(options, size);
  if (size == 1) return alone(options);
#if defined(LONGSPAN_HAVE_MPI)
  throw Unsupported(
      "This process was started by an MPI launcher, but the program was linked without longspan's "
      "MPI: link longspan::mpi, or start the ranks with torchrun or srun.");
#else
  throw Unsupported(
      "This process was started by an MPI launcher, but longspan was built without MPI: configure "
      "with -DLONGSPAN_MPI=ON, or start the ranks with torchrun or srun.");
#endif
}

/// The ranks of a control plane other than MPI.
std::shared_ptr<comm::Transport> between(std::unique_ptr<comm::Control> control,
                                         const CommOptions& options) {
  if (options.device == Device::cuda) return comm::gpu_transport(std::move(control), options.gpu);
  return comm::tcp_transport(std::move(control));
}

/// The ranks of a launcher have one port, and so one communicator is made there. While it is alive,
/// others are made over it.
Communicator over_tcp(const CommOptions& options, const comm::Launch& launch) {
  if (launch.size == 1) return alone(options);
  static std::mutex mutex;
  static std::weak_ptr<comm::Transport> there;
  const std::lock_guard lock(mutex);
  if (const auto first = there.lock()) {
    const auto gather = [&](const std::string& mine) {
      return first->gather(mine, "make another communicator");
    };
    return from_exchange(launch.rank, launch.size, gather, options);
  }
  auto first =
      between(comm::tcp_control(launch, comm::deadline_of(options), options.on_wait), options);
  there = first;
  return Communicator(std::move(first));
}

}  // namespace

Communicator self(Device device, int gpu) { return alone({.device = device, .gpu = gpu}); }

std::string launched_rank() { return comm::launched_rank(); }

Communicator from_environment(CommOptions options) {
  const comm::Launch launch = comm::find_launch();
  switch (launch.by) {
    case comm::Launcher::mpirun:
      return over_mpi(options, launch.size);
    case comm::Launcher::torchrun:
    case comm::Launcher::srun:
      return over_tcp(options, launch);
    default:
      return alone(options);
  }
}

Communicator from_exchange(int rank, int size, const ByteExchange& exchange, CommOptions options) {
  auto control = comm::exchange_control(rank, size, exchange, options);
  if (size == 1) return alone(options);
  return Communicator(between(std::move(control), options));
}

void agree(const Communicator& world, const NamedValues& arguments, const std::string& step) {
  std::vector<std::string> mine;
  for (const auto& [name, value] : arguments) mine.insert(mine.end(), {name, value});
  const auto packed = world.gather(comm::pack_all(mine), step);
  const auto first = comm::unpack(packed.front());

  // Every rank compares the same texts with rank 0's, so every rank finds the same difference.
  for (int r = 1; r < world.size(); ++r)
    if (const auto text =
            comm::difference(first, comm::transport_of(world).name_of(0), comm::unpack(packed[r]),
                             comm::transport_of(world).name_of(r), comm::printable(step)))
      throw UsageError(*text);
}

}  // namespace longspan

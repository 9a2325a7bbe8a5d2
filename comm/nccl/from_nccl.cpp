// Makes a longspan communicator from the caller's NCCL communicator: a split of it with all ranks,
// which longspan may abort without ending the caller's.
#include "longspan/nccl.hpp"

#include <fmt/format.h>

#include <condition_variable>
#include <thread>

#include "comm/control/environment.hpp"
#include "comm/control/threads.hpp"
#include "comm/nccl/control.hpp"
#include "comm/nccl/transport.hpp"
#include "src/base/device_guard.hpp"
#include "src/base/env.hpp"

namespace longspan {
namespace comm {
namespace {

/// Calls ncclCommSplit with a deadline. On a blocking communicator it waits for all ranks, so it
/// runs on a thread that is detached if a rank does not come.
ncclComm_t split(ncclComm_t comm, int rank, milliseconds deadline) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    bool nobody_waits = false;
    ncclComm_t child = nullptr;
    ncclResult_t result = ncclSuccess;
  };
  auto shared = std::make_shared<Shared>();
  const auto make = [=] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.splitShare = 0;
    ncclComm_t child = nullptr;
    ncclResult_t result = ncclCommSplit(comm, 0, rank, &child, &config);
    while (result == ncclInProgress) {
      std::this_thread::sleep_for(milliseconds(1));
      ncclCommGetAsyncError(comm, &result);
    }
    const std::lock_guard lock(shared->mutex);
    shared->child = child;
    shared->result = result;
    shared->done = true;
    shared->changed.notify_all();
    if (shared->nobody_waits && child != nullptr) ncclCommAbort(child);
  };
  start_thread("a split of the NCCL communicator", make).detach();

  std::unique_lock lock(shared->mutex);
  const std::string step = "make the communicator";
  if (!shared->changed.wait_for(lock, deadline, [&] { return shared->done; })) {
    shared->nobody_waits = true;
    throw RankError(ErrorKind::timeout, -1, step,
                    "A rank did not come to '" + step +
                        "' within the deadline; over NCCL alone it has no name.");
  }
  if (shared->result != ncclSuccess)
    throw BackendError(fmt::format("NCCL: ncclCommSplit returned {} ({}).",
                                   ncclGetErrorString(shared->result), ncclGetLastError(nullptr)));
  return shared->child;
}

}  // namespace
}  // namespace comm

Communicator from_nccl(ncclComm_t comm, CommOptions options) {
  if (options.device != Device::cuda)
    throw Unsupported(
        "from_nccl was asked for device host, but NCCL moves states on GPUs only: "
        "use device cuda, or from_mpi.");
  env_default("NCCL_NVLS_ENABLE", "0");
  const auto deadline = comm::deadline_of(options);
  int rank = 0, size = 0, device = 0;
  for (const ncclResult_t result :
       {ncclCommUserRank(comm, &rank), ncclCommCount(comm, &size), ncclCommCuDevice(comm, &device)})
    if (result != ncclSuccess)
      throw UsageError(fmt::format("from_nccl was given a communicator that NCCL rejects: {}.",
                                   ncclGetErrorString(result)));
  if (options.gpu >= 0 && options.gpu != device)
    throw UsageError(fmt::format("GPU {} was asked for; the NCCL communicator is on GPU {}",
                                 options.gpu, device));
  const DeviceGuard guard(device);
  auto link = std::make_shared<comm::Link>(comm::split(comm, rank, deadline), deadline);
  auto control = comm::nccl_control(link, rank, size, deadline);
  link->settle(*control, "make the communicator");
  const comm::Place place = comm::find_place(*control);
  return Communicator(comm::nccl_transport(std::move(link), std::move(control), place));
}

}  // namespace longspan

// Makes an NCCL communicator for ranks that have a control plane: each takes the GPU of its local
// rank, they compare GPUs (NCCL hangs when two ranks share one), and use the id of rank 0.
#include <fmt/format.h>

#include <cstring>

#include "comm/control/hosts.hpp"
#include "comm/control/wire.hpp"
#include "comm/cuda/stream.hpp"
#include "comm/nccl/transport.hpp"
#include "longspan/info.hpp"
#include "src/base/check.hpp"
#include "src/base/device_guard.hpp"
#include "src/base/env.hpp"

namespace longspan::comm {
namespace {

/// {uuid, name for people} of the current GPU. Instances of one partitioned GPU differ in the uuid.
std::string describe_gpu(int device) {
  cudaDeviceProp properties{};
  char bus[32] = "";
  LONGSPAN_CUDA(cudaGetDeviceProperties(&properties, device));
  LONGSPAN_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
  return pack(std::string(properties.uuid.bytes, sizeof properties.uuid.bytes),
              fmt::format("{} at {}", properties.name, bus));
}

/// The GPU that was asked for, or that of the local rank; or on every rank the reason why that is
/// impossible.
int choose_gpu(Control& control, const Place& place, int asked) {
  const int visible = gpu_count();
  check_gpu(asked, visible);
  int gpu = -1;
  std::string mine;
  if (visible > 0) {
    gpu = asked >= 0 ? asked : place.local_rank % visible;
    mine = describe_gpu(gpu);
  }
  const auto gpus = control.gather(mine, "compare the GPUs");
  for (int r = 0; r < control.size(); ++r)
    if (gpus[r].empty())
      throw Unsupported(
          fmt::format("Device cuda was asked for, but rank {} sees no GPU: check nvidia-smi and "
                      "CUDA_VISIBLE_DEVICES there, or use device host.",
                      r));
  for (int r = 0; r < control.size(); ++r)
    for (int other = 0; other < r; ++other)
      if (unpack(gpus[r]).at(0) == unpack(gpus[other]).at(0))
        throw Unsupported(
            fmt::format("Rank {} and rank {} would share one GPU ({}), which NCCL cannot do: start "
                        "at most as many ranks on a machine as it has GPUs.",
                        other, r, unpack(gpus[r]).at(1)));
  return gpu;
}

ncclUniqueId meet(Control& control) {
  ncclUniqueId id{};
  std::string mine;
  if (control.rank() == 0 && ncclGetUniqueId(&id) == ncclSuccess)
    mine.assign(id.internal, sizeof id.internal);
  const std::string all = control.gather(mine, "meet for NCCL").front();
  if (all.size() != sizeof id.internal)
    throw BackendError(
        "NCCL: ncclGetUniqueId failed on rank 0; set NCCL_DEBUG=WARN to learn why (often no "
        "network "
        "interface that NCCL may use: see NCCL_SOCKET_IFNAME).");
  std::memcpy(id.internal, all.data(), sizeof id.internal);
  return id;
}

}  // namespace

std::shared_ptr<Transport> nccl_bootstrap(std::shared_ptr<Control> control, int asked) {
  // NCCL's multicast fails on machines that do not allow it, and longspan does not need it.
  env_default("NCCL_NVLS_ENABLE", "0");
  const Place place = find_place(*control);
  int gpu = -1;
  try {
    gpu = choose_gpu(*control, place, asked);
  } catch (const BackendError& error) {
    control->tell(gave_up(*control, error.what()));  // only this rank's error
    throw;
  } catch (const UsageError& error) {
    control->tell(gave_up(*control, error.what()));  // only this rank's error, too
    throw;
  }
  const DeviceGuard guard(gpu);
  const ncclUniqueId id = meet(*control);

  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const ncclResult_t result =
      ncclCommInitRankConfig(&comm, control->size(), id, control->rank(), &config);
  if (result != ncclSuccess && result != ncclInProgress) {
    if (comm != nullptr) ncclCommAbort(comm);
    control->fail(
        {ErrorKind::backend, -1, "make the NCCL communicator",
         fmt::format("NCCL on rank {}: ncclCommInitRankConfig returned {} ({}).", control->rank(),
                     ncclGetErrorString(result), ncclGetLastError(nullptr))});
  }
  std::shared_ptr<Link> link;
  try {
    link = std::make_shared<Link>(comm, control->patience());
  } catch (const BackendError& error) {
    control->tell(gave_up(*control, error.what()));
    throw;
  }
  link->settle(*control, "make the NCCL communicator");
  return nccl_transport(std::move(link), std::move(control), place);
}

}  // namespace longspan::comm

// Makes a longspan communicator from an MPI communicator. Messages always go over MPI; states go
// over MPI on CPUs and over NCCL on GPUs.
#include "comm/mpi/from_mpi.hpp"

#include <fmt/format.h>

#include "comm/control/environment.hpp"
#include "comm/gpu.hpp"
#include "comm/mpi/mailbox.hpp"
#include "comm/mpi/transport.hpp"
#include "longspan/mpi.hpp"
#include "src/base/check.hpp"

namespace longspan {
namespace comm {
namespace {

Communicator connect(MPI_Comm comm, const CommOptions& options,
                     std::shared_ptr<MpiSession> session) {
  const milliseconds deadline = deadline_of(options);
  auto duplicate =
      std::make_shared<MpiDuplicate>(comm, deadline, std::move(session), options.on_wait);
  auto control = mail_control(std::make_unique<MpiMailbox>(duplicate), deadline);
  control->on_wait(options.on_wait);
  return Communicator(options.device == Device::cuda
                          ? gpu_transport(std::move(control), options.gpu)
                          : mpi_transport(std::move(duplicate), std::move(control)));
}

}  // namespace

Communicator from_mpirun(const CommOptions& options, int size) {
  claim_rank();
  auto session = MpiSession::join(deadline_of(options), options.on_wait);
  if (!session) check_thread_level();  // the caller initialised MPI
  int found = 0;
  LONGSPAN_MPI(MPI_Comm_size(MPI_COMM_WORLD, &found));
  if (size > 0 && found != size)
    throw UsageError(fmt::format(
        "The launcher announces {} ranks, but MPI found {}: the launcher and the MPI library do "
        "not know each other. Start with the mpirun of this MPI, or with srun --mpi=pmix.",
        size, found));
  return connect(MPI_COMM_WORLD, options, std::move(session));
}

}  // namespace comm

Communicator from_mpi(MPI_Comm comm, CommOptions options) {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (!initialized || finalized)
    throw UsageError(
        "from_mpi was called while MPI was not running: call MPI_Init_thread before it, or use "
        "from_environment, which does.");
  comm::claim_rank();
  comm::check_thread_level();
  return comm::connect(comm, options, nullptr);
}

}  // namespace longspan

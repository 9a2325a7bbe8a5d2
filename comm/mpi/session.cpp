#include "comm/mpi/session.hpp"

#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "comm/mpi/mailbox.hpp"
#include "src/check.hpp"

namespace longspan::comm {

namespace {

/// Runs what MPI offers only as a blocking call; false when it has not returned by the deadline. It
/// then goes on, on a thread of its own, until the process ends.
bool returns_in_time(const std::function<void()>& call, std::chrono::milliseconds deadline) {
  std::packaged_task<void()> task(call);
  auto done = task.get_future();
  std::thread(std::move(task)).detach();
  return done.wait_for(deadline) == std::future_status::ready;
}

}  // namespace

std::shared_ptr<MpiSession> MpiSession::join(std::chrono::milliseconds deadline) {
  static std::mutex mutex;
  static std::weak_ptr<MpiSession> running;
  const std::lock_guard lock(mutex);
  if (auto session = running.lock()) return session;

  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized)
    throw UsageError(
        "MPI was asked for after it was finalised, and it cannot start twice in one process: keep "
        "one communicator alive for as long as more may be made, or call MPI_Init yourself.");
  if (initialized) return nullptr;
  const bool came = returns_in_time(
      [] {
        int level = 0;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
      },
      deadline);
  if (!came)
    throw RankError(ErrorKind::timeout, -1, "start MPI",
                    "MPI_Init did not return within the deadline: a rank has not started MPI, and "
                    "MPI does not say which. LONGSPAN_DEADLINE_S sets the deadline.");
  auto session = std::make_shared<MpiSession>(deadline);
  running = session;
  return session;
}

MpiSession::~MpiSession() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!failed_ && !finalized) returns_in_time([] { MPI_Finalize(); }, deadline_);
}

MpiDuplicate::MpiDuplicate(MPI_Comm comm, std::chrono::milliseconds deadline,
                           std::shared_ptr<MpiSession> session)
    : session_(std::move(session)) {
  // A tag that the caller is unlikely to use; letters travel on `comm` only when a rank is missing.
  constexpr int kRollCallTag = 30571;
  const std::string step = "make the communicator";
  Patience patient(deadline - deadline / 4);
  const auto complete = [&](MPI_Request request) {
    for (int done = 0; !done; patient.pause()) {
      LONGSPAN_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done || !patient.over()) continue;
      failed();
      mail_control(std::make_unique<MpiMailbox>(comm, kRollCallTag), deadline)
          ->timed_out(step.c_str(), patient.waited());
    }
  };
  MPI_Request request = MPI_REQUEST_NULL;
  LONGSPAN_MPI(MPI_Comm_idup(comm, &comm_, &request));
  complete(request);
  // Open MPI 4.1 can crash on a letter that overtakes the birth of its communicator, so nobody
  // writes before everybody has it.
  LONGSPAN_MPI(MPI_Ibarrier(comm, &request));
  complete(request);
  LONGSPAN_MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
}

MpiDuplicate::~MpiDuplicate() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!kept_ && !finalized) MPI_Comm_free(&comm_);
}

void MpiDuplicate::failed() {
  keep();
  if (session_) session_->failed();
}

}  // namespace longspan::comm

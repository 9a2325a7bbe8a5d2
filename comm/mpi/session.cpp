#include "comm/mpi/session.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "comm/control/threads.hpp"
#include "comm/mpi/mailbox.hpp"
#include "src/base/check.hpp"
#include "src/base/env.hpp"

namespace longspan::comm {
namespace {

const char* level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    case MPI_THREAD_MULTIPLE:
      return "MPI_THREAD_MULTIPLE";
    default:
      return "no level that MPI names";
  }
}

bool mpi_ran_before_fork = false;

bool is_initialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}

/// The rank's name by its launcher, the same in all processes that inherit its variables; empty
/// where the launcher does not name jobs.
std::string name_of_rank() {
  constexpr const char* kNames[][2] = {{"PMIX_NAMESPACE", "PMIX_RANK"}, {"PMI_JOBID", "PMI_RANK"}};
  for (const auto& [job, rank] : kNames)
    if (env_text(job) && env_text(rank))
      return fmt::format("longspan mpi {} {} {}", ::getuid(), *env_text(job), *env_text(rank));
  return "";
}

[[noreturn]] void refuse_process(const char* who) {
  throw UsageError(fmt::format(
      "{} has started MPI for this rank already, and MPI takes one process a rank: this process "
      "has "
      "inherited the variables of the MPI launcher from it. Start it without them (OMPI_*, PMIX_*, "
      "PMI_*), or let it compute alone (self(), longspan.alone()) or meet others by from_exchange.",
      who));
}

}  // namespace

void remember_forks() {
  static_cast<void>(
      pthread_atfork(nullptr, nullptr, [] { mpi_ran_before_fork = is_initialized(); }));
}

void claim_rank() {
  if (mpi_ran_before_fork) refuse_process("The process that this one was forked from");
  // A Unix socket in the abstract namespace, which has names and no files: the system frees it when
  // the process ends.
  static std::mutex mutex;
  static int claim = -1;
  const std::lock_guard lock(mutex);
  const std::string name = name_of_rank();
  if (claim >= 0 || name.empty()) return;
  sockaddr_un here{};
  here.sun_family = AF_UNIX;
  const std::size_t bytes = std::min(name.size(), sizeof here.sun_path - 1);
  std::memcpy(here.sun_path + 1, name.data(), bytes);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  claim = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (claim < 0 || ::bind(claim, reinterpret_cast<const sockaddr*>(&here), length) == 0) return;
  const bool is_taken = errno == EADDRINUSE;
  ::close(std::exchange(claim, -1));
  if (is_taken && !is_initialized()) refuse_process("Another process");
}

/// Shared by the thread and the session: how far the thread is, and how far it may go.
struct MpiSession::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  int status = MPI_SUCCESS;  // of MPI_Init_thread
  int level = MPI_THREAD_SINGLE;
  bool started = false;
  bool finalize = false;  // it was asked for
  bool leave = false;     // it was asked for: MPI stays as it is
  bool ended = false;
};

void MpiSession::live(Shared& shared) {
  int level = MPI_THREAD_SINGLE;
  const int status = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  std::unique_lock lock(shared.mutex);
  shared.status = status;
  shared.level = level;
  shared.started = true;
  shared.changed.notify_all();
  shared.changed.wait(lock, [&] { return shared.finalize || shared.leave; });
  if (shared.finalize) {
    lock.unlock();
    MPI_Finalize();
    lock.lock();
  }
  shared.ended = true;
  shared.changed.notify_all();
}

MpiSession::MpiSession(std::chrono::milliseconds deadline, const std::function<bool()>& gives_up)
    : deadline_(deadline), shared_(std::make_shared<Shared>()) {
  start_thread("MPI", [shared = shared_] { live(*shared); }).detach();
  constexpr const char* kStep = "start MPI";
  const auto end = Patience::Clock::now() + deadline;
  GivesUp asked(gives_up);
  std::unique_lock lock(shared_->mutex);
  while (!shared_->changed.wait_until(lock,
                                      std::min(end, Patience::Clock::now() + milliseconds(100)),
                                      [&] { return shared_->started; })) {
    const bool is_late = Patience::Clock::now() >= end;
    lock.unlock();
    const bool is_interrupted = asked.now();
    lock.lock();
    if (!is_late && !is_interrupted) continue;
    shared_->leave = true;
    shared_->changed.notify_all();
    if (is_interrupted)
      throw RankError(ErrorKind::rank_failure, -1, kStep,
                      fmt::format("This rank gave up: it was interrupted at '{}'.", kStep));
    throw RankError(ErrorKind::timeout, -1, kStep,
                    "MPI_Init did not return within the deadline: a rank has not started MPI, and "
                    "MPI does not say which. LONGSPAN_DEADLINE_S sets the deadline.");
  }
}

MpiSession::~MpiSession() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  std::unique_lock lock(shared_->mutex);
  (failed_ || finalized ? shared_->leave : shared_->finalize) = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, deadline_, [&] { return shared_->ended; });
}

std::shared_ptr<MpiSession> MpiSession::join(std::chrono::milliseconds deadline,
                                             const std::function<bool()>& gives_up) {
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
        "one communicator alive for as long as more may be made, or call MPI_Init_thread "
        "yourself.");
  if (initialized) return nullptr;
  auto session = std::make_shared<MpiSession>(deadline, gives_up);
  LONGSPAN_MPI(session->shared_->status);
  if (session->shared_->level < MPI_THREAD_SERIALIZED)
    throw Unsupported(fmt::format(
        "MPI was started for MPI_THREAD_SERIALIZED, which longspan needs, but this MPI library "
        "gives {}: use one that was built for threads.",
        level_name(session->shared_->level)));
  running = session;
  return session;
}

void check_thread_level() {
  int provided = MPI_THREAD_SINGLE, main = 0;
  LONGSPAN_MPI(MPI_Query_thread(&provided));
  LONGSPAN_MPI(MPI_Is_thread_main(&main));
  check_thread_level(provided, main != 0);
}

void check_thread_level(int provided, bool on_main_thread) {
  const int wanted = on_main_thread ? MPI_THREAD_FUNNELED : MPI_THREAD_SERIALIZED;
  if (provided >= wanted) return;
  throw UsageError(fmt::format(
      "MPI was initialised for {}, but longspan {}: call MPI_Init_thread with {} or more in place "
      "of MPI_Init, and look at what it provides.",
      level_name(provided),
      on_main_thread ? "computes on threads of its own besides the one that calls MPI"
                     : "was called on another thread than the one that initialised MPI",
      level_name(wanted)));
}

MpiDuplicate::MpiDuplicate(MPI_Comm comm, std::chrono::milliseconds deadline,
                           std::shared_ptr<MpiSession> session,
                           const std::function<bool()>& gives_up)
    : session_(std::move(session)) {
  // A tag that the caller is unlikely to use; messages travel on `comm` only when a rank is
  // missing.
  constexpr int kRollCallTag = 30571;
  const std::string step = "make the communicator";
  Patience patient(deadline - deadline / 4);
  GivesUp asked(gives_up);
  const auto complete = [&](MPI_Request request) {
    for (int done = 0; !done; patient.pause()) {
      LONGSPAN_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done) continue;
      if (asked.now()) {
        failed();
        throw RankError(ErrorKind::rank_failure, -1, step,
                        fmt::format("This rank gave up: it was interrupted at '{}'.", step));
      }
      if (!patient.over()) continue;
      failed();
      mail_control(std::make_unique<MpiMailbox>(comm, kRollCallTag), deadline)
          ->timed_out(step.c_str(), patient.waited());
    }
  };
  MPI_Request request = MPI_REQUEST_NULL;
  // MPI writes the duplicate when all ranks have come, perhaps after this rank gave up: its memory
  // must still exist then.
  auto place = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  LONGSPAN_MPI(MPI_Comm_idup(comm, place.get(), &request));
  try {
    complete(request);
  } catch (...) {
    static_cast<void>(place.release());  // it is kept
    throw;
  }
  comm_ = *place;
  // Open MPI 4.1 can crash on a message that arrives before its communicator exists, so no rank
  // writes before all have it.
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

// Keeps MPI's own objects while they are used: MPI itself where longspan started it, and the
// duplicate of the caller's communicator that separates longspan's messages from all others.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <memory>

namespace longspan::comm {

/// Finalises MPI when the last communicator from the environment is released, unless one of them
/// failed: finalising waits for all ranks, and one of them may be gone. MPI must be finalised by
/// the thread that initialised it, and either call may block past any deadline. So both run on one
/// thread that lives that long: none has to be started at the end, which may fail.
class MpiSession {
 public:
  /// Initialises MPI, or joins the session that is running; null where the caller initialised it.
  /// `gives_up`: see CommOptions::on_wait.
  static std::shared_ptr<MpiSession> join(std::chrono::milliseconds deadline,
                                          const std::function<bool()>& gives_up);

  /// Called only by join.
  MpiSession(std::chrono::milliseconds deadline, const std::function<bool()>& gives_up);
  ~MpiSession();
  void failed() { failed_ = true; }

 private:
  struct Shared;
  static void live(Shared& shared);

  std::chrono::milliseconds deadline_;
  bool failed_ = false;
  std::shared_ptr<Shared> shared_;  // shared with the thread, which is detached where MPI blocks
};

/// Notes that this process speaks for its rank of an MPI launcher. Throws UsageError where it
/// cannot: a process that a rank started or forked inherits the launcher's variables, and MPI_Init
/// would end it, or all ranks, without an error.
void claim_rank();
/// Called once, before main: a process forked later remembers whether MPI ran before.
void remember_forks();

/// Throws UsageError where MPI was initialised with too low a thread level: longspan computes on
/// threads of its own, and the calling thread calls MPI.
void check_thread_level();

/// The decision itself, separate for tests.
void check_thread_level(int provided, bool on_main_thread);

class MpiDuplicate {
 public:
  /// Makes the duplicate. It is collective, and takes no longer than the deadline.
  MpiDuplicate(MPI_Comm comm, std::chrono::milliseconds deadline,
               std::shared_ptr<MpiSession> session,
               const std::function<bool()>& gives_up = nullptr);
  ~MpiDuplicate();
  MPI_Comm get() const { return comm_; }
  /// Leaves the communicator to MPI: a peer may still write to it, and MPI may reuse the number of
  /// a freed one.
  void keep() { kept_ = true; }
  /// Notes that the communicator failed: no collective call is possible then, nor finalising.
  void failed();

 private:
  std::shared_ptr<MpiSession> session_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  bool kept_ = false;
};

}  // namespace longspan::comm

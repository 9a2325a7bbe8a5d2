// Keeps MPI's own objects for as long as they are used: MPI itself where longspan started it, and
// the duplicate of the caller's communicator that keeps longspan's messages apart from all others.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <memory>

namespace longspan::comm {

/// Finalises MPI when the last communicator that came from the environment goes, unless one of them
/// failed: finalising waits for all ranks, and one of them may be gone. MPI wants to be finalised
/// by the thread that initialised it, and either call may block past any deadline. So both run on
/// one thread that lives as long, and at the end none has to be started, which may fail.
class MpiSession {
 public:
  /// Initialises MPI, or joins the session that is running; null where the caller initialised it.
  /// `gives_up`: see CommOptions::on_wait.
  static std::shared_ptr<MpiSession> join(std::chrono::milliseconds deadline,
                                          const std::function<bool()>& gives_up);

  /// Is called by join alone.
  MpiSession(std::chrono::milliseconds deadline, const std::function<bool()>& gives_up);
  ~MpiSession();
  void failed() { failed_ = true; }

 private:
  struct Shared;
  static void live(Shared& shared);

  std::chrono::milliseconds deadline_;
  bool failed_ = false;
  std::shared_ptr<Shared> shared_;  // shared with the thread, which is left behind where MPI blocks
};

/// Notes that this process is the one that speaks for its rank of an MPI launcher. Throws
/// UsageError where it cannot be: a process that a rank has started or forked inherits the
/// launcher's variables, and MPI_Init would end it, or all ranks, without an error.
void claim_rank();
/// Is called once, before main: a process that is forked later remembers whether MPI ran before.
void remember_forks();

/// Throws UsageError where MPI was initialised for fewer threads than longspan's use of it takes:
/// longspan computes on threads of its own, and the calling thread calls MPI.
void check_thread_level();

/// Decides that, from what is given; it stands apart for tests.
void check_thread_level(int provided, bool on_main_thread);

class MpiDuplicate {
 public:
  /// Makes the duplicate. It is collective, and takes no longer than the deadline.
  MpiDuplicate(MPI_Comm comm, std::chrono::milliseconds deadline,
               std::shared_ptr<MpiSession> session,
               const std::function<bool()>& gives_up = nullptr);
  ~MpiDuplicate();
  MPI_Comm get() const { return comm_; }
  /// Leaves the communicator to MPI: a peer may still write to it, and MPI may give the number of a
  /// freed one to another.
  void keep() { kept_ = true; }
  /// Says that the communicator failed: nothing collective is possible then, finalising neither.
  void failed();

 private:
  std::shared_ptr<MpiSession> session_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  bool kept_ = false;
};

}  // namespace longspan::comm

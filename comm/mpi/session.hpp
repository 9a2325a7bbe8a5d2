// Lifetimes of MPI's own objects: MPI itself where longspan started it, and the duplicate of the
// caller's communicator that keeps longspan's messages apart from everybody else's.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>

namespace longspan::comm {

/// Finalises MPI when the last communicator that came from the environment goes, unless one of them
/// failed: finalising waits for all ranks, and one of them may be gone.
class MpiSession {
 public:
  explicit MpiSession(std::chrono::milliseconds deadline) : deadline_(deadline) {}
  ~MpiSession();
  /// Initialises MPI, or joins the session that is running; null where the caller initialised it.
  static std::shared_ptr<MpiSession> join(std::chrono::milliseconds deadline);
  void failed() { failed_ = true; }

 private:
  std::chrono::milliseconds deadline_;
  bool failed_ = false;
};

class MpiDuplicate {
 public:
  /// Collective; at most for the deadline.
  MpiDuplicate(MPI_Comm comm, std::chrono::milliseconds deadline,
               std::shared_ptr<MpiSession> session);
  ~MpiDuplicate();
  MPI_Comm get() const { return comm_; }
  /// Leaves the communicator to MPI: a peer may still write to it, and MPI may give the number of a
  /// freed one to another.
  void keep() { kept_ = true; }
  /// After a failure nothing collective is possible, finalising neither.
  void failed();

 private:
  std::shared_ptr<MpiSession> session_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  bool kept_ = false;
};

}  // namespace longspan::comm

// Letters over MPI, and the tags that longspan uses on its own communicator.
#pragma once

#include <mpi.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/control.hpp"
#include "comm/mpi/session.hpp"

namespace longspan::comm {

inline constexpr int kLetterTag = 1;
inline constexpr int kDataTag = 2;

class MpiMailbox final : public Mailbox {
 public:
  explicit MpiMailbox(std::shared_ptr<MpiDuplicate> duplicate);
  /// On a communicator that stays the caller's.
  MpiMailbox(MPI_Comm comm, int tag);
  ~MpiMailbox() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(coming_.size()); }
  void post(int to, const std::string& text) override;
  std::optional<Letter> next() override;
  void flush(milliseconds limit) noexcept override;
  void abandon() noexcept override;

 private:
  struct Leaving {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Coming {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  /// Drops what has been sent; true when nothing remains.
  bool sweep();
  void say_goodbye();

  std::shared_ptr<MpiDuplicate> duplicate_;
  MPI_Comm comm_;
  int tag_;
  int rank_ = 0;
  std::list<Leaving> leaving_;  // a list: MPI reads the text where it lies
  std::vector<Coming> coming_;  // one from each peer at a time, so that order is kept
  int next_peer_ = 0;
  int present_ = 0;  // peers that have not said goodbye
};

}  // namespace longspan::comm

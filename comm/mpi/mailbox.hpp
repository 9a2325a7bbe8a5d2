// Sends messages over MPI, and names the tags that longspan uses on its own communicator.
#pragma once

#include <mpi.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/mailbox.hpp"
#include "comm/mpi/session.hpp"

namespace longspan::comm {

inline constexpr int kControlTag = 1;
inline constexpr int kDataTag = 2;  // the tag of a group follows it, by the group's number

class MpiMailbox final : public Mailbox {
 public:
  explicit MpiMailbox(std::shared_ptr<MpiDuplicate> duplicate);
  /// A mailbox on a communicator that stays the caller's.
  MpiMailbox(MPI_Comm comm, int tag);
  ~MpiMailbox() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void post(int to, const std::string& text) override;
  std::optional<Message> next() override;
  void flush(milliseconds limit) noexcept override;
  void abandon() noexcept override;
  void distrust() noexcept override;

 private:
  /// A message on its way: MPI reads or writes the text in place.
  struct Moving {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Messages {
    std::list<Moving> leaving;   // a list, so that none of them moves in memory
    std::vector<Moving> coming;  // one from each peer at a time, so that order is kept
  };

  /// Drops what has been sent; returns true when nothing remains.
  bool sweep() noexcept;
  bool receives() const;
  void post_goodbye() noexcept;

  std::shared_ptr<MpiDuplicate> duplicate_;
  MPI_Comm comm_;
  int tag_;
  int rank_ = 0;
  int size_ = 0;
  std::unique_ptr<Messages> messages_;  // outlives this where MPI is not done with them
  int next_peer_ = 0;
  int present_ = 0;  // peers that have not said goodbye
};

}  // namespace longspan::comm

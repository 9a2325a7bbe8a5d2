// Small messages between ranks, which never block: the base of a control plane. MPI, TCP and the
// group of a split each have a mailbox.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/control/control.hpp"
#include "comm/control/patience.hpp"

namespace longspan::comm {

class Mailbox {
 public:
  struct Message {
    /// left, died: this is the last message of the peer. damaged: what came from it cannot be read,
    /// and `body` has the reason.
    enum Kind { text, left, died, damaged };
    int from = 0;
    Kind kind = text;
    std::string body = {};
  };

  virtual ~Mailbox() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// The rank whose process relays messages between all others, and echoes those that a rank posts
  /// to itself; -1 where it is not a rank of this mailbox. Nothing where messages go directly, and
  /// for that rank itself.
  virtual std::optional<int> relay() const { return std::nullopt; }
  /// Posts a message. Messages of one sender arrive in the order in which they were posted.
  virtual void post(int to, const std::string& text) = 0;
  virtual std::optional<Message> next() = 0;
  /// Sends posted messages, for at most `limit`. After a failure some may never leave.
  virtual void flush(milliseconds limit) noexcept = 0;
  /// Called when the communicator failed: from now on nothing may wait for a peer.
  virtual void abandon() noexcept {}
  /// Called when a child of the communicator failed: a rank may not come to the common end.
  virtual void distrust() noexcept {}
};

std::unique_ptr<Control> mail_control(std::unique_ptr<Mailbox> mailbox, milliseconds deadline);

}  // namespace longspan::comm

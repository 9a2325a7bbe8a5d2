// Sends messages by calls that return at once: a peer that stops in the middle of a message delays
// only its own messages. The last message of a rank is empty, and means goodbye.
#include "comm/mpi/mailbox.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <climits>

#include "src/base/check.hpp"

namespace longspan::comm {

MpiMailbox::MpiMailbox(std::shared_ptr<MpiDuplicate> duplicate)
    : MpiMailbox(duplicate->get(), kControlTag) {
  duplicate_ = std::move(duplicate);
}

MpiMailbox::MpiMailbox(MPI_Comm comm, int tag)
    : comm_(comm), tag_(tag), messages_(std::make_unique<Messages>()) {
  LONGSPAN_MPI(MPI_Comm_rank(comm, &rank_));
  LONGSPAN_MPI(MPI_Comm_size(comm, &size_));
  messages_->coming.resize(size_);
  present_ = size_ - 1;
}

MpiMailbox::~MpiMailbox() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (duplicate_ && !finalized) post_goodbye();
  // Memory that MPI may still read or write stays allocated: the price of not waiting.
  if (!finalized && (!sweep() || receives())) static_cast<void>(messages_.release());
}

bool MpiMailbox::receives() const {
  return std::any_of(messages_->coming.begin(), messages_->coming.end(),
                     [](const Moving& message) { return message.request != MPI_REQUEST_NULL; });
}

/// Ranks mostly leave together. A rank that has to wait for the others does not free the
/// communicator, so the wait can be short.
void MpiMailbox::post_goodbye() noexcept try {
  for (int p = 0; p < size(); ++p)
    if (p != rank_) post(p, "");
  for (Patience patient(milliseconds(100)); present_ > 0 && !patient.over(); patient.pause())
    next();
  if (present_ > 0) duplicate_->keep();
} catch (...) {  // an error of MPI, or no memory for a message
  duplicate_->keep();
}

void MpiMailbox::post(int to, const std::string& text) {
  if (text.size() > INT_MAX)
    throw UsageError(fmt::format(
        "A text of {} bytes was given to a gather, but texts between ranks have at most {} bytes.",
        text.size(), INT_MAX));
  sweep();
  Moving& message = messages_->leaving.emplace_back(Moving{text});
  LONGSPAN_MPI(MPI_Isend(message.text.data(), static_cast<int>(text.size()), MPI_BYTE, to, tag_,
                         comm_, &message.request));
}

std::optional<Mailbox::Message> MpiMailbox::next() {
  // A probe looks first and then lets MPI progress: a second probe finds what arrived.
  for (int tried = 0; tried < 2 * size(); ++tried) {
    const int peer = next_peer_;
    next_peer_ = (next_peer_ + 1) % size();
    if (peer == rank_) continue;
    Moving& message = messages_->coming[peer];
    if (message.request == MPI_REQUEST_NULL) {
      int found = 0, bytes = 0;
      MPI_Message matched;
      MPI_Status status;
      LONGSPAN_MPI(MPI_Improbe(peer, tag_, comm_, &found, &matched, &status));
      if (!found) continue;
      LONGSPAN_MPI(MPI_Get_count(&status, MPI_BYTE, &bytes));
      message.text.resize(bytes);
      LONGSPAN_MPI(MPI_Imrecv(message.text.data(), bytes, MPI_BYTE, &matched, &message.request));
    }
    int done = 0;
    LONGSPAN_MPI(MPI_Test(&message.request, &done, MPI_STATUS_IGNORE));
    if (!done) continue;
    next_peer_ = peer;  // there may be more from this peer
    if (!message.text.empty()) return Message{peer, Message::text, std::move(message.text)};
    --present_;
    return Message{peer, Message::left};
  }
  return std::nullopt;
}

bool MpiMailbox::sweep() noexcept {
  std::list<Moving>& leaving = messages_->leaving;
  for (auto message = leaving.begin(); message != leaving.end();) {
    int done = 0;
    MPI_Test(&message->request, &done, MPI_STATUS_IGNORE);
    // A failed request is over too: MPI has then taken its handle back.
    const bool over = done || message->request == MPI_REQUEST_NULL;
    message = over ? leaving.erase(message) : std::next(message);
  }
  return leaving.empty();
}

void MpiMailbox::flush(milliseconds limit) noexcept {
  int finalized = 0;
  MPI_Finalized(&finalized);
  Patience patient(limit);
  while (!finalized && !sweep() && !patient.over()) patient.pause();
}

void MpiMailbox::abandon() noexcept {
  distrust();
  duplicate_.reset();
}

void MpiMailbox::distrust() noexcept {
  if (duplicate_) duplicate_->failed();
}

}  // namespace longspan::comm

// The verbs over MPI: every rank sends to and receives from each peer itself, without MPI's own
// collectives, so that a peer that does not arrive has a name. The calls return at once, and the
// loop that completes them watches the deadline and the control plane.
#include "comm/mpi/transport.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "comm/controlled.hpp"
#include "comm/hosts.hpp"
#include "comm/mpi/mailbox.hpp"
#include "src/check.hpp"

namespace longspan::comm {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 30;  // MPI counts bytes in an int

std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* at(const void* base, std::size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

/// "Open MPI 4.1.4" of "Open MPI v4.1.4, package: ..."; "MPICH 4.0.2" of "MPICH Version: 4.0.2
/// ...".
std::string library_name() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, length);
  std::istringstream words(all.substr(0, all.find_first_of(",\n")));
  std::string name;
  for (std::string word; words >> word;) {
    if (word == "Version:" || word == "Library") continue;
    if (word.size() > 1 && word[0] == 'v' && std::isdigit(word[1])) word.erase(0, 1);
    name += (name.empty() ? "" : " ") + word;
  }
  return name;
}

class MpiTransport final : public ControlledTransport {
 public:
  MpiTransport(std::shared_ptr<MpiDuplicate> duplicate, std::unique_ptr<Control> control)
      : ControlledTransport(std::move(control)),
        duplicate_(std::move(duplicate)),
        place_(find_place(this->control())) {}

  Device device() const override { return Device::host; }
  std::string describe() const override {
    return library_name() + " | " + comm::describe(size(), place_);
  }

  void all_gather(const void* send, void* recv, std::size_t bytes, Stream,
                  const char* step) override {
    control().fate().check();
    for (int p = 0; p < size(); ++p)
      if (p != rank()) receive(at(recv, p * bytes), bytes, p);
    for (int p = 0; p < size(); ++p)
      if (p != rank()) this->send(send, bytes, p);
    keep(send, at(recv, rank() * bytes), bytes);
    finish(step);
  }

  void all_to_all(const void* send, void* recv, std::size_t bytes, Stream,
                  const char* step) override {
    control().fate().check();
    for (int p = 0; p < size(); ++p)
      if (p != rank()) receive(at(recv, p * bytes), bytes, p);
    for (int p = 0; p < size(); ++p)
      if (p != rank()) this->send(at(send, p * bytes), bytes, p);
    keep(at(send, rank() * bytes), at(recv, rank() * bytes), bytes);
    finish(step);
  }

  void shift(const void* send, void* recv, std::size_t bytes, int distance, Stream,
             const char* step) override {
    control().fate().check();
    const int ahead = (distance % size() + size()) % size();
    if (ahead == 0) return keep(send, recv, bytes);
    receive(recv, bytes, (rank() - ahead + size()) % size());
    this->send(send, bytes, (rank() + ahead) % size());
    finish(step);
  }

  void wait(Stream, const char* step) override { control().check(step, milliseconds(0)); }

 private:
  struct Part {
    int peer;
    int bytes;
    bool receives;
  };

  static void keep(const void* from, void* to, std::size_t bytes) {
    if (from != to && bytes > 0) std::memcpy(to, from, bytes);
  }

  /// Calls queue(offset, bytes) for each piece; nothing at all is one empty piece, so that a peer
  /// that expects more finds out.
  template <class Queue>
  static void cut(std::size_t bytes, Queue queue) {
    std::size_t offset = 0;
    do {
      const std::size_t piece = std::min(bytes - offset, kPiece);
      queue(offset, static_cast<int>(piece));
      offset += piece;
    } while (offset < bytes);
  }

  void receive(void* to, std::size_t bytes, int peer) {
    cut(bytes, [&](std::size_t offset, int piece) {
      LONGSPAN_MPI(MPI_Irecv(at(to, offset), piece, MPI_BYTE, peer, kDataTag, duplicate_->get(),
                             &requests_.emplace_back(MPI_REQUEST_NULL)));
      parts_.push_back({peer, piece, true});
    });
  }

  void send(const void* from, std::size_t bytes, int peer) {
    cut(bytes, [&](std::size_t offset, int piece) {
      LONGSPAN_MPI(MPI_Isend(at(from, offset), piece, MPI_BYTE, peer, kDataTag, duplicate_->get(),
                             &requests_.emplace_back(MPI_REQUEST_NULL)));
      parts_.push_back({peer, piece, false});
    });
  }

  /// Completes everything that was queued, or ends the communicator.
  void finish(const char* step) try {
    statuses_.resize(requests_.size());
    done_.resize(requests_.size());
    Patience patient(control().patience());
    for (std::size_t open = requests_.size(); open > 0;) {
      int count = 0;
      const int result = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                      done_.data(), statuses_.data());
      if (count == MPI_UNDEFINED) break;
      for (int i = 0; i < count; ++i) judge(parts_[done_[i]], statuses_[i], result, step);
      open -= count;
      if (count > 0) {
        patient.progress();
        continue;
      }
      control().check(step, patient.waited());
      if (patient.over()) control().timed_out(step, patient.waited());
      patient.pause();
    }
    requests_.clear();
    parts_.clear();
  } catch (...) {
    drop();
    throw;
  }

  void judge(const Part& part, MPI_Status& status, int result, const char* step) {
    int came = part.bytes, error = result == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS;
    if (part.receives && error == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &came);
    if (error == MPI_SUCCESS && came == part.bytes) return;
    int kind = MPI_SUCCESS;
    if (error != MPI_SUCCESS) MPI_Error_class(error, &kind);
    if (error == MPI_SUCCESS || kind == MPI_ERR_TRUNCATE)
      control().fail(
          {ErrorKind::rank_failure, part.peer, step,
           fmt::format("Rank {} sent {} bytes at '{}' where rank {} expects {}: every "
                       "rank must make the same calls with the same sizes.",
                       part.peer, kind ? "more" : std::to_string(came), step, rank(), part.bytes)});
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(error, text, &length);
    control().fail({ErrorKind::rank_failure, part.peer, step,
                    fmt::format("Rank {} was lost at '{}'. MPI says: {}", part.peer, step, text)});
  }

  /// After a failure: what can be called back is, and the rest is left to MPI.
  void drop() noexcept {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      if (parts_[i].receives) MPI_Cancel(&requests_[i]);
      MPI_Request_free(&requests_[i]);
    }
    requests_.clear();
    parts_.clear();
  }

  std::shared_ptr<MpiDuplicate> duplicate_;
  Place place_;
  std::vector<MPI_Request> requests_;  // of the verb that runs, and what each of them is
  std::vector<Part> parts_;
  std::vector<MPI_Status> statuses_;
  std::vector<int> done_;
};

}  // namespace

std::shared_ptr<Transport> mpi_transport(std::shared_ptr<MpiDuplicate> duplicate,
                                         std::unique_ptr<Control> control) {
  return std::make_shared<MpiTransport>(std::move(duplicate), std::move(control));
}

}  // namespace longspan::comm

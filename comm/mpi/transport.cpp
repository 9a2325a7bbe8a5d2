// The verbs over MPI: every rank sends to and receives from each peer itself, without MPI's own
// collectives, so that a peer that does not arrive has a name. The calls return at once, and the
// loop that completes them watches the deadline and the control plane.
#include "comm/mpi/transport.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <memory>
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

  /// What MPI still reads stays where it is.
  ~MpiTransport() override {
    if (!requests_.empty() && !completes(milliseconds(0))) staged_.release();
  }

  void all_gather(const void* send, void* recv, std::size_t bytes, Stream, const char* step,
                  std::uint64_t* said) override {
    control().fate().check();
    const std::byte* staged = stage(send, bytes, said ? said[rank()] : 0);
    for (int p = 0; p < size(); ++p) {
      if (p == rank()) continue;
      if (said) receive(said + p, sizeof *said, p);
      receive(at(recv, p * bytes), bytes, p);
    }
    for (int p = 0; p < size(); ++p) {
      if (p == rank()) continue;
      if (said) this->send(at(staged, bytes), sizeof *said, p);
      this->send(staged, bytes, p);
    }
    keep(send, at(recv, rank() * bytes), bytes);
    finish(step);
    for (int p = 0; said && p < size(); ++p)
      if (said[p] != said[rank()]) disagree(control().run(), p, step);
  }

  void all_to_all(const void* send, void* recv, std::size_t bytes, Stream,
                  const char* step) override {
    control().fate().check();
    const std::byte* staged = stage(send, bytes * size());
    for (int p = 0; p < size(); ++p)
      if (p != rank()) receive(at(recv, p * bytes), bytes, p);
    for (int p = 0; p < size(); ++p)
      if (p != rank()) this->send(at(staged, p * bytes), bytes, p);
    keep(at(send, rank() * bytes), at(recv, rank() * bytes), bytes);
    finish(step);
  }

  void shift(const void* send, void* recv, std::size_t bytes, int distance, Stream,
             const char* step) override {
    control().fate().check();
    const int ahead = (distance % size() + size()) % size();
    if (ahead == 0) return keep(send, recv, bytes);
    const std::byte* staged = stage(send, bytes);
    receive(recv, bytes, (rank() - ahead + size()) % size());
    this->send(staged, bytes, (rank() + ahead) % size());
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

  /// The same bytes in memory of this transport, and behind them a word. A send to a rank that has
  /// stopped cannot be called back, and MPI may read it as long as it is open, long after the
  /// caller freed what was sent.
  const std::byte* stage(const void* from, std::size_t bytes, std::uint64_t word = 0) {
    const std::size_t needed = bytes + sizeof word;
    if (needed > staged_bytes_) {
      staged_bytes_ = 0;
      staged_ = std::make_unique_for_overwrite<std::byte[]>(needed);
      staged_bytes_ = needed;
    }
    keep(from, staged_.get(), bytes);
    std::memcpy(staged_.get() + bytes, &word, sizeof word);
    return staged_.get();
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
      control().disagree(
          control().run(),
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

  /// After a failure nothing may be written to the caller's memory any more: receives are called
  /// back. One that was already coming in cannot be, and is waited for, as are the sends, for a
  /// moment. What is open then belongs to a rank that stopped in the middle of it, and stays with
  /// MPI: the requests are never given to others, nor is what they read.
  void drop() noexcept {
    for (std::size_t i = 0; i < requests_.size(); ++i)
      if (requests_[i] != MPI_REQUEST_NULL && parts_[i].receives) MPI_Cancel(&requests_[i]);
    if (completes(milliseconds(200))) requests_.clear();
    parts_.clear();
    // An error of another kind (no memory) loses the exchange too, and with it the communicator.
    if (!control().fate().failed()) abort("it met an error in an exchange; its own output says it");
  }

  /// Whether MPI is done with all requests, after `limit` at most.
  bool completes(milliseconds limit) noexcept {
    int finalized = 0, all = 0;
    MPI_Finalized(&finalized);
    for (Patience patient(limit); !finalized && !all; patient.pause()) {
      all = 1;
      for (MPI_Request& request : requests_) {
        int done = 0;
        if (request != MPI_REQUEST_NULL) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (request != MPI_REQUEST_NULL) all = 0;
      }
      if (patient.over()) break;
    }
    return all || finalized;
  }

  std::shared_ptr<MpiDuplicate> duplicate_;
  Place place_;
  std::unique_ptr<std::byte[]> staged_;  // what is sent
  std::size_t staged_bytes_ = 0;
  std::vector<MPI_Request> requests_;  // of the verb that runs or failed, and what each of them is
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

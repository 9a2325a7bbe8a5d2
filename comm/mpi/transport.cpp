// Runs the collectives over MPI. Every rank sends to and receives from each peer itself, without
// MPI's own collectives, so that a missing peer can be named. The calls return at once, and the
// loop that completes them watches the deadline and the control plane.
//
// Several transfers may be open. All ranks start them in the same order, and MPI matches messages
// of two ranks in the order of posting, so nothing else is needed to tell them apart. A
// communicator that was split from another uses the same duplicate with another tag: no collective
// call makes or frees anything, and so none can wait for a missing rank.
#include "comm/mpi/transport.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstring>
#include <ctime>
#include <memory>
#include <numeric>
#include <sstream>

#include "comm/control/hosts.hpp"
#include "comm/controlled.hpp"
#include "comm/mpi/mailbox.hpp"
#include "comm/sum.hpp"
#include "longspan/storage.hpp"
#include "src/base/check.hpp"

namespace longspan::comm {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 30;  // MPI counts bytes in an int
// A call of MPI that finds nothing takes less than this, or on a slow machine at most a few times
// the shortest call; a call that copies part of a message takes longer.
constexpr std::chrono::microseconds kIdleCall{4};
constexpr int kTimesIdle = 4;

/// CPU time of this thread. Time in which others had its core does not count.
std::chrono::nanoseconds time_of_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* at(const void* base, std::size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

/// "Open MPI 4.1.4" from "Open MPI v4.1.4, package: ...", and "MPICH 4.0.2" from "MPICH Version:
/// 4.0.2 ...".
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
  /// `ranks` are those of the duplicate, by rank; `tag` is the tag of the data.
  MpiTransport(std::shared_ptr<MpiDuplicate> duplicate, std::shared_ptr<Control> control,
               std::vector<int> ranks, int tag)
      : ControlledTransport(std::move(control)),
        duplicate_(std::move(duplicate)),
        ranks_(std::move(ranks)),
        tag_(tag),
        place_(find_place(this->control())) {}

  Device device() const override { return Device::host; }
  int ranks_per_node() const override { return place_.ranks_per_node; }
  std::string describe() const override {
    return library_name() + " | " + comm::describe(size(), place_);
  }

  /// Memory that MPI still reads or writes is kept, with its communicator.
  ~MpiTransport() override {
    if (complete(milliseconds(0))) return;
    duplicate_->keep();
    for (auto& open : open_) static_cast<void>(open->staged.release());
  }

  void wait(Stream, const char* step) override { control().check(step, milliseconds(0)); }

 protected:
  int start(const Collective& collective, Stream, const char* step) override {
    // A rank that comes late learns of it here, before anything can be written to the caller's
    // memory.
    or_drop_all([&] { control().check(step, milliseconds(0)); });
    const int number = free_entry(open_);
    Open& open = *open_[number];
    try {
      open.collective = collective;
      open.step = step;
      open.run = control().run();
      post(open);
    } catch (...) {
      drop_all();
      throw;
    }
    open.is_taken = true;
    return number;
  }

  void finish(int number, Stream) override {
    Open& open = *open_[number];
    open.is_taken = false;
    or_drop_all([&] {
      control().outcome().check();
      Patience patient(control().patience());
      const char* step = open.step.c_str();
      while (!move(open)) {
        control().check(step, patient.waited());
        if (moved_) {
          patient.progress();
          continue;
        }
        if (patient.over()) control().timed_out(step, patient.waited());
        patient.pause();
      }
      conclude(open);
    });
  }

  bool test(int number) override {
    Open& open = *open_[number];
    bool done = false;
    or_drop_all([&] {
      control().outcome().check();
      done = move(open);
      if (!done) control().check(open.step.c_str(), milliseconds(0));
    });
    return done;
  }

  /// MPI writes to the memory until all has come, so a transfer that the caller does not wait for
  /// is waited for here. An error ends the communicator, and the next call throws it.
  void drop(int number) noexcept override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized) return;
    try {
      finish(number, {});
    } catch (...) {
    }
  }

  std::shared_ptr<Transport> branch(const Group& group) override {
    if (group.members.empty()) return nullptr;
    int found = 0;
    int* most = nullptr;
    LONGSPAN_MPI(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &found));
    if (found && group.number > static_cast<std::uint32_t>(*most - kDataTag))
      throw Unsupported(
          fmt::format("This is split {} of a communicator, and this MPI has tags for {}: split "
                      "once and keep the result.",
                      group.number, *most - kDataTag));
    std::vector<int> ranks;
    for (const int member : group.members) ranks.push_back(ranks_[member]);
    return std::make_shared<MpiTransport>(duplicate_, control().branch(group), std::move(ranks),
                                          kDataTag + static_cast<int>(group.number));
  }

 private:
  struct Part {
    int peer;
    int bytes;
    bool receives;
  };
  /// A transfer, whose memory later transfers reuse.
  struct Open {
    bool is_taken = false;
    Collective collective;
    std::string step;
    RunName run;
    std::unique_ptr<std::byte[]> staged;  // data to send; for a sum, also the received data
    std::size_t staged_bytes = 0;
    std::vector<MPI_Request> requests;  // described by the parts
    std::vector<Part> parts;
    std::vector<MPI_Status> statuses;
    std::vector<int> done;
    std::size_t left = 0;      // requests that are not complete
    std::size_t received = 0;  // bytes, when all of them are complete
  };

  static void keep(const void* from, void* to, std::size_t bytes) {
    if (from != to && bytes > 0) std::memcpy(to, from, bytes);
  }

  /// Copies the bytes into memory of this transport, with room for `more` behind them. A send to a
  /// stopped rank cannot be cancelled, and MPI may read its memory while it is open, long after the
  /// caller freed it.
  static std::byte* stage(Open& open, std::size_t bytes, std::size_t more = 0) {
    const std::size_t needed = std::max<std::size_t>(bytes + more, 1);
    if (needed > open.staged_bytes) {
      open.staged_bytes = 0;
      open.staged = std::make_unique_for_overwrite<std::byte[]>(needed);
      open.staged_bytes = needed;
    }
    keep(open.collective.send, open.staged.get(), bytes);
    return open.staged.get();
  }

  /// Does the same, with this rank's digest of its run behind the bytes, where the collective has
  /// digests.
  const std::byte* stage_with_digest(Open& open, std::size_t bytes) const {
    const std::uint64_t* digests = open.collective.digests;
    std::byte* staged = stage(open, bytes, digests ? sizeof *digests : 0);
    if (digests) std::memcpy(staged + bytes, digests + rank(), sizeof *digests);
    return staged;
  }
  /// Receives a peer's digest of its run, which travels ahead of the data.
  void receive_digest(Open& open, int peer) const {
    if (!open.collective.digests) return;
    receive(open, open.collective.digests + peer, sizeof *open.collective.digests, peer);
    open.received -= sizeof *open.collective.digests;  // the digest is not data
  }
  void send_digest(Open& open, const std::byte* digest, int peer) const {
    if (open.collective.digests) send(open, digest, sizeof *open.collective.digests, peer);
  }

  void post(Open& open) {
    open.requests.clear();
    open.parts.clear();
    const Collective& collective = open.collective;
    const std::size_t bytes = collective.bytes;
    open.left = open.received = 0;
    if (size() == 1) return keep(collective.send, collective.recv, bytes);
    switch (collective.kind) {
      case Collective::all_gather: {
        const std::byte* staged = stage_with_digest(open, bytes);
        for_peers([&](int p) {
          receive_digest(open, p);
          receive(open, at(collective.recv, p * bytes), bytes, p);
        });
        for_peers([&](int p) {
          send_digest(open, staged + bytes, p);
          send(open, staged, bytes, p);
        });
        keep(collective.send, at(collective.recv, rank() * bytes), bytes);
        break;
      }
      case Collective::all_to_all: {
        const std::byte* staged = stage_with_digest(open, bytes * size());
        for_peers([&](int p) {
          receive_digest(open, p);
          receive(open, at(collective.recv, p * bytes), bytes, p);
        });
        for_peers([&](int p) {
          send_digest(open, staged + bytes * size(), p);
          send(open, staged + p * bytes, bytes, p);
        });
        keep(at(collective.send, rank() * bytes), at(collective.recv, rank() * bytes), bytes);
        break;
      }
      case Collective::shift: {
        const int ahead = (collective.place % size() + size()) % size();
        if (ahead == 0) {
          keep(collective.send, collective.recv, bytes);
          break;
        }
        const std::byte* staged = stage(open, bytes);
        if (collective.received > 0)
          receive(open, collective.recv, collective.received, (rank() - ahead + size()) % size());
        if (bytes > 0) send(open, staged, bytes, (rank() + ahead) % size());
        break;
      }
      case Collective::reduce_scatter: {
        std::byte* staged = stage(open, bytes * size(), bytes * size());
        std::byte* came = staged + bytes * size();
        for_peers([&](int p) { receive(open, came + p * bytes, bytes, p); });
        for_peers([&](int p) { send(open, staged + p * bytes, bytes, p); });
        break;
      }
    }
    open.left = open.requests.size();
    open.statuses.resize(open.requests.size());
    open.done.resize(open.requests.size());
  }

  template <class Work>
  void for_peers(const Work& work) const {
    for (int p = 0; p < size(); ++p)
      if (p != rank()) work(p);
  }

  /// Calls queue(offset, bytes) for each piece. No bytes are one empty piece, so that a peer that
  /// expects more finds out.
  template <class Queue>
  static void cut(std::size_t bytes, Queue queue) {
    std::size_t offset = 0;
    do {
      const std::size_t piece = std::min(bytes - offset, kPiece);
      queue(offset, static_cast<int>(piece));
      offset += piece;
    } while (offset < bytes);
  }

  void receive(Open& open, void* to, std::size_t bytes, int peer) const {
    open.received += bytes;
    cut(bytes, [&](std::size_t offset, int piece) {
      open.parts.push_back({peer, piece, true});
      LONGSPAN_MPI(MPI_Irecv(at(to, offset), piece, MPI_BYTE, ranks_[peer], tag_, duplicate_->get(),
                             &open.requests.emplace_back(MPI_REQUEST_NULL)));
    });
  }

  void send(Open& open, const void* from, std::size_t bytes, int peer) const {
    cut(bytes, [&](std::size_t offset, int piece) {
      open.parts.push_back({peer, piece, false});
      LONGSPAN_MPI(MPI_Isend(at(from, offset), piece, MPI_BYTE, ranks_[peer], tag_,
                             duplicate_->get(), &open.requests.emplace_back(MPI_REQUEST_NULL)));
    });
  }

  /// Moves what can move, of all transfers, as MPI does inside any call. Returns true when this
  /// transfer is complete. `moved_` tells whether some data moved now. MPI does not report a part
  /// of a message, but then the call takes the thread longer than one that finds nothing.
  bool move(Open& open) {
    moved_ = false;
    if (open.left == 0) return true;
    int count = 0;
    const auto begin = time_of_thread();
    const int result = MPI_Testsome(static_cast<int>(open.requests.size()), open.requests.data(),
                                    &count, open.done.data(), open.statuses.data());
    if (count == MPI_UNDEFINED)
      count = static_cast<int>(open.left);
    else
      for (int i = 0; i < count; ++i)
        judge(open, open.parts[open.done[i]], open.statuses[i], result);
    open.left -= static_cast<std::size_t>(count);
    const auto took = time_of_thread() - begin;
    shortest_call_ = std::min(shortest_call_, took);
    moved_ = count > 0 ||
             took > std::max<std::chrono::nanoseconds>(kIdleCall, kTimesIdle * shortest_call_);
    if (open.left == 0) count_received(open.received);
    return open.left == 0;
  }

  /// Finishes the transfer when all has come.
  void conclude(Open& open) {
    const Collective& collective = open.collective;
    compare(collective.digests, open.run, open.step.c_str());
    if (collective.kind == Collective::reduce_scatter && size() > 1) {
      const std::byte* sent = open.staged.get();
      const std::byte* came = sent + collective.bytes * size();
      const auto part = [&](int p) { return (p == rank() ? sent : came) + p * collective.bytes; };
      const std::size_t count = collective.bytes / size_of(collective.dtype);
      add_up(collective.dtype, collective.recv, count, size(), part);
    }
  }

  void judge(const Open& open, const Part& part, MPI_Status& status, int result) {
    const std::string& step = open.step;
    int came = part.bytes, error = result == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS;
    if (part.receives && error == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &came);
    if (error == MPI_SUCCESS && came == part.bytes) return;
    int kind = MPI_SUCCESS;
    if (error != MPI_SUCCESS) MPI_Error_class(error, &kind);
    const std::string peer = name_of(part.peer);
    if (error == MPI_SUCCESS || kind == MPI_ERR_TRUNCATE)
      control().disagree(
          open.run, {ErrorKind::rank_failure, part.peer, step,
                     fmt::format("Rank {} sent {} bytes at '{}' where rank {} expects {}: every "
                                 "rank must make the same calls with the same sizes.",
                                 peer, kind ? "more" : std::to_string(came), step, name_of(rank()),
                                 part.bytes)});
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(error, text, &length);
    control().fail({ErrorKind::rank_failure, part.peer, step,
                    fmt::format("Rank {} was lost at '{}'. MPI says: {}", peer, step, text)});
  }

  template <class Work>
  void or_drop_all(const Work& work) try {
    work();
  } catch (...) {
    drop_all();
    throw;
  }

  /// Cancels the receives of all transfers: after a failure nothing may be written to a caller's
  /// memory any more. A receive that has begun cannot be cancelled: it is waited for a moment, as
  /// are the sends. What is open then belongs to a rank that stopped in the middle of it, and stays
  /// with MPI: its requests and memory are never reused.
  void drop_all() noexcept {
    if (!is_dropped_) {
      is_dropped_ = true;
      for (auto& open : open_)
        for (std::size_t i = 0; i < open->requests.size(); ++i)
          if (open->requests[i] != MPI_REQUEST_NULL && open->parts[i].receives)
            MPI_Cancel(&open->requests[i]);
      complete(milliseconds(200));
    }
    // Another error (no memory) loses the exchange too, and with it the communicator.
    if (!control().outcome().failed())
      abort("it met an error in an exchange; its own output says it");
  }

  /// Whether MPI is done with all requests; waits for that at most `limit`.
  bool complete(milliseconds limit) noexcept {
    int finalized = 0, all = 0;
    MPI_Finalized(&finalized);
    for (Patience patient(limit); !finalized && !all; patient.pause()) {
      all = 1;
      for (auto& open : open_)
        for (MPI_Request& request : open->requests) {
          int done = 0;
          if (request != MPI_REQUEST_NULL) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
          if (request != MPI_REQUEST_NULL) all = 0;
        }
      if (patient.over()) break;
    }
    return all || finalized;
  }

  std::shared_ptr<MpiDuplicate> duplicate_;
  std::vector<int> ranks_;
  int tag_;
  Place place_;
  std::vector<std::unique_ptr<Open>> open_;  // by number
  bool moved_ = false;
  std::chrono::nanoseconds shortest_call_ = std::chrono::seconds(1);
  bool is_dropped_ = false;
};

}  // namespace

std::shared_ptr<Transport> mpi_transport(std::shared_ptr<MpiDuplicate> duplicate,
                                         std::shared_ptr<Control> control) {
  std::vector<int> ranks(control->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<MpiTransport>(std::move(duplicate), std::move(control), std::move(ranks),
                                        kDataTag);
}

}  // namespace longspan::comm

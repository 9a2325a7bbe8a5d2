// The collectives over TCP: every rank sends to and receives from each peer itself, over their own
// connection, from and to the caller's memory. The calls that move bytes return at once, and the
// loop that waits for them watches the deadline and the control plane.
//
// Several transfers may be open. All ranks start them in the same order, and messages of two ranks
// match in that order. A communicator that was split from another uses the same connections with
// its own number: nothing has to be connected, and so nothing can wait for a missing rank.
#include "comm/tcp/transport.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "comm/control/hosts.hpp"
#include "comm/controlled.hpp"
#include "comm/sum.hpp"
#include "comm/tcp/connect.hpp"
#include "comm/tcp/mesh.hpp"
#include "longspan/storage.hpp"

namespace longspan::comm {
namespace {

/// How long to wait, after a connection ended, for the message with the reason, on another way.
constexpr milliseconds kNews{1000};

std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* at(const void* base, std::size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

bool overlap(const void* one, std::size_t bytes, const void* other, std::size_t more) {
  const std::less<const std::byte*> before;
  return bytes > 0 && more > 0 && before(at(one, 0), at(other, more)) &&
         before(at(other, 0), at(one, bytes));
}

class TcpTransport final : public ControlledTransport {
 public:
  /// `ranks`: of the mesh, by rank; `group`: the number of the communicator.
  TcpTransport(std::shared_ptr<Mesh> mesh, std::shared_ptr<Control> control, std::vector<int> ranks,
               std::uint32_t group)
      : ControlledTransport(std::move(control)),
        mesh_(std::move(mesh)),
        ranks_(std::move(ranks)),
        group_(group) {
    mesh_->open(group_);
    try {
      this->control().set_progress([moved = mesh_] { return moved->progress(); });
      place_ = find_place(this->control());
    } catch (...) {
      mesh_->cancel(group_);
      throw;
    }
  }
  ~TcpTransport() override { mesh_->cancel(group_); }

  Device device() const override { return Device::host; }
  int ranks_per_node() const override { return place_.ranks_per_node; }
  std::string describe() const override { return "TCP | " + comm::describe(size(), place_); }
  void wait(Stream, const char* step) override { control().check(step, milliseconds(0)); }

 protected:
  int start(const Collective& collective, Stream, const char* step) override {
    // A rank that comes late learns of it here, before anything is written to the caller's memory.
    or_end([&] { control().check(step, milliseconds(0)); });
    int number = 0;
    or_end([&] {
      number = free_entry(open_);
      Open& open = *open_[number];
      open.collective = collective;
      open.step = step;
      open.run = control().run();
      post(open);
      open.is_taken = true;
      mesh_->progress();
    });
    return number;
  }

  void finish(int number, Stream) override {
    Open& open = *open_[number];
    or_end([&] {
      control().outcome().check();
      Patience patient(control().patience());
      const char* step = open.step.c_str();
      while (open.left > 0) {
        if (mesh_->progress()) {
          patient.progress();
          continue;
        }
        find_trouble(open);
        control().check(step, patient.waited());
        if (patient.over()) control().timed_out(step, patient.waited());
        patient.pause([&](milliseconds limit) { mesh_->wait(limit); });
      }
      conclude(open);
    });
    open.is_taken = false;
  }

  bool test(int number) override {
    Open& open = *open_[number];
    or_end([&] {
      control().outcome().check();
      if (open.left > 0) mesh_->progress();
      if (open.left == 0) return;
      find_trouble(open);
      control().check(open.step.c_str(), milliseconds(0));
    });
    return open.left == 0;
  }

  /// The caller's memory is written until all has come, so a transfer that nobody waits for is
  /// waited for here. An error ends the communicator, and the next call throws it.
  void drop(int number) noexcept override {
    try {
      finish(number, {});
    } catch (...) {
    }
  }

  std::shared_ptr<Transport> branch(const Group& group) override {
    if (group.members.empty()) return nullptr;
    std::vector<int> ranks;
    for (const int member : group.members) ranks.push_back(ranks_[member]);
    return std::make_shared<TcpTransport>(mesh_, control().branch(group), std::move(ranks),
                                          group.number);
  }

 private:
  /// A transfer, whose memory later ones reuse.
  struct Open {
    bool is_taken = false;
    Collective collective;
    std::string step;
    RunName run;
    std::vector<std::byte> staged;  // what a sum receives; data to send that gets overwritten
    std::vector<Mesh::Part> parts;
    std::vector<int> peers;  // the rank here of each part
    std::size_t left = 0;    // parts that are not done
  };

  static void keep(const void* from, void* to, std::size_t bytes) {
    if (from != to && bytes > 0) std::memmove(to, from, bytes);
  }

  std::byte* stage(Open& open, std::size_t bytes) const {
    if (open.staged.size() < bytes) open.staged.resize(bytes);
    return open.staged.data();
  }

  /// The data to send, in memory that nothing is received into meanwhile. A rank's own part may lie
  /// in its place of the received data.
  const std::byte* apart(Open& open, std::size_t sent, std::size_t received) const {
    const Collective& collective = open.collective;
    const std::byte* send = at(collective.send, 0);
    const bool in_place =
        collective.kind == Collective::all_gather &&
        send == at(collective.recv, static_cast<std::size_t>(rank()) * collective.bytes);
    if (in_place || !overlap(send, sent, collective.recv, received)) return send;
    std::byte* staged = stage(open, sent);
    std::memcpy(staged, send, sent);
    return staged;
  }

  void post(Open& open) {
    const Collective& collective = open.collective;
    const std::size_t bytes = collective.bytes, all = bytes * static_cast<std::size_t>(size());
    const auto me = static_cast<std::size_t>(rank());
    open.left = 0;
    open.parts.clear();
    open.peers.clear();
    open.parts.reserve(2 * static_cast<std::size_t>(size()));  // the mesh keeps pointers to them
    open.peers.reserve(2 * static_cast<std::size_t>(size()));
    if (size() == 1) return keep(collective.send, collective.recv, bytes);
    switch (collective.kind) {
      case Collective::all_gather: {
        const std::byte* sent = apart(open, bytes, all);
        for_peers([&](int p) { receive(open, at(collective.recv, p * bytes), p); });
        for_peers([&](int p) { send(open, sent, p); });
        keep(sent, at(collective.recv, me * bytes), bytes);
        break;
      }
      case Collective::all_to_all: {
        const std::byte* sent = apart(open, all, all);
        for_peers([&](int p) { receive(open, at(collective.recv, p * bytes), p); });
        for_peers([&](int p) { send(open, sent + p * bytes, p); });
        keep(sent + me * bytes, at(collective.recv, me * bytes), bytes);
        break;
      }
      case Collective::shift: {
        const int ahead = (collective.place % size() + size()) % size();
        if (ahead == 0) {
          keep(collective.send, collective.recv, bytes);
          break;
        }
        const std::byte* sent = apart(open, bytes, collective.received);
        if (collective.received > 0)
          receive(open, at(collective.recv, 0), (rank() - ahead + size()) % size());
        if (bytes > 0) send(open, sent, (rank() + ahead) % size());
        break;
      }
      case Collective::reduce_scatter: {
        std::byte* came = stage(open, all);
        for_peers([&](int p) { receive(open, came + p * bytes, p); });
        for_peers([&](int p) { send(open, at(collective.send, p * bytes), p); });
        break;
      }
    }
    for (Mesh::Part& part : open.parts) mesh_->post(part);
  }

  /// From the next rank on, so that ranks do not all send to the same one first.
  template <class Work>
  void for_peers(const Work& work) const {
    for (int turn = 1; turn < size(); ++turn) work((rank() + turn) % size());
  }

  Mesh::Part& add(Open& open, int peer) const {
    ++open.left;
    open.peers.push_back(peer);
    Mesh::Part& part = open.parts.emplace_back();
    const Collective& collective = open.collective;
    part.peer = ranks_[peer];
    part.left = &open.left;
    part.header.group = group_;
    part.header.collective =
        static_cast<std::uint32_t>(collective.kind) * 2 + (collective.digests ? 1 : 0);
    part.header.bytes = collective.bytes;
    return part;
  }
  /// The bytes that one rank sends to this one.
  static std::size_t expected(const Collective& collective) {
    return collective.kind == Collective::shift ? collective.received : collective.bytes;
  }
  void receive(Open& open, std::byte* to, int peer) const {
    Mesh::Part& part = add(open, peer);
    part.receives = true;
    part.to = to;
    part.header.bytes = expected(open.collective);
  }
  void send(Open& open, const std::byte* from, int peer) const {
    Mesh::Part& part = add(open, peer);
    part.from = from;
    if (open.collective.digests) part.header.digest = open.collective.digests[rank()];
  }

  /// Finishes the transfer when all has come.
  void conclude(Open& open) {
    const Collective& collective = open.collective;
    for (std::size_t i = 0; i < open.parts.size(); ++i) {
      const Mesh::Part& part = open.parts[i];
      if (part.is_wrong) differ(open, open.peers[i], part.header);
      if (!part.receives) continue;
      count_received(part.header.bytes);
      if (collective.digests) collective.digests[open.peers[i]] = part.header.digest;
    }
    compare(collective.digests, open.run, open.step.c_str());
    if (collective.kind == Collective::reduce_scatter && size() > 1)
      add_up(collective.dtype, collective.recv, collective.bytes / size_of(collective.dtype),
             size(), [&](int p) {
               return p == rank() ? at(collective.send, p * collective.bytes)
                                  : open.staged.data() + p * collective.bytes;
             });
    open.parts.clear();
  }

  void differ(const Open& open, int peer, const Mesh::Header& came) {
    const std::string same = "every rank must make the same calls with the same sizes.";
    const std::string what =
        came.bytes != expected(open.collective)
            ? fmt::format("Rank {} sent {} bytes at '{}' where rank {} expects {}: {}",
                          name_of(peer), came.bytes, open.step, name_of(rank()),
                          expected(open.collective), same)
            : fmt::format("Rank {} does something else than rank {} at '{}': {}", name_of(peer),
                          name_of(rank()), open.step, same);
    control().disagree(open.run, {ErrorKind::rank_failure, peer, open.step, what});
  }

  /// Throws where a part cannot be done since its peer has gone. The reason may be on its way.
  void find_trouble(const Open& open) {
    for (std::size_t i = 0; i < open.parts.size(); ++i) {
      const char* why = mesh_->trouble(open.parts[i]);
      if (!why) continue;
      const char* step = open.step.c_str();
      for (Patience patient(std::min(kNews, control().patience())); !patient.over();
           patient.pause())
        control().check(step, patient.waited());
      const int peer = open.peers[i];
      control().fail({ErrorKind::rank_failure, peer, open.step,
                      fmt::format("Rank {} left or was lost before '{}' was done ({}). Its own "
                                  "output says why.",
                                  name_of(peer), step, why)});
    }
  }

  /// After a failure nothing is read from or written to a caller's memory any more.
  template <class Work>
  void or_end(const Work& work) try {
    work();
  } catch (...) {
    mesh_->cancel(group_);
    for (auto& open : open_) open->parts.clear();
    // Another error (no memory) loses the exchange too, and with it the communicator.
    if (!control().outcome().failed())
      abort("it met an error in an exchange; its own output says it");
    throw;
  }

  std::shared_ptr<Mesh> mesh_;
  std::vector<int> ranks_;
  std::uint32_t group_;
  Place place_;
  std::vector<std::unique_ptr<Open>> open_;  // by number
};

}  // namespace

std::shared_ptr<Transport> tcp_transport(std::shared_ptr<Control> control) {
  std::vector<int> ranks(control->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  auto mesh = std::make_shared<Mesh>(connect_ranks(*control));
  return std::make_shared<TcpTransport>(std::move(mesh), std::move(control), std::move(ranks), 0);
}

}  // namespace longspan::comm

// Three messages of fixed size (the handshake) on each connection, so that nothing of the data
// behind them is read:
//   hello    from the rank that connects, with the key of the other
//   welcome  back, with the key of the rank that connected: not a stranger at the same address
//   seated   from the rank that connects: it has read that, and uses only this connection
#include "comm/tcp/connect.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>

#include "comm/control/wire.hpp"
#include "comm/tcp/address.hpp"
#include "comm/tcp/key.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

using Clock = Patience::Clock;

constexpr const char* kStep = "connect the ranks";
/// The longest time from a connection to the last message of its handshake, and the strangers that
/// are served at once.
constexpr std::chrono::seconds kStay{5};
constexpr int kStrangers = 16;
/// A message of 1 MB then leaves in one call, without waking its sender repeatedly.
constexpr int kBuffer = 4 << 20;

struct Handshake {
  enum Kind : std::uint32_t { hello = 1, welcome, seated };
  std::uint32_t magic;
  std::uint32_t kind;
  std::uint32_t from;
  std::uint32_t to;
  std::array<char, kKeyBytes> key;
};
constexpr std::uint32_t kMagic = 0x4c535044;

/// A rank's message to the others, and where this one connects to it.
struct Entry {
  int port = 0;
  std::string key;
  std::vector<std::string> hosts;
  std::string local;     // the name of its Unix socket
  bool is_near = false;  // where that is

  std::string where() const {
    return is_near ? "its Unix socket" : fmt::format("port {} of {}", port, fmt::join(hosts, ", "));
  }
};

/// A connection that is being made.
struct Line {
  Fd fd;
  int peer = -1;               // -1 until the peer has named itself
  Handshake::Kind wants = {};  // the message that comes next
  std::size_t came = 0;        // bytes of it
  std::array<char, sizeof(Handshake)> bytes{};
  bool connecting = false;
  Clock::time_point since = Clock::now();

  /// True when the whole message is here. False for more to come, or the end: then fd is gone.
  bool read() {
    while (came < bytes.size()) {
      const ssize_t got = ::recv(fd.get(), bytes.data() + came, bytes.size() - came, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
      if (got <= 0) {
        fd = Fd();
        return false;
      }
      came += static_cast<std::size_t>(got);
    }
    came = 0;
    return true;
  }

  /// An empty socket accepts a message as a whole.
  void send(Handshake::Kind kind, int from, int to, const std::string& key) {
    Handshake message{
        kMagic, kind, static_cast<std::uint32_t>(from), static_cast<std::uint32_t>(to), {}};
    std::copy_n(key.begin(), std::min(key.size(), message.key.size()), message.key.begin());
    if (::send(fd.get(), &message, sizeof message, MSG_NOSIGNAL) != sizeof message) fd = Fd();
  }
};

class Meeting {
 public:
  Meeting(Control& control, std::vector<Door> doors, std::string key, std::vector<Entry> all)
      : control_(control),
        doors_(std::move(doors)),
        key_(std::move(key)),
        all_(std::move(all)),
        made_(control.size()),
        goals_(control.rank()) {
    for (int q = 0; q < control.rank(); ++q) goals_[q].line.peer = q;
  }

  std::vector<Fd> meet() {
    Patience patient(control_.patience());
    while (missing() > 0) {
      for (int q = 0; q < control_.rank(); ++q)
        if (!made_[q]) approach(goals_[q]);
      admit();
      for (auto guest = guests_.begin(); guest != guests_.end();) {
        serve(*guest);
        const bool may_stay = guest->peer >= 0 || Clock::now() - guest->since < kStay;
        guest = guest->fd && may_stay ? std::next(guest) : guests_.erase(guest);
      }
      if (missing() == 0) break;
      control_.check(kStep, patient.waited());
      if (patient.waited() > control_.patience() * 3 / 4) blame();
      if (patient.over()) control_.timed_out(kStep, patient.waited());
      wait();
      patient.pause();
    }
    return std::move(made_);
  }

 private:
  /// A rank to connect to, at one of its addresses after the other.
  struct Goal {
    Line line;
    std::size_t next = 0;
    Clock::time_point not_before{};
    std::string why = "not tried yet";
  };

  int missing() const {
    return control_.size() - 1 -
           static_cast<int>(std::count_if(made_.begin(), made_.end(),
                                          [](const Fd& fd) { return static_cast<bool>(fd); }));
  }

  bool right(const Line& line, Handshake::Kind kind, int from) const {
    Handshake message;
    std::memcpy(&message, line.bytes.data(), sizeof message);
    return message.magic == kMagic && message.kind == kind &&
           message.from == static_cast<std::uint32_t>(from) &&
           message.to == static_cast<std::uint32_t>(control_.rank()) &&
           same_secret(key_, std::string(message.key.begin(), message.key.end()));
  }

  void give_up(Goal& goal, std::string why) {
    goal.line.fd = Fd();
    goal.why = std::move(why);
    if (goal.next == 0) goal.not_before = Clock::now() + milliseconds(50);  // all were tried
  }

  void approach(Goal& goal) {
    Line& line = goal.line;
    if (!line.fd) {
      if (Clock::now() < goal.not_before) return;
      begin(goal);
      if (!line.fd) return;
    }
    if (line.connecting) {
      pollfd connecting{line.fd.get(), POLLOUT, 0};
      const bool is_late = Clock::now() - line.since > milliseconds(1000);
      if (::poll(&connecting, 1, 0) <= 0)
        return is_late ? give_up(goal, std::strerror(ETIMEDOUT)) : void();
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(line.fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return give_up(goal, std::strerror(error));
      line.connecting = false;
      line.send(Handshake::hello, control_.rank(), line.peer, all_[line.peer].key);
      if (!line.fd) return give_up(goal, "it hung up");
    }
    if (line.read()) {
      if (!right(line, Handshake::welcome, line.peer))
        return give_up(goal, "somebody else answers there");
      line.send(Handshake::seated, control_.rank(), line.peer, all_[line.peer].key);
      if (!line.fd) return give_up(goal, "it hung up");
      made_[line.peer] = std::move(line.fd);
    } else if (!line.fd) {
      give_up(goal, "it hung up");
    } else if (Clock::now() - line.since > kStay) {
      give_up(goal, "it takes connections, but does not answer");
    }
  }

  void begin(Goal& goal) {
    const Entry& there = all_[goal.line.peer];
    std::vector<Address> found;
    if (there.is_near) {
      found = {local_address(there.local)};
    } else {
      found = numeric(there.hosts[goal.next], there.port);
      goal.next = (goal.next + 1) % there.hosts.size();
      if (found.empty()) return give_up(goal, "it is not an address");
    }
    const Address& address = found.front();
    Line& line = goal.line;
    line.fd = Fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    line.since = Clock::now();
    line.wants = Handshake::welcome;
    line.came = 0;
    line.connecting = true;
    if (!line.fd || (::connect(line.fd.get(), address.get(), address.length) != 0 &&
                     errno != EINPROGRESS && errno != EINTR))
      give_up(goal, std::strerror(errno));
  }

  void admit() {
    for (const Door& door : doors_) admit(door);
  }
  void admit(const Door& door) {
    for (;;) {
      Fd fd(::accept4(door.listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) return;
      // Only strangers make room: a rank that was welcomed here does not come again.
      const auto unknown = [](const Line& guest) { return guest.peer < 0; };
      if (std::count_if(guests_.begin(), guests_.end(), unknown) >= kStrangers + control_.size())
        guests_.erase(std::find_if(guests_.begin(), guests_.end(), unknown));
      Line& guest = guests_.emplace_back();
      guest.fd = std::move(fd);
      guest.wants = Handshake::hello;
    }
  }

  void serve(Line& guest) {
    while (guest.fd && guest.read()) {
      Handshake message;
      std::memcpy(&message, guest.bytes.data(), sizeof message);
      const int from = guest.peer >= 0 ? guest.peer : claimed(message);
      if (from < 0 || !right(guest, guest.wants, from)) {
        guest.fd = Fd();
      } else if (guest.wants == Handshake::hello) {
        for (Line& other : guests_)
          if (other.peer == from) other.fd = Fd();  // the rank has given that one up
        guest.peer = from;
        guest.wants = Handshake::seated;
        guest.send(Handshake::welcome, control_.rank(), from, all_[from].key);
      } else {
        if (!made_[from]) made_[from] = std::move(guest.fd);
        guest.fd = Fd();
      }
    }
  }

  /// A rank that should connect to this one and has not; -1: none.
  int claimed(const Handshake& message) const {
    const bool comes = message.from > static_cast<std::uint32_t>(control_.rank()) &&
                       message.from < static_cast<std::uint32_t>(control_.size());
    return comes && !made_[message.from] ? static_cast<int>(message.from) : -1;
  }

  /// Names a rank that this one cannot reach, while others still wait for it.
  void blame() {
    for (int q = 0; q < control_.rank(); ++q) {
      if (made_[q]) continue;
      const Entry& there = all_[q];
      control_.fail(
          {ErrorKind::timeout, q, kStep,
           fmt::format("Rank {} could not connect to rank {} at {} ({}). Is rank {} stopped, or "
                       "does a firewall keep the ports between the machines closed?",
                       control_.rank(), q, there.where(), goals_[q].why, q)});
    }
  }

  void wait() {
    std::vector<pollfd> polled;
    for (const Door& door : doors_) polled.push_back({door.listener.get(), POLLIN, 0});
    for (const Goal& goal : goals_)
      if (goal.line.fd)
        polled.push_back(
            {goal.line.fd.get(), static_cast<short>(goal.line.connecting ? POLLOUT : POLLIN), 0});
    for (const Line& guest : guests_) polled.push_back({guest.fd.get(), POLLIN, 0});
    ::poll(polled.data(), polled.size(), 10);
  }

  Control& control_;
  std::vector<Door> doors_;
  std::string key_;
  std::vector<Entry> all_;
  std::vector<Fd> made_;
  std::vector<Goal> goals_;  // the ranks below this one
  std::list<Line> guests_;
};

}  // namespace

std::vector<Fd> connect_ranks(Control& control) {
  const auto places = control.gather(network_place(), "find the machines");
  const bool within = std::all_of(places.begin(), places.end(),
                                  [&](const std::string& place) { return place == places[0]; });
  std::vector<Door> doors;
  std::string key;
  try {
    doors.push_back(open_local_door("longspan " + fresh_key()));
    if (!within) doors.push_back(open_door(false));
    key = fresh_key();
  } catch (const std::exception& error) {
    control.tell(gave_up(control, error.what()));  // only this rank's error
    throw;
  }
  const Door& far = doors.back();
  const auto reports = control.gather(
      pack(std::to_string(far.port), key, pack_all(far.hosts), doors.front().hosts.front()), kStep);
  std::vector<Entry> all;
  for (const std::string& text : reports) {
    auto parts = unpack(text, 4);
    const bool is_near = places[all.size()] == places[control.rank()];
    all.push_back({static_cast<int>(number_from(parts[0], 0, 65535)), std::move(parts[1]),
                   unpack(parts[2]), std::move(parts[3]), is_near});
    if (all.back().hosts.empty()) throw_damage();
  }
  std::vector<Fd> made = Meeting(control, std::move(doors), std::move(key), std::move(all)).meet();
  for (const Fd& fd : made) {
    if (!fd) continue;
    const int on = 1;
    if (setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0) continue;
    // A Unix socket, whose buffer does not grow by itself as TCP's does; the system may allow less
    // than this.
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDBUF, &kBuffer, sizeof kBuffer);
  }
  return made;
}

}  // namespace longspan::comm

#include "comm/tcp_hub.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <vector>

#include "comm/patience.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

/// One socket for IPv6 and IPv4 alike, or none.
Fd try_listen_6(int port) {
  Fd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_in6 here{};
  here.sin6_family = AF_INET6;
  here.sin6_addr = in6addr_any;
  here.sin6_port = htons(static_cast<std::uint16_t>(port));
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&here), sizeof here) != 0 ||
      ::listen(fd.get(), 1024) != 0)
    return Fd();
  return fd;
}

Fd listen_on(int port, bool local) {
  if (!local)
    if (Fd fd = try_listen_6(port)) return fd;
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(local ? INADDR_LOOPBACK : INADDR_ANY);
  here.sin_port = htons(static_cast<std::uint16_t>(port));
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&here), sizeof here) != 0 ||
      ::listen(fd.get(), 1024) != 0)
    throw UsageError(
        fmt::format("Rank 0 could not listen on port {} ({}): set LONGSPAN_PORT to a free one, the "
                    "same on all ranks.",
                    port, std::strerror(errno)));
  return fd;
}

/// What the thread works on.
struct Office {
  struct Guest {
    Frames frames;
    int rank = -1;  // until it has said hello
    bool left = false;
  };
  struct Rank {
    Guest* guest = nullptr;
    std::vector<Frame> kept;  // for a rank that has not come yet
    bool gone = false;
  };

  std::list<Guest> guests;
  std::vector<Rank> ranks;
  std::string key;

  void deliver(int to, const Frame& frame) {
    Rank& rank = ranks[to];
    if (rank.guest)
      rank.guest->frames.push(frame);
    else if (!rank.gone)
      rank.kept.push_back(frame);
  }

  void seat(Guest& guest, int rank) {
    guest.rank = rank;
    ranks[rank].guest = &guest;
    guest.frames.push({Frame::hello, static_cast<std::uint32_t>(rank)});
    for (const Frame& frame : ranks[rank].kept) guest.frames.push(frame);
    ranks[rank].kept.clear();
  }

  void handle(Guest& guest, const Frame& frame) {
    if (guest.rank < 0) {
      const bool known = frame.kind == Frame::hello && frame.body == key &&
                         frame.peer < ranks.size() && !ranks[frame.peer].guest &&
                         !ranks[frame.peer].gone;
      if (known)
        seat(guest, static_cast<int>(frame.peer));
      else
        guest.frames.close();
    } else if (frame.kind == Frame::left) {
      guest.left = true;
    } else if (frame.kind == Frame::text && frame.peer < ranks.size()) {
      deliver(static_cast<int>(frame.peer),
              {Frame::text, static_cast<std::uint32_t>(guest.rank), frame.body});
    }
  }

  void part(Guest& guest) {
    if (guest.rank < 0) return;
    ranks[guest.rank].guest = nullptr;
    ranks[guest.rank].gone = true;
    for (int r = 0; r < static_cast<int>(ranks.size()); ++r)
      deliver(r, {guest.left ? Frame::left : Frame::died, static_cast<std::uint32_t>(guest.rank)});
  }

  bool has_ranks() const {
    return std::any_of(ranks.begin(), ranks.end(), [](const Rank& rank) { return rank.guest; });
  }

  /// Moves all that can move now.
  void serve() {
    for (auto guest = guests.begin(); guest != guests.end();) {
      guest->frames.read();
      while (auto frame = guest->frames.next()) handle(*guest, *frame);
      if (guest->frames.open()) {
        ++guest;
      } else {
        part(*guest);
        guest = guests.erase(guest);
      }
    }
    for (Guest& guest : guests) guest.frames.write();
  }
};

}  // namespace

Hub::Hub(int port, bool local, int size, const std::string& key) {
  Fd listener = listen_on(port, local);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw BackendError(fmt::format("socketpair failed: {}.", std::strerror(errno)));
  own_ = Fd(ends[0]);
  thread_ =
      std::thread([this, size, key, listener = std::move(listener), first = Fd(ends[1])]() mutable {
        run(std::move(listener), std::move(first), size, key);
      });
}

Hub::~Hub() {
  closing_ = true;
  thread_.join();
}

void Hub::run(Fd listener, Fd first, int size, const std::string& key) {
  Office office;
  office.ranks.resize(size);
  office.key = key;
  office.seat(office.guests.emplace_back(Office::Guest{Frames(std::move(first))}), 0);

  std::optional<Patience::Clock::time_point> closing_since;
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign(1, {listener.get(), POLLIN, 0});
    for (const Office::Guest& guest : office.guests)
      polled.push_back({guest.frames.fd(),
                        static_cast<short>(POLLIN | (guest.frames.wants_to_write() ? POLLOUT : 0)),
                        0});
    ::poll(polled.data(), polled.size(), 20);

    while (Fd guest{::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)})
      office.guests.emplace_back(Office::Guest{Frames(std::move(guest))});
    office.serve();

    if (!closing_) continue;
    const auto now = Patience::Clock::now();
    if (!closing_since) closing_since = now;
    if (!office.has_ranks() || now - *closing_since >= milliseconds(linger_ms_)) return;
  }
}

}  // namespace longspan::comm

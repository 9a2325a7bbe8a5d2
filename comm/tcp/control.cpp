#include "comm/tcp/control.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "comm/tcp/address.hpp"
#include "comm/tcp/hello.hpp"
#include "comm/tcp/hub.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

class TcpMailbox final : public Mailbox {
 public:
  /// `hub` on rank 0 only.
  TcpMailbox(Frames frames, std::unique_ptr<Hub> hub, int rank, int size)
      : hub_(std::move(hub)), frames_(std::move(frames)), rank_(rank), size_(size) {}

  ~TcpMailbox() override {
    try {
      frames_.push({Frame::left});
    } catch (...) {  // no memory for a goodbye: the others hear that the connection ended
    }
    flush(milliseconds(500));
    frames_.finish();
    // Closing with letters unread would reset the connection and lose what was just sent.
    for (Patience patient(milliseconds(500)); frames_.open() && !patient.over(); patient.pause()) {
      try {
        frames_.read();
      } catch (...) {
        break;
      }
      frames_.discard();
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void post(int to, const std::string& text) override {
    frames_.push({Frame::text, static_cast<std::uint32_t>(to), text});
    frames_.write();
  }

  std::optional<Letter> next() override {
    frames_.write();
    frames_.read();
    if (auto frame = frames_.next()) return letter_of(std::move(*frame));
    if (frames_.open() || heard_end_of_0_) return std::nullopt;
    heard_end_of_0_ = true;
    if (!frames_.damage().empty()) return damaged(frames_.damage());
    if (const std::string why = hub_ ? hub_->trouble() : ""; !why.empty())
      return damaged("the thread for letters between ranks ended (" + why + ")");
    return Letter{0, Letter::died};  // the hub ended without a word, and rank 0 with it
  }

  void flush(milliseconds limit) noexcept override {
    Patience patient(limit);
    for (frames_.write(); frames_.wants_to_write() && !patient.over(); patient.pause())
      frames_.write();
  }

  void abandon() noexcept override {
    if (hub_) hub_->set_linger(milliseconds(1000));
  }

 private:
  Letter letter_of(Frame frame) {
    if (frame.kind == Frame::refused) return damaged(printable(frame.body));
    const bool known =
        frame.kind == Frame::text || frame.kind == Frame::left || frame.kind == Frame::died;
    if (!known || frame.peer >= static_cast<std::uint32_t>(size_))
      return damaged(fmt::format("a frame of kind {} from rank {}",
                                 static_cast<std::uint32_t>(frame.kind), frame.peer));
    const int from = static_cast<int>(frame.peer);
    if (frame.kind == Frame::text) return Letter{from, Letter::text, std::move(frame.body)};
    if (from == 0) heard_end_of_0_ = true;
    return Letter{from, frame.kind == Frame::left ? Letter::left : Letter::died};
  }

  /// What comes through the hub is rank 0's to answer for.
  Letter damaged(const std::string& why) {
    heard_end_of_0_ = true;
    frames_.close();
    frames_.discard();
    return Letter{0, Letter::damaged, why};
  }

  std::unique_ptr<Hub> hub_;  // ends last: it passes on this rank's goodbye
  Frames frames_;
  int rank_;
  int size_;
  bool heard_end_of_0_ = false;
};

using Clock = Patience::Clock;

milliseconds until(Clock::time_point end) {
  return std::max(std::chrono::duration_cast<milliseconds>(end - Clock::now()), milliseconds(0));
}

/// Rank 0, as another rank looks for it.
struct Goal {
  std::string name;  // for messages
  std::vector<std::string> hosts;
  int port;
  std::string advice;
};

/// One attempt to connect and to be welcomed; nothing, and why, when it failed. Throws UsageError
/// when rank 0 says no; where it says not now, `later` has its words.
std::optional<Frames> try_meet(const Address& address, const Goal& goal, int rank,
                               const std::string& hello, Clock::time_point end, std::string& why,
                               std::string& later) {
  Fd fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = errno;
  if (fd) {
    error = ::connect(fd.get(), address.get(), address.length) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd connecting{fd.get(), POLLOUT, 0};
      const auto longest = std::min(until(end), milliseconds(1000));
      ::poll(&connecting, 1, static_cast<int>(longest.count()));
      socklen_t length = sizeof error;
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error == 0 && !(connecting.revents & POLLOUT)) error = ETIMEDOUT;
    }
  }
  if (error != 0) {
    why = std::strerror(error);
    return std::nullopt;
  }

  Frames frames(std::move(fd), kMostHello);
  frames.push({Frame::hello, static_cast<std::uint32_t>(rank), hello});
  Patience patient(std::min(until(end), milliseconds(Hub::kStay)));
  for (; !patient.over(); patient.pause()) {
    frames.write();
    frames.read();
    const auto frame = frames.next();
    if (!frame) {
      if (frames.open()) continue;
      why = frames.damage().empty() ? "it hung up" : "it sends " + frames.damage();
      return std::nullopt;
    }
    if (frame->kind == Frame::refused && frame->peer == kComeLater) {
      later = printable(frame->body);
      std::this_thread::sleep_for(milliseconds(10));
      return std::nullopt;
    }
    if (frame->kind == Frame::refused)
      throw UsageError(
          fmt::format("Rank 0 at {} refused rank {}: {}", goal.name, rank, printable(frame->body)));
    // Anything else comes from somebody else, or from this very socket: a port of this machine that
    // nobody listens on can be connected to itself.
    if (frame->kind != Frame::welcome || frame->peer != static_cast<std::uint32_t>(rank)) {
      why = "it sends what no rank 0 sends";
      return std::nullopt;
    }
    frames.take_up_to(kMostText);
    frames.push({Frame::seated});
    frames.write();
    return frames;
  }
  why = "it takes connections, but does not answer";
  return std::nullopt;
}

Frames meet(const Goal& goal, int rank, const std::string& hello, milliseconds deadline) {
  std::string why, later;
  bool resolved = false;
  const auto end = Clock::now() + deadline;
  for (Patience patient(deadline); !patient.over(); patient.pause())
    for (const std::string& host : goal.hosts) {
      // Names may come late: a cluster makes them while its machines start.
      const std::vector<Address> addresses = resolve(host, goal.port, why);
      resolved = !addresses.empty();
      for (const Address& address : addresses)
        if (auto frames = try_meet(address, goal, rank, hello, end, why, later))
          return std::move(*frames);
    }
  if (!resolved)
    throw UsageError(
        fmt::format("Rank {} is to meet rank 0 at '{}', which cannot be resolved ({}): set "
                    "MASTER_ADDR to the name or the address of rank 0's machine.",
                    rank, goal.hosts.front(), why));
  throw RankError(
      ErrorKind::timeout, 0, "meet rank 0",
      fmt::format("Rank 0 did not answer at {} within the deadline of {:g} s ({}). {}", goal.name,
                  deadline.count() / 1000.0, later.empty() ? why : later, goal.advice));
}

std::unique_ptr<Control> control_of(Frames frames, std::unique_ptr<Hub> hub, int rank, int size,
                                    milliseconds deadline) {
  if (hub) hub->set_linger(deadline);
  return mail_control(std::make_unique<TcpMailbox>(std::move(frames), std::move(hub), rank, size),
                      deadline);
}

std::unique_ptr<Control> first_control(std::vector<Fd> listeners, const Hello& hello,
                                       milliseconds deadline) {
  auto hub = std::make_unique<Hub>(std::move(listeners), hello);
  Frames own(hub->take_own_end(), kMostText);
  return control_of(std::move(own), std::move(hub), 0, hello.size, deadline);
}

}  // namespace

std::unique_ptr<Control> tcp_control(const Launch& launch, milliseconds deadline) {
  const Hello hello = hello_of(launch);
  if (launch.rank == 0)
    return first_control(listen_at(launch.address, launch.port), hello, deadline);
  const Goal zero{fmt::format("{}:{}", launch.address, launch.port),
                  {launch.address},
                  launch.port,
                  "Set MASTER_ADDR to rank 0's machine and LONGSPAN_PORT to a free port there."};
  return control_of(meet(zero, launch.rank, to_text(hello), deadline), nullptr, launch.rank,
                    launch.size, deadline);
}

std::unique_ptr<Control> tcp_control(Meeting meeting, milliseconds deadline) {
  const Hello hello = hello_of({Launcher::none, meeting.rank, meeting.size, "", 0}, meeting.key);
  if (meeting.rank == 0) {
    std::vector<Fd> listeners;
    listeners.push_back(std::move(meeting.door.listener));
    return first_control(std::move(listeners), hello, deadline);
  }
  const Goal zero{
      fmt::format("port {} of {}", meeting.door.port, fmt::join(meeting.door.hosts, ", ")),
      meeting.door.hosts, meeting.door.port,
      "Is it still running, and does a firewall between the machines let its port through?"};
  return control_of(meet(zero, meeting.rank, to_text(hello), deadline), nullptr, meeting.rank,
                    meeting.size, deadline);
}

}  // namespace longspan::comm

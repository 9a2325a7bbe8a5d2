#include "comm/tcp/control.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "comm/control/mailbox.hpp"
#include "comm/control/wire.hpp"
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
    } catch (...) {  // no memory for a goodbye: the others see that the connection ended
    }
    flush(milliseconds(500));
    frames_.finish();
    // Closing with messages unread would reset the connection and lose what was just sent.
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
  std::optional<int> relay() const override { return rank_ == 0 ? std::nullopt : std::optional(0); }

  void post(int to, const std::string& text) override {
    frames_.push({Frame::text, static_cast<std::uint32_t>(to), text});
    frames_.write();
  }

  std::optional<Message> next() override {
    frames_.write();
    frames_.read();
    if (auto frame = frames_.next()) return message_of(std::move(*frame));
    if (frames_.open() || saw_end_of_0_) return std::nullopt;
    saw_end_of_0_ = true;
    if (!frames_.damage().empty()) return damaged(frames_.damage());
    if (const std::string why = hub_ ? hub_->trouble() : ""; !why.empty())
      return damaged("the thread for messages between ranks ended (" + why + ")");
    return Message{0, Message::died};  // the hub ended without a message, and rank 0 with it
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
  Message message_of(Frame frame) {
    if (frame.kind == Frame::refused) return damaged(printable(frame.body));
    const bool known =
        frame.kind == Frame::text || frame.kind == Frame::left || frame.kind == Frame::died;
    if (!known || frame.peer >= static_cast<std::uint32_t>(size_))
      return damaged(fmt::format("a frame of kind {} from rank {}",
                                 static_cast<std::uint32_t>(frame.kind), frame.peer));
    const int from = static_cast<int>(frame.peer);
    if (frame.kind == Frame::text) return Message{from, Message::text, std::move(frame.body)};
    if (from == 0) saw_end_of_0_ = true;
    return Message{from, frame.kind == Frame::left ? Message::left : Message::died};
  }

  /// Rank 0 is responsible for what comes through the hub.
  Message damaged(const std::string& why) {
    saw_end_of_0_ = true;
    frames_.close();
    frames_.discard();
    return Message{0, Message::damaged, why};
  }

  std::unique_ptr<Hub> hub_;  // ends last: it relays this rank's goodbye
  Frames frames_;
  int rank_;
  int size_;
  bool saw_end_of_0_ = false;
};

constexpr const char* kStep = "meet rank 0";

/// How a rank waits until it has met rank 0: one deadline for all attempts. It sleeps in short
/// turns, since other threads act in real time meanwhile, and asks in each whether to give up.
class Turns {
 public:
  Turns(int rank, milliseconds deadline, std::function<bool()> gives_up)
      : rank_(rank), patient_(deadline), gives_up_(std::move(gives_up)) {}

  bool over() const { return patient_.over(); }
  milliseconds waited() const { return patient_.waited(); }
  /// Sleeps a little, less when something happens at `fd`. False when time is up.
  bool next(int fd = -1, short events = POLLIN) {
    if (over()) return false;
    patient_.pause([&](milliseconds limit) {
      pollfd polled{fd, events, 0};
      ::poll(&polled, 1, static_cast<int>(limit.count()));
    });
    if (gives_up_.now())
      throw RankError(ErrorKind::rank_failure, rank_, kStep,
                      fmt::format("Rank {} gave up: it was interrupted at '{}'.", rank_, kStep));
    return !over();
  }

 private:
  int rank_;
  Patience patient_;
  GivesUp gives_up_;
};

/// Rank 0, as another rank sees it.
struct Goal {
  std::string name;  // for messages
  std::vector<std::string> hosts;
  int port;
  std::string advice;
};

/// The addresses of a name. It is looked up repeatedly, at growing intervals: names may appear late
/// (a cluster makes them while its machines start), and addresses may change.
class Name {
 public:
  Name(const std::string& host, int port) : host_(host), port_(port) {}

  /// The addresses known by now. `why`: the resolver's message where there are none.
  const std::vector<Address>& addresses(milliseconds now, std::string& why) {
    if (!lookup_ && now >= due_) lookup_.emplace(host_, port_);
    if (!lookup_) return known_;
    if (!lookup_->done()) {
      if (!is_answered_) why = "no name server has answered";
      return known_;
    }
    is_answered_ = true;
    if (auto found = lookup_->take(why); !found.empty()) known_ = std::move(found);
    lookup_.reset();
    due_ = now + pause_;
    pause_ = std::min(2 * pause_, milliseconds(2000));
    return known_;
  }

 private:
  std::string host_;
  int port_;
  std::optional<Lookup> lookup_;
  bool is_answered_ = false;
  std::vector<Address> known_;
  milliseconds due_{0}, pause_{100};
};

/// One attempt to connect and be welcomed; nothing, and why, when it failed. Throws UsageError when
/// rank 0 refuses; where it refuses for now, `later` has its message.
std::optional<Frames> try_meet(const Address& address, const Goal& goal, int rank,
                               const std::string& hello, Turns& turns, std::string& why,
                               std::string& later) {
  constexpr milliseconds kConnect{1000};
  const milliseconds begin = turns.waited();
  Fd fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = errno;
  if (fd) {
    error = ::connect(fd.get(), address.get(), address.length) == 0 ? 0 : errno;
    while (error == EINPROGRESS) {
      pollfd connecting{fd.get(), POLLOUT, 0};
      socklen_t length = sizeof error;
      if (::poll(&connecting, 1, 0) > 0)
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      else if (turns.waited() - begin >= kConnect || !turns.next(fd.get(), POLLOUT))
        error = ETIMEDOUT;
    }
  }
  if (error != 0) {
    why = std::strerror(error);
    return std::nullopt;
  }

  Frames frames(std::move(fd), kMostHello);
  frames.push({Frame::hello, static_cast<std::uint32_t>(rank), hello});
  const milliseconds answered = turns.waited();
  do {
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
      return std::nullopt;
    }
    if (frame->kind == Frame::refused)
      throw UsageError(
          fmt::format("Rank 0 at {} refused rank {}: {}", goal.name, rank, printable(frame->body)));
    // Anything else comes from another program, or from this very socket: a local port without a
    // listener can be connected to itself.
    if (frame->kind != Frame::welcome || frame->peer != static_cast<std::uint32_t>(rank)) {
      why = "it sends what no rank 0 sends";
      return std::nullopt;
    }
    frames.take_up_to(kMostText);
    frames.push({Frame::seated});
    frames.write();
    return frames;
  } while (turns.waited() - answered < Hub::kStay && turns.next(frames.fd()));
  why = "it takes connections, but does not answer";
  return std::nullopt;
}

Frames meet(const Goal& goal, int rank, const std::string& hello, milliseconds deadline,
            Turns turns) {
  std::string why, later;
  bool resolved = false;
  std::vector<Name> names;
  for (const std::string& host : goal.hosts) names.emplace_back(host, goal.port);
  do {
    for (Name& name : names) {
      std::string unknown;
      const std::vector<Address> addresses = name.addresses(turns.waited(), unknown);
      resolved = resolved || !addresses.empty();
      if (!unknown.empty() && !resolved) why = unknown;
      for (const Address& address : addresses)
        if (auto frames = try_meet(address, goal, rank, hello, turns, why, later))
          return std::move(*frames);
    }
  } while (turns.next());
  if (!resolved)
    throw UsageError(fmt::format(
        "Rank {} is to meet rank 0 at '{}', which cannot be resolved within the deadline of {} "
        "({}): set MASTER_ADDR to the name or the address of rank 0's machine.",
        rank, goal.hosts.front(), seconds(deadline), why));
  throw RankError(
      ErrorKind::timeout, 0, kStep,
      fmt::format("Rank 0 did not answer at {} within the deadline of {} ({}). {}", goal.name,
                  seconds(deadline), later.empty() ? why : later, goal.advice));
}

std::unique_ptr<Control> control_of(Frames frames, std::unique_ptr<Hub> hub, int rank, int size,
                                    milliseconds deadline, std::function<bool()> gives_up) {
  if (hub) hub->set_linger(deadline);
  auto control = mail_control(
      std::make_unique<TcpMailbox>(std::move(frames), std::move(hub), rank, size), deadline);
  control->on_wait(std::move(gives_up));
  return control;
}

std::unique_ptr<Control> first_control(std::vector<Fd> listeners, const Hello& hello,
                                       milliseconds deadline, std::function<bool()> gives_up) {
  auto hub = std::make_unique<Hub>(std::move(listeners), hello);
  Frames own(hub->take_own_end(), kMostText);
  return control_of(std::move(own), std::move(hub), 0, hello.size, deadline, std::move(gives_up));
}

}  // namespace

std::unique_ptr<Control> tcp_control(const Launch& launch, milliseconds deadline,
                                     std::function<bool()> gives_up) {
  const Hello hello = hello_of(launch);
  Turns turns(launch.rank, deadline, gives_up);
  if (launch.rank == 0)
    return first_control(listen_at(launch.address, launch.port, [&] { return turns.next(); }),
                         hello, deadline, std::move(gives_up));
  const Goal zero{fmt::format("{}:{}", launch.address, launch.port),
                  {launch.address},
                  launch.port,
                  "Set MASTER_ADDR to rank 0's machine and LONGSPAN_PORT to a free port there."};
  return control_of(meet(zero, launch.rank, to_text(hello), deadline, std::move(turns)), nullptr,
                    launch.rank, launch.size, deadline, std::move(gives_up));
}

std::unique_ptr<Control> tcp_control(Meeting meeting, milliseconds deadline,
                                     std::function<bool()> gives_up) {
  const Hello hello = hello_of({Launcher::none, meeting.rank, meeting.size, "", 0}, meeting.key);
  if (meeting.rank == 0) {
    std::vector<Fd> listeners;
    listeners.push_back(std::move(meeting.door.listener));
    return first_control(std::move(listeners), hello, deadline, std::move(gives_up));
  }
  const Goal zero{
      fmt::format("port {} of {}", meeting.door.port, fmt::join(meeting.door.hosts, ", ")),
      meeting.door.hosts, meeting.door.port,
      "Is it still running, and does a firewall between the machines let its port through?"};
  Turns turns(meeting.rank, deadline, gives_up);
  return control_of(meet(zero, meeting.rank, to_text(hello), deadline, std::move(turns)), nullptr,
                    meeting.rank, meeting.size, deadline, std::move(gives_up));
}

}  // namespace longspan::comm

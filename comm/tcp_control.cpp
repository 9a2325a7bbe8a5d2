#include "comm/tcp_control.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>

#include "comm/tcp_hub.hpp"
#include "comm/wire.hpp"
#include "longspan/version.hpp"
#include "src/env.hpp"

namespace longspan::comm {
namespace {

class TcpMailbox final : public Mailbox {
 public:
  /// `hub` on rank 0 only.
  TcpMailbox(Frames frames, std::unique_ptr<Hub> hub, int rank, int size)
      : hub_(std::move(hub)), frames_(std::move(frames)), rank_(rank), size_(size) {}

  ~TcpMailbox() override {
    frames_.push({Frame::left});
    flush(milliseconds(500));
    frames_.finish();
    // Closing with letters unread would reset the connection and lose what was just sent.
    for (Patience patient(milliseconds(500)); frames_.open() && !patient.over(); patient.pause())
      frames_.read();
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
    while (auto frame = frames_.next()) {
      if (frame->kind == Frame::hello) continue;
      const int from = static_cast<int>(frame->peer);
      if (frame->kind == Frame::text) return Letter{from, Letter::text, std::move(frame->body)};
      if (from == 0) heard_end_of_0_ = true;
      return Letter{from, frame->kind == Frame::left ? Letter::left : Letter::died};
    }
    if (frames_.open() || heard_end_of_0_) return std::nullopt;
    heard_end_of_0_ = true;
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
  std::unique_ptr<Hub> hub_;  // ends last: it passes on this rank's goodbye
  Frames frames_;
  int rank_;
  int size_;
  bool heard_end_of_0_ = false;
};

/// One attempt to connect and to be welcomed; nothing when it failed.
std::optional<Frames> try_meet(const Launch& launch, const std::string& key,
                               const Patience& patient) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(launch.address.c_str(), std::to_string(launch.port).c_str(), &hints, &found) != 0)
    return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, freeaddrinfo);

  for (const addrinfo* to = all.get(); to; to = to->ai_next) {
    const int fd = ::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    Frames frames{Fd(fd)};
    ::connect(fd, to->ai_addr, to->ai_addrlen);
    pollfd connecting{fd, POLLOUT, 0};
    ::poll(&connecting, 1, 1000);
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0 || !(connecting.revents & POLLOUT)) continue;

    frames.push({Frame::hello, static_cast<std::uint32_t>(launch.rank), key});
    for (Patience welcome(milliseconds(5000)); frames.open(); welcome.pause()) {
      frames.write();
      frames.read();
      if (const auto frame = frames.next(); frame && frame->kind == Frame::hello) return frames;
      if (welcome.over() || patient.over()) break;
    }
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Control> tcp_control(const Launch& launch, milliseconds deadline) {
  const std::string key = pack(std::string(LONGSPAN_VERSION), std::to_string(launch.size),
                               env_text("TORCHELASTIC_RUN_ID").value_or(""));
  std::unique_ptr<Hub> hub;
  std::optional<Frames> frames;
  if (launch.rank == 0) {
    const bool local = launch.address == "localhost" || launch.address.starts_with("127.");
    hub = std::make_unique<Hub>(launch.port, local, launch.size, key);
    hub->set_linger(deadline);
    frames.emplace(hub->take_own_end());
  } else {
    for (Patience patient(deadline); !frames; patient.pause()) {
      frames = try_meet(launch, key, patient);
      if (!frames && patient.over())
        throw RankError(
            ErrorKind::timeout, 0, "meet rank 0",
            fmt::format("Rank 0 did not answer at {}:{} within the deadline of {:g} s. Set "
                        "MASTER_ADDR to rank 0's machine and LONGSPAN_PORT to a free port there.",
                        launch.address, launch.port, deadline.count() / 1000.0));
    }
  }
  return mail_control(
      std::make_unique<TcpMailbox>(std::move(*frames), std::move(hub), launch.rank, launch.size),
      deadline);
}

}  // namespace longspan::comm

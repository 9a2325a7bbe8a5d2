#include "comm/tcp/frames.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

struct Header {
  std::uint32_t magic;  // another program at this port is noticed at once
  std::uint32_t kind;
  std::uint32_t peer;
  std::uint32_t bytes;
};
constexpr std::uint32_t kMagic = 0x4c53504e;
/// Read and written in one turn, so that one busy connection does not delay the others.
constexpr std::size_t kTurn = std::size_t{1} << 20;

/// Drops the used part, when that is most of it: each byte is moved once on average.
void compact(std::string& bytes, std::size_t& done) {
  if (done < bytes.size() / 2 || done == 0) return;
  bytes.erase(0, done);
  done = 0;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Frames::Frames(Fd fd, std::size_t most) : fd_(std::move(fd)), most_(most) {
  fcntl(fd_.get(), F_SETFL, fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // not TCP: nothing to set
}

void Frames::push(const Frame& frame) {
  if (frame.body.size() > kMostText)
    throw UsageError(fmt::format(
        "A text of {} bytes was given to a gather, but texts between ranks have at most {} bytes.",
        frame.body.size(), kMostText));
  const Header header{kMagic, frame.kind, frame.peer,
                      static_cast<std::uint32_t>(frame.body.size())};
  compact(out_, sent_);
  out_.append(reinterpret_cast<const char*>(&header), sizeof header);
  out_ += frame.body;
}

std::nullopt_t Frames::damaged(std::string why) {
  damage_ = std::move(why);
  open_ = false;
  discard();
  return std::nullopt;
}

std::optional<Frame> Frames::next() {
  Header header;
  if (held() < sizeof header) return std::nullopt;
  std::memcpy(&header, in_.data() + taken_, sizeof header);
  if (header.magic != kMagic) return damaged("bytes that are not a frame of longspan");
  if (header.kind > Frame::died) return damaged(fmt::format("a frame of kind {}", header.kind));
  if (header.bytes > most_)
    return damaged(fmt::format("a frame of {} bytes where {} are the most", header.bytes, most_));
  if (held() < sizeof header + header.bytes) return std::nullopt;
  Frame frame{static_cast<Frame::Kind>(header.kind), header.peer,
              in_.substr(taken_ + sizeof header, header.bytes)};
  taken_ += sizeof header + header.bytes;
  compact(in_, taken_);
  return frame;
}

void Frames::write() {
  for (std::size_t turn = 0; wants_to_write() && turn < kTurn;) {
    const ssize_t sent = ::send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent > 0) {
      sent_ += static_cast<std::size_t>(sent);
      turn += static_cast<std::size_t>(sent);
    } else if (errno == EINTR) {
      continue;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno == EPIPE || errno == ECONNRESET) {
      hears_ = false;  // read() finds the end, after what came before it
    } else {
      open_ = false;
    }
  }
  if (sent_ == out_.size() || !hears_) {
    out_.clear();
    sent_ = 0;
  }
}

void Frames::read() {
  char bytes[1 << 16];
  for (std::size_t turn = 0; open_ && turn < kTurn;) {
    const std::size_t room = sizeof(Header) + most_ - std::min(held(), sizeof(Header) + most_);
    if (room == 0) return;  // a whole frame, or a damaged one, waits for next()
    const ssize_t got = ::recv(fd_.get(), bytes, std::min(room, sizeof bytes), 0);
    if (got > 0) {
      in_.append(bytes, static_cast<std::size_t>(got));
      turn += static_cast<std::size_t>(got);
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else {
      open_ = false;
    }
  }
}

void Frames::discard() {
  in_.clear();
  taken_ = 0;
}

void Frames::finish() { ::shutdown(fd_.get(), SHUT_WR); }

}  // namespace longspan::comm

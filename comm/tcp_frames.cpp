#include "comm/tcp_frames.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace longspan::comm {
namespace {

struct Header {
  std::uint32_t magic;  // whoever else talks to this port is noticed at once
  std::uint32_t kind;
  std::uint32_t peer;
  std::uint32_t bytes;
};
constexpr std::uint32_t kMagic = 0x4c53504e;
constexpr std::uint32_t kMostBytes = 1u << 30;

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Frames::Frames(Fd fd) : fd_(std::move(fd)) {
  fcntl(fd_.get(), F_SETFL, fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // not TCP: nothing to set
}

void Frames::push(const Frame& frame) {
  const Header header{kMagic, frame.kind, frame.peer,
                      static_cast<std::uint32_t>(frame.body.size())};
  out_.append(reinterpret_cast<const char*>(&header), sizeof header);
  out_ += frame.body;
}

std::optional<Frame> Frames::next() {
  Header header;
  if (in_.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, in_.data(), sizeof header);
  if (header.magic != kMagic || header.bytes > kMostBytes || header.kind > Frame::died) {
    open_ = false;
    in_.clear();
    return std::nullopt;
  }
  if (in_.size() < sizeof header + header.bytes) return std::nullopt;
  Frame frame{static_cast<Frame::Kind>(header.kind), header.peer,
              in_.substr(sizeof header, header.bytes)};
  in_.erase(0, sizeof header + header.bytes);
  return frame;
}

void Frames::write() {
  while (wants_to_write()) {
    const ssize_t sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (sent > 0)
      out_.erase(0, static_cast<std::size_t>(sent));
    else if (errno == EINTR)
      continue;
    else if (errno == EAGAIN || errno == EWOULDBLOCK)
      return;
    else
      open_ = false;
  }
}

void Frames::read() {
  char bytes[1 << 16];
  while (open_) {
    const ssize_t got = ::recv(fd_.get(), bytes, sizeof bytes, 0);
    if (got > 0)
      in_.append(bytes, static_cast<std::size_t>(got));
    else if (got < 0 && errno == EINTR)
      continue;
    else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
      return;
    else
      open_ = false;
  }
}

void Frames::finish() { ::shutdown(fd_.get(), SHUT_WR); }

}  // namespace longspan::comm

// Frames on a TCP connection: a header of fixed size, then the bytes. Nothing here blocks. What a
// connection may leave in memory is bounded: a frame is refused by its header, and at most one
// frame of the largest allowed size is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace longspan::comm {

/// A file descriptor, owned.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd();
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct Frame {
  enum Kind : std::uint32_t {
    hello,    // to the hub: my rank and secret
    welcome,  // from the hub: you have a seat
    seated,   // to the hub: I know; from now on my end is the end of this rank
    refused,  // from the hub, the last one: why the seat is refused or lost
    text,
    left,
    died
  };
  Kind kind = text;
  std::uint32_t peer = 0;  // the receiver on the way to the hub, the sender on the way back
  std::string body = {};
};

/// In `peer` of `refused`: try again.
inline constexpr std::uint32_t kComeLater = 1;

/// The largest bodies of strangers, and of ranks.
inline constexpr std::size_t kMostHello = 4096;
inline constexpr std::size_t kMostText = std::size_t{1} << 30;

/// One connection. Closed by the peer, it still returns the frames that came before.
class Frames {
 public:
  Frames(Fd fd, std::size_t most);
  int fd() const { return fd_.get(); }
  bool open() const { return open_; }
  bool wants_to_write() const { return open_ && hears_ && sent_ < out_.size(); }
  /// The bytes that were not a frame and ended the connection; empty: none.
  const std::string& damage() const { return damage_; }
  /// The largest body that is accepted from now on.
  void take_up_to(std::size_t most) { most_ = most; }

  /// Throws UsageError for a body that no connection accepts.
  void push(const Frame& frame);
  std::optional<Frame> next();

  /// Reads and writes what the connection allows now, a bounded part of it.
  void write();
  void read();
  /// Forgets what has been read.
  void discard();
  /// No more will be written.
  void finish();
  void close() { open_ = false; }

 private:
  std::size_t held() const { return in_.size() - taken_; }
  std::nullopt_t damaged(std::string why);

  Fd fd_;
  std::size_t most_;
  bool open_ = true;
  bool hears_ = true;  // the other side does, as far as writing to it has shown
  std::string damage_;
  std::string in_;  // what was read, from taken_ on
  std::size_t taken_ = 0;
  std::string out_;  // what is to be written, from sent_ on
  std::size_t sent_ = 0;
};

}  // namespace longspan::comm

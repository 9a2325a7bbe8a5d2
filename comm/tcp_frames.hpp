// Frames on a TCP connection: a header of fixed size, then the bytes. Nothing here blocks.
#pragma once

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
  enum Kind : std::uint32_t { hello, text, left, died };
  Kind kind = text;
  std::uint32_t peer = 0;  // to whom on the way to the hub, from whom on the way back
  std::string body = {};
};

/// One connection. Closed from the other side, it still gives the frames that came before.
class Frames {
 public:
  explicit Frames(Fd fd);
  int fd() const { return fd_.get(); }
  bool open() const { return open_; }
  bool wants_to_write() const { return open_ && !out_.empty(); }

  void push(const Frame& frame);
  std::optional<Frame> next();

  /// Moves what the connection takes and gives now.
  void write();
  void read();
  /// No more will be written.
  void finish();
  void close() { open_ = false; }

 private:
  Fd fd_;
  bool open_ = true;
  std::string in_;
  std::string out_;
};

}  // namespace longspan::comm

// One process alone: every verb is a copy.
#pragma once

#include <cstring>

#include "comm/controlled.hpp"

namespace longspan::comm {

class SelfTransport : public ControlledTransport {
 public:
  explicit SelfTransport(milliseconds deadline) : ControlledTransport(self_control(deadline)) {}
  Device device() const override { return Device::host; }
  std::string describe() const override { return "1 rank"; }

  void all_gather(const void* send, void* recv, std::size_t bytes, Stream stream, const char*,
                  std::uint64_t*) override {
    move(send, recv, bytes, stream);
  }
  void all_to_all(const void* send, void* recv, std::size_t bytes, Stream stream,
                  const char*) override {
    move(send, recv, bytes, stream);
  }
  void shift(const void* send, void* recv, std::size_t bytes, int, Stream stream,
             const char*) override {
    move(send, recv, bytes, stream);
  }
  void wait(Stream, const char*) override { control().fate().check(); }

 protected:
  virtual void copy(const void* from, void* to, std::size_t bytes, Stream) {
    std::memmove(to, from, bytes);
  }

 private:
  void move(const void* from, void* to, std::size_t bytes, Stream stream) {
    control().fate().check();
    if (from != to && bytes > 0) copy(from, to, bytes, stream);
  }
};

}  // namespace longspan::comm

// A transport for one process alone, where every collective is a copy.
#pragma once

#include <cstring>

#include "comm/controlled.hpp"

namespace longspan::comm {

class SelfTransport : public ControlledTransport {
 public:
  explicit SelfTransport(milliseconds deadline) : SelfTransport(self_control(deadline)) {}
  explicit SelfTransport(std::shared_ptr<Control> control)
      : ControlledTransport(std::move(control)) {}
  Device device() const override { return Device::host; }
  std::string describe() const override { return "1 rank"; }
  void wait(Stream, const char*) override { control().fate().check(); }

 protected:
  int start(const Collective& collective, Stream, const char*) override {
    control().fate().check();
    if (collective.send != collective.recv && collective.bytes > 0)
      std::memmove(collective.recv, collective.send, collective.bytes);
    return -1;
  }
  void finish(int, Stream) override { control().fate().check(); }
  bool test(int) override {
    control().fate().check();
    return true;
  }
  void drop(int) noexcept override {}

  std::shared_ptr<Transport> branch(const Group& group) override {
    if (group.members.empty()) return nullptr;
    return std::make_shared<SelfTransport>(control().branch(group));
  }
};

}  // namespace longspan::comm

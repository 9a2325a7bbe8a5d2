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
  void wait(Stream, const char*) override { control().outcome().check(); }

 protected:
  int start(const Collective& collective, Stream, const char*) override {
    control().outcome().check();
    if (collective.send != collective.recv && collective.bytes > 0)
      std::memmove(collective.recv, collective.send, collective.bytes);
    return -1;
  }
  void finish(int, Stream) override { control().outcome().check(); }
  bool test(int) override {
    control().outcome().check();
    return true;
  }
  void drop(int) noexcept override {}

  std::shared_ptr<Transport> branch(const Group& group) override {
    if (group.members.empty()) return nullptr;
    return std::make_shared<SelfTransport>(control().branch(group));
  }
};

}  // namespace longspan::comm

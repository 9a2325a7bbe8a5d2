// What the transports share: who they are comes from the control plane, and so does their end.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

class ControlledTransport : public Transport {
 public:
  explicit ControlledTransport(std::unique_ptr<Control> control) : control_(std::move(control)) {}
  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  milliseconds deadline() const override { return control_->deadline(); }
  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    return control_->gather(mine, step);
  }
  void abort(const std::string& why) noexcept override { control_->tell(gave_up(rank(), why)); }

 protected:
  Control& control() { return *control_; }
  const Control& control() const { return *control_; }

 private:
  std::unique_ptr<Control> control_;
};

}  // namespace longspan::comm

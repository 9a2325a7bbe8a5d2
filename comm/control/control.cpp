#include "comm/control/control.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "comm/control/messages.hpp"
#include "comm/control/wire.hpp"

namespace longspan::comm {
namespace {

class SelfControl final : public Control {
 public:
  using Control::Control;
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::vector<std::string> gather(const std::string& mine, const std::string&) override {
    outcome().check();
    return {mine};
  }
  void check(const char*, milliseconds) override { outcome().check(); }
  [[noreturn]] void timed_out(const char* step, milliseconds) override {
    outcome().fail({ErrorKind::timeout, 0, step,
                    fmt::format("'{}' was not done within the deadline of {}; LONGSPAN_DEADLINE_S "
                                "sets it.",
                                step, seconds(deadline()))});
  }
  void tell(const Failure& failure) noexcept override { outcome().note(failure); }

  std::shared_ptr<Control> branch(const Group& group) override {
    auto child = std::make_shared<SelfControl>(deadline());
    child->set_parent(*this, group);
    return child;
  }
};

}  // namespace

std::string Control::name_of(int rank) const {
  if (origins_.empty() || rank < 0 || rank >= size()) return std::to_string(rank);
  return fmt::format("{} ({} of all)", rank, origins_[rank]);
}

std::string Control::split_request(int color, int key) const {
  return encode(SplitRequest{color, key, next_number()});
}

Group Control::group_of(const std::vector<std::string>& requests) const {
  std::vector<SplitRequest> all;
  all.reserve(requests.size());
  for (const std::string& text : requests) all.push_back(decode_split_request(text));
  const SplitRequest& own = all[rank()];
  if (own.color < 0) return {};
  Group group{.color = own.color};
  for (int p = 0; p < size(); ++p) {
    if (all[p].color != own.color) continue;
    group.members.push_back(p);
    group.number = std::max(group.number, all[p].number);
  }
  std::stable_sort(group.members.begin(), group.members.end(),
                   [&](int a, int b) { return all[a].key < all[b].key; });
  group.rank = static_cast<int>(std::find(group.members.begin(), group.members.end(), rank()) -
                                group.members.begin());
  return group;
}

void Control::set_parent(Control& parent, const Group& group) {
  for (const int member : group.members)
    origins_.push_back(parent.origins_.empty() ? member : parent.origins_[member]);
  parent_ = parent.weak_from_this();
  members_ = group.members;
  next_number_ = parent.next_number_;
  *next_number_ = group.number + 1;
  parent.outcome_->add_child(outcome_, group.members);
}

void Control::end_with_parent() {
  failure_domain_ = parent_.lock();
  if (failure_domain_) outcome_ = failure_domain_->outcome_;
}

Failure gave_up(const Control& control, const std::string& why) {
  return {
      ErrorKind::rank_failure, control.rank(), "",
      fmt::format("Rank {} gave up: {}", control.name_of(control.rank()), printable(why, 1000))};
}

std::unique_ptr<Control> self_control(milliseconds deadline) {
  return std::make_unique<SelfControl>(deadline);
}

}  // namespace longspan::comm

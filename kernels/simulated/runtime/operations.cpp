#include "kernels/simulated/runtime/operations.hpp"

#include <algorithm>
#include <utility>

namespace longspan::simulated {
namespace {

/// Some operations begin as soon as they can, others late, after much other work.
constexpr double kEagerness[] = {1, 0.25, 0.02};

OperationPtr take(std::vector<OperationPtr>& from, std::size_t index) {
  OperationPtr taken = std::move(from[index]);
  from.erase(from.begin() + static_cast<std::ptrdiff_t>(index));
  return taken;
}

}  // namespace

Operations& operations() {
  static Operations* const all = new Operations;
  return *all;
}

OperationPtr Operations::queue(WorkPtr work, std::vector<OperationPtr> after,
                               OperationPtr overlapped) {
  auto operation = std::make_shared<Operation>(std::move(work));
  if (operation->work().queued) operation->work().queued(operation, after);
  if (overlapped != nullptr && !overlapped->is_done())
    operation->overlapped_ = std::move(overlapped);
  for (const OperationPtr& before : after) {
    if (before == nullptr || before->is_done()) continue;
    before->followers_.push_back(operation);
    ++operation->unmet_;
  }
  if (operation->unmet_ == 0) make_ready(operation);
  return operation;
}

void Operations::make_ready(const OperationPtr& operation) {
  if (operation->overlapped_ != nullptr) return overlapping_.push_back(operation);
  operation->state_ = Operation::State::ready;
  operation->eagerness_ = kEagerness[pick(static_cast<unsigned>(std::size(kEagerness)))];
  ready_.push_back(operation);
}

void Operations::begin(OperationPtr operation) {
  operation->state_ = Operation::State::running;
  const Work& work = operation->work();
  if (work.is_kernel()) {
    GridHandle before;
    if (operation->overlapped_ != nullptr) before = operation->overlapped_->grid_;
    operation->grid_ = start(work.kernel, work.device, std::move(before));
    running_.push_back(std::move(operation));
  } else if (work.begin) {
    operation->poll_ = work.begin();
    polled_.push_back(std::move(operation));
  } else {
    if (work.now) {
      order_kernels_before_host();
      work.now();
      order_host_before_kernels();
    }
    finish(operation);
  }
}

void Operations::finish(const OperationPtr& operation) {
  operation->state_ = Operation::State::done;
  operation->ended_at_ = nanoseconds();
  operation->poll_ = nullptr;
  operation->overlapped_ = nullptr;
  // Its work may own the operation's owner, as with a communicator.
  operation->work_ = nullptr;
  for (const OperationPtr& follower : std::exchange(operation->followers_, {}))
    if (--follower->unmet_ == 0) make_ready(follower);
}

/// Collects kernels that have ended, and those that may start since the kernel before allows it.
bool Operations::collect() {
  bool any = false;
  for (std::size_t i = 0; i < running_.size();) {
    const Operation& kernel = *running_[i];
    const bool comes_last = kernel.overlapped_ == nullptr || kernel.overlapped_->is_done();
    if (!comes_last || !has_ended(*kernel.grid_)) {
      ++i;
      continue;
    }
    const OperationPtr ended = take(running_, i);
    finish(ended);
    ended->grid_ = nullptr;
    any = true;
  }
  for (std::size_t i = 0; i < overlapping_.size();) {
    const Operation& before = *overlapping_[i]->overlapped_;
    const bool runs = before.state_ == Operation::State::running;
    if (!before.is_done() && !(runs && lets_next_start(*before.grid_))) {
      ++i;
      continue;
    }
    const OperationPtr next = take(overlapping_, i);
    const OperationPtr overlapped = std::exchange(next->overlapped_, nullptr);
    make_ready(next);
    if (!overlapped->is_done()) next->overlapped_ = overlapped;
    any = true;
  }
  return any;
}

bool Operations::begin_one(bool at_once) {
  if (ready_.empty()) return false;
  const std::size_t index = pick(static_cast<unsigned>(ready_.size()));
  if (!at_once && !chance(ready_[index]->eagerness_)) return false;
  begin(take(ready_, index));
  return true;
}

bool Operations::poll_one(std::size_t index) {
  const OperationPtr operation = polled_[index];
  order_kernels_before_host();  // its data was written before
  const Progress progress = operation->poll_();
  if (progress == Progress::none) return false;
  if (progress == Progress::ended) {
    std::erase(polled_, operation);
    order_host_before_kernels();  // received data is visible to whatever follows
    finish(operation);
  }
  return true;
}

bool Operations::step(int most_slices) {
  collect();
  if (begin_one(running_.empty())) return true;
  if (!polled_.empty() && chance(0.5) && poll_one(pick(static_cast<unsigned>(polled_.size()))))
    return true;
  // If nothing else could begin, there is no need to check after each slice.
  const int most = ready_.empty() && polled_.empty() ? most_slices : 1;
  if (!running_.empty() && run_slices(most)) {
    collect();
    return true;
  }
  if (collect() || begin_one(true)) return true;
  for (std::size_t i = 0; i < polled_.size(); ++i)
    if (poll_one(i)) return true;
  return false;
}

}  // namespace longspan::simulated

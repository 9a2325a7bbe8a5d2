// Work in streams that the GPUs have not done yet: a graph of operations, each of which may begin
// when those before it are done. Nothing runs by itself: a thread that waits calls step(), and
// chance decides what makes progress, so that every order that the streams allow occurs.
//
// All functions are called with the machine's mutex held.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/simulated/machine.hpp"

namespace longspan::simulated {

class Operation;
using OperationPtr = std::shared_ptr<Operation>;

/// The result of one poll of work that waits for other ranks.
enum class Progress { none, some, ended };
using Poll = std::function<Progress()>;

/// The work of an operation; a graph's node does it at every replay. At most one of the three is
/// set; none means that it only has a position in the order.
struct Work {
  Kernel kernel;                // set if it has a body
  std::function<void()> now;    // done as soon as it begins: copies
  std::function<Poll()> begin;  // polled until it reports that it has ended

  int device = 0;
  bool overlaps = false;  // of a kernel: may start while the kernel before it ends
  /// Called when it is queued, with the operations that it has to wait for in addition.
  std::function<void(const OperationPtr& self, std::vector<OperationPtr>& after)> queued;

  bool is_kernel() const { return kernel.body != nullptr; }
};
using WorkPtr = std::shared_ptr<const Work>;

class Operation {
 public:
  explicit Operation(WorkPtr work) : work_(std::move(work)) {}
  bool is_done() const { return state_ == State::done; }
  /// Valid until it is done.
  const Work& work() const { return *work_; }
  /// On the machine's clock.
  std::uint64_t ended_at() const { return ended_at_; }

 private:
  friend class Operations;
  enum class State { queued, ready, running, done };

  WorkPtr work_;
  State state_ = State::queued;
  int unmet_ = 0;  // operations that it waits for
  std::vector<OperationPtr> followers_;
  OperationPtr overlapped_;  // a kernel whose end it need not await
  double eagerness_ = 1;     // chance to begin, at each step
  GridHandle grid_;
  Poll poll_;
  std::uint64_t ended_at_ = 0;
};

class Operations {
 public:
  /// `overlapped`: null, or a kernel at whose let_next_kernel_start() this one may start.
  OperationPtr queue(WorkPtr work, std::vector<OperationPtr> after,
                     OperationPtr overlapped = nullptr);

  /// Makes progress. False: nothing can at present. It runs up to `most_slices` of the machine, if
  /// nothing else could begin between them.
  bool step(int most_slices = 1);

  /// Whether work in progress waits for other ranks: it is unknown when it continues.
  bool waits_for_others() const { return !polled_.empty(); }
  /// Whether kernels are resident.
  bool runs_kernels() const { return !running_.empty(); }

 private:
  void make_ready(const OperationPtr& operation);
  void begin(OperationPtr operation);
  void finish(const OperationPtr& operation);
  bool begin_one(bool at_once);
  bool collect();
  bool poll_one(std::size_t index);

  std::vector<OperationPtr> ready_;
  std::vector<OperationPtr> overlapping_;  // ready except for the kernel that they overlap
  std::vector<OperationPtr> running_;      // kernels, in the order in which they started
  std::vector<OperationPtr> polled_;
};

/// The operations of this process.
Operations& operations();

}  // namespace longspan::simulated

// The control plane: small texts between ranks, to meet, to agree and to find a missing rank. Every
// wait has a deadline. When it passes, the ranks that still run call the roll: each reports the
// step where it waits and for how long, and the silent rank is named. The first verdict goes to
// all, so every rank ends with the same error.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/control/agreement.hpp"
#include "comm/control/failure.hpp"
#include "comm/control/patience.hpp"

namespace longspan::comm {

/// The group that a split gives a rank.
struct Group {
  int color = -1;            // below 0: this rank is in none
  std::uint32_t number = 0;  // of the group; no two communicators of a rank have the same
  int rank = 0;              // this rank's place among the members
  std::vector<int> members;  // by their ranks in the group, their ranks in the parent
};

class Control : public std::enable_shared_from_this<Control> {
 public:
  explicit Control(milliseconds deadline) : deadline_(deadline) {}
  virtual ~Control() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  milliseconds deadline() const { return deadline_; }

  /// The part of the deadline that a rank spends waiting; the rest is left for the roll call.
  virtual milliseconds patience() const { return deadline_; }

  /// Gathers every rank's text, in rank order.
  virtual std::vector<std::string> gather(const std::string& mine, const std::string& step) = 0;

  /// Throws when the communicator has failed, when a peer gave up or died, or, after the roll call,
  /// when a peer's deadline has passed. Otherwise it never waits: it is for loops that have waited
  /// for something else since `waited`.
  virtual void check(const char* step, milliseconds waited) = 0;

  /// Called when this rank's deadline has passed at `step`; calls the roll and throws.
  [[noreturn]] virtual void timed_out(const char* step, milliseconds waited) = 0;

  /// See Communicator::on_wait.
  void on_wait(std::function<bool()> gives_up) { gives_up_ = GivesUp(std::move(gives_up)); }

  /// Sets what moves the data of open transfers while gather waits, where this process must move
  /// it: a peer may come to the gather only after it has that data. move() returns whether any
  /// moved.
  void set_progress(std::function<bool()> move) { move_ = std::move(move); }

  /// Called where ranks were given different arguments for `run`. The roll call finds the field and
  /// throws UsageError. Throws `otherwise` where no description has the difference.
  [[noreturn]] virtual void disagree(RunName, const Failure& otherwise) { fail(otherwise); }

  /// Gives a new layer its number and keeps its log, which the roll call may ask for while it
  /// lives.
  std::uint32_t enlist(const std::shared_ptr<const RunLog>& log) {
    std::erase_if(logs_, [](const auto& entry) { return entry.second.expired(); });
    logs_[++layers_] = log;
    return layers_;
  }
  /// From here on this rank is in `run`.
  virtual void begin(RunName run) { runs_.add(run); }
  RunName run() const { return runs_.last(); }

  /// Tells the other ranks that this one refused the call that would have been its next run: its
  /// arguments, as far as known, and why. It waits for nobody and ends nothing. A rank that waits
  /// in that run for this one can then report the difference.
  virtual void refuse(const NamedValues&, const std::string& /*why*/) {}

  /// Ends the communicator with this failure on all ranks that can be reached.
  virtual void tell(const Failure& failure) noexcept = 0;

  /// Sends what is still queued. Call it before anything that waits for a peer in another way: the
  /// peer may still wait for a message.
  virtual void flush() noexcept {}

  /// The name of a rank in messages: "5", or "1 (5 of all)" in one that was split from another.
  std::string name_of(int rank) const;
  /// For each rank its number in the communicator that all were split from; empty where this is
  /// that communicator.
  const std::vector<int>& origins() const { return origins_; }

  /// This rank's request at a split, and its group by all ranks' requests.
  std::string split_request(int color, int key) const;
  Group group_of(const std::vector<std::string>& requests) const;

  /// Makes a control plane among the members of a group. Its messages travel over this one, which
  /// it keeps alive. Null where this kind of control plane has none.
  virtual std::shared_ptr<Control> branch(const Group&) { return nullptr; }

  /// Takes this control plane's place below `parent`: ranks are named after it, and its end is the
  /// end of this one.
  void set_parent(Control& parent, const Group& group);

  /// Makes the end of this control plane also the end of its parent, for parts that all ranks of
  /// the parent use together: a rank that never comes here may itself wait in another part. So the
  /// roll is called in the parent, and a failure has the parent's numbers.
  void end_with_parent();

  Outcome& outcome() { return *outcome_; }

  /// Ends the communicator everywhere and throws.
  [[noreturn]] void fail(const Failure& failure) {
    if (failure_domain_) failure_domain_->fail(in_failure_domain(failure));
    tell(failure);
    outcome_->fail(failure);
  }

 protected:
  /// Moves the data of open transfers; false where none moved.
  bool progress() { return move_ && move_(); }

  /// Called from a loop that waits: asks the caller, at most ten times a second, whether to go on.
  void check_interrupt(const char* step) {
    if (gives_up_.now())
      fail({ErrorKind::rank_failure, rank(), step,
            "Rank " + name_of(rank()) + " gave up: it was interrupted at '" + step + "'."});
  }

  /// The run in the form that this rank asks others for.
  AskedRun asked(RunName run) const { return runs_.find(run); }

  /// The place of the last run that this rank began.
  std::uint64_t place() const { return runs_.count(); }

  /// This rank's description of a run; empty where it is not (or no longer) known.
  NamedValues describe(const AskedRun& asked) const {
    const RunName run = runs_.at(asked);
    const auto found = logs_.find(run.layer);
    const auto log = found == logs_.end() ? nullptr : found->second.lock();
    return log ? log->describe(run.run) : NamedValues{};
  }

  /// The parent, where both fail together (end_with_parent); else null.
  Control* failure_domain() const { return failure_domain_.get(); }
  Failure in_failure_domain(Failure failure) const {
    if (failure.rank >= 0) failure.rank = members_[failure.rank];
    return failure;
  }

  /// The lowest number that no group of this rank has had.
  std::uint32_t next_number() const { return *next_number_; }

 private:
  std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  std::shared_ptr<std::uint32_t> next_number_ = std::make_shared<std::uint32_t>(1);
  std::vector<int> origins_;
  std::weak_ptr<Control> parent_;
  std::vector<int> members_;  // by the ranks here, those in the parent
  std::shared_ptr<Control> failure_domain_;
  GivesUp gives_up_;
  std::function<bool()> move_;
  milliseconds deadline_;
  RunOrder runs_;
  std::uint32_t layers_ = 0;
  std::map<std::uint32_t, std::weak_ptr<const RunLog>> logs_;
};

/// The failure of a transport's abort(why): this rank gives up.
Failure gave_up(const Control& control, const std::string& why);

/// Makes a control plane for one process alone.
std::unique_ptr<Control> self_control(milliseconds deadline);

}  // namespace longspan::comm

// Common to the transports: the control plane decides their rank, and when they end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"

namespace longspan::comm {

/// The number of an entry that no open transfer uses; a new one where all are in use.
template <class Open>
int free_entry(std::vector<std::unique_ptr<Open>>& entries) {
  const auto free = std::find_if(entries.begin(), entries.end(),
                                 [](const auto& entry) { return !entry->is_taken; });
  const auto number = static_cast<int>(free - entries.begin());
  if (free == entries.end()) entries.push_back(std::make_unique<Open>());
  return number;
}

class ControlledTransport : public Transport {
 public:
  explicit ControlledTransport(std::shared_ptr<Control> control) : control_(std::move(control)) {}
  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  milliseconds deadline() const override { return control_->deadline(); }
  std::string name_of(int rank) const override { return control_->name_of(rank); }
  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    return control_->gather(mine, step);
  }
  void check(const char*) override { control_->outcome().check(); }
  void abort(const std::string& why) noexcept override try {
    control_->tell(gave_up(*control_, why));
  } catch (...) {  // without memory for the reason: the end itself takes none
    control_->tell({ErrorKind::rank_failure, rank(), {}, {}});
  }

  void on_wait(std::function<bool()> gives_up) override { control_->on_wait(std::move(gives_up)); }

  std::uint32_t enlist(const std::shared_ptr<const RunLog>& log) override {
    return control_->enlist(log);
  }
  void begin(RunName run) override { control_->begin(run); }
  void refuse(const NamedValues& given, const std::string& why) override {
    control_->refuse(given, why);
  }
  void disagree(RunName run, int other, const char* step) override {
    control_->disagree(
        run, {ErrorKind::usage, other, step,
              "Rank " + control_->name_of(other) + " runs another attention than rank " +
                  control_->name_of(rank()) + " at '" + step +
                  "': every rank must run with the same tokens, batch, shard and options."});
  }

  void end_with_parent() override { control_->end_with_parent(); }

  std::shared_ptr<Transport> split(int color, int key) override {
    const auto requests = gather(control_->split_request(color, key), "split of the communicator");
    return branch(control_->group_of(requests));
  }

 protected:
  Control& control() { return *control_; }
  const Control& control() const { return *control_; }

  /// Compares the digests of `run` of all ranks, [size]; null compares nothing. Throws UsageError
  /// on every rank where another rank's digest differs from this one's.
  void compare(const std::uint64_t* digests, RunName run, const char* step) {
    for (int p = 0; digests && p < size(); ++p)
      if (digests[p] != digests[rank()]) disagree(run, p, step);
  }

  /// Makes the transport among the members of a group; null where this rank is in no group.
  virtual std::shared_ptr<Transport> branch(const Group& group) = 0;

 private:
  std::shared_ptr<Control> control_;
};

}  // namespace longspan::comm

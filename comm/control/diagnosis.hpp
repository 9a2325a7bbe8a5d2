// Finds the rank to blame: what a rank knows of its peers, and the failure that follows from it.
// Ranks with the same knowledge name the same rank.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/control/control.hpp"
#include "comm/control/messages.hpp"

namespace longspan::comm {

inline constexpr const char* kSameOrder = "every rank must make the same calls in the same order.";

/// What a rank knows of a peer, and of itself what it has told the others.
struct Peer {
  std::deque<GatherPart> gathered;  // parts of gathers that have not been opened
  bool counted = false;             // in the gather that runs now
  bool gone = false;
  bool left = false;  // gone, after a goodbye
  std::optional<WaitNotice> waits;
  std::optional<Refusal> refused;  // the last call, where it refused that
};

class Diagnosis {
 public:
  /// `own` is where this rank waits, and its last run.
  Diagnosis(const Control& control, std::span<const Peer> peers, WaitNotice own)
      : control_(control), peers_(peers), own_(std::move(own)) {}

  /// A peer is gone before the step was done.
  Failure departure(int p) const;

  /// Finds two ranks that were given different arguments for the same run; nothing while none are
  /// known.
  std::optional<Failure> disagreement() const;

  /// Names the rank to blame after a roll call. `mute_relay` is the rank that passes messages on,
  /// where not even this rank's own echo came back through it.
  Failure verdict(std::optional<int> mute_relay) const;

 private:
  Failure absence(int p) const;
  Failure mute(int relay) const;
  std::optional<Failure> other_step() const;
  Failure lateness() const;
  Failure late(int p, const std::string& how) const;
  Failure unless_refused(Failure absent) const;
  const std::string& usual_step() const;
  std::string name_of(int rank) const { return control_.name_of(rank); }
  std::string deadline() const { return seconds(control_.deadline()); }
  int size() const { return static_cast<int>(peers_.size()); }

  const Control& control_;
  std::span<const Peer> peers_;
  WaitNotice own_;
};

}  // namespace longspan::comm

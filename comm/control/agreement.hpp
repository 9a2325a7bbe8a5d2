// Tells what ranks must give alike. A layer keeps a log of its runs; every collective of a run
// carries a hash of the run's description, and where two hashes differ, or a wait ends without
// data, the roll call (control.hpp) asks the logs for the descriptions, so that the error can name
// the field.
#pragma once

#include <cstdint>

#include "longspan/communicator.hpp"

namespace longspan::comm {

/// Names one run of one layer. Layers of a communicator are numbered from 1 in the order in which
/// they were made, and runs of a layer from 1 in the order in which they were queued. All ranks
/// make the same calls in the same order, so a name means the same run everywhere. Layer 0 stands
/// for no run.
struct RunName {
  std::uint32_t layer = 0;
  std::uint32_t run = 0;

  explicit operator bool() const { return layer != 0; }
  bool operator==(const RunName&) const = default;
};

/// The value of what a rank cannot tell yet, which differs from no other value. It is the SUB of
/// ASCII, which no text of a caller is.
inline constexpr char kNotKnown[] = "\x1a";

class RunLog {
 public:
  virtual ~RunLog() = default;
  /// What must be alike on all ranks in this run; empty when the log does not reach back so far.
  virtual NamedValues describe(std::uint32_t run) const = 0;
};

}  // namespace longspan::comm

// Checks that ranks give the same arguments. A layer keeps a log of its runs, and every collective
// of a run carries a digest of the run's description. Where two digests differ, or a wait ends
// without data, the roll call (control.hpp) asks the logs for the descriptions, so that the error
// can name the field. The description begins with the layer: so ranks that run two layers in
// different orders are found like ranks that run one layer with different arguments.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "longspan/communicator.hpp"

namespace longspan::comm {

/// Names one run of one layer. Layers of a communicator are numbered from 1 in the order of their
/// making, and runs of a layer from 1 in the order of queueing. Run 0 is the making of the layer.
/// Layer 0 means no run.
struct RunName {
  std::uint32_t layer = 0;
  std::uint32_t run = 0;

  explicit operator bool() const { return layer != 0; }
  bool operator==(const RunName&) const = default;
};

/// A run that ranks are asked to describe: by its place among all runs of the communicator, so that
/// ranks in different layers are compared. A run that began too long ago has place 0 and is asked
/// for by name.
struct AskedRun {
  std::uint64_t place = 0;
  RunName name;

  explicit operator bool() const { return place != 0 || bool{name}; }
  /// Whether ranks that ask for both choose this one. A run without a place is known to fewer
  /// ranks.
  bool is_before(const AskedRun& other) const {
    if (place == 0) return bool{name} && !other;
    return other.place == 0 || place < other.place;
  }
  bool operator==(const AskedRun& other) const {
    return place == other.place && (place != 0 || name == other.name);
  }
};

/// The last runs that a rank began on a communicator, makings of layers among them.
class RunOrder {
 public:
  void add(RunName run) { last_[++count_ % kKept] = run; }
  RunName last() const { return count_ == 0 ? RunName{} : last_[count_ % kKept]; }
  /// The number of runs that began: the place of the last one.
  std::uint64_t count() const { return count_; }
  /// The latest run of this name, with its place where it is still kept.
  AskedRun find(RunName run) const {
    for (std::uint64_t place = count_; run && is_kept(place); --place)
      if (last_[place % kKept] == run) return {place, run};
    return {0, run};
  }
  /// This rank's run at the place that another rank asks for; none where it is unknown.
  RunName at(const AskedRun& asked) const {
    if (asked.place == 0) return asked.name;
    return is_kept(asked.place) ? last_[asked.place % kKept] : RunName{};
  }

 private:
  static constexpr std::uint64_t kKept = 1024;
  bool is_kept(std::uint64_t place) const {
    return place > 0 && place <= count_ && count_ - place < kKept;
  }

  std::uint64_t count_ = 0;
  std::array<RunName, kKept> last_{};
};

/// The value of what a rank cannot know yet, which matches any other value. It is the SUB of ASCII,
/// which no text of a caller contains.
inline constexpr char kNotKnown[] = "\x1a";

class RunLog {
 public:
  virtual ~RunLog() = default;
  /// What must be the same on all ranks in this run, or for run 0 in the making of the layer. Empty
  /// where the log does not reach back so far.
  virtual NamedValues describe(std::uint32_t run) const = 0;
};

/// How two ranks' lists of names and values (in turn) differ; nothing where they agree in all that
/// both know.
std::optional<std::string> difference(const std::vector<std::string>& one,
                                      const std::string& rank_of_one,
                                      const std::vector<std::string>& other,
                                      const std::string& rank_of_other, const std::string& step);

}  // namespace longspan::comm

// Measures the memory that this process takes for a piece of work on the host.
#pragma once

#include <optional>

namespace longspan::launcher {

/// By how much the resident memory of this process grew at most.
class PeakMemory {
 public:
  /// Begins a measurement.
  PeakMemory();

  /// Begins another one from the same base.
  void restart();

  /// Bytes above those at the beginning; none where the system does not tell.
  std::optional<double> grown() const;

 private:
  std::optional<double> base_;  // bytes
};

}  // namespace longspan::launcher

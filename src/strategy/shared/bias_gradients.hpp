// The gradients of what is added to scores, ALiBi slopes and qq_bias. Every strategy attends to
// each pair of row and key once, on some rank, and adds its part to that rank's sums:
//
//     d slope_h = sum over rows, keys dS distance,   d qq[i][j] = sum over sequences, heads dS
//
// Then the ranks' sums are added up in the order of the ranks, and rounded once. The layer has
// this, for all strategies alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/backend.hpp"
#include "src/base/parts.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class BiasGradients {
 public:
  /// They outlive this.
  BiasGradients(const Options& options, const kernels::Backend& kernels, comm::Transport& comm)
      : options_(options), kernels_(kernels), comm_(comm) {}

  /// The bytes of its memory.
  static std::int64_t bytes(const Options& options, int ranks);
  void lay_out(Parts& memory);

  /// Queues the zeros with which a backward starts, and gives it the sums that it asks for.
  void begin(Pass& pass, const GradientArgs& args) const;
  /// Queues the sum over the ranks, and stores it.
  void finish(const Pass& pass, const GradientArgs& args) const;

 private:
  struct Sums {
    kernels::GradientSums slopes;  // [1, batch or 1, heads]
    kernels::GradientSums qq;      // [1, width, width], behind those of slopes
    std::int64_t bytes = 0;        // of both
  };
  Sums sums_of(const GradientArgs& args) const;

  const Options& options_;
  const kernels::Backend& kernels_;
  comm::Transport& comm_;
  std::byte* own_ = nullptr;       // this rank's sums, then those of all
  std::byte* arriving_ = nullptr;  // with several ranks
};

}  // namespace longspan

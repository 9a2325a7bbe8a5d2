// With Dout::partial each rank gives the gradient of its own part of the loss with respect to the
// replicated results. The dout and dlse of all ranks are added up in fp32, in the order of the
// ranks, before backward reads them. The layer has this, for all strategies alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/backend.hpp"
#include "src/base/parts.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class PartialDout {
 public:
  /// They outlive this.
  PartialDout(const Options& options, const kernels::Backend& kernels, comm::Transport& comm)
      : options_(options), kernels_(kernels), comm_(comm) {}

  /// Whether there is anything to add.
  explicit operator bool() const { return are_partial(options_, comm_.size()); }

  /// The bytes of its memory.
  static std::int64_t bytes(const Options& options, int ranks);
  void lay_out(Parts& memory);

  /// Queues the sum, compares the ranks' digests with it, and returns the arguments with dout and
  /// dlse of all ranks.
  GradientArgs add_up(Pass& pass, GradientArgs args) const;

 private:
  static bool are_partial(const Options& o, int ranks) {
    return o.gradients && o.dout == Dout::partial && ranks > 1;
  }

  const Options& options_;
  const kernels::Backend& kernels_;
  comm::Transport& comm_;
  std::byte* own_ = nullptr;  // dout [tokens, heads, value_dim], then dlse [tokens, heads]
  std::byte* arriving_ = nullptr;
};

}  // namespace longspan

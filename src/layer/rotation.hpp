// The query rows of a run with RoPE, rotated: a copy in the layer's memory, which takes the place
// of the caller's q before rows travel. Each rank rotates the rows that it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/options.hpp"
#include "longspan/rope.hpp"
#include "src/arguments/run_arrays.hpp"
#include "src/base/parts.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// The turns of each pair for one position, times 2^64, modulo 2^64. A long double has the 64 bits
/// that keep the angles of positions of 31 bits exact to fp32.
std::vector<std::uint64_t> turns_of(const RopeOptions& rope);

class RotatedRows {
 public:
  /// The options outlive it.
  explicit RotatedRows(const Options& options) : options_(options) {}

  /// Whether the layer has RoPE.
  explicit operator bool() const { return options_.rope.dim > 0; }

  void lay_out(Parts& memory);
  /// Allocates and fills in what a layer keeps besides its workspace: the turns of one position.
  void allocate(Device device);

  /// The rotation of a run or an append.
  Rope rope(const RunArrays& arrays) const;
  /// The rotated rows of q, dense.
  Tensor view(const Tensor& q) const;
  /// Where sequences start in this rank's rows of a run, which rotate() computes; null if the run
  /// has the starts.
  const std::int32_t* starts(const RunArrays& arrays) const;
  /// Queues the rotation of the rows of `q`. The run has the rotated ones.
  void rotate(const Run& run, const kernels::TokenRows& q, const kernels::Backend& with) const;

 private:
  const Options& options_;
  std::byte* rows_ = nullptr;      // [max_tokens, heads, head_dim]
  std::int32_t* start_ = nullptr;  // [max_batch + 1] of this rank's rows, with sharded queries
  Buffer turns_;                   // [dim / 2]
};

}  // namespace longspan

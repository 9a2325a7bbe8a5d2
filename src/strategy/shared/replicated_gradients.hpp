// Backward of strategies whose keys stay, and whose queries are replicated: every rank has all rows
// with their gradients, so the gradients of its keys are complete at once. Of dq every rank has the
// part of its keys, and the parts fold (rank_sums.hpp): all ranks get the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/strategy/shared/gradient_memory.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class ReplicatedGradients {
 public:
  explicit ReplicatedGradients(const LayerContext& layer);

  static double workspace_bytes(const Options& options, int ranks, const RunSize& size);
  static BackwardCost cost(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  void backward(const Pass& pass, const GradientArgs& args) const;

 private:
  LayerContext layer_;
  TravellingKeys keys_;  // how many there are; they stay
  GradientMemory memory_;
  std::byte* arriving_ = nullptr;  // [ranks] every rank's part of this rank's share
};

}  // namespace longspan

// Backward of strategies whose keys stay, and whose queries are replicated: every rank has all rows
// with their gradients, so the gradients of its keys are complete at once. Of dq every rank has the
// part of its keys. Each rank folds an equal share of all ranks' parts (rank_fold.hpp).
//
//     part of dq, dk, dv = gradients(all rows, my keys)
//     share r of every part  ->  rank r folds them  ->  every rank
//
// All ranks get the same bits of dq.
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
  /// The bytes of the share of dq that a rank folds, of `rows` rows.
  std::int64_t share_bytes(std::int64_t rows) const;
  void add_up(const Pass& pass, std::byte* parts, std::int64_t rows) const;

  LayerContext layer_;
  TravellingKeys keys_;  // how many there are; they stay
  GradientMemory memory_;
  std::byte* arriving_ = nullptr;  // [ranks] every rank's part of this rank's share
};

}  // namespace longspan

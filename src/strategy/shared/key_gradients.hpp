// Backward of strategies whose keys travel to the rows: keys go around the ring once more, and the
// gradients of a guest return while the next guest is attended to. Their owner adds them up, in
// the order of the ring's steps.
//
//     dq, dk, dv = gradients(my rows, my keys),   then for s = 1 ... P - 1:
//     dq += ..., part = gradients(my rows, keys of rank - s);   part goes to rank - s
//     dk, dv += the part of rank + s
//
// All sums are fp32, and so is what returns; the one rounding is at the end.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "src/strategy/route.hpp"
#include "src/strategy/shared/gradient_memory.hpp"
#include "src/strategy/shared/returning_sums.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class KeyGradients {
 public:
  /// `keys` outlives this.
  KeyGradients(const LayerContext& layer, const TravellingKeys& keys);

  /// The bytes of its memory on a rank for runs of that size, without the scratch of its kernels.
  static double workspace_bytes(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  void backward(Pass& pass, const GradientArgs& args);

 private:
  class Backward;
  static constexpr std::size_t kSlots = 2;  // of guests

  int rank() const { return layer_.comm.rank(); }
  int ranks() const { return layer_.comm.size(); }
  int rank_at(int distance) const { return (rank() + distance + ranks()) % ranks(); }

  comm::Transfers start_keys(const Run& run, const Move& move, const KeyBlock& own) const;

  LayerContext layer_;
  const TravellingKeys& keys_;
  GradientMemory memory_;
  ReturningSums returning_;
  std::vector<std::string> key_steps_;  // names of steps, by distance
  Route route_;                         // of the current run
  Underway underway_;
  std::array<KeyBlock, kSlots> guests_{};  // keys of other ranks
  KeyBlock copy_;                          // of this rank's own keys
};

}  // namespace longspan

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

#include "src/strategy/shared/gradient_memory.hpp"
#include "src/strategy/shared/gradient_ring.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class KeyGradients {
 public:
  /// `keys` outlives this.
  KeyGradients(const LayerContext& layer, const TravellingKeys& keys);

  /// The bytes of its memory on a rank for runs of that size, without the scratch of its kernels.
  static double workspace_bytes(const Options& options, int ranks, const RunSize& size);
  static BackwardCost cost(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  void backward(Pass& pass, const GradientArgs& args);

 private:
  class Backward;

  LayerContext layer_;
  const TravellingKeys& keys_;
  GradientMemory memory_;
  GradientRing ring_;
  std::array<KeyBlock, GradientRing::kSlots> guests_{};  // keys of other ranks
  KeyBlock copy_;                                        // of this rank's own keys
};

}  // namespace longspan

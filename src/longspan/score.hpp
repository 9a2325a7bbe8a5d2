// What happens to one raw product q.k before the softmax: scale, then softcap. The result is in
// base 2. Host and CUDA run this same function, so that its meaning cannot drift; a kernel may
// write the same arithmetic for vectors.
#pragma once

#include <cmath>

#include "longspan/state.hpp"

namespace longspan {

struct Score {
  float scale = 1.0f;    // of the product, in natural units; usually 1 / sqrt(dim)
  float softcap = 0.0f;  // 0: off; else score = softcap * tanh(score / softcap)

  LONGSPAN_HD float operator()(float product) const {
    if (softcap == 0.0f) return product * (scale * kLog2E);
    return softcap * kLog2E * ::tanhf(product * (scale / softcap));
  }
};

}  // namespace longspan

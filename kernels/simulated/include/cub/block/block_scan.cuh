// The one function of CUB that kernels use, in the simulator: the exclusive sum over a block, and
// its total.
#pragma once

#include "kernels/simulated/builtins.hpp"

namespace cub {

template <class T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T values[kThreads];
  };

  explicit BlockScan(TempStorage& storage) : values_(storage.values) {}

  /// Like CUB's it ends without a barrier: a block that uses the storage again must synchronise
  /// first.
  void ExclusiveSum(T own, T& before, T& total, Site site = Site::current()) {
    if (blockDim.x != kThreads || blockDim.y != 1 || blockDim.z != 1)
      longspan::simulated::fail("a scan for another number of threads than the block has", site);
    values_[threadIdx.x] = own;
    __syncthreads(site);
    T sum{};
    for (unsigned i = 0; i < kThreads; ++i) {
      if (i == threadIdx.x) before = sum;
      sum += values_[i];
    }
    total = sum;
  }

 private:
  T* values_;
};

}  // namespace cub

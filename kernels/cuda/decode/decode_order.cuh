// The order in which the pieces of a batch are handed out. At the end all blocks wait for the last
// piece, so no piece of a long sequence should begin late. Lengths are on the device: a block sorts
// the sequences when it first needs their order, while keys are in flight. The pieces that blocks
// begin with (below WorkPlan::by_length) come in the order of their numbers.
#pragma once

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// The sequences of a batch by their lengths, in the shared memory of a block.
struct SequenceOrder {
  int size;  // 0: not sorted yet
  std::int32_t lengths[kMostSorted];
  std::uint8_t sequences[kMostSorted];  // the longest first
};

/// Sorts the sequences with `threads` threads, which `sync` synchronises.
template <class Sync>
__device__ __noinline__ void sort_sequences(SequenceOrder& order, const std::int32_t* lengths,
                                            int size, int thread, int threads, const Sync& sync) {
  for (int b = thread; b < size; b += threads) order.lengths[b] = lengths[b];
  sync();
  for (int b = thread; b < size; b += threads) {
    const int own = order.lengths[b];
    int place = 0;
    for (int other = 0; other < size; ++other) {
      const int length = order.lengths[other];
      place += length > own || (length == own && other < b);
    }
    order.sequences[place] = static_cast<std::uint8_t>(b);
  }
  if (thread == 0) order.size = size;
  sync();
}

/// The number, for work_of, of the piece with index `index` >= WorkPlan::by_length.
__device__ inline int sorted_work(const WorkPlan& plan, const SequenceOrder& order, int index) {
  const int late = index - plan.by_length, place = late / plan.by_late_works;
  const int remainder = late % plan.by_late_works,
            kv_heads = static_cast<int>(plan.by_kv_heads.value);
  const int turn = plan.by_length / plan.by_kv_heads / plan.by_tiles + remainder / plan.by_kv_heads;
  const int tile = plan.tiles - 1 - order.sequences[place];  // work_of counts them from the end
  return (turn * plan.tiles + tile) * kv_heads + remainder % plan.by_kv_heads;
}

}  // namespace longspan::kernels::cuda

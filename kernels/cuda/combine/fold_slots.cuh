// Folds the states of one row from slots, for four columns. A thread loads and folds neighbouring
// slots, and the rest of the tree goes through shared memory.
//
// All of a thread's states must be requested before the first is used. The compiler would rather
// save registers, so that one L2 access follows another: for eight states these were four or five.
// But it keeps volatile loads in order, so the state that is used first is requested last. Volatile
// loads bypass L1; with four adjacent columns that costs nothing.
#pragma once

#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/combine/fold_tree.cuh"
#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// Returns the root of the tree over 2^kLevels slots, `slot_bytes` apart. `stats` and `o` are those
/// of the row in the first slot, o from the first column on. holds(i) is false if the ith slot was
/// not written. kChoosy: that is known before, and such a slot is not read.
template <int kLevels, bool kChoosy = false, class Holds>
__device__ StateColumns<4> fold_slots(const void* stats, const void* o, std::uint64_t slot_bytes,
                                      const Holds& holds) {
  constexpr int kCount = 1 << kLevels;
  uint2 two[kCount];
  uint4 four[kCount];
  const auto in_slot = [&](const void* first, int i) {
    return static_cast<const std::byte*>(first) + static_cast<unsigned>(i) * slot_bytes;
  };
#pragma unroll
  for (int i = kCount; i-- > 0;) {
    if constexpr (kChoosy)
      arch::load_volatile_if(holds(i), in_slot(o, i), four[i] = {});
    else
      four[i] = arch::load_volatile(in_slot(o, i));
  }
#pragma unroll
  for (int i = kCount; i-- > 0;) {
    if constexpr (kChoosy)
      arch::load_volatile_if(holds(i), in_slot(stats, i), two[i] = {});
    else
      two[i] = arch::load_volatile_two(in_slot(stats, i));
  }
  return fold_subtree<kLevels>(
      [&](int i) {
        const Stats stored{__uint_as_float(two[i].x), __uint_as_float(two[i].y)};
        return StateColumns<4>{holds(i) ? stored : empty_stats(),
                               {__uint_as_float(four[i].x), __uint_as_float(four[i].y),
                                __uint_as_float(four[i].z), __uint_as_float(four[i].w)}};
      },
      0);
}

/// Which splits of a plan the kernel before has written.
class TakenSplits {
 public:
  __device__ explicit TakenSplits(const SplitNumbers& numbers)
      : numbers_(numbers), all_(numbers.taken == nullptr) {
    if (all_) return;
    const uint2 words = arch::load_volatile_two(numbers.taken);
    taken_ = {static_cast<int>(words.x), static_cast<int>(words.y)};
  }
  __device__ bool hold(int split) const { return all_ || numbers_.holds(taken_, split); }

 private:
  const SplitNumbers& numbers_;
  bool all_;
  SplitsTaken taken_;
};

/// The states that wait for the other half of their subtree, in the shared memory of a block.
template <int kThreads>
struct Waiting {
  float4 o[kThreads];
  Stats stats[kThreads];
};

/// Folds the states of `count` threads, a power of two, into the root of their tree, in the first
/// of them. `index` is this thread's index among them, `self` its index in the block, where
/// neighbours are `stride` apart. All threads of the block call this, with a barrier between calls.
template <int kThreads>
__device__ void fold_threads(StateColumns<4>& state, Waiting<kThreads>& waiting, unsigned index,
                             unsigned count, unsigned self, unsigned stride) {
  for (unsigned distance = 1; distance < count; distance *= 2) {
    const unsigned place = index & (2 * distance - 1);
    if (place == distance) {  // a thread writes once, so nothing is overwritten
      waiting.o[self] = make_float4(state.o[0], state.o[1], state.o[2], state.o[3]);
      waiting.stats[self] = state.stats;
    }
    __syncthreads();
    if (place == 0) {
      const unsigned from = self + distance * stride;
      const float4 four = waiting.o[from];
      StateColumns<4> newer{waiting.stats[from], {four.x, four.y, four.z, four.w}};
      merge_columns(state, newer);
      state = newer;
    }
  }
}

}  // namespace longspan::kernels::cuda

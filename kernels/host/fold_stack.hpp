// Folds a stream of states into one, in the order of a binary tree over their indices, with a stack
// as deep as the tree. Before index i is pushed, after p, everything on the stack inside p's
// subtree of size 2^msb(p ^ i) folds, newest first: no later index belongs to it. Indices may be
// missing, since an absent state is empty and an empty state changes no bits.
//
//     pushed 0 1 2 3 6:   ((0 1) (2 3)) 6
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace longspan::kernels::host {

class FoldStack {
 public:
  /// Makes room for the state with `index`, which is higher than all before. Calls merge(a, b) for
  /// each fold: level a becomes the fold of levels a and b. Returns the level of the new state.
  template <class Merge>
  int push(std::uint64_t index, Merge&& merge) {
    if (size_ > 0) {
      const int size = std::bit_width(index ^ last_) - 1;
      while (size_ > 1 && index_[size_ - 2] >> size == last_ >> size) pop(merge);
    }
    index_[size_] = last_ = index;
    return size_++;
  }

  /// Folds all into level 0. False when nothing was pushed.
  template <class Merge>
  bool finish(Merge&& merge) {
    while (size_ > 1) pop(merge);
    return size_ == 1;
  }

 private:
  template <class Merge>
  void pop(Merge&& merge) {
    merge(size_ - 2, size_ - 1);
    --size_;
  }

  std::array<std::uint64_t, 65> index_;  // of the first state in each level's fold
  std::uint64_t last_ = 0;
  int size_ = 0;
};

}  // namespace longspan::kernels::host

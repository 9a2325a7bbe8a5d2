// Folds the states of one row in tree order in one thread, for some columns of the row: neighbours
// first, missing places empty. A binary counter holds pieces in registers; groups of places are
// loaded before they fold, so that their loads overlap.
#pragma once

#include <type_traits>

#include "longspan/state.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kGroupLevels = 3;  // a thread loads up to 8 places before it folds two
inline constexpr int kMostLevels = 8;   // up to 256 places

/// kColumns columns of a state.
template <int kColumns>
struct Piece {
  Stats stats;
  float o[kColumns];
};

/// newer = merge(older, newer). It has the law and the bits of longspan::fold, by selections
/// instead of branches: merges that do not need each other then go side by side.
template <int kColumns>
__device__ void merge_pieces(const Piece<kColumns>& older, Piece<kColumns>& newer) {
  const Stats a = older.stats, b = newer.stats;
  const bool newer_leads = is_empty(a) || (!is_empty(b) && !(a.max >= b.max));
  const bool alone = is_empty(a) || is_empty(b);  // then what leads is the result
  const Stats high = newer_leads ? b : a, low = newer_leads ? a : b;
  const float ratio = ::exp2f(low.max - high.max);
  newer.stats.max = is_empty(high) ? -infinity() : high.max;
  newer.stats.sum = alone ? high.sum : ::fmaf(low.sum, ratio, high.sum);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float leading = newer_leads ? newer.o[i] : older.o[i];
    const float other = newer_leads ? older.o[i] : newer.o[i];
    newer.o[i] = alone ? leading : ::fmaf(other, ratio, leading);
  }
}

/// The state of the subtree over places [place, place + 2^kLevels); load(place) gives a Piece.
template <int kLevels, class Load>
__device__ auto fold_subtree(const Load& load, int place) {
  if constexpr (kLevels == 0) {
    return load(place);
  } else {
    const auto older = fold_subtree<kLevels - 1>(load, place);
    auto newer = fold_subtree<kLevels - 1>(load, place + (1 << (kLevels - 1)));
    merge_pieces(older, newer);
    return newer;
  }
}

/// Adds a group of places to a binary counter: on level k the left half of a subtree of 2^(k+1)
/// groups waits. `newest` becomes the subtree that the group completes.
template <int kLevel = 0, class Piece>
__device__ void count(Piece (&waiting)[kMostLevels - kGroupLevels], Piece& newest, int group) {
  if constexpr (kLevel < kMostLevels - kGroupLevels) {
    if ((group >> kLevel & 1) == 0) {
      waiting[kLevel] = newest;
    } else {
      merge_pieces(waiting[kLevel], newest);
      count<kLevel + 1>(waiting, newest, group);
    }
  }
}

/// Gives the root of a tree over 2^levels groups of places; group(i) gives a group's Piece.
template <class Group>
__device__ auto fold_groups(const Group& group, int levels) {
  using Piece = decltype(group(0));
  Piece waiting[kMostLevels - kGroupLevels];
  Piece newest;
  for (int index = 0; index < 1 << levels; ++index) {
    newest = group(index);
    count(waiting, newest, index);
  }
  return newest;
}

/// Gives the root of a tree of `levels` levels; kLevels is the same, or more than kGroupLevels.
template <int kLevels, class Load>
__device__ auto fold_tree(const Load& load, int levels) {
  if constexpr (kLevels <= kGroupLevels) {
    return fold_subtree<kLevels>(load, 0);
  } else {
    return fold_groups(
        [&](int group) { return fold_subtree<kGroupLevels>(load, group << kGroupLevels); },
        levels - kGroupLevels);
  }
}

/// Calls use(std::integral_constant) with the number of levels, up to `kMost`.
template <int kMost, int kLevels = 0, class Use>
void for_levels(int levels, const Use& use) {
  if constexpr (kLevels < kMost) {
    if (levels > kLevels) return for_levels<kMost, kLevels + 1>(levels, use);
  }
  use(std::integral_constant<int, kLevels>{});
}

}  // namespace longspan::kernels::cuda

// Folds the states of one row in tree order in one thread, for some columns of the row: neighbours
// first, missing entries empty. A binary counter holds pieces in registers. Groups are loaded
// before they fold, so that their loads overlap.
#pragma once

#include <type_traits>

#include "longspan/state.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kGroupLevels = 3;  // a thread loads up to 8 entries before it folds two
inline constexpr int kMostLevels = 8;   // up to 256 entries

/// kColumns columns of a state.
template <int kColumns>
struct StateColumns {
  Stats stats;
  float o[kColumns];
};

/// newer = merge(older, newer), whose maxima are in `base`. It gives the bits of longspan::fold,
/// with selections instead of branches, so that independent merges run in parallel.
template <int kColumns>
__device__ void merge_columns(const StateColumns<kColumns>& older, StateColumns<kColumns>& newer,
                              LogBase base = LogBase::two) {
  const Stats a = older.stats, b = newer.stats;
  const bool newer_leads = is_empty(a) || (!is_empty(b) && !(a.max >= b.max));
  const bool alone = is_empty(a) || is_empty(b);  // the side that leads is then the result
  const Stats high = newer_leads ? b : a, low = newer_leads ? a : b;
  const float ratio = fold_ratio(low.max, high.max, base);
  newer.stats.max = is_empty(high) ? -infinity() : high.max;
  newer.stats.sum = alone ? high.sum : ::fmaf(low.sum, ratio, high.sum);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float leading = newer_leads ? newer.o[i] : older.o[i];
    const float other = newer_leads ? older.o[i] : newer.o[i];
    newer.o[i] = alone ? leading : ::fmaf(other, ratio, leading);
  }
}

/// The state of the subtree over entries [place, place + 2^kLevels); load(place) gives a Piece.
template <int kLevels, class Load>
__device__ auto fold_subtree(const Load& load, int place, LogBase base = LogBase::two) {
  if constexpr (kLevels == 0) {
    return load(place);
  } else {
    const auto older = fold_subtree<kLevels - 1>(load, place, base);
    auto newer = fold_subtree<kLevels - 1>(load, place + (1 << (kLevels - 1)), base);
    merge_columns(older, newer, base);
    return newer;
  }
}

/// Adds a group to a binary counter: on level k the left half of a subtree of 2^(k+1) groups waits.
/// `newest` becomes the subtree that the group completes.
template <int kLevel = 0, class Columns>
__device__ void count(Columns (&waiting)[kMostLevels - kGroupLevels], Columns& newest, int group,
                      LogBase base) {
  if constexpr (kLevel < kMostLevels - kGroupLevels) {
    if ((group >> kLevel & 1) == 0) {
      waiting[kLevel] = newest;
    } else {
      merge_columns(waiting[kLevel], newest, base);
      count<kLevel + 1>(waiting, newest, group, base);
    }
  }
}

/// Returns the root of a tree over 2^levels groups; group(i) gives a group's Piece.
template <class Group>
__device__ auto fold_groups(const Group& group, int levels, LogBase base) {
  using Columns = decltype(group(0));
  Columns waiting[kMostLevels - kGroupLevels];
  Columns newest;
  for (int index = 0; index < 1 << levels; ++index) {
    newest = group(index);
    count(waiting, newest, index, base);
  }
  return newest;
}

/// Returns the root of a tree of `levels` levels; kLevels is the same, or more than kGroupLevels.
/// `base`: of the maxima.
template <int kLevels, class Load>
__device__ auto fold_tree(const Load& load, int levels, LogBase base = LogBase::two) {
  if constexpr (kLevels <= kGroupLevels) {
    return fold_subtree<kLevels>(load, 0, base);
  } else {
    return fold_groups(
        [&](int group) { return fold_subtree<kGroupLevels>(load, group << kGroupLevels, base); },
        levels - kGroupLevels, base);
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

// Chooses the number of splits by an estimate of time: pieces of equal size should fill the GPU's
// resident slots, within the ways in which the order's tree can be cut.
#include "kernels/cuda/combine/splits.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/common/fixed_order.cuh"

namespace longspan::kernels::cuda {
namespace {

constexpr int kLongSplit = 512;  // least keys of a split of long queries: a fold costs traffic

/// One rank's part of most_keys, if they were distributed evenly.
std::int64_t most_local_keys(const AttendParams& p) {
  return (most_keys(p) + p.shard.ranks - 1) / p.shard.ranks;
}

/// The part of a segment's time that is left when hardly any other piece is running. Short queries
/// are bound by memory: half of the slots read nearly as fast as all of them.
constexpr double kAloneShort = 0.55, kAloneLong = 1.0;

/// The time of a piece of short queries in one pass besides its keys, in segments: its queries, its
/// state, and the fold of that.
constexpr double kPieceOfOnePass = 2.0;

/// A rank's part of the fixed order's tree for the longest sequence, in segments.
struct Tree {
  double alone;
  std::int64_t segments;
  std::int64_t leaves, leaf_places = 1;  // entries are a power of two, up to half of them empty
  double piece = 0;                      // the cost of a slot's next piece besides its keys

  /// The time of `works` x `splits` pieces, in the order of their numbers, with `resident` of them
  /// running at a time. The unit is a segment in each slot. Leaves differ by few segments.
  double time(std::int64_t works, std::int64_t splits, std::int64_t resident) const {
    std::int64_t whole = (segments + splits - 1) / splits, remainder = 0;  // segments of pieces
    std::int64_t wholes = works * splits, remainders = 0;                  // numbers of such pieces
    if (splits > leaves) {
      const std::int64_t each = segments / leaves;
      whole = std::max<std::int64_t>(1, leaf_places * leaves / splits);
      remainder = each % whole;
      wholes = works * leaves * (each / whole);
      remainders = remainder > 0 ? works * leaves : 0;
    }
    const auto spent = [&](std::int64_t count, std::int64_t active) {
      const double busy = static_cast<double>(active) / static_cast<double>(resident);
      return static_cast<double>(count) * std::max(busy, alone);
    };
    double sum = -piece;               // the first wave, which always exists, does not pay it
    while (wholes + remainders > 0) {  // each turn is a wave
      const std::int64_t a = std::min(wholes, resident), b = std::min(remainders, resident - a);
      const std::int64_t together = b > 0 ? remainder : 0;
      sum += spent(together, a + b);
      if (a > 0) sum += spent(whole - together, a);
      sum += piece;
      wholes -= a;
      remainders -= b;
    }
    return sum;
  }
};

Tree tree_of(const AttendParams& p, Lengths lengths) {
  const std::int64_t segments = segments_of(most_local_keys(p));
  const bool by_table = p.shard.layout == Layout::ranges || p.shard.layout == Layout::listed;
  const bool is_long = lengths == Lengths::only_long;
  const double alone = is_long ? kAloneLong : kAloneShort;
  if (by_table || (is_long && !p.invariant)) return {alone, segments, kMostSplits};  // no leaf cut
  const SegmentOrder order = p.shard.order(most_keys(p));
  return {alone, segments, order.leaves, std::int64_t{1} << leaf_bits(order)};
}

/// Chooses the number of splits with which `works` pieces each take the least time: the smallest
/// power of two, up to kMostSplits, within 5 % of that time. Splits have `least` keys or more.
/// `resident` is the number of pieces that the GPU runs at a time.
int choose_splits(std::int64_t works, int resident, const Tree& tree, int least) {
  int best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int splits = 1; splits <= kMostSplits; splits *= 2) {
    if (splits > 1 && (works * splits > kPieces * resident ||
                       (splits - 1) * std::int64_t{least} >= tree.segments * kSegment))
      break;
    const double time = tree.time(works, splits, resident);
    if (time * 1.05 < best_time) {
      best_time = time;
      best = splits;
    }
  }
  return best;
}

/// Cuts further, for pieces that are handed out dynamically: up to `pieces` per slot, of at least
/// `large` segments, so that the fixed cost of a piece is small.
int cut_further(int splits, std::int64_t works, int resident, const Tree& tree, int pieces,
                int large) {
  while (splits < kMostSplits && works * splits * 2 <= pieces * resident &&
         tree.segments >= splits * 2 * large)
    splits *= 2;
  return splits;
}

/// The most splits of one sequence whose leaves are cut, enough for its length to determine later
/// how many pay off; 0 if its leaves are not cut.
int most_splits(std::int64_t works, int places, const Tree& tree) {
  std::int64_t splits = tree.leaves;
  while (splits * 2 <= kMostSplits && works * splits <= places && splits < tree.segments)
    splits *= 2;
  return splits > tree.leaves ? static_cast<int>(splits) : 0;
}

/// The log2 of the splits of a leaf, up to `most`, with which a slot's pieces take the least time.
int worth_of(Tree tree, std::int64_t works, int places, int most) {
  tree.piece = 0.25;  // of a segment
  int best = 0;
  double best_time = tree.time(works, tree.leaves, places);
  for (int bits = 1; bits <= most; ++bits) {
    const double time = tree.time(works, tree.leaves << bits, places);
    if (time >= best_time) continue;
    best = bits;
    best_time = time;
  }
  return best;
}

/// Computes SplitNumbers::worth, with an entry for each fill.
std::uint64_t worth_of_fills(std::int64_t works, int places, std::int64_t leaves, int most) {
  std::uint64_t worth = 0;
  for (int fill = 0; fill < kFills; ++fill) {
    const Tree tree{kAloneShort, leaves * (kFills + fill), leaves, 2 * kFills};
    worth |= static_cast<std::uint64_t>(worth_of(tree, works, places, most)) << 4 * fill;
  }
  return worth;
}

/// Sets the plan's splits. If leaves of the tree are cut into several splits each, the first splits
/// of all leaves come first.
void take_splits(int splits, const Tree& tree, const Shard& shard, WorkPlan& plan) {
  plan.splits = splits;
  plan.numbers = {};
  if (splits <= tree.leaves) return;
  plan.numbers.leaves = log2_ceil(static_cast<int>(tree.leaves));
  plan.numbers.leaf_splits = log2_ceil(splits) - plan.numbers.leaves;
  plan.numbers.reversed = shard.layout == Layout::interleaved;
}

/// Plans the splits of several sequences. If their lengths are about equal, few large pieces are
/// best; if they differ, all others wait for pieces of the long ones. Lengths are on the device.
bool plan_shared_splits(std::int64_t works, int places, const Tree& tree, WorkPlan& plan) {
  constexpr int kEvenPieces = 2, kLargeEven = 16, kLargeUneven = 4;
  const int least = choose_splits(works, places, tree, kSegment);
  const int few = cut_further(least, works, places, tree, kEvenPieces, kLargeEven);
  plan.splits = cut_further(few, works, places, tree, kSharedPieces, kLargeUneven);
  plan.numbers = {};
  plan.numbers.leaves = log2_ceil(few);
  plan.numbers.leaf_splits = log2_ceil(plan.splits) - plan.numbers.leaves;
  plan.numbers.where_uneven = plan.numbers.leaf_splits > 0;
  return plan.numbers.where_uneven;
}

}  // namespace

std::int64_t most_keys(const AttendParams& p) {
  if (p.batch.kv_len == nullptr) return p.shard.length;
  return p.max_kv_len > 0 ? p.max_kv_len : kMostKeys;
}

bool plan_splits(const AttendParams& p, std::int64_t works, int places, bool decodes, bool one_pass,
                 WorkPlan& plan) {
  if (p.parts) {
    plan.splits = p.parts.count;
    return false;
  }
  Tree tree = tree_of(p, plan.lengths);
  if (one_pass) {
    tree.alone = kAloneLong;
    tree.piece = kPieceOfOnePass;
  }
  const auto take = [&](int splits) { take_splits(splits, tree, p.shard, plan); };
  // A single sequence has pieces of one size, and each slot runs the same number of them.
  if (decodes && p.batch.size > 1) return plan_shared_splits(works, places, tree, plan);
  const int most = decodes && !one_pass ? most_splits(works, places, tree) : 0;
  if (most == 0) {
    const int least = plan.lengths == Lengths::only_long ? kLongSplit : kSegment;
    take(choose_splits(works, places, tree, least));
    return false;
  }
  take(most);
  if (p.batch.kv_len == nullptr) {  // at most the splits that pay off for its known length
    take(static_cast<int>(tree.leaves << worth_of(tree, works, places, plan.numbers.leaf_splits)));
    plan.numbers.worth = plan.numbers.leaf_splits * 0x1111'1111'1111'1111;
  } else {
    plan.numbers.worth = worth_of_fills(works, places, tree.leaves, plan.numbers.leaf_splits);
  }
  return plan.splits > tree.leaves;
}

}  // namespace longspan::kernels::cuda

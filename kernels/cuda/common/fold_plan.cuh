// Plans in advance where each state of the fixed order waits for its sibling, for a block with
// storage closer than memory. Waiting states form a stack. One state may wait in registers, where
// the next segment's meets it. One may wait near, in shared memory, while one other comes and goes
// above it. All others wait far away, in memory. In a full tree these are a half, a quarter and a
// quarter of all states, level by level. With missing indices, the states that wait shortest are
// the near ones.
//
// The storage of a waiting state changes no bit: finished_level determines which states fold. A
// walk that is three segments ahead knows it, and one thread's plan serves all threads that fold.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fixed_order.cuh"

namespace longspan::kernels::cuda {

/// The storage of a waiting state.
enum class Waits : std::uint8_t { nowhere, held, near, far };

/// What happens to the state of one segment: it folds with waiting states, the newest first, and
/// the result waits.
struct FoldStep {
  std::uint32_t bits = 0;

  FoldStep() = default;
  LONGSPAN_HD FoldStep(bool held, bool near, int far, Waits then)
      : bits(static_cast<std::uint32_t>(held) | static_cast<std::uint32_t>(near) << 1 |
             static_cast<std::uint32_t>(then) << 2 | static_cast<std::uint32_t>(far) << 4) {}

  LONGSPAN_HD bool takes_held() const { return (bits & 1) != 0; }
  LONGSPAN_HD bool takes_near() const { return (bits & 2) != 0; }
  /// The number of far states that it folds with, after the two others.
  LONGSPAN_HD int takes_far() const { return static_cast<int>(bits >> 4); }
  /// Storage of the result; nowhere after the last segment: it is the state of all.
  LONGSPAN_HD Waits then() const { return static_cast<Waits>(bits >> 2 & 3); }
};

/// Plans step by step.
class FoldPlanner {
 public:
  static constexpr int kLast = 31;  // the level of the last segment; no tree is that high

  /// Plans the step of a segment. `level`, `next`, `after`: the levels on which its subtree and
  /// those of the two segments after it are finished (finished_level), or kLast.
  LONGSPAN_HD FoldStep step(int level, int next, int after) {
    const bool held = held_, near = near_ < level;
    const std::uint32_t below = far_ & ((1u << level) - 1);
    held_ = false;
    if (near) near_ = kLast;
    far_ &= ~below;
    Waits then = Waits::far;
    if (level == kLast) {
      then = Waits::nowhere;
    } else if (next > level) {
      then = Waits::held;
      held_ = true;
    } else if (after > level) {  // the next one is held above it, and they fold together
      then = Waits::near;
      near_ = level;
    } else {
      far_ |= 1u << level;
    }
    return {held, near, count(below), then};
  }

 private:
  LONGSPAN_HD static int count(std::uint32_t bits) {
    int ones = 0;
    for (; bits != 0; bits &= bits - 1) ++ones;
    return ones;
  }

  bool held_ = false;
  int near_ = kLast;       // the level of the state that waits near; kLast: none
  std::uint32_t far_ = 0;  // bit k: a state waits far on level k
};

/// A walk over the segments of a work tile that yields each of them with the plan for its state.
class PlannedWalk {
 public:
  LONGSPAN_HD PlannedWalk(const SegmentOrder& order, const Interval& any)
      : walk_(order, any, 0, 1), more_(walk_.next()) {
    if (more_) note(0);
    advance(levels_[0], 1);
    advance(levels_[1], 2);
    advance(levels_[2], 3);
  }

  int segment;    // local
  FoldStep step;  // of its state

  /// Steps to the next segment. It is not called after the last one.
  LONGSPAN_HD void next() {
    segment = segments_[0];
    step = planner_.step(levels_[0], levels_[1], levels_[2]);
    segments_[0] = segments_[1];
    segments_[1] = segments_[2];
    segments_[2] = segments_[3];
    levels_[0] = levels_[1];
    levels_[1] = levels_[2];
    advance(levels_[2], 3);
  }

 private:
  LONGSPAN_HD void note(int at) {
    segments_[at] = static_cast<int>(walk_.segment);
    place_ = static_cast<int>(walk_.place);
  }
  /// Steps the walk to its segment `at`, which determines the level on which the one before it is
  /// finished.
  LONGSPAN_HD void advance(int& level, int at) {
    level = FoldPlanner::kLast;
    if (more_) more_ = walk_.next();
    if (!more_) return;
    level = finished_level(place_, walk_.place);
    note(at);
  }

  SegmentWalk walk_;
  bool more_;
  int place_ = 0;      // of the walk's segment
  int segments_[4]{};  // the following ones
  int levels_[3];      // on which they are finished
  FoldPlanner planner_;
};

}  // namespace longspan::kernels::cuda

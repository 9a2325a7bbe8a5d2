// Sums of which every rank has made a part. Their fold is the top of the tree of virtual ranks
// (order.hpp): the same bits for every number of ranks that divides 64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/order.hpp"
#include "longspan/shard.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// The fold of the parts of `ranks` ranks, whose virtual ranks are dealt out by `dealt`. For other
/// numbers of ranks, and other rules, it is a fixed order.
class RankFold {
 public:
  RankFold(int ranks, const Sharding& dealt)
      : ranks_(ranks), interleaved_(dealt.layout == Layout::interleaved) {}
  /// The parts added up in the order of the ranks.
  static RankFold one_after_another(int ranks) {
    RankFold fold(ranks, {});
    fold.is_tree_ = false;
    return fold;
  }

  /// Folds parts of `bytes` bytes. part_of(rank) is null if the rank has none. Returns the part
  /// that has become the sum.
  template <class PartOf>
  std::byte* operator()(const PartOf& part_of, const kernels::GradientKernels& with,
                        std::int64_t bytes, Stream stream) const {
    const auto add = [&](std::byte* to, const std::byte* from) {
      with.add_sums(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), bytes / 4,
                    stream);
    };
    if (is_tree_) return fold(part_of, add, 0, 1 << log2_ceil(ranks_));
    for (int rank = 1; rank < ranks_; ++rank) add(part_of(0), part_of(rank));
    return part_of(0);
  }

 private:
  /// Of `count` places from `first` on.
  template <class PartOf, class Add>
  std::byte* fold(const PartOf& part_of, const Add& add, int first, int count) const {
    if (count == 1) {
      const int rank = fold_place(first, ranks_, interleaved_);  // which is its own inverse
      return rank < ranks_ ? part_of(rank) : nullptr;
    }
    std::byte* const low = fold(part_of, add, first, count / 2);
    std::byte* const high = fold(part_of, add, first + count / 2, count / 2);
    if (low == nullptr || high == nullptr) return low == nullptr ? high : low;
    add(low, high);
    return low;
  }

  int ranks_;
  bool interleaved_;
  bool is_tree_ = true;
};

/// Memory for the parts of other ranks, which stay apart until they fold.
class RankParts {
 public:
  explicit RankParts(const LayerContext& layer) : layer_(layer) {}

  static double workspace_bytes(int ranks, double bytes) { return (ranks - 1) * bytes; }
  void lay_out(Parts& memory, std::int64_t bytes) {
    each_ = bytes;
    parts_ = memory.take(static_cast<std::size_t>((layer_.comm.size() - 1) * bytes));
  }

  std::byte* of(int rank) const {
    const int ranks = layer_.comm.size();
    return parts_ + ((rank - layer_.comm.rank() + ranks) % ranks - 1) * each_;
  }
  /// Folds them with `own`, which becomes the sum. has_part(rank) says which other ranks have one.
  template <class HasPart>
  void fold(const Sharding& dealt, std::byte* own, std::int64_t bytes, const HasPart& has_part,
            Stream stream) const {
    const auto part_of = [&](int rank) {
      if (rank == layer_.comm.rank()) return own;
      return has_part(rank) ? of(rank) : nullptr;
    };
    constexpr std::int64_t kWord = 64;  // bytes; sums have whole ones
    const std::byte* const sum =
        RankFold(layer_.comm.size(), dealt)(part_of, layer_.kernels, bytes, stream);
    if (sum != own) layer_.kernels.place_rows({sum, own, nullptr, bytes / kWord, kWord}, stream);
  }

 private:
  LayerContext layer_;
  std::byte* parts_ = nullptr;
  std::int64_t each_ = 0;
};

}  // namespace longspan

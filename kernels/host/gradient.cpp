// Adds up the gradients of a batch. Where the threads have heads enough, a thread takes a whole kv
// head: keys stay, rows stream, and one pass over the products makes dq, dk and dv. Otherwise one
// pass makes dk and dv, segment by segment, and another makes dq, tile by tile; both make the
// scores. The bits are the same: an element is the sum of its segments' sums in the order of the
// keys, or of its tiles' sums in the order of the rows.
//
// The gradients of slopes are first added up over the keys of each row, in the pass that makes dq,
// and then over the rows. Those of qq_bias have a pass of their own, by rows of the matrix, as all
// sequences and heads share it.
//
// In the fixed order (`invariant`) the sums of virtual ranks (order.hpp) fold as a tree. There are
// always two passes then.
#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "kernels/gradient_params.hpp"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/gradient_tile.hpp"
#include "kernels/host/host.hpp"
#include "longspan/error.hpp"
#include "longspan/state.hpp"

namespace longspan::kernels::host {
namespace {

constexpr int kLevels = 1 + 7;  // of a tree of 64 virtual ranks, and the sum in progress

std::size_t space_bytes(const GradientParams& p) {
  const std::size_t floats = GradientSpace::floats(p, p.invariant ? kLevels : 1);
  return (floats * 4 + 255) / 256 * 256;
}

std::size_t slope_bytes(const GradientParams& p) {
  return static_cast<std::size_t>(p.tokens * p.heads) * sizeof(double);
}

class GradientRun {
 public:
  GradientRun(const GradientParams& p, ThreadPool& pool, const BetweenTiles& between)
      : p_(p),
        pool_(pool),
        between_(between),
        group_(p.heads / p.kv_heads),
        head_columns_(GradientSums::padded(p.head_dim)),
        value_columns_(GradientSums::padded(p.value_dim)) {}

  void operator()() {
    if (p_.biases.slopes != nullptr) std::fill_n(slope_rows(), p_.tokens * p_.heads, 0.0);
    attend();
    if (p_.biases.slopes != nullptr) add_up_slopes();
    if (p_.biases.qq != nullptr)
      pool_.run((qq_rows() + rows_of_item() - 1) / rows_of_item(),
                [&](std::int64_t item, int thread) { take_qq(item * rows_of_item(), thread); });
  }

 private:
  /// What the rows of a kv head get, from a sequence's first row on.
  struct RowSums {
    float* dq = nullptr;
    double* slopes = nullptr;
  };

  void attend() const {
    const std::int64_t heads = std::int64_t{p_.batch.size} * p_.kv_heads;
    const bool both = p_.dq.data != nullptr && p_.dk.data != nullptr;
    if (both && !p_.invariant && shares_evenly(heads)) {
      pool_.run(heads, [&](std::int64_t item, int thread) {
        const Sequence s(p_, static_cast<int>(item / p_.kv_heads));
        const int kv_head = static_cast<int>(item % p_.kv_heads);
        clear_rows(s, kv_head);
        for (std::int64_t i = 0; i < segments_of(s.keys); ++i)
          take_segment(s, kv_head, i, thread, {dq_of(s, kv_head), slopes_of(s, kv_head)});
      });
      return;
    }
    if (p_.dk.data != nullptr) {
      const std::int64_t each = most_segments();
      pool_.run(heads * each, [&](std::int64_t item, int thread) {
        const Sequence s(p_, static_cast<int>(item / each / p_.kv_heads));
        if (item % each < segments_of(s.keys))
          take_segment(s, static_cast<int>(item / each % p_.kv_heads), item % each, thread, {});
      });
    }
    if (p_.dq.data != nullptr) {
      const std::int64_t each = most_tiles();
      pool_.run(heads * each, [&](std::int64_t item, int thread) {
        const Sequence s(p_, static_cast<int>(item / each / p_.kv_heads));
        const std::int64_t first = item % each * kGradientRows;
        if (first < s.query_len * group_)
          take_rows(s, static_cast<int>(item / each % p_.kv_heads), first, thread);
      });
    }
  }

  /// Whether threads that each take whole heads wait little for the last one. A second pass costs 7
  /// products for 5.
  bool shares_evenly(std::int64_t heads) const {
    const std::int64_t rounds = (heads + pool_.size() - 1) / pool_.size();
    return 5 * rounds * pool_.size() <= 7 * heads;
  }
  std::int64_t most_segments() const {
    std::int64_t most = 0;
    for (int b = 0; b < p_.batch.size; ++b)
      most = std::max(most, segments_of(Sequence(p_, b).keys));
    return most;
  }
  std::int64_t most_tiles() const {
    std::int64_t most = 0;
    for (int b = 0; b < p_.batch.size; ++b)
      most =
          std::max(most, (Sequence(p_, b).query_len * group_ + kGradientRows - 1) / kGradientRows);
    return most;
  }

  GradientSpace space(int thread) const {
    return {reinterpret_cast<float*>(p_.scratch + thread * space_bytes(p_)), p_,
            p_.invariant ? kLevels : 1};
  }
  void pause(int thread) const {
    if (thread == 0 && between_) between_();
  }

  float* dq_of(const Sequence& s, int kv_head) const {
    return p_.dq.at(kv_head, s.first_row * group_);
  }
  /// [kv_heads, tokens * group] dS times distances, added up over the keys of each row.
  double* slope_rows() const {
    return reinterpret_cast<double*>(p_.scratch +
                                     static_cast<std::size_t>(pool_.size()) * space_bytes(p_));
  }
  /// Those of a sequence; null: not wanted.
  double* slopes_of(const Sequence& s, int kv_head) const {
    if (p_.biases.slopes == nullptr) return nullptr;
    return slope_rows() + (kv_head * p_.tokens + s.first_row) * group_;
  }
  void add_up_slopes() const {
    pool_.run(p_.heads, [&](std::int64_t head, int) {
      const int kv_head = static_cast<int>(head) / group_;
      double all = 0;
      for (int b = 0; b < p_.batch.size; ++b) {
        const Sequence s(p_, b);
        const double* row = slopes_of(s, kv_head) + head % group_;
        double sum = 0;
        for (std::int64_t t = 0; t < s.query_len; ++t, row += group_) sum += *row;
        if (p_.biases.slope_stride > 0)
          p_.biases.slopes[b * p_.biases.slope_stride + head] += static_cast<float>(sum);
        all += sum;
      }
      if (p_.biases.slope_stride == 0) p_.biases.slopes[head] += static_cast<float>(all);
    });
  }

  /// The rows of qq_bias that queries have, and how many of them one thread takes at a time.
  std::int64_t qq_rows() const {
    std::int64_t most = 0;
    for (int b = 0; b < p_.batch.size; ++b) most = std::max(most, p_.whole_query_len(b));
    return std::min(most, p_.bias.qq.width);
  }
  std::int64_t rows_of_item() const { return std::max(1, kGradientRows / group_); }

  /// The gradients of some rows of qq_bias, from `first` on.
  void take_qq(std::int64_t first, int thread) const {
    const GradientSpace own = space(thread);
    for (int b = 0; b < p_.batch.size; ++b) {
      const Sequence s(p_, b);
      const auto row_of = [&](std::int64_t index) {  // the first that has at least this index
        std::int64_t begin = 0, end = s.query_len;
        while (begin < end) {
          const std::int64_t middle = begin + (end - begin) / 2;
          if (p_.query_index(b, middle) < index)
            begin = middle + 1;
          else
            end = middle;
        }
        return begin * group_;
      };
      const std::int64_t begin = row_of(first), end = row_of(first + rows_of_item());
      for (int kv_head = 0; kv_head < p_.kv_heads; ++kv_head)
        for (std::int64_t at = begin; at < end; at += kGradientRows)
          take_qq_tile(tile_of(s, kv_head, at, end, kGradientRows), own, thread);
    }
  }
  void take_qq_tile(const Tile& of_rows, const GradientSpace& own, int thread) const {
    const Sequence& s = of_rows.sequence;
    PackedQueryRows rows;
    pack_gradient_rows(p_, of_rows, own, rows);
    for (std::int64_t i = 0; i < segments_of(s.keys); ++i) {
      const Segment of_keys = segment_of(s, i);
      if (!sees(of_rows, of_keys) || !has_qq(s, of_keys)) continue;
      PackedKeyRows keys;
      pack_gradient_keys(p_, s, of_rows.kv_head, of_keys, own, keys);
      gradient_tile(p_, of_rows, rows, keys, own, {.qq = p_.biases.qq});
      pause(thread);
    }
  }
  /// Whether some key of a segment has a column in qq_bias.
  bool has_qq(const Sequence& s, const Segment& keys) const {
    for (int j = 0; j < keys.keys; ++j) {
      const std::int64_t column = s.shard.position(keys.first + j, s.kv_len) - s.context_len;
      if (column >= 0 && column < p_.bias.qq.width) return true;
    }
    return false;
  }

  void clear_rows(const Sequence& s, int kv_head) const {
    if (!p_.resume_rows) std::fill_n(dq_of(s, kv_head), s.query_len * group_ * head_columns_, 0.0f);
  }

  /// Calls visit(leaf, first, end) for stretches of packed rows, in the order of their sum.
  template <class Visit>
  void for_each_stretch(const Sequence& s, Visit&& visit) const {
    const std::int64_t rows = s.query_len * group_;
    if (!p_.invariant) return visit(0, std::int64_t{0}, rows);
    const SegmentOrder order = p_.queries.for_sequence(s.index).order(p_.whole_query_len(s.index));
    for (int leaf = 0; leaf < order.leaves; ++leaf)
      for (std::int64_t t = 0; t < order.count(leaf); ++t) {
        const std::int64_t first = order.segment(leaf, t) * kSegment * group_;
        visit(leaf, first, std::min(rows, first + kSegment * group_));
      }
  }

  /// dk and dv of one segment, and its part of what rows have: `rows_have` is of the sequence's
  /// first row, null where it is not wanted.
  void take_segment(const Sequence& s, int kv_head, std::int64_t number, int thread,
                    const RowSums& rows_have) const {
    const GradientSpace own = space(thread);
    const std::int64_t k_floats = kSegment * head_columns_, v_floats = kSegment * value_columns_;
    PackedKeyRows keys;
    pack_gradient_keys(p_, s, kv_head, segment_of(s, number), own, keys);
    const std::int64_t count = keys.segment.keys;
    const std::int64_t row =
        keys.segment.first +
        (p_.key_sum_start != nullptr ? p_.key_sum_start[s.index] : s.first_key);
    float *const to_k = p_.dk.at(kv_head, row), *const to_v = p_.dv.at(kv_head, row);

    FoldStack stack;
    const auto fold = [&](int a, int b) {
      add_sums(own.dk + a * k_floats, own.dk + b * k_floats, k_floats);
      add_sums(own.dv + a * v_floats, own.dv + b * v_floats, v_floats);
    };
    int level = -1, last_leaf = -1;
    const auto begin_level = [&] {
      std::fill_n(own.dk + level * k_floats, k_floats, 0.0f);
      std::fill_n(own.dv + level * v_floats, v_floats, 0.0f);
    };
    for_each_stretch(s, [&](int leaf, std::int64_t first, std::int64_t end) {
      if (leaf != last_leaf) {
        level = stack.push(static_cast<std::uint64_t>(leaf), fold);
        begin_level();
        if (level == 0 && p_.resume_keys && !p_.invariant) {
          std::copy_n(to_k, count * head_columns_, own.dk);
          std::copy_n(to_v, count * value_columns_, own.dv);
        }
        last_leaf = leaf;
      }
      for (std::int64_t at = first; at < end; at += kGradientRows) {
        const Tile of_rows = tile_of(s, kv_head, at, end, kGradientRows);
        if (!sees(of_rows, keys.segment)) continue;
        PackedQueryRows rows;
        pack_gradient_rows(p_, of_rows, own, rows);
        TileSums sums{.dk = own.dk + level * k_floats, .dv = own.dv + level * v_floats};
        if (rows_have.dq != nullptr) sums.dq = rows_have.dq + at * head_columns_;
        if (rows_have.slopes != nullptr) sums.slopes = rows_have.slopes + at;
        gradient_tile(p_, of_rows, rows, keys, own, sums);
        pause(thread);
      }
    });
    if (!stack.finish(fold)) {
      level = 0;
      begin_level();
    }
    if (p_.resume_keys && p_.invariant) {
      add_sums(to_k, own.dk, count * head_columns_);
      add_sums(to_v, own.dv, count * value_columns_);
    } else {
      std::copy_n(own.dk, count * head_columns_, to_k);
      std::copy_n(own.dv, count * value_columns_, to_v);
    }
  }

  /// dq of one tile.
  void take_rows(const Sequence& s, int kv_head, std::int64_t first, int thread) const {
    const GradientSpace own = space(thread);
    const Tile of_rows = tile_of(s, kv_head, first, s.query_len * group_, kGradientRows);
    const std::int64_t floats = kGradientRows * head_columns_;
    const std::int64_t used = of_rows.rows * head_columns_;
    float* const to = dq_of(s, kv_head) + first * head_columns_;
    PackedQueryRows rows;
    pack_gradient_rows(p_, of_rows, own, rows);
    FoldStack stack;
    const auto fold = [&](int a, int b) {
      add_sums(own.dq + a * floats, own.dq + b * floats, used);
    };
    double* const slopes = slopes_of(s, kv_head);
    const auto take = [&](std::int64_t number, float* dq) {
      const Segment of_keys = segment_of(s, number);
      if (!sees(of_rows, of_keys)) return;
      PackedKeyRows keys;
      pack_gradient_keys(p_, s, kv_head, of_keys, own, keys);
      gradient_tile(p_, of_rows, rows, keys, own,
                    {.dq = dq, .slopes = slopes == nullptr ? nullptr : slopes + first});
      pause(thread);
    };
    if (!p_.invariant) {
      if (!p_.resume_rows) std::fill_n(to, used, 0.0f);
      for (std::int64_t i = 0; i < segments_of(s.keys); ++i) take(i, to);
      return;
    }
    for (int leaf = 0; leaf < s.order.leaves; ++leaf) {
      if (s.order.count(leaf) == 0) continue;
      const int level = stack.push(static_cast<std::uint64_t>(leaf), fold);
      std::fill_n(own.dq + level * floats, used, 0.0f);
      for (std::int64_t t = 0; t < s.order.count(leaf); ++t)
        take(s.order.segment(leaf, t), own.dq + level * floats);
    }
    if (!stack.finish(fold)) std::fill_n(own.dq, used, 0.0f);
    if (p_.resume_rows)
      add_sums(to, own.dq, used);
    else
      std::copy_n(own.dq, used, to);
  }

  bool sees(const Tile& rows, const Segment& keys) const {
    return Visible(p_, rows).some_row_sees(keys);
  }

  const GradientParams& p_;
  ThreadPool& pool_;
  const BetweenTiles& between_;
  const int group_;
  const int head_columns_, value_columns_;
};

}  // namespace

std::size_t gradient_scratch(const GradientParams& bounds, int threads) {
  return static_cast<std::size_t>(threads) * space_bytes(bounds) + slope_bytes(bounds);
}

void attend_gradients(const GradientParams& p, ThreadPool& pool, const BetweenTiles& between) {
  if (p.scratch_bytes < gradient_scratch(p, pool.size()))
    throw Error(ErrorKind::internal, "host gradients were given " +
                                         std::to_string(p.scratch_bytes) +
                                         " bytes of scratch and need " +
                                         std::to_string(gradient_scratch(p, pool.size())));
  GradientRun(p, pool, between)();
}

void add_sums(float* to, const float* from, std::int64_t count, ThreadPool& pool) {
  constexpr std::int64_t kFloats = 1024;  // a multiple of 16, as the count is
  pool.run_stretches((count + kFloats - 1) / kFloats, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * kFloats;
    add_sums(to + first, from + first, std::min(count, end * kFloats) - first);
  });
}

void add_to_first_columns(const AddColumnsParams& p, ThreadPool& pool) {
  const auto add = [&](auto* to, const auto* from) {
    for (int c = 0; c < p.from.dim; ++c) to[c] += from[c];
  };
  for (int head = 0; head < p.kv_heads; ++head)
    pool.run_stretches(p.from.rows, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        if (p.dtype == DType::fp64)
          add(p.to.wide_at(head, row), p.from.wide_at(head, row));
        else
          add(p.to.at(head, row), p.from.at(head, row));
    });
}

void widen_gradients(const WidenGradientsParams& p, ThreadPool& pool) {
  pool.run_stretches(p.tokens,
                     [&](std::int64_t begin, std::int64_t end) { widen_gradients(p, begin, end); });
}

void row_terms(const RowTermParams& p, ThreadPool& pool) {
  pool.run_stretches(p.tokens,
                     [&](std::int64_t begin, std::int64_t end) { row_terms(p, begin, end); });
}

void sink_gradients(const SinkGradientParams& p, ThreadPool& pool) {
  pool.run(p.heads, [&](std::int64_t head, int) {
    const double sink = to_base_2(p.sinks[head]);
    const auto sum_of = [&](int b, std::int64_t first, std::int64_t end) {
      double sum = 0;
      for (std::int64_t t = first; t < end; ++t) sum += p.part(sink, b, t, head);
      return sum;
    };
    if (!p.invariant) {
      double sum = 0;
      for (int b = 0; b < p.batch.size; ++b) sum += sum_of(b, 0, p.rows_of(b));
      p.to[head] = static_cast<float>(sum);
      return;
    }
    std::array<float, kLevels> sums{};
    FoldStack stack;
    const auto fold = [&](int a, int b) { sums[a] += sums[b]; };
    for (int leaf = 0; leaf < p.order(0).leaves; ++leaf) {
      double sum = 0;
      for (int b = 0; b < p.batch.size; ++b) {
        const SegmentOrder order = p.order(b);
        for (std::int64_t t = 0; t < order.count(leaf); ++t) {
          const std::int64_t first = order.segment(leaf, t) * kSegment;
          sum += sum_of(b, first, std::min(p.rows_of(b), first + kSegment));
        }
      }
      sums[stack.push(static_cast<std::uint64_t>(leaf), fold)] = static_cast<float>(sum);
    }
    p.to[head] = stack.finish(fold) ? sums[0] : 0.0f;
  });
}

void store_gradients(const StoreGradientParams& p, ThreadPool& pool) {
  for (int kv_head = 0; kv_head < p.kv_heads; ++kv_head)
    pool.run_stretches(p.count, [&](std::int64_t begin, std::int64_t end) {
      store_gradients(p, kv_head, begin, end);
    });
}

}  // namespace longspan::kernels::host

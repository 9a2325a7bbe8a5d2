// Attention of fp64, forward and backward, tile by tile; threads take tiles in turn. Backward makes
// the scores twice: once for dk and dv, segment by segment, and once for dq.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/host/fp64.hpp"
#include "kernels/host/host.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels::host {
namespace {

std::size_t space_bytes(const Geometry& p, bool gradients) {
  return (WideSpace::size(p, gradients) * sizeof(double) + 255) / 256 * 256;
}

/// The tiles of rows of a batch, and the memory of the threads that take them.
class WideRun {
 public:
  WideRun(const AttendParams& p, bool gradients)
      : p_(p), gradients_(gradients), group_(p.heads / p.kv_heads) {
    for (int b = 0; b < p.batch.size; ++b) {
      const Sequence s(p, b);
      if (p.batch.skips(s.query_len)) continue;
      most_tiles_ = std::max(most_tiles_, tiles_of(s));
      most_segments_ = std::max(most_segments_, segments_of(s.keys));
    }
  }

  WideSpace space(int thread) const {
    return {reinterpret_cast<double*>(p_.scratch + thread * space_bytes(p_, gradients_)), p_,
            gradients_};
  }
  std::int64_t heads() const { return std::int64_t{p_.batch.size} * p_.kv_heads; }
  std::int64_t most_tiles() const { return most_tiles_; }
  std::int64_t most_segments() const { return most_segments_; }
  std::int64_t tiles_of(const Sequence& s) const {
    return (s.query_len * group_ + kWideRows - 1) / kWideRows;
  }
  /// The sequence of an item (sequence, kv head, `each` others).
  Sequence sequence(std::int64_t item, std::int64_t each) const {
    return {p_, static_cast<int>(item / each / p_.kv_heads)};
  }
  int kv_head(std::int64_t item, std::int64_t each) const {
    return static_cast<int>(item / each % p_.kv_heads);
  }
  Tile tile(const Sequence& s, int kv_head, std::int64_t number) const {
    return tile_of(s, kv_head, number * kWideRows, s.query_len * group_, kWideRows);
  }

 private:
  const AttendParams& p_;
  bool gradients_;
  int group_;
  std::int64_t most_tiles_ = 0, most_segments_ = 0;
};

void check_scratch(std::size_t given, std::size_t needed) {
  if (given < needed)
    throw Error(ErrorKind::internal, "attention of fp64 was given " + std::to_string(given) +
                                         " bytes of scratch and needs " + std::to_string(needed));
}

/// The sums of a run of rows or keys: what is there already, or 0.
void start(double* sums, std::int64_t count, bool resume) {
  if (!resume) std::fill_n(sums, count, 0.0);
}

}  // namespace

std::size_t fp64_scratch(const AttendParams& bounds, int threads) {
  return threads * space_bytes(bounds, false);
}

void attend_fp64(const AttendParams& p, const MergeParams& result, ThreadPool& pool,
                 const BetweenTiles& between) {
  check_scratch(p.scratch_bytes, fp64_scratch(p, pool.size()));
  if (p.resume || p.parts || result.rows != nullptr || result.first_head != 0)
    throw Error(ErrorKind::internal, "attention of fp64 has no states to resume, cut or place");
  const WideRun run(p, false);
  const std::int64_t each = run.most_tiles();
  pool.run(run.heads() * each, [&](std::int64_t item, int thread) {
    const Sequence s = run.sequence(item, each);
    // Later rows come first, since a causal mask gives them the most work.
    const std::int64_t number = run.tiles_of(s) - 1 - item % each;
    if (number < 0 || p.batch.skips(s.query_len)) return;
    attend_fp64_tile(p, result, run.tile(s, run.kv_head(item, each), number), run.space(thread));
    if (thread == 0 && between) between();
  });
}

std::size_t gradient_scratch_fp64(const GradientParams& bounds, int threads) {
  return threads * space_bytes(bounds, true);
}

void attend_gradients_fp64(const GradientParams& p, ThreadPool& pool, const BetweenTiles& between) {
  check_scratch(p.scratch_bytes, gradient_scratch_fp64(p, pool.size()));
  const WideRun run(p, true);
  const int head_columns = GradientSums::padded(p.head_dim),
            value_columns = GradientSums::padded(p.value_dim), group = p.heads / p.kv_heads;
  const std::int64_t tiles = run.most_tiles();
  if (p.dk.data != nullptr) {
    const std::int64_t each = run.most_segments();
    pool.run(run.heads() * each, [&](std::int64_t item, int thread) {
      const Sequence s = run.sequence(item, each);
      if (item % each >= segments_of(s.keys)) return;
      const Segment segment = segment_of(s, item % each);
      const int kv_head = run.kv_head(item, each);
      const std::int64_t row =
          segment.first + (p.key_sum_start != nullptr ? p.key_sum_start[s.index] : s.first_key);
      const WideGradients to{nullptr, p.dk.wide_at(kv_head, row), p.dv.wide_at(kv_head, row)};
      start(to.dk, segment.keys * head_columns, p.resume_keys);
      start(to.dv, segment.keys * value_columns, p.resume_keys);
      const WideSpace space = run.space(thread);
      for (std::int64_t number = 0; number < run.tiles_of(s); ++number) {
        const Tile tile = run.tile(s, kv_head, number);
        if (!Visible(p, tile).some_row_sees(segment)) continue;
        pack_fp64_rows(p, tile, space);
        gradient_fp64_tile(p, tile, segment, space, to);
        if (thread == 0 && between) between();
      }
    });
  }
  if (p.dq.data != nullptr) {
    pool.run(run.heads() * tiles, [&](std::int64_t item, int thread) {
      const Sequence s = run.sequence(item, tiles);
      if (item % tiles >= run.tiles_of(s)) return;
      const Tile tile = run.tile(s, run.kv_head(item, tiles), item % tiles);
      const WideGradients to{p.dq.wide_at(tile.kv_head, s.first_row * group + tile.first), nullptr,
                             nullptr};
      start(to.dq, std::int64_t{tile.rows} * head_columns, p.resume_rows);
      const WideSpace space = run.space(thread);
      pack_fp64_rows(p, tile, space);
      for (std::int64_t number = 0; number < segments_of(s.keys); ++number)
        gradient_fp64_tile(p, tile, segment_of(s, number), space, to);
      if (thread == 0 && between) between();
    });
  }
}

void add_sums(double* to, const double* from, std::int64_t count, ThreadPool& pool) {
  pool.run_stretches(count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] += from[i];
  });
}

void row_terms_fp64(const RowTermParams& p, ThreadPool& pool) {
  auto* const terms = reinterpret_cast<WideRowTerm*>(p.terms);
  pool.run_stretches(p.tokens, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token)
      for (int head = 0; head < p.heads; ++head) {
        WideRowTerm& term = terms[token * p.heads + head];
        term = {*wide_lse(p.lse, token, head), 0};
        // If the row sees nothing, its dout may hold anything.
        if (term.lse == -std::numeric_limits<double>::infinity()) continue;
        const double* const out = p.out.at<double>(token, head);
        const double* const dout = p.dout.at<double>(token, head);
        for (int c = 0; c < p.value_dim; ++c) term.d += dout[c] * out[c];
        if (p.dlse.data != nullptr) term.d -= *wide_lse(p.dlse, token, head);
      }
  });
}

void store_gradients_fp64(const StoreGradientParams& p, ThreadPool& pool) {
  for (int kv_head = 0; kv_head < p.kv_heads; ++kv_head)
    pool.run_stretches(p.count, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t place = p.place(row);
        if (place < 0) continue;
        const double* const from = p.sums.wide_at(kv_head, row);
        double* const to = p.to.at<double>(place / p.group, kv_head * p.group + place % p.group);
        for (int c = 0; c < p.sums.dim; ++c) to[c] = p.accumulate ? to[c] + from[c] : from[c];
      }
    });
}

}  // namespace longspan::kernels::host

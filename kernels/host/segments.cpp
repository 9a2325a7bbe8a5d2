// Converts longspan's states into states per segment, as serving engines store them, and those into
// results.
//
//     max = m ln 2,  expsum = l,  output = o      (m in base 2; an empty segment: -inf, 0, 0)
//
// There they fold in natural units, so that a max of any size keeps its value.
#include <algorithm>
#include <cmath>

#include "kernels/batch_rows.hpp"
#include "kernels/host/host.hpp"

namespace longspan::kernels::host {
namespace {

/// The local keys of the sequence that a row belongs to; -1 if the row is left out.
std::int64_t local_len_of(const Batch& batch, const Shard& shard, std::int64_t token) {
  const int b = sequence_of_row(batch, token);
  return b < 0 ? -1 : shard.for_sequence(b).local_len(batch.keys(b, shard));
}

void export_segment(const ExportSegmentsParams& p, std::int64_t row, int segment) {
  Stats stats = p.states.stats(segment)[row];
  const bool has_keys = !is_empty(stats);
  float factor = 1.0f;
  if (segment == 0 && p.sinks) {
    const Fold f = fold(stats, sink_stats(p.sinks[row % p.heads]));
    factor = f(1.0f, 0.0f);
    stats = f.stats;
  }
  if (is_empty(stats)) stats = empty_stats();
  const std::int64_t at = row * p.to.segments + segment;
  p.to.max[at] = stats.max * kLn2;
  p.to.expsum[at] = stats.sum;
  const float* o = p.states.o(segment, row);
  float* to = p.to.output + at * p.to.padded_dim;
  for (int c = 0; c < p.states.dim; ++c) to[c] = has_keys ? o[c] * factor : 0.0f;
}

void reduce_row(const ReduceSegmentsParams& p, std::int64_t row, int filled) {
  constexpr int kColumns = 64;  // of one pass over the segments
  const std::int64_t token = row / p.heads, head = row % p.heads, at = row * p.from.segments;
  float lse = -infinity();
  for (int first = 0; first < p.dim; first += kColumns) {
    const int n = std::min(kColumns, p.dim - first);
    Stats stats = empty_stats();
    float o[kColumns] = {};
    for (int s = 0; s < filled; ++s) {
      const Stats next = segment_stats(p.from.max[at + s], p.from.expsum[at + s]);
      if (is_empty(next)) continue;
      const Fold f = fold(stats, next, LogBase::e);
      const float* from = p.from.output + (at + s) * p.from.padded_dim + first;
      for (int c = 0; c < n; ++c) o[c] = f(o[c], from[c]);
      stats = f.stats;
    }
    const Finish result = finish(stats);
    lse = part_lse(stats, LogBase::e);
    for (int c = 0; c < n; ++c)
      store_element(p.out.at<std::byte>(0, 0), p.dtype,
                    token * p.out.row_stride + head * p.out.head_stride + first + c,
                    p.out_scale(result(o[c])));
  }
  if (p.lse.data != nullptr) *p.lse.at(token, head) = lse;
}

}  // namespace

void export_segments(const ExportSegmentsParams& p, ThreadPool& pool) {
  pool.run(p.tokens, [&](std::int64_t token, int) {
    const std::int64_t local_len = local_len_of(p.batch, p.shard, token);
    if (local_len < 0) return;
    const int filled = filled_segments(p.parts, p.to.segments, local_len);
    for (std::int64_t row = token * p.heads; row < (token + 1) * p.heads; ++row)
      for (int s = 0; s < filled; ++s) export_segment(p, row, s);
  });
}

void reduce_segments(const ReduceSegmentsParams& p, ThreadPool& pool) {
  pool.run(p.tokens, [&](std::int64_t token, int) {
    const std::int64_t local_len = local_len_of(p.batch, p.shard, token);
    if (local_len < 0) return;
    const int filled = filled_segments(p.parts, p.from.segments, local_len);
    for (std::int64_t row = token * p.heads; row < (token + 1) * p.heads; ++row)
      reduce_row(p, row, filled);
  });
}

}  // namespace longspan::kernels::host

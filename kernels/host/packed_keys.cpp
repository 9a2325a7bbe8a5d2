#include "kernels/host/packed_keys.hpp"

#include <algorithm>
#include <limits>

#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/families.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/visible.hpp"

namespace longspan::kernels::host {
namespace {

bool packs_bf16(const Geometry& p) {
  return p.bf16_products && p.dtype == DType::bf16 && has_bf16_products();
}

std::int64_t segment_bytes(const Geometry& p) {
  return packs_bf16(p) ? Bf16Space::segment_elements(p) * std::int64_t{sizeof(Bf16Space::Element)}
                       : TileSpace::segment_floats(p) * std::int64_t{sizeof(float)};
}

/// The number of segments that fit.
std::int64_t capacity_of(const Geometry& p) {
  const std::int64_t rows = p.tokens * (p.heads / p.kv_heads);
  if (rows < PackedKeys::kLeastRows) return 0;
  const std::int64_t most = PackedKeys::kMostBytes / segment_bytes(p);
  if (p.max_kv_len == 0) return most;
  const std::int64_t sequences =
      std::min<std::int64_t>(p.batch.size, rows / PackedKeys::kLeastRows);
  return std::min(most, sequences * p.kv_heads * segments_of(p.max_kv_len));
}

/// All rows of a sequence, of any kv head: all see the same keys.
Tile whole(const AttendParams& p, const Sequence& s) {
  const int rows = static_cast<int>(s.query_len * (p.heads / p.kv_heads));
  return {s, 0, 1, 0, rows, 0, s.order.leaves, {0, s.keys}};
}

}  // namespace

std::size_t PackedKeys::bytes(const Geometry& bounds) {
  const std::int64_t capacity = capacity_of(bounds);
  if (capacity == 0) return 0;
  return static_cast<std::size_t>(capacity * (segment_bytes(bounds) + 1)) +
         (2 * bounds.batch.size + 1) * sizeof(std::int64_t);
}

PackedKeys::PackedKeys(const AttendParams& params, std::byte* memory,
                       const std::function<bool(const Sequence&)>& has_tiles)
    : p_(params),
      bf16_(packs_bf16(params)),
      bytes_(segment_bytes(params)),
      capacity_(capacity_of(params)),
      packed_(memory) {
  if (capacity_ == 0) return;
  begin_ = reinterpret_cast<std::int64_t*>(memory + capacity_ * bytes_);
  first_ = begin_ + p_.batch.size + 1;
  finite_ = reinterpret_cast<std::uint8_t*>(first_ + p_.batch.size);
  begin_[0] = 0;
  for (int b = 0; b < p_.batch.size; ++b) {
    const Sequence s(p_, b);
    const std::int64_t rows = s.query_len * (p_.heads / p_.kv_heads);
    std::int64_t count = 0;
    first_[b] = 0;
    if (rows >= kLeastRows && rows <= std::numeric_limits<int>::max() &&
        (serving(p_, b).id == OnHost::Id::amx) == bf16_ && has_tiles(s)) {
      const Tile tile = whole(p_, s);
      const Interval hull = Visible(p_, tile).hull();
      if (!hull.empty()) {
        first_[b] = hull.begin / kSegment;
        count = segments_of(hull.end) - first_[b];
        if (count > capacity_) count = 0;
      }
    }
    begin_[b + 1] = begin_[b] + count;
  }
}

PackedKeys::Round PackedKeys::round(std::int64_t begin) const {
  const std::int64_t heads = std::int64_t{p_.batch.size} * p_.kv_heads;
  if (capacity_ == 0) return {begin, heads};
  std::int64_t end = begin, used = 0;
  while (end < heads) {
    used += segments(static_cast<int>(end / p_.kv_heads));
    if (used > capacity_) break;
    ++end;
  }
  return {begin, end};
}

void PackedKeys::pack(ThreadPool& pool, Round round, const std::function<float*(int thread)>& wide,
                      const BetweenTiles& between) {
  if (capacity_ == 0 || round.begin == round.end) return;
  base_ = segments_before(round.begin);
  const std::int64_t first = begin_[round.begin / p_.kv_heads];
  const std::int64_t* const end = begin_ + (round.end - 1) / p_.kv_heads + 1;
  pool.run(*end - first, [&](std::int64_t item, int thread) {
    const std::int64_t* const next =
        std::upper_bound(static_cast<const std::int64_t*>(begin_), end, first + item);
    const int b = static_cast<int>(next - begin_) - 1;
    pack(b, first + item - begin_[b], round, wide(thread));
    if (thread == 0 && between) between();
  });
}

PackedSegments PackedKeys::of(const Tile& tile) const {
  const int b = tile.sequence.index;
  if (capacity_ == 0 || segments(b) == 0) return {};
  const std::int64_t at = segments_before(std::int64_t{b} * p_.kv_heads + tile.kv_head) - base_;
  return {packed_ + at * bytes_, bytes_, finite_ + at, first_[b]};
}

std::int64_t PackedKeys::segments_before(std::int64_t head) const {
  const int b = static_cast<int>(head / p_.kv_heads);
  const std::int64_t within = head % p_.kv_heads;
  return begin_[b] * p_.kv_heads + (within > 0 ? within * segments(b) : 0);
}

/// Packs a segment of all heads of the round: they are adjacent.
void PackedKeys::pack(int b, std::int64_t number, Round round, float* wide) {
  const Sequence s(p_, b);
  const std::int64_t before = std::int64_t{b} * p_.kv_heads;
  const int begin = static_cast<int>(std::max<std::int64_t>(round.begin - before, 0));
  const int end = static_cast<int>(std::min<std::int64_t>(round.end - before, p_.kv_heads));
  const std::int64_t first = (first_[b] + number) * kSegment;
  const Segment segment{first, static_cast<int>(std::min<std::int64_t>(kSegment, s.keys - first))};
  const Tile tile = whole(p_, s);
  const Visible visible(p_, tile);
  if (!visible.some_row_sees(segment)) return;
  const Range any = visible.keys(segment, 0, tile.rows - 1);
  KeyRows rows;
  for (int head = begin; head < end; ++head) {
    find_seen(p_, tile, visible, head, segment, any, 0, rows);
    const std::int64_t at = segments_before(before + head) - base_ + number;
    std::byte* const to = packed_ + at * bytes_;
    if (bf16_)
      finite_[at] = pack_bf16_segment(p_, rows, Bf16Space::whole_steps(any), wide,
                                      reinterpret_cast<Bf16Space::Element*>(to));
    else
      pack_segment(p_, rows, any, reinterpret_cast<float*>(to));
  }
}

}  // namespace longspan::kernels::host

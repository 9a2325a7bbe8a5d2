#include "src/strategy/shared/sent_rows.hpp"

#include <algorithm>

#include "kernels/row_puts.hpp"
#include "src/base/peer_view.hpp"

namespace longspan {

using kernels::KeyArrivals;
using kernels::RowPuts;

int pieces_of_bytes(double bytes) {
#ifdef LONGSPAN_SIMULATED
  constexpr double kPieceBytes = 32 << 10;  // as little travels there
#else
  constexpr double kPieceBytes = 2 << 20;
#endif
  return static_cast<int>(std::clamp<double>(bytes / kPieceBytes, 1, KeyArrivals::kMostPieces));
}

std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most) {
  std::vector<Stretch> ends;
  for (const Stretch& one : stretches) {
    if (one.count <= 2 * most) {
      ends.push_back(one);
      continue;
    }
    const std::int64_t remainder = one.count - most;
    ends.push_back({one.first, most, one.position});
    ends.push_back({one.first + remainder, most, one.position + remainder});
  }
  return ends;
}

// All stretches of three tensors of every other rank; of this rank those of the queries, and both
// ends of those of keys and values.
static_assert(RowPuts::kMostBlocks >=
              (PeerView::kMostRanks - 1) * kMostStretches * 3 + kMostStretches * (1 + 2 * 2));

int list_portions(const StretchesOfRanks& ranks, int own, KeyArrivals::Portion* table) {
  static_assert(PeerView::kMostRanks * kMostStretches <= KeyArrivals::kMostPortions);
  KeyArrivals::Portion* end = table;
  for (int p = 0; p < static_cast<int>(ranks.size()); ++p)
    for (const Stretch& one : ranks[static_cast<std::size_t>(p)])
      *end++ = {static_cast<int>(one.position), p == own ? static_cast<int>(one.first) : ~p};
  std::sort(table, end, [](const auto& a, const auto& b) { return a.begin > b.begin; });
  return static_cast<int>(end - table);
}

}  // namespace longspan

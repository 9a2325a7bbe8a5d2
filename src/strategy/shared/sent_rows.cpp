#include "src/strategy/shared/sent_rows.hpp"

#include <algorithm>

#include "src/divided_up.hpp"
#include "src/peer_view.hpp"

namespace longspan {

using kernels::KeyArrivals;

int count_portions(double bytes) {
  constexpr double kPortionBytes = 16 << 20;
  return static_cast<int>(std::clamp<double>(bytes / kPortionBytes, 2, KeyArrivals::kMostPieces));
}

std::vector<Stretch> in_portions(std::vector<Stretch> stretches, int most) {
  std::sort(stretches.begin(), stretches.end(),
            [](const Stretch& a, const Stretch& b) { return a.position > b.position; });
  // Each stretch ends with a portion that may be short.
  const auto count = static_cast<std::int64_t>(stretches.size());
  const std::int64_t full = std::max<std::int64_t>(most + 1 - count, 1);
  const std::int64_t longest = divided_up(count_rows(stretches), full);
  std::vector<Stretch> portions;
  for (const Stretch& one : stretches) {
    const std::int64_t length = divided_up(one.count, divided_up(one.count, longest));
    for (std::int64_t end = one.count; end > 0; end -= length) {
      const std::int64_t begin = std::max<std::int64_t>(end - length, 0);
      portions.push_back({one.first + begin, end - begin, one.position + begin});
    }
  }
  return portions;
}

std::vector<Stretch> ends_of(const std::vector<Stretch>& stretches, std::int64_t most) {
  std::vector<Stretch> ends;
  for (const Stretch& one : stretches) {
    if (one.count <= 2 * most) {
      ends.push_back(one);
      continue;
    }
    const std::int64_t rest = one.count - most;
    ends.push_back({one.first, most, one.position});
    ends.push_back({one.first + rest, most, one.position + rest});
  }
  return ends;
}

comm::Put put_of_word(std::uint64_t* word, int to) {
  auto* const place = reinterpret_cast<std::byte*>(word);
  constexpr std::int64_t kSize = sizeof *word;
  return {to, {place, place, kSize, kSize, kSize, 1}};
}

std::size_t most_portions(const std::vector<SentRows>& ranks) {
  std::size_t most = 0;
  for (const SentRows& one : ranks) most = std::max(most, one.portions.size());
  return most;
}

int list_portions(const std::vector<SentRows>& ranks, int own, KeyArrivals::Portion* table) {
  static_assert(PeerView::kMostRanks * KeyArrivals::kMostPieces <= KeyArrivals::kMostPortions);
  static_assert(kMostStretches <= KeyArrivals::kMostPieces);
  KeyArrivals::Portion* end = table;
  const auto count = static_cast<int>(ranks.size());
  for (int p = 0; p < count; ++p) {
    const SentRows& one = ranks[static_cast<std::size_t>(p)];
    if (p == own) {
      for (const Stretch& part : one.stretches)
        *end++ = {static_cast<int>(part.position), static_cast<int>(part.first)};
      continue;
    }
    int signal = p;
    for (const Stretch& part : one.portions)
      *end++ = {static_cast<int>(part.position), ~(signal += count)};
  }
  std::sort(table, end, [](const auto& a, const auto& b) { return a.begin > b.begin; });
  return static_cast<int>(end - table);
}

}  // namespace longspan

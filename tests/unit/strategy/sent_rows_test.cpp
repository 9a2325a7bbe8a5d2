// The stretches of rows and keys that ranks have, and the pieces in which they send them.
#include "src/strategy/shared/sent_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "src/strategy/shared/head_shares.hpp"

namespace longspan {
namespace {

bool operator==(const Stretch& a, const Stretch& b) {
  return a.first == b.first && a.count == b.count && a.position == b.position;
}

TEST(Stretches, OfAZigzag) {
  const auto found = stretches_of(Shard::zigzag(800, 1, 4), 800);
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 2u);
  EXPECT_TRUE((*found)[0] == (Stretch{0, 100, 100}));
  EXPECT_TRUE((*found)[1] == (Stretch{100, 100, 600}));
  EXPECT_EQ(count_rows(*found), 200);
}

TEST(Stretches, AreNotTakenWhereThereAreMany) {
  EXPECT_FALSE(stretches_of(Shard::striped(100, 0, 2), 100));
  EXPECT_TRUE(stretches_of(Shard::striped(2 * static_cast<int>(kMostStretches), 0, 2), 8));
}

TEST(Stretches, TheirEnds) {
  const std::vector<Stretch> ends = ends_of({{0, 20, 100}, {20, 21, 500}, {41, 3, 7}}, 10);
  ASSERT_EQ(ends.size(), 4u);
  EXPECT_TRUE(ends[0] == (Stretch{0, 20, 100})) << "the two ends are all of it";
  EXPECT_TRUE(ends[1] == (Stretch{20, 10, 500}));
  EXPECT_TRUE(ends[2] == (Stretch{31, 10, 511}));
  EXPECT_TRUE(ends[3] == (Stretch{41, 3, 7}));
}

/// Own stretches are in the list with their rows, and those of others with their rank.
TEST(SentRows, AreListedFromTheLastOfTheSequenceToTheFirst) {
  const StretchesOfRanks ranks = {
      {{0, 100, 0}, {100, 100, 300}}, {{0, 100, 100}, {100, 100, 200}}, {}};
  kernels::KeyArrivals::Portion list[kernels::KeyArrivals::kMostPortions] = {};
  const auto expect = [&](int own, const std::vector<std::pair<int, int>>& expected) {
    ASSERT_EQ(list_portions(ranks, own, list), static_cast<int>(expected.size()));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(list[i].begin, expected[i].first) << i;
      EXPECT_EQ(list[i].place, expected[i].second) << i;
    }
  };
  expect(0, {{300, 100}, {200, ~1}, {100, ~1}, {0, 0}});
  expect(1, {{300, ~0}, {200, 100}, {100, 0}, {0, ~0}});
  expect(2, {{300, ~0}, {200, ~1}, {100, ~1}, {0, ~0}});
}

TEST(SentRows, GoInMorePiecesTheMoreBytesTheyHave) {
  int last = 1;
  for (double bytes = 0; bytes < 1e12; bytes = bytes * 2 + 1) {
    const int pieces = pieces_of_bytes(bytes);
    EXPECT_GE(pieces, last);
    EXPECT_LE(pieces, kernels::KeyArrivals::kMostPieces);
    last = pieces;
  }
  EXPECT_EQ(pieces_of_bytes(0), 1);
  EXPECT_EQ(last, kernels::KeyArrivals::kMostPieces);
}

/// All heads of every rank once, in order, and each kv head not after the first head that reads it.
TEST(HeadPieces, BringEveryHeadOnce) {
  for (int group = 1; group <= 5; ++group)
    for (int kv_heads = 1; kv_heads <= 6; ++kv_heads)
      for (int ranks = 1; ranks <= std::min(group * kv_heads, 8); ++ranks)
        for (int most = 1; most <= 8; ++most) {
          SCOPED_TRACE(::testing::Message()
                       << group << " " << kv_heads << " " << ranks << " " << most);
          const int heads = group * kv_heads;
          const HeadPieces pieces(most_heads(heads, kv_heads, ranks).query, group, most, false);
          ASSERT_LE(pieces.count, most);
          for (int rank = 0; rank < ranks; ++rank) {
            const HeadShare share = head_share(heads, kv_heads, rank, ranks);
            HeadRange query{share.query.begin, share.query.begin},
                kv{share.kv.begin, share.kv.begin};
            for (int i = 0; i < pieces.count; ++i) {
              const HeadShare part = pieces.of(share, i);
              ASSERT_EQ(part.query.begin, query.end);
              ASSERT_EQ(part.kv.begin, part.query.size() > 0 ? kv.end : part.kv.end);
              query.end = part.query.end;
              if (part.query.size() > 0) kv.end = part.kv.end;
              for (int head = part.query.begin; head < part.query.end; ++head) {
                ASSERT_EQ((head - share.query.begin) / pieces.size, i);
                ASSERT_LT(head / group, kv.end) << "it has not come yet";
              }
            }
            ASSERT_EQ(query.end, share.query.end);
            ASSERT_EQ(kv.end, share.kv.end);
          }
        }
}

/// A piece has whole groups, or a group whole pieces: so the kv heads of pieces follow a rule
/// (kernels::RowPuts::Block).
TEST(HeadPieces, AndGroupsDivideEachOther) {
  for (int group = 1; group <= 12; ++group)
    for (int most = 1; most <= 3 * group; ++most)
      for (int count = 1; count <= 8; ++count)
        for (const bool whole : {false, true}) {
          const HeadPieces pieces(most, group, count, whole);
          EXPECT_TRUE(pieces.size % group == 0 || group % pieces.size == 0) << pieces.size;
          EXPECT_LE(pieces.count, count);
          EXPECT_GE(pieces.count * pieces.size, most);
          EXPECT_LT((pieces.count - 1) * pieces.size, most);
          if (whole) {
            EXPECT_EQ(pieces.size % group, 0);
          }
        }
}

TEST(HeadPieces, OfWholeGroups) {
  const HeadPieces pieces(12, 4, 2, true);
  EXPECT_EQ(pieces.size, 8);
  EXPECT_EQ(pieces.count, 2);
  const HeadShare all{{0, 12}, {0, 3}};
  EXPECT_EQ(pieces.of(all, 0).kv.end, 2);
  EXPECT_EQ(pieces.of(all, 1).kv.begin, 2);
  EXPECT_EQ(pieces.of(all, 1).kv.end, 3);
  EXPECT_EQ(HeadPieces(4, 4, 8, true).count, 1) << "one kv head";
}

}  // namespace
}  // namespace longspan

// Rows that are put into the memory of several ranks, which are regions of one GPU here: all of
// them at their place in each, with nothing written beside them, and counters at every rank; and
// ranks that wait for each other.
#include <gmock/gmock.h>

#include "kernels/row_puts.hpp"
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/strided_regions.hpp"

namespace longspan::tests {
namespace {

using kernels::RowPuts;

class PutRows : public OnDevice {
 protected:
  static PutRanks among(const DeviceArray<PutFlags>& flags, int ranks, int rank) {
    PutRanks all{.rank = rank, .ranks = ranks};
    for (int p = 0; p < ranks; ++p) all.flags[p] = flags.data() + p;
    return all;
  }

  /// The counters of all ranks, where all but `rank` are runs ahead.
  static std::vector<PutFlags> of_ranks_that_are_ahead(std::size_t ranks, int rank) {
    std::vector<PutFlags> flags(ranks);
    PutFlags& own = flags[static_cast<std::size_t>(rank)];
    for (int p = 0; p < static_cast<int>(ranks); ++p)
      if (p != rank) own.free[p] = 100, own.here[p] = 100 * PutFlags::kRun;
    return flags;
  }

  static void expect_equal(const PutFlags& one, const PutFlags& other) {
    EXPECT_THAT(one.free, ::testing::ElementsAreArray(other.free));
    EXPECT_THAT(one.here, ::testing::ElementsAreArray(other.here));
    EXPECT_THAT(one.ended, ::testing::ElementsAreArray(other.ended));
    EXPECT_EQ(one.runs, other.runs);
    EXPECT_EQ(one.before, other.before);
    EXPECT_EQ(one.blocks, other.blocks);
  }

  /// A block that goes to `to`.
  struct Shape {
    int to;
    StridedShape rows;
    std::int64_t part_width;
    int every = 1;
  };

  void expect_put(const std::vector<Shape>& shapes, int ranks, int rank, int pieces, bool says) {
    std::vector<StridedShape> rows;
    for (const Shape& s : shapes) rows.push_back(s.rows);
    const StridedRegions regions(rows);
    const std::size_t bytes = regions.bytes;
    std::vector<std::byte> from(bytes);
    for (std::byte& byte : from) byte = static_cast<std::byte>(below(256));
    const auto source = on_device(from);
    const auto count = static_cast<std::size_t>(ranks);
    std::vector<std::vector<std::byte>> expected(count,
                                                 std::vector<std::byte>(bytes, std::byte{0xff}));
    std::vector<DeviceArray<std::byte>> to;
    std::vector<DeviceArray<std::uint64_t>> words;
    const auto flags = on_device(of_ranks_that_are_ahead(count, rank));
    for (int p = 0; p < ranks; ++p) {
      to.push_back(poisoned<std::byte>(bytes));
      words.push_back(poisoned<std::uint64_t>(count));
    }
    constexpr std::uint64_t kHash = 0x1234567890abcdef;
    const auto contents = on_device(std::vector<std::uint64_t>{77});
    const std::uint64_t seventy_seven = 77;
    const auto done = on_device(std::vector<unsigned>(RowPuts::kMostPieces, 0));
    RowPuts puts;
    puts.pieces = pieces;
    puts.among = among(flags, ranks, rank);
    puts.done = done.data();
    if (says)
      puts.digest = {kHash, contents.data(), words[static_cast<std::size_t>(rank)].data() + rank};
    for (std::size_t p = 0; p < count; ++p) {
      puts.digests[p] = words[p].data() + rank;
    }
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto at = static_cast<std::size_t>(shapes[i].to);
      puts.add(regions.copy(i, source.data(), to[at].data()), shapes[i].part_width,
               shapes[i].every);
      regions.apply(i, from, expected[at]);
    }
    puts.divide();
    constexpr int kTurns = 2;  // the count of warps begins anew, with other numbers of them
    for (int turn = 0; turn < kTurns; ++turn) {
      puts.beside = turn == 0;
      backend().put_rows(puts, {});
    }
    std::vector<PutFlags> counted = of_ranks_that_are_ahead(count, rank);
    for (int p = 0; p < ranks; ++p) {
      if (p != rank) counted[static_cast<std::size_t>(p)].free[rank] = kTurns;
      counted[static_cast<std::size_t>(p)].here[rank] = kTurns * PutFlags::kRun;
    }
    counted[static_cast<std::size_t>(rank)].runs = kTurns;
    counted[static_cast<std::size_t>(rank)].before = (kTurns - 1) * PutFlags::kRun;
    const std::vector<PutFlags> found = flags.values();
    for (std::size_t p = 0; p < count; ++p) {
      SCOPED_TRACE("at rank " + std::to_string(p));
      EXPECT_EQ(to[p].values(), expected[p]);
      expect_equal(found[p], counted[p]);
      std::vector<std::uint64_t> digests(count, ~std::uint64_t{0});
      if (says)
        digests[static_cast<std::size_t>(rank)] = kernels::run_digest(kHash, &seventy_seven);
      EXPECT_EQ(words[p].values(), digests);
    }
    EXPECT_THAT(done.values(), ::testing::Each(0u));
  }
};

/// Rows of any width, in one part and in parts that do not divide it, at any address.
TEST_F(PutRows, OfAnyWidthInParts) {
  for (const std::int64_t width : {1, 6, 16, 24, 80, 250, 640, 1024, 8192, 10000})
    for (const std::int64_t ahead : {0, 2, 8, 16})
      for (const std::int64_t gap : {0, 3, 16}) {
        SCOPED_TRACE("width " + std::to_string(width) + " ahead " + std::to_string(ahead) +
                     " gap " + std::to_string(gap));
        const std::int64_t third = (width + 2) / 3;
        expect_put({{0, {width, 37, gap, 0, ahead}, third},
                    {1, {width, 1, 0, gap, ahead}, width},
                    {1, {width, reduced(150, 20), 16, 0, ahead}, (third + 15) / 16 * 16}},
                   2, 0, 3, true);
      }
}

/// Parts that go after every few pieces, several ranks, blocks of no rows, and no blocks.
TEST_F(PutRows, ToEveryRankInPieces) {
  for (const int ranks : {1, 3, 8}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    std::vector<Shape> shapes;
    for (int i = 0; i < RowPuts::kMostBlocks; ++i) {
      const int every = 1 << below(3);
      const std::int64_t parts = 1 + below(8 / every);
      const std::int64_t part = 16 * (1 + below(20));
      const std::int64_t width = parts * part - 16 * below(2);
      shapes.push_back({static_cast<int>(below(ranks)),
                        {width > 0 ? width : part, below(4) == 0 ? 0 : below(reduced(300, 40)),
                         16 * below(3), 16 * below(3), 4 * below(5)},
                        part,
                        every});
    }
    expect_put(shapes, ranks, ranks - 1, RowPuts::kMostPieces, true);
    expect_put({}, ranks, 0, 1, false);
  }
}

TEST_F(PutRows, RefusesMoreBlocksThanALaunchTakes) {
  RowPuts puts;
  std::byte some[16];
  for (int i = 0; i < RowPuts::kMostBlocks; ++i) puts.add({some, some, 16, 16, 16, 1}, 16);
  puts.add({some, some, 16, 16, 16, 0}, 16);  // is none
  EXPECT_THROW(puts.add({some, some, 16, 16, 16, 1}, 16), InputError);
}

}  // namespace
}  // namespace longspan::tests

// Messages between ranks, on socket pairs and by one thread: receives in any order get their data,
// and an error in one group does not affect the others.
#include "comm/tcp/mesh.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/fresh_seed.hpp"

namespace longspan::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

/// `size` meshes, every two of them connected.
class Ranks {
 public:
  explicit Ranks(int size) {
    std::vector<std::vector<Fd>> ends(size);
    for (auto& of_rank : ends) of_rank.resize(size);
    for (int p = 0; p < size; ++p)
      for (int q = p + 1; q < size; ++q) {
        int pair[2];
        EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
        ends[p][q] = Fd(pair[0]);
        ends[q][p] = Fd(pair[1]);
      }
    for (auto& of_rank : ends) meshes_.push_back(std::make_unique<Mesh>(std::move(of_rank)));
  }
  Mesh& operator[](int rank) { return *meshes_[rank]; }
  void open(std::uint32_t group) {
    for (auto& mesh : meshes_) mesh->open(group);
  }
  void end(int rank) { meshes_[rank].reset(); }

  /// Until it holds, or nothing has moved for a while.
  bool until(const std::function<bool()>& holds) {
    for (int idle = 0; idle < 1000;) {
      if (holds()) return true;
      bool moved = false;
      for (auto& mesh : meshes_) moved |= mesh && mesh->progress();
      idle = moved ? 0 : idle + 1;
    }
    return holds();
  }

 private:
  std::vector<std::unique_ptr<Mesh>> meshes_;
};

/// A message with its memory.
struct Message {
  Bytes bytes;
  std::size_t left = 1;
  Mesh::Part part;
};

Bytes random_bytes(std::mt19937& random, std::size_t size) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::unique_ptr<Message> message(std::uint32_t group, int peer, Bytes bytes, std::uint64_t digest) {
  auto one = std::make_unique<Message>();
  one->bytes = std::move(bytes);
  one->part.peer = peer;
  one->part.left = &one->left;
  one->part.header.group = group;
  one->part.header.bytes = one->bytes.size();
  one->part.header.digest = digest;
  return one;
}

std::unique_ptr<Message> send(Mesh& mesh, std::uint32_t group, int peer, Bytes bytes,
                              std::uint64_t digest = 0) {
  auto one = message(group, peer, std::move(bytes), digest);
  one->part.from = one->bytes.data();
  mesh.post(one->part);
  return one;
}

std::unique_ptr<Message> receive(Mesh& mesh, std::uint32_t group, int peer, std::size_t bytes) {
  auto one = message(group, peer, Bytes(bytes, std::byte{0xA5}), 0);
  one->part.receives = true;
  one->part.to = one->bytes.data();
  mesh.post(one->part);
  return one;
}

bool done(const std::unique_ptr<Message>& one) { return one->left == 0 && one->part.is_done; }

/// Every rank posts its messages at any time; those of one group and two ranks keep their order.
TEST(Mesh, BringsEveryMessageToItsPlace) {
  const unsigned seed = tests::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    const int size = 2 + static_cast<int>(random() % 3);
    const std::uint32_t groups = 1 + random() % 3;
    Ranks ranks(size);
    for (std::uint32_t group = 0; group < groups; ++group) ranks.open(group);
    std::vector<std::unique_ptr<Message>> all;
    // The messages to post: on one rank, those of each pair and group in this order.
    struct Line {
      int from, to;
      std::uint32_t group;
      std::deque<Bytes> sends, receives;
      std::deque<std::size_t> sent, received;
    };
    std::vector<Line> lines;
    for (int p = 0; p < size; ++p)
      for (int q = 0; q < size; ++q)
        for (std::uint32_t group = 0; p != q && group < groups; ++group) {
          Line line{p, q, group, {}, {}, {}, {}};
          for (unsigned i = 0; i < random() % 6; ++i) {
            const std::size_t sizes[] = {0, 1, 31, 1000, 16384, 16385, 100'000, 700'000};
            line.sends.push_back(random_bytes(random, sizes[random() % 8]));
            line.receives.push_back(line.sends.back());
          }
          lines.push_back(line);
        }
    for (;;) {
      std::vector<Line*> open;
      for (Line& line : lines)
        if (!line.sends.empty() || !line.receives.empty()) open.push_back(&line);
      if (open.empty()) break;
      Line& line = *open[random() % open.size()];
      const bool sends = !line.sends.empty() && (line.receives.empty() || random() % 2);
      if (sends) {
        line.sent.push_back(all.size());
        all.push_back(send(ranks[line.from], line.group, line.to, line.sends.front(), all.size()));
        line.sends.pop_front();
      } else {
        line.received.push_back(all.size());
        all.push_back(receive(ranks[line.to], line.group, line.from, line.receives.front().size()));
        line.receives.pop_front();
      }
      if (random() % 2) ranks[static_cast<int>(random() % size)].progress();
    }
    ASSERT_TRUE(ranks.until([&] { return std::all_of(all.begin(), all.end(), done); }));
    for (const Line& line : lines)
      for (std::size_t i = 0; i < line.sent.size(); ++i) {
        ASSERT_TRUE(all[line.received[i]]->bytes == all[line.sent[i]]->bytes);
        EXPECT_EQ(all[line.received[i]]->part.header.digest, line.sent[i]);
        EXPECT_FALSE(all[line.received[i]]->part.is_wrong);
      }
  }
}

TEST(Mesh, KeepsWhatComesBeforeItsGroup) {
  std::mt19937 random(1);
  Ranks ranks(2);
  ranks.open(0);
  ranks[0].open(3);
  const Bytes early = random_bytes(random, 300'000), later = random_bytes(random, 10);
  const auto first = send(ranks[0], 3, 1, early), second = send(ranks[0], 0, 1, later);
  const auto got = receive(ranks[1], 0, 0, later.size());
  ASSERT_TRUE(ranks.until([&] { return done(got); }));
  EXPECT_TRUE(got->bytes == later);
  ranks[1].open(3);
  const auto group = receive(ranks[1], 3, 0, early.size());
  EXPECT_TRUE(done(group));
  EXPECT_TRUE(group->bytes == early);
}

TEST(Mesh, TakesOverWhatHasPartlyComeEarly) {
  std::mt19937 random(2);
  Ranks ranks(2);
  ranks.open(0);
  ranks.open(1);
  const Bytes large = random_bytes(random, 3'000'000);
  const auto sent = send(ranks[0], 1, 1, large), last = send(ranks[0], 0, 1, Bytes(5));
  const auto other = receive(ranks[1], 0, 0, 5);
  for (int i = 0; i < 3; ++i) {
    ranks[0].progress();
    ranks[1].progress();
  }
  ASSERT_FALSE(done(sent));
  const auto got = receive(ranks[1], 1, 0, large.size());
  ASSERT_TRUE(ranks.until([&] { return done(got) && done(other); }));
  EXPECT_TRUE(got->bytes == large);
}

TEST(Mesh, SaysThatAnotherMessageCameAndGoesOn) {
  Ranks ranks(2);
  ranks.open(0);
  const auto longer = send(ranks[0], 0, 1, Bytes(50'000)), next = send(ranks[0], 0, 1, Bytes(7));
  const auto wrong = receive(ranks[1], 0, 0, 20), right = receive(ranks[1], 0, 0, 7);
  ASSERT_TRUE(ranks.until([&] { return done(wrong) && done(right); }));
  EXPECT_TRUE(wrong->part.is_wrong);
  EXPECT_EQ(wrong->part.header.bytes, 50'000u);
  EXPECT_TRUE(wrong->bytes == Bytes(20, std::byte{0xA5}));
  EXPECT_FALSE(right->part.is_wrong);
}

TEST(Mesh, ACancelledGroupLeavesTheOthersWhole) {
  std::mt19937 random(3);
  Ranks ranks(2);
  ranks.open(0);
  ranks.open(1);
  auto large = send(ranks[0], 1, 1, random_bytes(random, 5'000'000));
  auto behind = send(ranks[0], 1, 1, Bytes(1000));
  auto half = receive(ranks[1], 1, 0, 5'000'000);
  for (int i = 0; i < 3; ++i) {
    ranks[0].progress();
    ranks[1].progress();
  }
  ASSERT_FALSE(done(large));
  ranks[0].cancel(1);
  large.reset();  // and its memory is gone
  behind.reset();
  ranks[1].cancel(1);
  const Bytes before = half->bytes;
  const Bytes text = random_bytes(random, 1000);
  const auto sent = send(ranks[0], 0, 1, text);
  const auto got = receive(ranks[1], 0, 0, text.size());
  ASSERT_TRUE(ranks.until([&] { return done(got) && done(sent); }));
  EXPECT_TRUE(got->bytes == text);
  EXPECT_TRUE(half->bytes == before);

  ranks.open(2);  // a rank that has not cancelled its group yet
  auto one_sided = send(ranks[0], 2, 1, Bytes(400'000));
  ranks[1].cancel(2);
  const auto more = send(ranks[0], 0, 1, text);
  const auto again = receive(ranks[1], 0, 0, text.size());
  ASSERT_TRUE(ranks.until([&] { return done(again); }));
  EXPECT_TRUE(again->bytes == text);
}

TEST(Mesh, ACancelledReceiverOfAnEarlyMessageDropsTheRest) {
  std::mt19937 random(4);
  Ranks ranks(2);
  ranks.open(0);
  ranks.open(1);
  const auto large = send(ranks[0], 1, 1, random_bytes(random, 4'000'000));
  const Bytes text = random_bytes(random, 100);
  const auto sent = send(ranks[0], 0, 1, text);
  const auto got = receive(ranks[1], 0, 0, text.size());
  for (int i = 0; i < 3; ++i) {
    ranks[0].progress();
    ranks[1].progress();
  }
  ranks[1].cancel(1);
  ASSERT_TRUE(ranks.until([&] { return done(got); }));
  EXPECT_TRUE(got->bytes == text);
}

TEST(Mesh, KnowsThatAConnectionHasEndedAndGivesWhatCameBefore) {
  Ranks ranks(3);
  ranks.open(0);
  const auto sent = send(ranks[0], 0, 1, Bytes(2000, std::byte{1}));
  ASSERT_TRUE(ranks.until([&] { return done(sent); }));
  ranks.end(0);
  const auto got = receive(ranks[1], 0, 0, 2000), missing = receive(ranks[1], 0, 0, 1);
  const auto of_other = receive(ranks[1], 0, 2, 1);
  ASSERT_TRUE(ranks.until([&] { return ranks[1].trouble(missing->part) != nullptr; }));
  EXPECT_TRUE(done(got));
  EXPECT_EQ(ranks[1].trouble(got->part), nullptr);
  EXPECT_EQ(ranks[1].trouble(of_other->part), nullptr);
  EXPECT_THAT(ranks[1].trouble(missing->part), HasSubstr("closed"));
  const auto to_nobody = send(ranks[1], 0, 0, Bytes(5));
  ranks.until([&] { return ranks[1].trouble(to_nobody->part) != nullptr; });
  EXPECT_NE(ranks[1].trouble(to_nobody->part), nullptr);
}

TEST(Mesh, TakesNothingForAMessageThatIsNone) {
  const unsigned seed = tests::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    Fd stranger(pair[1]);
    std::vector<Fd> ends(2);
    ends[1] = Fd(pair[0]);
    Mesh mesh(std::move(ends));
    mesh.open(0);
    const auto got = receive(mesh, 0, 1, 100);
    Bytes bytes = random_bytes(random, 32 + random() % 5000);
    if (round % 2) {  // a header of ours with impossible lengths
      const Mesh::Header header{0x4c53504d, 0, 0, 0, (std::uint64_t{1} << 48) + random(), 0};
      std::copy_n(reinterpret_cast<const std::byte*>(&header), sizeof header, bytes.begin());
    }
    ASSERT_EQ(::send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    for (int i = 0; i < 3; ++i) mesh.progress();
    ASSERT_NE(mesh.trouble(got->part), nullptr);
    EXPECT_TRUE(got->bytes == Bytes(100, std::byte{0xA5}));
  }
}

TEST(Mesh, AsksForNothingAndReadsNothing) {
  Ranks ranks(2);
  ranks.open(0);
  const auto sent = send(ranks[0], 0, 1, Bytes(50'000'000));
  EXPECT_FALSE(ranks.until([&] { return done(sent); }));
  const auto got = receive(ranks[1], 0, 0, 50'000'000);
  EXPECT_TRUE(ranks.until([&] { return done(sent) && done(got); }));
}

}  // namespace
}  // namespace longspan::comm

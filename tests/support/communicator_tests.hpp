// What every communicator on CPUs does: every collective on every rank count, with random bytes.
// Each rank computes its expected data from (seed, sender, receiver), so only the seed comes from
// the code under test. A file that includes this provides make_world and meet, and a main that runs
// it on several ranks.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/communicator.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "tests/support/message.hpp"
#include "tests/support/random_elements.hpp"

namespace {
thread_local long allocations = 0;
}  // namespace

// Counts what each thread allocates by new, separately: the thread that relays messages allocates
// at any time. If inlined, compilers report a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(std::max<std::size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(std::max<std::size_t>(bytes, 1));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}

namespace longspan::tests {

/// All ranks of the test, in a communicator of its own.
Communicator make_world(CommOptions options);
/// Returns when all ranks have come here, without a communicator. A fault right after a world is
/// made may overtake a message to another rank, and end the making of the world.
void meet();

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Communicator host_world() { return make_world({}); }

/// A world with a deadline that the test waits for. In a roll call a rank that is silent for a
/// quarter of it is blamed, and among many ranks on few cores each runs less often.
Communicator impatient_world() {
  static const int size = host_world().size();
  return make_world({.deadline = std::chrono::seconds(size > 4 ? 3 : 2)});
}

Bytes poison(std::size_t bytes) { return Bytes(bytes, 0xA5); }

const std::vector<std::size_t> kSizes = {0, 1, 3, 16, 4095, 4096, 65537, 1 << 20};

TEST(Collectives, AllGather) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (std::size_t bytes : kSizes) {
    SCOPED_TRACE(bytes);
    Bytes expected;
    for (int p = 0; p < world.size(); ++p) append(expected, message(seed, p, 0, bytes));
    const Bytes mine = message(seed, world.rank(), 0, bytes);
    Bytes got = poison(expected.size());
    comm::transport_of(world).all_gather(mine.data(), got.data(), bytes, {}, "test");
    EXPECT_TRUE(got == expected);

    Bytes in_place = poison(expected.size());
    if (bytes) std::memcpy(in_place.data() + world.rank() * bytes, mine.data(), bytes);
    comm::transport_of(world).all_gather(in_place.data() + world.rank() * bytes, in_place.data(),
                                         bytes, {}, "test in place");
    EXPECT_TRUE(in_place == expected);
  }
}

TEST(Collectives, AllToAll) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (std::size_t bytes : kSizes) {
    SCOPED_TRACE(bytes);
    Bytes send, expected;
    for (int p = 0; p < world.size(); ++p) {
      append(send, message(seed, world.rank(), p, bytes));
      append(expected, message(seed, p, world.rank(), bytes));
    }
    Bytes got = poison(expected.size());
    comm::transport_of(world).all_to_all(send.data(), got.data(), bytes, {}, "test");
    EXPECT_TRUE(got == expected);
  }
}

TEST(Collectives, ShiftByEveryDistance) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  for (int distance = -size - 1; distance <= size + 1; ++distance) {
    SCOPED_TRACE(distance);
    for (std::size_t bytes : kSizes) {
      const int from = ((world.rank() - distance) % size + size) % size;
      const Bytes mine = message(seed, world.rank(), distance + 100, bytes);
      Bytes got = poison(bytes);
      comm::transport_of(world).shift(mine.data(), got.data(), bytes, distance, {}, "test");
      EXPECT_TRUE(got == message(seed, from, distance + 100, bytes));
    }
  }
}

/// What rank p sends to the rank at `distance`: a size of its own, for a third of them 0.
std::size_t uneven_bytes(std::uint64_t seed, int rank, int distance) {
  std::seed_seq mix{seed, std::uint64_t(rank), std::uint64_t(distance + 1000)};
  std::mt19937 random(mix);
  return random() % 3 == 0 ? 0 : random() % 100000;
}

TEST(Collectives, ShiftOfWhatDiffersInSize) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  for (int distance = -size - 1; distance <= size + 1; ++distance) {
    SCOPED_TRACE(distance);
    const int from = ((world.rank() - distance) % size + size) % size;
    const Bytes mine =
        message(seed, world.rank(), distance + 100, uneven_bytes(seed, world.rank(), distance));
    const Bytes expected = message(seed, from, distance + 100, uneven_bytes(seed, from, distance));
    const std::size_t room = expected.size() + 16;  // nothing is written past what is received
    Bytes got = poison(room);
    comm::transport_of(world).shift(mine.data(), mine.size(), got.data(), expected.size(), distance,
                                    {}, "test");
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got.begin()));
    EXPECT_TRUE(Bytes(got.begin() + static_cast<std::ptrdiff_t>(expected.size()), got.end()) ==
                poison(16));
  }
}

/// All distances at once, as keys travel around a ring.
TEST(Started, ShiftsOfWhatDiffersInSize) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  std::vector<Bytes> sent, got, expected;
  for (int distance = 1; distance < size; ++distance) {
    const int from = (world.rank() - distance + size) % size;
    sent.push_back(
        message(seed, world.rank(), distance, uneven_bytes(seed, world.rank(), distance)));
    expected.push_back(message(seed, from, distance, uneven_bytes(seed, from, distance)));
    got.push_back(poison(expected.back().size()));
  }
  std::vector<comm::Transfer> open;
  for (int i = 0; i < size - 1; ++i)
    open.push_back(comm::transport_of(world).start_shift(
        sent[i].data(), sent[i].size(), got[i].data(), got[i].size(), i + 1, {}, "test"));
  for (int i = size - 2; i >= 0; --i) {
    open[i].wait({});
    EXPECT_TRUE(got[i] == expected[i]) << "distance " << i + 1;
  }
}

/// As many pieces in one shift as one may have.
TEST(Started, AShiftOfTheMostPieces) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size(), from = (world.rank() + size - 1) % size;
  std::vector<Bytes> sent, got, expected;
  std::vector<comm::Piece> pieces;
  for (int i = 0; i < comm::Transfers::kMost; ++i) {
    sent.push_back(message(seed, world.rank(), i, uneven_bytes(seed, world.rank(), i)));
    expected.push_back(message(seed, from, i, uneven_bytes(seed, from, i)));
    got.push_back(poison(expected.back().size()));
  }
  for (std::size_t i = 0; i < sent.size(); ++i)
    pieces.push_back({sent[i].data(), sent[i].size(), got[i].data(), got[i].size()});
  comm::transport_of(world).start_shifts(pieces, 1, {}, "test").wait({});
  for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_TRUE(got[i] == expected[i]) << i;
}

/// A rank that waits for a late one is asleep when the first part of its message comes.
TEST(Collectives, AShiftBringsALargeMessageOfALateRank) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int from = (world.rank() + world.size() - 1) % world.size();
  constexpr std::size_t kBytes = 3'000'001;
  const Bytes mine = message(seed, world.rank(), 0, kBytes);
  Bytes got = poison(kBytes);
  if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  comm::transport_of(world).shift(mine.data(), kBytes, got.data(), kBytes, 1, {}, "test");
  EXPECT_TRUE(got == message(seed, from, 0, kBytes));
}

TEST(Collectives, AShiftToItselfReceivesWhatItSends) {
  const Communicator world = host_world();
  const Bytes send = poison(16);
  Bytes got(16);
  EXPECT_THROW(
      comm::transport_of(world).shift(send.data(), 16, got.data(), 8, world.size(), {}, "test"),
      UsageError);
}

/// Against sizes computed here: of each collective, of whole and of uneven shifts, without the
/// bytes of digests.
TEST(Collectives, CountWhatTheyReceive) {
  const Communicator world = host_world();
  comm::Transport& transport = comm::transport_of(world);
  const int size = world.size(), rank = world.rank();
  const auto others = static_cast<std::uint64_t>(size - 1);
  const Bytes send = poison(static_cast<std::size_t>(size) * 400);
  Bytes got = send;
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(size), 7);
  std::uint64_t expected = transport.received_bytes();
  const auto expect_more = [&](std::uint64_t bytes, const char* what) {
    expected += bytes;
    EXPECT_EQ(transport.received_bytes(), expected) << what;
  };
  transport.all_gather(send.data(), got.data(), 100, {}, "gather", digests.data());
  expect_more(100 * others, "all_gather");
  transport.all_to_all(send.data(), got.data(), 30, {}, "all to all", digests.data());
  expect_more(30 * others, "all_to_all");
  transport.reduce_scatter(send.data(), got.data(), 25, fp32, {}, "sum");
  expect_more(100 * others, "reduce_scatter");
  transport.shift(send.data(), got.data(), 77, size, {}, "shift");
  expect_more(0, "a shift to itself");
  // The sizes are those of the sender: 10 for each number of its rank.
  const int from = (rank + size - 1) % size;
  if (size > 1)
    transport.start_shift(send.data(), 10 * rank, got.data(), 10 * from, 1, {}, "ring").wait({});
  expect_more(size > 1 ? 10 * from : 0, "a shift of what differs");
  static_cast<void>(world.gather("a letter is none of the data", "letter"));
  expect_more(0, "letters");
}

/// Of order 1, different for each rank, and the same on every rank that computes it.
std::vector<float> values_of(std::uint64_t seed, int rank, std::size_t count) {
  return random_floats(static_cast<std::int64_t>(count), seed, static_cast<std::uint32_t>(rank));
}

Bytes stored(const std::vector<float>& values, DType dtype) {
  Bytes bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    store_element(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  return bytes;
}

/// Against the sum in float64: the difference may be one rounding to the type, and the roundings of
/// the sums in fp32. Also bit by bit against the sum in fp32 in rank order.
TEST(Collectives, ReduceScatter) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  for (const DType dtype : {fp32, fp16, bf16})
    for (const std::size_t count : {0, 1, 3, 511, 512, 513, 30001}) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(count));
      std::vector<Bytes> sent;
      for (int p = 0; p < size; ++p)
        sent.push_back(stored(values_of(seed + count, p, count * size), dtype));
      Bytes& mine = sent[world.rank()];
      Bytes got = poison(count * size_of(dtype));
      comm::transport_of(world).reduce_scatter(mine.data(), got.data(), count, dtype, {}, "sum");

      const double unit = std::ldexp(1.0, dtype == fp32 ? -24 : dtype == fp16 ? -11 : -8);
      Bytes expected(got.size());
      for (std::size_t i = 0; i < count; ++i) {
        const auto at = static_cast<std::int64_t>(world.rank() * count + i);
        float sum = load_element(sent[0].data(), dtype, at);
        double exact = sum, largest = std::abs(exact);
        for (int p = 1; p < size; ++p) {
          const float one = load_element(sent[p].data(), dtype, at);
          sum += one;
          exact += double{one};
          largest += std::abs(double{one});
        }
        store_element(expected.data(), dtype, static_cast<std::int64_t>(i), sum);
        const double found = load_element(got.data(), dtype, static_cast<std::int64_t>(i));
        ASSERT_LE(std::abs(found - exact),
                  unit * std::abs(exact) + size * std::ldexp(largest, -24) + 1e-7)
            << i;
      }
      EXPECT_TRUE(got == expected) << "the order of the sum is that of the ranks";

      Bytes again = poison(got.size());
      comm::transport_of(world).reduce_scatter(mine.data(), again.data(), count, dtype, {},
                                               "again");
      EXPECT_TRUE(again == got);
      unsigned char* own = mine.data() + world.rank() * got.size();
      comm::transport_of(world).reduce_scatter(mine.data(), own, count, dtype, {}, "in place");
      EXPECT_TRUE(std::equal(got.begin(), got.end(), own));
    }
}

TEST(Collectives, ASumKeepsInfinityAndNaN) {
  const Communicator world = host_world();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : {fp32, fp16, bf16}) {
    std::vector<float> values(3 * world.size(), 1.0f);
    for (int p = 0; p < world.size(); ++p) {
      values[3 * p] = world.rank() == 0 ? infinity : 1;
      values[3 * p + 1] = world.rank() == world.size() - 1 ? std::nanf("") : 1;
    }
    const Bytes send = stored(values, dtype);
    Bytes got = poison(3 * size_of(dtype));
    comm::transport_of(world).reduce_scatter(send.data(), got.data(), 3, dtype, {}, "sum");
    EXPECT_EQ(load_element(got.data(), dtype, 0), infinity);
    EXPECT_TRUE(std::isnan(load_element(got.data(), dtype, 1)));
    EXPECT_EQ(load_element(got.data(), dtype, 2), static_cast<float>(world.size()));
  }
}

/// A transfer of some collective, with what it must bring.
struct Started {
  Bytes send, got, expected;
  comm::Transfer transfer;
};

/// The `number`th: collectives in turn, of `bytes` each.
std::unique_ptr<Started> start_one(const Communicator& world, std::uint64_t seed, int number,
                                   std::size_t bytes) {
  auto one = std::make_unique<Started>();
  comm::Transport& transport = comm::transport_of(world);
  const int size = world.size(), rank = world.rank();
  seed += 1000 * number;
  switch (number % 4) {
    case 0:
      one->send = message(seed, rank, 0, bytes);
      for (int p = 0; p < size; ++p) append(one->expected, message(seed, p, 0, bytes));
      one->got = poison(one->expected.size());
      one->transfer =
          transport.start_all_gather(one->send.data(), one->got.data(), bytes, {}, "all gather");
      break;
    case 1:
      for (int p = 0; p < size; ++p) {
        append(one->send, message(seed, rank, p, bytes));
        append(one->expected, message(seed, p, rank, bytes));
      }
      one->got = poison(one->expected.size());
      one->transfer =
          transport.start_all_to_all(one->send.data(), one->got.data(), bytes, {}, "all to all");
      break;
    case 2: {
      const int distance = number + 1;
      one->send = message(seed, rank, 0, bytes);
      one->expected = message(seed, ((rank - distance) % size + size) % size, 0, bytes);
      one->got = poison(bytes);
      one->transfer =
          transport.start_shift(one->send.data(), one->got.data(), bytes, distance, {}, "shift");
      break;
    }
    default: {
      const std::size_t count = bytes / sizeof(float);
      std::vector<float> sum(count);
      for (int p = 0; p < size; ++p) {
        const auto values = values_of(seed, p, count * size);
        for (std::size_t i = 0; i < count; ++i) sum[i] += values[rank * count + i];
        if (p == rank) one->send = stored(values, fp32);
      }
      one->expected = stored(sum, fp32);
      one->got = poison(one->expected.size());
      one->transfer =
          transport.start_reduce_scatter(one->send.data(), one->got.data(), count, fp32, {}, "sum");
    }
  }
  return one;
}

/// Of sums the bits too: theirs begin with rank 0's term.
bool is_as_expected(const Started& one) { return one.got == one.expected; }

TEST(Started, EndInAnyOrderOnEveryRank) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  std::mt19937 random(static_cast<unsigned>(seed) + world.rank());  // another order on each rank
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Started>> open;
    for (int number = 0; number < 15; ++number)
      open.push_back(start_one(world, seed + round, number, kSizes[(number + round) % 8]));
    std::shuffle(open.begin(), open.end(), random);
    for (std::size_t i = 0; i < open.size(); ++i) {
      if (i == 7) world.barrier("between two waits");
      open[i]->transfer.wait({});
      EXPECT_TRUE(is_as_expected(*open[i])) << i;
      open[i]->transfer.wait({});
      EXPECT_TRUE(open[i]->transfer.test());
    }
  }
}

/// The others come to the gather only with the data, which is more than a connection holds.
TEST(Started, GoOnWhileAGatherWaits) {
  const Communicator world = host_world();
  const std::size_t bytes = std::size_t{24} << 20;
  const int rank = world.rank(), last = world.size() - 1;
  const std::vector<std::byte> send(rank == 0 ? bytes : 0, std::byte{7});
  std::vector<std::byte> got(rank == last ? bytes : 0);
  auto transfer = comm::transport_of(world).start_shift(send.data(), send.size(), got.data(),
                                                        got.size(), last, {}, "to the last");
  if (rank > 0) transfer.wait({});
  world.barrier("behind the shift");
  transfer.wait({});
  EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{7}), std::ssize(got));
}

TEST(Started, GoOnBesideCollectivesThatBlock) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (int number = 0; number < 10; ++number) {
    const auto one = start_one(world, seed, number, 1 << 18);
    std::uint64_t mine = seed + world.rank();
    std::vector<std::uint64_t> got(world.size());
    for (int turn = 0; turn < 3; ++turn)
      comm::transport_of(world).all_gather(&mine, got.data(), sizeof mine, {}, "meanwhile");
    for (int p = 0; p < world.size(); ++p) EXPECT_EQ(got[p], seed + p);
    one->transfer.wait({});
    EXPECT_TRUE(is_as_expected(*one)) << number;
  }
}

TEST(Started, TestBringsThemToTheirEnd) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (int number = 0; number < 10; ++number) {
    const auto one = start_one(world, seed, number, (1 << 18) + 4);
    while (!one->transfer.test()) std::this_thread::yield();
    one->transfer.wait({});
    EXPECT_TRUE(is_as_expected(*one)) << number;
  }
}

TEST(Started, SayWhatTheRunIsToo) {
  const Communicator world = host_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  std::vector<std::uint64_t> digests(world.size());
  digests[world.rank()] = world.rank() == 1 ? 8 : 7;
  std::vector<int> got(world.size());
  int mine = 1;
  comm::Transfer transfer = comm::transport_of(world).start_all_gather(
      &mine, got.data(), sizeof mine, {}, "states", digests.data());
  EXPECT_THROW(transfer.wait({}), UsageError);
  EXPECT_THROW(world.barrier("after"), UsageError);
}

TEST(Started, ASteadyStateAllocatesNothing) {
  const Communicator world = host_world();
  comm::Transport& transport = comm::transport_of(world);
  const std::size_t size = world.size(), bytes = 1 << 16;
  Bytes send(size * bytes), got(4 * size * bytes);
  long before = 0;
  for (int round = 0; round < 12; ++round) {
    if (round == 6) {
      world.barrier("all are warm");
      before = allocations;
    }
    unsigned char* place = got.data();
    comm::Transfer one = transport.start_shift(send.data(), place, bytes, 1, {},
                                               "a step with a name of more than a few letters");
    comm::Transfer other =
        transport.start_all_gather(send.data(), place + bytes, bytes, {}, "gather");
    comm::Transfer sum = transport.start_reduce_scatter(send.data(), place + (size + 1) * bytes,
                                                        bytes / 4, fp32, {}, "sum");
    sum.wait({});
    while (!one.test()) std::this_thread::yield();
    one.wait({});
    other.wait({});
    transport.all_to_all(send.data(), place, bytes, {}, "all to all");
  }
  EXPECT_EQ(allocations - before, 0);
}

TEST(Started, ThatNobodyWaitsForStillArrive) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (int number = 0; number < 10; ++number) {
    const auto one = start_one(world, seed, number, 1 << 18);
    if (world.rank() % 2 == 0) {
      one->transfer = {};
    } else {
      one->transfer.wait({});
    }
    EXPECT_TRUE(is_as_expected(*one)) << number;
  }
  try {  // and so do those that an exception passes
    const auto one = start_one(world, seed, 3, 1 << 18);
    throw std::runtime_error("of the caller's");
  } catch (const std::runtime_error&) {
  }
  std::unique_ptr<Started> last;
  {
    const Communicator short_lived = host_world();
    last = start_one(short_lived, seed, 1, 1 << 18);
  }
  last->transfer.wait({});  // it kept the communicator
  EXPECT_TRUE(is_as_expected(*last));
  world.barrier("the communicator lives on");
}

TEST(Collectives, ManyInARowKeepTheirOrder) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t mine = seed * 1000003u + round * 101 + world.rank();
    std::vector<std::uint64_t> got(world.size());
    comm::transport_of(world).all_gather(&mine, got.data(), sizeof mine, {}, "round");
    for (int p = 0; p < world.size(); ++p) ASSERT_EQ(got[p], seed * 1000003u + round * 101 + p);
  }
  comm::transport_of(world).wait({}, "end");
}

TEST(Gather, InRankOrderWithAnyBytesAndLengths) {
  const Communicator world = host_world();
  for (int round = 0; round < 20; ++round) {
    const auto text_of = [&](int p) {
      return std::string(static_cast<std::size_t>(p) * 5000, '\0') + "rank:" + std::to_string(p) +
             "\n" + std::to_string(round);
    };
    const auto texts = world.gather(text_of(world.rank()), "gather");
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(world.size()));
    for (int p = 0; p < world.size(); ++p) EXPECT_EQ(texts[p], text_of(p));
  }
  world.barrier("end");
}

TEST(Agree, PassesWhereAllAreEqual) {
  const Communicator world = host_world();
  agree(world, {{"heads", "32"}, {"dim", "128"}}, "make the layer");
}

TEST(Agree, NamesTheArgumentAndBothValuesOnEveryRank) {
  const Communicator world = host_world();
  for (int odd = 1; odd < world.size(); ++odd) {
    const bool me = world.rank() == odd;
    try {
      agree(world, {{"heads", "32"}, {"dim", me ? "64" : "128"}}, "make the layer");
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'dim'"));
      EXPECT_THAT(error.what(), HasSubstr("rank 0 has 128"));
      EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(odd) + " has 64"));
    }
    agree(world, {{"heads", "32"}}, "again");  // the communicator lives on
  }
}

/// Runs `work` and expects it to fail. Then every later call must fail alike, and report that the
/// communicator had ended before it.
RankError failure_of(const Communicator& world, const std::function<void()>& work) {
  try {
    work();
  } catch (const RankError& error) {
    for (int again = 0; again < 2; ++again) {
      try {
        world.barrier("after the failure");
        ADD_FAILURE() << "a failed communicator went on";
      } catch (const RankError& same) {
        EXPECT_THAT(same.what(),
                    AllOf(HasSubstr("had ended before this call"), HasSubstr(error.what())));
        EXPECT_EQ(same.rank(), error.rank());
        EXPECT_EQ(same.step(), error.step());
      }
    }
    return error;
  }
  ADD_FAILURE() << "no error";
  return RankError(ErrorKind::internal, -2, "", "");
}

TEST(Abort, EndsTheOthersEarlyWithTheReason) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int quitter = world.size() - 1;
  std::vector<int> got(world.size());
  meet();
  if (world.rank() == quitter) world.abort("q.npy is truncated");
  const RankError error = failure_of(world, [&] {
    comm::transport_of(world).all_gather(&got[world.rank()], got.data(), sizeof(int), {}, "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.rank(), quitter);
  EXPECT_THAT(error.what(), HasSubstr("q.npy is truncated"));
}

TEST(Abort, EndsAGatherToo) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  meet();
  if (world.rank() == 0) world.abort("no memory");
  const RankError error = failure_of(world, [&] { world.barrier("meet"); });
  EXPECT_EQ(error.rank(), 0);
}

TEST(Abort, EndsTransfersThatAreUnderWay) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  Bytes send(1 << 20), got = poison(world.size() << 20), other = poison(1 << 20);
  comm::Transfer first, second;
  if (world.rank() != 0) {
    first = comm::transport_of(world).start_all_gather(send.data(), got.data(), send.size(), {},
                                                       "states");
    second = comm::transport_of(world).start_shift(send.data(), other.data(), send.size(), 1, {},
                                                   "ring");
  }
  world.barrier("all have started");
  meet();
  if (world.rank() == 0) world.abort("no memory");
  const RankError error =
      failure_of(world, [&] { world.rank() == 0 ? world.barrier("own") : first.wait({}); });
  EXPECT_EQ(error.rank(), 0);
  EXPECT_THAT(error.what(), HasSubstr("no memory"));
  if (world.rank() != 0) {
    const Bytes before = other;
    EXPECT_THROW(second.test(), RankError);
    EXPECT_THROW(second.wait({}), RankError);
    EXPECT_TRUE(other == before);
  }
}

TEST(Disagreement, DifferentSizesAreNamed) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  meet();
  const std::size_t bytes = world.rank() == 1 ? 12 : 16;
  Bytes send(16), got(16 * world.size());
  const RankError error = failure_of(world, [&] {
    comm::transport_of(world).all_gather(send.data(), got.data(), bytes, {}, "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.step(), "states");
}

TEST(Disagreement, DifferentSizesOfAShiftAreNamed) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const Bytes send(64);
  Bytes got(64);
  const std::size_t expected = world.rank() == 1 ? 48 : 32;
  const RankError error = failure_of(world, [&] {
    comm::transport_of(world).shift(send.data(), 32, got.data(), expected, 1, {}, "ring");
    world.barrier("behind the ring");
  });
  EXPECT_EQ(error.step(), "ring");
  EXPECT_THAT(error.what(), AllOf(HasSubstr("sent 32 bytes"), HasSubstr("expects 48")));
}

TEST(Disagreement, DifferentStepsOfAGatherAreNamed) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  meet();
  const RankError error =
      failure_of(world, [&] { world.barrier(world.rank() == 1 ? "left" : "right"); });
  EXPECT_THAT(error.what(), HasSubstr("'left'"));
  EXPECT_THAT(error.what(), HasSubstr("'right'"));
}

void expect_one_that_waits_elsewhere_is_named(const Communicator& world) {
  const int odd = world.size() - 1;
  std::vector<int> got(world.size());
  const RankError error = failure_of(world, [&] {
    if (world.rank() == odd)
      world.barrier("elsewhere");
    else
      comm::transport_of(world).all_gather(&got[world.rank()], got.data(), sizeof(int), {},
                                           "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.rank(), odd);
  EXPECT_THAT(error.what(), HasSubstr("'elsewhere'"));
}

TEST(Deadline, ARankThatWaitsElsewhereIsNamed) {
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  expect_one_that_waits_elsewhere_is_named(world);
}

/// On a busy machine each call takes as long as one that moves data.
TEST(Deadline, ARankThatWaitsElsewhereIsNamedOnABusyMachineToo) {
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < std::max(std::thread::hardware_concurrency(), 1u); ++i)
    busy.emplace_back([&] {
      while (!stop) {
      }
    });
  expect_one_that_waits_elsewhere_is_named(world);
  stop = true;
  for (std::thread& one : busy) one.join();
}

/// One rank stays away longer than the deadline, and comes back when the others have their verdict.
/// No sleep would be long enough: on a busy machine their patience, which counts only time while
/// they run, may last longer.
class Absence {
 public:
  ~Absence() { over(); }

  void stay_away(std::chrono::milliseconds deadline) {
    std::this_thread::sleep_for(deadline * 3 / 2);
    over();
  }

  /// The others have their verdict.
  void over() {
    if (!std::exchange(is_over_, true)) meet();
  }

 private:
  bool is_over_ = false;
};

/// The absent rank does something else. It gets the verdict when it comes back, also where the
/// others have left.
void stay_away(Absence& absence, const Communicator& world, int me) {
  absence.stay_away(world.deadline());
  const RankError error = failure_of(world, [&] { world.barrier("back again"); });
  EXPECT_EQ(error.rank(), me);
}

TEST(Deadline, ARankThatDoesNotComeIsNamed) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() / 2;
  if (world.rank() == absent) return stay_away(absence, world, absent);
  std::vector<int> got(world.size());
  const RankError error = failure_of(world, [&] {
    comm::transport_of(world).all_gather(&got[world.rank()], got.data(), sizeof(int), {}, "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), absent);
  EXPECT_EQ(error.step(), "states");
  EXPECT_THAT(error.what(), HasSubstr("'states'"));
}

TEST(Deadline, TheStuckRankIsNamedThroughARing) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  if (world.rank() == 0) return stay_away(absence, world, 0);
  Bytes send(1 << 20), got(1 << 20);
  const RankError error = failure_of(world, [&] {
    for (int turn = 0; turn < world.size(); ++turn)
      comm::transport_of(world).shift(send.data(), got.data(), send.size(), 1, {}, "ring");
  });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), 0);
}

/// The error names the step of the transfer that is waited for. Nothing is written after it: not
/// for this transfer, nor for other open ones.
TEST(Deadline, ARankThatDoesNotComeIsNamedAtTheWaitOfATransfer) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() - 1;
  const std::size_t bytes = 1 << 20;
  Bytes send(bytes * world.size()), got(bytes * world.size()), other(bytes * world.size());
  if (world.rank() == absent) {
    absence.stay_away(world.deadline());
    EXPECT_THROW(
        comm::transport_of(world).all_gather(send.data(), got.data(), bytes, {}, "too late"),
        RankError);
    return;
  }
  comm::Transfer first =
      comm::transport_of(world).start_all_gather(send.data(), got.data(), bytes, {}, "first");
  comm::Transfer second =
      comm::transport_of(world).start_all_to_all(send.data(), other.data(), bytes, {}, "second");
  EXPECT_FALSE(first.test());
  const RankError error = failure_of(world, [&] { second.wait({}); });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), absent);
  EXPECT_THAT(error.what(), HasSubstr("'second'"));
  absence.over();
  got = poison(got.size());
  other = poison(other.size());
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_THROW(first.wait({}), RankError);
  EXPECT_TRUE(got == poison(got.size()));
  EXPECT_TRUE(other == poison(other.size()));
  EXPECT_THROW(static_cast<void>(comm::transport_of(world).start_shift(
                   send.data(), other.data(), bytes, 1, {}, "at the start")),
               RankError);
}

TEST(Deadline, ADroppedTransferOfARankThatDoesNotComeIsAnErrorOfTheNextCall) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() / 2;
  if (world.rank() == absent) return stay_away(absence, world, absent);
  auto send = std::make_unique<Bytes>(1 << 16), got = std::make_unique<Bytes>(world.size() << 16);
  {
    const comm::Transfer dropped = comm::transport_of(world).start_all_gather(
        send->data(), got->data(), send->size(), {}, "nobody waits");
  }
  send.reset();
  got.reset();
  const RankError error = failure_of(world, [&] { world.barrier("next"); });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), absent);
  EXPECT_EQ(error.step(), "nobody waits");
}

TEST(Deadline, ARankThatLeavesEarlyIsNamed) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  meet();
  if (world.rank() == 1) return;
  const RankError error = failure_of(world, [&] { world.barrier("meet"); });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("left"));
}

// ---- parts of a communicator -------------------------------------------------------------------

/// All collectives between the ranks of a part, which are `ranks` of the world.
void use(const Communicator& part, const std::vector<int>& ranks, std::uint64_t seed) {
  ASSERT_EQ(part.size(), static_cast<int>(ranks.size()));
  const auto texts = part.gather(std::to_string(ranks[part.rank()]), "who is here");
  for (int p = 0; p < part.size(); ++p) EXPECT_EQ(texts[p], std::to_string(ranks[p]));
  for (int number = 0; number < 10; ++number) {
    const auto one = start_one(part, seed + ranks[0], number, 5000);
    one->transfer.wait({});
    EXPECT_TRUE(is_as_expected(*one)) << number;
  }
}

TEST(Split, IntoHalvesInterleavedWithTheWhole) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size(), rank = world.rank();
  const auto half = world.split(rank % 2, -rank);
  ASSERT_TRUE(half);
  std::vector<int> mine;
  for (int p = size - 1; p >= 0; --p)
    if (p % 2 == rank % 2) mine.push_back(p);
  use(*half, mine, seed);
  EXPECT_THAT(half->describe(), HasSubstr(size == 1 ? "1 rank" : "1 node"));
  EXPECT_EQ(half->deadline(), world.deadline());

  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  for (int round = 0; round < 5; ++round) {
    // Open in both at once, and waited for in another order than started.
    const auto in_part = start_one(*half, seed + rank % 2, round, 1 << 17);
    const auto in_all = start_one(world, seed, round, 1 << 17);
    const auto in_part_too = start_one(*half, seed + rank % 2, round + 1, 3000);
    in_part_too->transfer.wait({});
    in_all->transfer.wait({});
    use(world, all, seed);
    in_part->transfer.wait({});
    EXPECT_TRUE(is_as_expected(*in_part)) << round;
    EXPECT_TRUE(is_as_expected(*in_part_too)) << round;
    EXPECT_TRUE(is_as_expected(*in_all)) << round;
  }
}

TEST(Split, OrdersByKeyAndThenByRank) {
  const Communicator world = host_world();
  const auto part = world.split(0, world.rank() % 2);
  ASSERT_TRUE(part);
  std::vector<int> order;
  for (int key : {0, 1})
    for (int p = key; p < world.size(); p += 2) order.push_back(p);
  use(*part, order, 1);
}

TEST(Split, IntoSingletonsAndIntoNone) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const auto alone = world.split(world.rank());
  ASSERT_TRUE(alone);
  use(*alone, {world.rank()}, seed);
  EXPECT_FALSE(world.split(-1));
  const auto but_the_first = world.split(world.rank() == 0 ? -3 : 5);
  EXPECT_EQ(but_the_first.has_value(), world.rank() != 0);
  std::vector<int> others(world.size() - 1);
  std::iota(others.begin(), others.end(), 1);
  if (but_the_first) use(*but_the_first, others, seed);
  world.barrier("the whole lives on");
}

TEST(Split, OfASplitOutlivesWhatItCameFrom) {
  std::optional<Communicator> inner;
  std::vector<int> mine;
  std::uint64_t seed = 0;
  {
    const Communicator world = host_world();
    seed = shared_seed(world);
    const int half = world.rank() < (world.size() + 1) / 2;
    const auto outer = world.split(half);
    ASSERT_TRUE(outer);
    inner = outer->split(outer->rank() % 2);
    ASSERT_TRUE(inner);
    for (int p = 0; p < world.size(); ++p) {
      const bool in_half = (p < (world.size() + 1) / 2) == (half != 0);
      const int place = half ? p : p - (world.size() + 1) / 2;
      if (in_half && place % 2 == outer->rank() % 2) mine.push_back(p);
    }
    EXPECT_EQ(comm::transport_of(*inner).name_of(inner->rank()),
              std::to_string(inner->rank()) + " (" + std::to_string(world.rank()) + " of all)");
  }
  use(*inner, mine, seed);
}

TEST(Split, ManyTimesAndLetGoInAnyOrder) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  std::mt19937 random(static_cast<unsigned>(seed) + world.rank());
  std::vector<Communicator> parts;
  for (int round = 0; round < 30; ++round) {
    auto part = world.split((world.rank() + round) % 3 == 0, round % 2 ? world.rank() : 0);
    ASSERT_TRUE(part);
    const auto here = part->gather(std::to_string(round), "round");
    for (const std::string& text : here) EXPECT_EQ(text, std::to_string(round));
    parts.push_back(*part);
    if (parts.size() > 4) parts.erase(parts.begin() + random() % parts.size());
  }
  world.barrier("the whole lives on");
}

TEST(Split, ARankThatDoesNotComeToItIsNamed) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() - 1;
  if (world.rank() == absent) {
    absence.stay_away(world.deadline());
    EXPECT_THROW(world.barrier("back again"), RankError);
    return;
  }
  const RankError error = failure_of(world, [&] { world.split(world.rank()); });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), absent);
  EXPECT_EQ(error.step(), "split of the communicator");
}

/// Ranks of the part name the rank with both numbers, and the whole lives on.
TEST(Split, AStoppedRankOfAPartIsNamedThereAndTheWholeLivesOn) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() < 3) GTEST_SKIP() << "takes a part of two ranks, and one besides";
  const int absent = world.size() - 1;
  const auto part = world.split(world.rank() == 0 ? -1 : 0, -world.rank());
  Bytes send(1 << 20), got(std::size_t(world.size()) << 20);
  if (world.rank() == absent) {
    absence.stay_away(world.deadline());
    const RankError error = failure_of(*part, [&] { part->barrier("back again"); });
    EXPECT_EQ(error.rank(), 0);
  } else if (part) {
    const RankError error = failure_of(*part, [&] {
      comm::transport_of(*part).all_gather(send.data(), got.data(), send.size(), {}, "states");
    });
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_EQ(error.rank(), 0) << "by falling ranks, the last is the first";
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("Rank 0 (" + std::to_string(absent) + " of all) did not come"),
                      HasSubstr("'states'")));
  }
  absence.over();
  meet();
  world.barrier("the whole lives on");
  const auto again = world.split(0);
  again->barrier("and can be split again");
}

/// Rank 0 waits for all, the others in a part; the last one is in neither.
TEST(Split, AStoppedRankIsNamedByThoseWhoWaitForAllToo) {
  Absence absence;  // ends after the world, for the ranks present
  const Communicator world = impatient_world();
  if (world.size() < 3) GTEST_SKIP() << "takes a part of two ranks, and one besides";
  const int absent = world.size() - 1;
  const auto part = world.split(world.rank() == 0 ? -1 : 0);
  if (world.rank() == absent) {
    absence.stay_away(world.deadline());
    EXPECT_THROW(world.barrier("back again"), RankError);
    EXPECT_THROW(part->barrier("back again"), RankError);
  } else if (part) {
    std::vector<int> got(part->size());
    const RankError error = failure_of(*part, [&] {
      comm::transport_of(*part).all_gather(&got[part->rank()], got.data(), sizeof(int), {},
                                           "in the part");
    });
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_EQ(error.rank(), absent - 1);
  } else {
    const RankError error = failure_of(world, [&] { world.barrier("in the whole"); });
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_EQ(error.rank(), absent);
  }
}

TEST(Split, AnAbortOfTheWholeEndsThePartsAndNoneOfAPartEndsTheWhole) {
  const Communicator world = make_world({.deadline = std::chrono::seconds(90)});
  if (world.size() < 3) GTEST_SKIP() << "takes a part of two ranks, and one besides";
  const auto part = world.split(world.rank() == 0 ? -1 : 0);
  const auto other = world.split(0);
  meet();
  if (other->rank() == 1) other->abort("of the other alone");
  EXPECT_THROW(other->barrier("ended"), RankError);
  if (part) part->barrier("the part lives on");
  world.barrier("the whole lives on");

  meet();
  if (world.rank() == 0) world.abort("no more");
  const auto expect_end = [](const Communicator& one, int rank) {
    Bytes send(1 << 20), got(std::size_t(one.size()) << 20);
    const RankError error = failure_of(one, [&] {
      for (;;)  // some may still come through
        comm::transport_of(one).all_gather(send.data(), got.data(), send.size(), {}, "states");
    });
    EXPECT_EQ(error.rank(), rank);
    EXPECT_THAT(error.what(), HasSubstr("Rank 0 gave up: no more"));
  };
  if (part) expect_end(*part, -1);  // rank 0 is not part of it
  expect_end(world, 0);
  if (part) {
    EXPECT_THROW(part->split(0), RankError);
  }
}

}  // namespace
}  // namespace longspan::tests

// Communicators over TCP that meet by the caller's exchange: several in one process, with ranks in
// threads; invalid exchanges; strangers at the ports; and ranks that die.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/control/wire.hpp"
#include "comm/tcp/address.hpp"
#include "comm/tcp/connect.hpp"
#include "comm/tcp/exchange.hpp"
#include "comm/tcp/transport.hpp"
#include "comm/transport.hpp"
#include "longspan/attention.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "tests/support/free_port.hpp"
#include "tests/support/stumbling_transport.hpp"

namespace longspan::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Strings = std::vector<std::string>;

/// Gathers among threads.
class Table {
 public:
  explicit Table(int size) : texts_(size) {}
  Strings exchange(int rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    texts_[rank] = mine;
    const int round = round_;
    if (++came_ == static_cast<int>(texts_.size())) {
      all_ = texts_;
      came_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait_for(lock, 60s, [&] { return round_ != round; });
    return all_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Strings texts_, all_;
  int came_ = 0, round_ = 0;
};

/// Runs work(rank) for each rank in its own thread; an exception is a failure.
void in_threads(int size, const std::function<void(int rank)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

ByteExchange over(Table& table, int rank) {
  return [&table, rank](const std::string& mine) { return table.exchange(rank, mine); };
}

TEST(FromExchange, ManyCommunicatorsInOneProcess) {
  constexpr int kSize = 3;
  Table table(kSize);
  in_threads(kSize, [&](int rank) {
    std::vector<Communicator> all;
    for (int i = 0; i < 4; ++i) {
      all.push_back(from_exchange(rank, kSize, over(table, rank), {.deadline = 60s}));
      EXPECT_EQ(all.back().describe(), "TCP | 3 ranks, 1 node");
    }
    // Another one over one of them, and a part of that.
    all.push_back(from_exchange(
        rank, kSize, [&](const std::string& mine) { return all[1].gather(mine, "exchange"); }));
    all.push_back(*all.back().split(0, -rank));
    for (int round = 0; round < 20; ++round)
      for (std::size_t i = 0; i < all.size(); ++i) {
        const int mine = round * 100 + static_cast<int>(i) * 10 + all[i].rank();
        std::vector<int> got(kSize);
        transport_of(all[i]).all_gather(&mine, got.data(), sizeof mine, {}, "round");
        for (int p = 0; p < kSize; ++p)
          EXPECT_EQ(got[p], round * 100 + static_cast<int>(i) * 10 + p);
      }
    // Released in another order on each rank.
    std::rotate(all.begin(), all.begin() + rank, all.end());
  });
}

TEST(FromExchange, OneRankIsAlone) {
  int calls = 0;
  const Communicator world = from_exchange(0, 1, [&](const std::string& mine) {
    ++calls;
    return Strings{mine};
  });
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.describe(), "1 rank");
  EXPECT_EQ(calls, 1);
}

/// The message of the UsageError that it throws.
std::string refusal(int rank, int size, const ByteExchange& exchange, CommOptions options = {}) {
  try {
    from_exchange(rank, size, exchange, options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "made";
}

TEST(FromExchange, WantsARankAndAnExchange) {
  const ByteExchange none;
  const auto echo = [](const std::string& mine) { return Strings{mine}; };
  EXPECT_THAT(refusal(0, 1, none), HasSubstr("no exchange"));
  for (const auto& [rank, size] : {std::pair(-1, 2), {2, 2}, {0, 0}, {0, -3}})
    EXPECT_THAT(refusal(rank, size, echo), HasSubstr("rank " + std::to_string(rank) + " of"));
}

TEST(FromExchange, SaysWhatIsWrongWithTheExchange) {
  const auto with = [](const std::function<Strings(const std::string&)>& exchange) {
    return refusal(1, 2, exchange);
  };
  EXPECT_THAT(with([](const std::string& mine) { return Strings{mine}; }),
              AllOf(HasSubstr("gave 1 texts"), HasSubstr("rank 1 of 2")));
  EXPECT_THAT(with([](const std::string& mine) {
                return Strings{mine, mine + " "};
              }),
              HasSubstr("in its own place"));
  EXPECT_THAT(with([](const std::string& mine) {
                return Strings{"hello", mine};
              }),
              AllOf(HasSubstr("gave for rank 0"), HasSubstr("not what a rank")));
  EXPECT_THAT(with([](const std::string& mine) {
                return Strings{"", mine};
              }),
              HasSubstr("gave for rank 0"));
  EXPECT_THAT(with([](const std::string& mine) {
                return Strings{mine, mine};
              }),
              AllOf(HasSubstr("text of rank 1 in place 0")));
  EXPECT_THROW(from_exchange(0, 2,
                             [](const std::string&) -> Strings {
                               throw std::runtime_error("the group has ended");
                             }),
               std::runtime_error);
}

TEST(FromExchange, NamesWhatRanksAskForDifferently) {
  {
    Table table(2);
    in_threads(2, [&](int rank) {
      EXPECT_THAT(
          refusal(rank, 2, over(table, rank), {.device = rank == 0 ? Device::host : Device::cuda}),
          AllOf(HasSubstr("'the device' differs"), HasSubstr("rank 0 has host"),
                HasSubstr("rank 1 has cuda")));
    });
  }
  {
    Table table(2);
    in_threads(2, [&](int rank) {  // an error on one rank is reported on both
      EXPECT_THAT(refusal(rank, 2, over(table, rank), {.deadline = rank == 0 ? 1s : -1s}),
                  AllOf(HasSubstr("Rank 1: "), HasSubstr("deadline")));
    });
  }
  Table table(2);
  in_threads(2, [&](int rank) {
    EXPECT_THAT(refusal(0, 2, over(table, rank)), HasSubstr("the text of rank 0 in place 1"));
  });
}

/// Ranks of one launcher make another communicator over the first.
TEST(FromEnvironment, IsCalledAgain) {
  const std::string port = std::to_string(tests::free_port());
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(100);
      int status = 1;
      try {
        ::setenv("RANK", std::to_string(rank).c_str(), 1);
        ::setenv("WORLD_SIZE", "2", 1);
        ::setenv("MASTER_ADDR", "127.0.0.1", 1);
        ::setenv("LONGSPAN_PORT", port.c_str(), 1);
        for (const char* name :
             {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"})
          ::unsetenv(name);
        for (int round = 0; round < 3; ++round) {  // one after the other, at the same port
          const Communicator first = from_environment({.deadline = 50s});
          const Communicator second = from_environment({.deadline = 50s});
          if (first.gather("a", "first").size() == 2 && second.gather("b", "second")[1] == "b" &&
              first.describe() == "TCP | 2 ranks, 1 node")
            status = round == 2 ? 0 : 1;
        }
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(status);
    }
    ranks.push_back(pid);
  }
  for (const pid_t pid : ranks) {
    int status = 1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

/// Rank 0 releases it long before the others: it waits a moment, and they still get messages.
TEST(FromExchange, WhoLetsGoFirstWaitsForAMoment) {
  constexpr int kSize = 3;
  Table table(kSize), outside(kSize);
  in_threads(kSize, [&](int rank) {
    std::optional<Communicator> world =
        from_exchange(rank, kSize, over(table, rank), {.deadline = 100s});
    const auto part = world->split(rank == 0 ? -1 : 0);
    const auto begin = std::chrono::steady_clock::now();
    world.reset();  // the others keep it, as their part does
    if (rank == 0) {
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
    }
    outside.exchange(rank, "");
    if (part) {
      EXPECT_EQ(part->gather("x", "in the part").size(), 2u);
    }
  });
}

// ---- strangers at the ports for data ---------------------------------------------------------

/// Another control plane, whose messages during the connection are changed or delayed. Ranks are
/// apart where they believe to be on other machines, and connect by TCP.
class Meddled final : public Control {
 public:
  using Act = std::function<void(int rank, Strings& told)>;
  Meddled(std::shared_ptr<Control> inner, bool apart, Act act)
      : Control(inner->deadline()), inner_(std::move(inner)), apart_(apart), act_(std::move(act)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  milliseconds patience() const override { return inner_->patience(); }
  Strings gather(const std::string& mine, const std::string& step) override {
    const bool moves = apart_ && step == "find the machines";
    Strings told = inner_->gather(moves ? std::to_string(rank()) : mine, step);
    if (step == "connect the ranks") act_(rank(), told);
    return told;
  }
  void check(const char* step, milliseconds waited) override { inner_->check(step, waited); }
  [[noreturn]] void timed_out(const char* step, milliseconds waited) override {
    inner_->timed_out(step, waited);
    std::abort();
  }
  void tell(const Failure& failure) noexcept override { inner_->tell(failure); }

 private:
  std::shared_ptr<Control> inner_;
  bool apart_;
  Act act_;
};

/// Connects two ranks; `meddle` changes the addresses that they receive from each other.
void connect_two(bool apart, const Meddled::Act& meddle, const std::function<void(Control&)>& work,
                 milliseconds deadline = 50s) {
  Table table(2);
  in_threads(2, [&](int rank) {
    Meddled control(exchange_control(rank, 2, over(table, rank), {.deadline = deadline}), apart,
                    meddle);
    work(control);
  });
}

int port_in(const std::string& told) { return std::stoi(unpack(told).at(0)); }

sockaddr_in address(int port) {
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  there.sin_port = htons(static_cast<std::uint16_t>(port));
  return there;
}

/// Connects to the address in this message.
Fd connect_to(bool apart, const std::string& told) {
  Fd fd(::socket(apart ? AF_INET : AF_UNIX, SOCK_STREAM, 0));
  const sockaddr_in far = address(port_in(told));
  const Address near = local_address(unpack(told).at(3));
  EXPECT_EQ(apart ? ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&far), sizeof far)
                  : ::connect(fd.get(), near.get(), near.length),
            0);
  return fd;
}

void expect_ping(Control& control) {
  const std::vector<Fd> made = connect_ranks(control);
  const Fd& fd = made[1 - control.rank()];
  ASSERT_TRUE(fd);
  EXPECT_FALSE(made[control.rank()]);
  const char mine = control.rank() == 0 ? 'a' : 'b';
  EXPECT_EQ(::send(fd.get(), &mine, 1, MSG_NOSIGNAL), 1);
  char theirs = 0;
  for (Patience patient(20s); !patient.over(); patient.pause())
    if (::recv(fd.get(), &theirs, 1, 0) == 1) break;
  EXPECT_EQ(theirs, control.rank() == 0 ? 'b' : 'a');
}

/// At rank 0's port, before rank 1: garbage of all lengths, a hello with a wrong key, and silence.
class Doors : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(NearAndFar, Doors, ::testing::Bool());

TEST_P(Doors, ForDataAreClosedToStrangers) {
  const bool apart = GetParam();
  std::vector<Fd> strangers;
  std::mt19937 random(5);
  connect_two(
      apart,
      [&](int rank, Strings& told) {
        if (rank == 0) return;
        for (int i = 0; i < 40; ++i) {
          strangers.push_back(connect_to(apart, told[0]));
          std::string bytes(random() % 100, '\0');
          for (char& c : bytes) c = static_cast<char>(random());
          if (i % 4 == 0) {  // magic, hello, from 1 to 0: all but the key
            const std::uint32_t words[] = {0x4c535044, 1, 1, 0};
            bytes.assign(reinterpret_cast<const char*>(words), sizeof words);
            bytes += std::string(32, '0');
          }
          if (i % 5 == 0) bytes.clear();
          static_cast<void>(
              ::send(strangers.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
        }
      },
      expect_ping);
}

/// Both ranks throw this, at the latest at the deadline.
void expect_unreachable(bool apart, const Meddled::Act& meddle, const std::string& words) {
  std::atomic<int> named{0};
  connect_two(
      apart, meddle,
      [&](Control& control) {
        try {
          connect_ranks(control);
          ADD_FAILURE() << "connected";
        } catch (const RankError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::timeout);
          EXPECT_EQ(error.rank(), 0);
          EXPECT_THAT(error.what(), AllOf(HasSubstr("Rank 1 could not connect to rank 0 at "),
                                          HasSubstr(words), HasSubstr("firewall")));
          ++named;
        }
      },
      2s);
  EXPECT_EQ(named, 2);
}

/// Another program listens in rank 0's place, and answers.
TEST(Strangers, InTheOtherRanksPlaceAreNotTakenForIt) {
  for (const std::string& answer : {std::string(48, 'x'), std::string("HTTP/1.1 400\r\n\r\n")}) {
    Fd impostor(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in here = address(0);
    socklen_t length = sizeof here;
    ASSERT_EQ(::bind(impostor.get(), reinterpret_cast<const sockaddr*>(&here), sizeof here), 0);
    ASSERT_EQ(::listen(impostor.get(), 64), 0);
    ::getsockname(impostor.get(), reinterpret_cast<sockaddr*>(&here), &length);
    std::thread speaker([&impostor, answer] {
      for (;;) {
        const Fd guest(::accept(impostor.get(), nullptr, nullptr));
        if (!guest) return;
        static_cast<void>(::send(guest.get(), answer.data(), answer.size(), MSG_NOSIGNAL));
      }
    });
    expect_unreachable(
        true,
        [&](int, Strings& told) {
          auto parts = unpack(told[0]);
          parts[0] = std::to_string(ntohs(here.sin_port));
          parts[2] = pack(std::string("127.0.0.1"));
          told[0] = pack_all(parts);
        },
        answer.front() == 'x' ? "somebody else answers there" : "127.0.0.1 (it hung up)");
    ::shutdown(impostor.get(), SHUT_RDWR);
    speaker.join();
  }
}

/// The first of rank 0's addresses leads nowhere.
TEST(Strangers, AnAddressThatIsNoneIsNotTheLast) {
  connect_two(
      true,
      [](int, Strings& told) {
        auto parts = unpack(told[0]);
        parts[2] = pack(std::string("192.0.2.1"), std::string("127.0.0.1"));  // unused address
        told[0] = pack_all(parts);
      },
      expect_ping);
}

TEST(Strangers, APortThatIsClosedIsAnErrorThatSaysWhere) {
  expect_unreachable(
      true,
      [](int, Strings& told) {
        auto parts = unpack(told[0]);
        parts[0] = "1";
        told[0] = pack_all(parts);
      },
      "port 1 of ");
  expect_unreachable(
      false,
      [](int, Strings& told) {
        auto parts = unpack(told[0]);
        parts[3] = "nobody";
        told[0] = pack_all(parts);
      },
      "its Unix socket (Connection refused)");
}

/// Ranks that are apart: data of all sizes over TCP.
TEST(Tcp, CarriesTheCollectivesBetweenMachines) {
  Table table(3);
  in_threads(3, [&](int rank) {
    auto control =
        std::make_shared<Meddled>(exchange_control(rank, 3, over(table, rank), {.deadline = 50s}),
                                  true, [](int, Strings&) {});
    const auto transport = tcp_transport(control);
    for (const std::size_t bytes : {0, 1, 5000, 70'000, 3'000'000}) {
      std::vector<char> send(bytes, static_cast<char>('a' + rank)), got(3 * bytes);
      transport->all_gather(send.data(), got.data(), bytes, {}, "states");
      for (std::size_t i = 0; i < got.size(); ++i)
        ASSERT_EQ(got[i], static_cast<char>('a' + i / bytes)) << i;
    }
  });
}

// ---- ranks that die --------------------------------------------------------------------------

/// A gather among forked processes through the parent's file descriptors: a socket pair for each.
class Post {
 public:
  explicit Post(int size) : ends_(size) {
    for (auto& end : ends_) EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, end.data()), 0);
  }
  Strings exchange(int rank, const std::string& mine) {
    const std::string text = std::to_string(mine.size()) + "\n" + mine;
    EXPECT_EQ(::send(ends_[rank][1], text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    Strings all;
    for (std::size_t p = 0; p < ends_.size(); ++p) all.push_back(read(ends_[rank][1]));
    return all;
  }
  /// The parent relays the texts of one round.
  void serve() {
    Strings all;
    for (auto& end : ends_) all.push_back(read(end[0]));
    for (auto& end : ends_)
      for (const std::string& one : all) {
        const std::string text = std::to_string(one.size()) + "\n" + one;
        EXPECT_EQ(::send(end[0], text.data(), text.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(text.size()));
      }
  }

 private:
  static std::string read(int fd) {
    std::string length;
    for (char c = 0; ::recv(fd, &c, 1, 0) == 1 && c != '\n';) length += c;
    std::string text(std::stoul(length), '\0');
    EXPECT_EQ(::recv(fd, text.data(), text.size(), MSG_WAITALL), static_cast<ssize_t>(text.size()));
    return text;
  }
  std::vector<std::array<int, 2>> ends_;
};

/// The results of the ranks' work, as exit statuses: 0 is success.
void fork_ranks(int size, int victim, const std::function<bool(Communicator&)>& work) {
  Post post(size);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(100);
      int status = 1;
      try {
        Communicator world = from_exchange(
            rank, size, [&](const std::string& mine) { return post.exchange(rank, mine); },
            {.deadline = 80s});
        if (work(world)) status = 0;
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(status);
    }
    pids.push_back(pid);
  }
  post.serve();
  post.serve();
  for (int rank = 0; rank < size; ++rank) {
    int status = 1;
    waitpid(pids[rank], &status, 0);
    if (rank != victim) {
      EXPECT_EQ(status, 0) << "rank " << rank;
    }
  }
}

bool names(int victim, const std::function<void()>& work) {
  try {
    work();
  } catch (const RankError& error) {
    if (error.kind() == ErrorKind::rank_failure && error.rank() == victim) return true;
    fprintf(stderr, "unexpected: %s (kind %d, rank %d)\n", error.what(),
            static_cast<int>(error.kind()), error.rank());
  }
  return false;
}

class Faults : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Tcp, Faults, ::testing::Values(2, 3, 4));

/// In the middle of a message: it has begun, and its sender dies before the rest is sent. Where a
/// peer reads fast enough, one call sends all of it; then the next gather finds the rank gone.
TEST_P(Faults, ARankThatIsKilledInAMessageIsNamedLongBeforeTheDeadline) {
  const int size = GetParam();
  for (const int victim : {0, size - 1}) {
    const auto begin = std::chrono::steady_clock::now();
    fork_ranks(size, victim, [&](Communicator& world) {
      const std::size_t bytes = 32 << 20;
      std::vector<char> send(bytes), got(bytes * size);
      if (world.rank() == victim) {
        auto transfer =
            transport_of(world).start_all_gather(send.data(), got.data(), bytes, {}, "states");
        transfer.test();
        std::this_thread::sleep_for(300ms);
        raise(SIGKILL);
      }
      return names(victim, [&] {
        for (int turn = 0; turn < 2; ++turn)
          transport_of(world).all_gather(send.data(), got.data(), bytes, {}, "states");
      });
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 40s);
  }
}

TEST_P(Faults, ARankThatLeavesBeforeACollectiveIsNamed) {
  const int size = GetParam(), leaver = size - 1;
  fork_ranks(size, -1, [&](Communicator& world) {
    if (world.rank() == leaver) return true;
    std::vector<int> got(size);
    return names(leaver, [&] {
      transport_of(world).all_gather(&got[world.rank()], got.data(), sizeof(int), {}, "states");
    });
  });
}

/// Only its ring neighbours exchange data with it, and all have to learn of its end.
TEST_P(Faults, ARankThatIsKilledIsNamedThroughARing) {
  const int size = GetParam(), victim = size / 2;
  fork_ranks(size, victim, [&](Communicator& world) {
    std::vector<char> send(1 << 20), got(1 << 20);
    world.barrier("meet");
    if (world.rank() == victim) raise(SIGKILL);
    return names(victim, [&] {
      for (int turn = 0; turn < 100; ++turn)
        transport_of(world).shift(send.data(), got.data(), send.size(), 1, {}, "ring");
    });
  });
}

/// In a run of ring-kv, when it has sent the first of its keys and not yet the second: the step is
/// also named, by a rank that waits for it there or in a later one.
TEST_P(Faults, ARankThatIsKilledInMidRingIsNamedWithTheStep) {
  const int size = GetParam(), victim = size / 2;
  if (size < 3) GTEST_SKIP() << "a ring of two has one step";
  const auto begin = std::chrono::steady_clock::now();
  fork_ranks(size, victim, [&](Communicator& world) {
    const auto stumbling =
        std::make_shared<tests::StumblingTransport>(world, [] { raise(SIGKILL); });
    const Communicator own = world.rank() == victim ? Communicator(stumbling) : world;
    constexpr std::int64_t kRows = 600, kDim = 64;
    std::vector<float> rows(kRows * kDim, 1.0f), out(rows.size());
    const std::int64_t all = kRows * size;
    Attention layer(own, {.head_dim = kDim,
                          .dtypes = {.compute = fp32},
                          .limits = {.max_tokens = kRows, .max_kv_len = all},
                          .keys = {Layout::striped},
                          .queries = Sharding{Layout::striped},
                          .strategy = "ring-kv",
                          .threads = 1});
    const auto tensor = [&](std::vector<float>& memory) {
      return Tensor(memory.data(), fp32, {kRows, 1, kDim});
    };
    const auto run = [&] {
      layer.run({.q = tensor(rows),
                 .k = tensor(rows),
                 .v = tensor(rows),
                 .out = tensor(out),
                 .total_keys = all,
                 .total_tokens = all});
    };
    run();
    stumbling->stumble_at(2);  // a step is one shift, of keys and values
    try {
      run();
      std::this_thread::sleep_for(3s);  // a rank with all keys learns of it from the waiting ones
      world.barrier("the end");
    } catch (const RankError& error) {
      if (error.rank() == victim && error.step().starts_with("ring of keys, step ")) return true;
      fprintf(stderr, "unexpected: %s at '%s'\n", error.what(), error.step().c_str());
    }
    return false;
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 40s);
}

}  // namespace
}  // namespace longspan::comm

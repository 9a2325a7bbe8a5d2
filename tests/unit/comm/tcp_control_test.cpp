// The control plane over TCP, between forked processes: a rank reports its finding by its exit
// status.
#include "comm/tcp/control.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "longspan/error.hpp"
#include "tests/support/free_port.hpp"

namespace longspan::comm {
namespace {

using std::chrono::seconds;
using tests::free_port;

using Work = std::function<bool(Control&)>;

/// Runs `work` on each rank in its own process; returns the ranks' wait statuses. A rank whose work
/// returns false, or throws an uncaught exception, exits with 1.
std::vector<int> run_ranks(int size, milliseconds deadline, const Work& work) {
  const int port = free_port();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);  // a rank that hangs is found by its signal
      int status = 1;
      try {
        const Launch launch{Launcher::torchrun, rank, size, "localhost", port};
        const std::shared_ptr<Control> control = tcp_control(launch, deadline);
        if (work(*control)) status = 0;
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(status);
    }
    ranks.push_back(pid);
  }
  std::vector<int> statuses(size);
  for (int rank = 0; rank < size; ++rank) {
    while (true) {
      const pid_t ended = waitpid(ranks[rank], &statuses[rank], WUNTRACED);
      if (ended == ranks[rank] && !WIFSTOPPED(statuses[rank])) break;
      // A stopped rank stays stopped until all others are done.
      for (int other = 0; other < size; ++other)
        if (other != rank) waitpid(ranks[other], &statuses[other], 0);
      kill(ranks[rank], SIGKILL);
      waitpid(ranks[rank], &statuses[rank], 0);
      return statuses;
    }
  }
  return statuses;
}

void expect_all_well(const std::vector<int>& statuses, int except = -1) {
  for (int rank = 0; rank < static_cast<int>(statuses.size()); ++rank)
    if (rank != except) {
      EXPECT_EQ(statuses[rank], 0) << "rank " << rank;
    }
}

bool fails_with(ErrorKind kind, int rank, const std::function<void()>& work) {
  try {
    work();
  } catch (const RankError& error) {
    if (error.kind() == kind && error.rank() == rank) return true;
    fprintf(stderr, "unexpected: %s (kind %d, rank %d)\n", error.what(),
            static_cast<int>(error.kind()), error.rank());
  }
  return false;
}

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Tcp, Ranks, ::testing::Values(1, 2, 3, 7));

TEST_P(Ranks, GatherInRankOrderWithAnyBytes) {
  expect_all_well(run_ranks(GetParam(), seconds(20), [](Control& control) {
    for (int round = 0; round < 50; ++round) {
      const auto text_of = [&](int p) {
        return std::string(static_cast<std::size_t>(p) * 30000, '\0') + std::to_string(p + round);
      };
      const auto texts = control.gather(text_of(control.rank()), "round");
      for (int p = 0; p < control.size(); ++p)
        if (texts[p] != text_of(p)) return false;
    }
    return true;
  }));
}

/// The control plane of the ranks with the same color, by falling ranks.
std::shared_ptr<Control> part_of(Control& control, int color) {
  const auto requests = control.gather(control.split_request(color, -control.rank()), "split");
  const Group group = control.group_of(requests);
  return group.members.empty() ? nullptr : control.branch(group);
}

TEST_P(Ranks, GatherInGroupsAndAllTogether) {
  expect_all_well(run_ranks(GetParam(), seconds(20), [](Control& control) {
    for (int round = 0; round < 20; ++round) {
      const auto part = part_of(control, control.rank() % 2);
      const auto inner = part_of(*part, part->rank() == 0 ? -1 : 0);
      if ((inner == nullptr) != (part->rank() == 0)) return false;
      for (int turn = 0; turn < 3; ++turn) {
        const auto here = part->gather(std::to_string(control.rank()), "part");
        for (int p = 0; p < part->size(); ++p) {
          const int rank = std::stoi(here[p]);
          if (rank % 2 != control.rank() % 2 || rank != part->origins()[p]) return false;
          if (p > 0 && rank >= std::stoi(here[p - 1])) return false;
        }
        const auto all = control.gather(std::to_string(round), "all");
        if (static_cast<int>(all.size()) != control.size()) return false;
        if (!inner) continue;
        const auto within = inner->gather(std::to_string(control.rank()), "inner");
        for (int p = 0; p < inner->size(); ++p)
          if (std::stoi(within[p]) != inner->origins()[p]) return false;
      }
    }
    return true;
  }));
}

/// Meets the others. One rank may be done, and find the fault, while another still waits here for
/// the message of a third. That rank learns of the fault here already, and later calls throw the
/// same.
void meet(Control& control) {
  try {
    control.gather("", "meet");
  } catch (const RankError&) {
  }
}

class Faults : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Tcp, Faults, ::testing::Values(2, 3, 7));

TEST_P(Faults, ADeadRankIsNamedAtOnce) {
  const int size = GetParam(), victim = size / 2;
  const auto statuses = run_ranks(size, seconds(50), [&](Control& control) {
    meet(control);
    if (control.rank() == victim) raise(SIGKILL);
    return fails_with(ErrorKind::rank_failure, victim, [&] { control.gather("", "after"); }) &&
           fails_with(ErrorKind::rank_failure, victim, [&] { control.gather("", "later"); });
  });
  expect_all_well(statuses, victim);
  EXPECT_TRUE(WIFSIGNALED(statuses[victim]));
}

TEST_P(Faults, ADeadRankIsNamedToWhoWaitsForSomethingElse) {
  const int size = GetParam(), victim = size - 1;
  const auto statuses = run_ranks(size, seconds(50), [&](Control& control) {
    meet(control);
    if (control.rank() == victim) raise(SIGKILL);
    return fails_with(ErrorKind::rank_failure, victim, [&] {
      for (Patience patient(seconds(40)); !patient.over(); patient.pause())
        control.check("states", patient.waited());
    });
  });
  expect_all_well(statuses, victim);
}

TEST_P(Faults, AStoppedRankIsNamedAtTheDeadline) {
  const int size = GetParam(), victim = size - 1;
  const auto statuses = run_ranks(size, milliseconds(1500), [&](Control& control) {
    meet(control);
    if (control.rank() == victim) raise(SIGSTOP);
    return fails_with(ErrorKind::timeout, victim, [&] { control.gather("", "states"); });
  });
  expect_all_well(statuses, victim);
}

TEST_P(Faults, AStoppedHubIsNamedToo) {
  const auto statuses = run_ranks(GetParam(), milliseconds(1500), [&](Control& control) {
    // Rank 0 may stop with messages of the first gather still in the hub.
    return fails_with(ErrorKind::timeout, 0, [&] {
      control.gather("", "meet");
      if (control.rank() == 0) raise(SIGSTOP);
      control.gather("", "states");
    });
  });
  expect_all_well(statuses, 0);
}

/// One half finds it in its group, the other half in the whole.
TEST_P(Faults, ADeadRankIsNamedInItsGroupAndInTheWhole) {
  const int size = GetParam(), victim = size / 2;
  const auto statuses = run_ranks(size, seconds(50), [&](Control& control) {
    const bool has_victim = control.rank() % 2 == victim % 2;
    const auto part = part_of(control, has_victim);
    const int place = (size - 1 - victim) / 2;  // of the victim, by falling ranks
    meet(control);
    if (control.rank() == victim) raise(SIGKILL);
    return (!has_victim || fails_with(ErrorKind::rank_failure, place,
                                      [&] { part->gather("", "in the group"); })) &&
           fails_with(ErrorKind::rank_failure, victim, [&] { control.gather("", "in all"); });
  });
  expect_all_well(statuses, victim);
}

/// A rank that waits in a group answers the roll call of the whole.
TEST_P(Faults, AStoppedRankIsNamedWhereverTheOthersWait) {
  const int size = GetParam(), victim = size - 1;
  if (size < 3) GTEST_SKIP() << "takes a group of two besides one that waits for all";
  const auto statuses = run_ranks(size, milliseconds(1500), [&](Control& control) {
    const auto part = part_of(control, control.rank() == 0 ? -1 : 0);
    meet(control);
    if (control.rank() == victim) raise(SIGSTOP);
    if (control.rank() == 0)
      return fails_with(ErrorKind::timeout, victim, [&] { control.gather("", "in all"); });
    return fails_with(ErrorKind::timeout, 0, [&] { part->gather("", "in the group"); });
  });
  expect_all_well(statuses, victim);
}

/// Parts that all ranks use together, as strategies of two levels do: a rank waits in one part for
/// a rank that waits in another. The stopped rank is named, and no healthy one, also where it is
/// the one that relays messages; and it takes only one deadline.
TEST(Tcp, AStoppedRankIsNamedInPartsThatEndTogether) {
  for (const int victim : {0, 3}) {
    const auto statuses = run_ranks(4, milliseconds(1500), [&](Control& control) {
      const auto node = part_of(control, control.rank() / 2);
      const auto nodes = part_of(control, control.rank() % 2);
      node->end_with_parent();
      nodes->end_with_parent();
      meet(control);
      if (control.rank() == victim) {
        std::this_thread::sleep_for(milliseconds(300));  // rank 0 has relayed all messages
        raise(SIGSTOP);
      }
      const auto begin = Patience::Clock::now();
      try {
        for (int turn = 0; turn < 3; ++turn) {
          node->gather("", "in the node");
          nodes->gather("", "between nodes");
        }
      } catch (const RankError& error) {
        const std::string message = error.what(), name = "Rank " + std::to_string(victim) + " ";
        const bool is_right =
            error.kind() == ErrorKind::timeout && error.rank() == victim &&
            message.starts_with(name + "did not come to '" + error.step() + "'") &&
            (error.step() == "in the node" || error.step() == "between nodes") &&
            message.find("nor did") == std::string::npos && control.outcome().failed() &&
            Patience::Clock::now() - begin < milliseconds(2600);
        if (!is_right) fprintf(stderr, "rank %d: %s\n", control.rank(), error.what());
        return is_right;
      }
      return false;
    });
    expect_all_well(statuses, victim);
  }
}

TEST_P(Faults, WhoGivesUpTellsTheOthersWhy) {
  const int size = GetParam();
  expect_all_well(run_ranks(size, seconds(50), [&](Control& control) {
    if (control.rank() == 1) {
      meet(control);
      control.tell(gave_up(control, "out of memory"));
      return true;
    }
    try {
      meet(control);
      control.gather("", "states");
    } catch (const RankError& error) {
      return error.rank() == 1 &&
             std::string(error.what()).find("out of memory") != std::string::npos;
    }
    return false;
  }));
}

TEST_P(Faults, WhoLeavesEarlyIsNamed) {
  const int size = GetParam(), leaver = size - 1;
  expect_all_well(run_ranks(size, seconds(50), [&](Control& control) {
    meet(control);
    if (control.rank() == leaver) return true;
    return fails_with(ErrorKind::rank_failure, leaver, [&] { control.gather("", "states"); });
  }));
}

TEST(Tcp, NobodyThereIsAnErrorWithinTheDeadline) {
  const Launch launch{Launcher::torchrun, 1, 2, "localhost", free_port()};
  try {
    tcp_control(launch, milliseconds(300));
    FAIL() << "met nobody";
  } catch (const RankError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_EQ(error.rank(), 0);
  }
}

TEST(Tcp, ATakenPortIsRefused) {
  const int port = free_port();
  const auto first = tcp_control({Launcher::torchrun, 0, 1, "localhost", port}, seconds(5));
  EXPECT_THROW(tcp_control({Launcher::torchrun, 0, 1, "localhost", port}, seconds(5)), UsageError);
}

TEST(Tcp, StrangersDoNotDisturb) {
  const int port = free_port();
  const Launch zero{Launcher::torchrun, 0, 2, "localhost", port};
  std::thread other;
  {
    auto control = tcp_control(zero, seconds(20));
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    there.sin_port = htons(static_cast<std::uint16_t>(port));
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&there), sizeof there), 0);
    ASSERT_GT(::send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL), 0);
    other = std::thread([port] {
      auto one = tcp_control({Launcher::torchrun, 1, 2, "localhost", port}, seconds(20));
      EXPECT_EQ(one->gather("b", "meet"), (std::vector<std::string>{"a", "b"}));
    });
    EXPECT_EQ(control->gather("a", "meet"), (std::vector<std::string>{"a", "b"}));
    ::close(fd);
  }
  other.join();
}

}  // namespace
}  // namespace longspan::comm

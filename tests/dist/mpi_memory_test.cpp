// Memory that MPI still reads or writes after a failure must not be freed with the caller's. Each
// test makes MPI continue a message whose communicator has failed, after the caller's memory is
// gone from the address space; touching it would end the process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "comm/control/control.hpp"
#include "comm/mpi/mailbox.hpp"
#include "comm/mpi/session.hpp"
#include "comm/mpi/transport.hpp"
#include "longspan/error.hpp"
#include "tests/dist/world.hpp"

namespace longspan::tests {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::size_t kBytes = 8 << 20;          // far more than MPI sends without asking
constexpr std::size_t kMessageBytes = 40 << 20;  // so much that free() gives it back to the system

/// Memory that leaves the address space when freed.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Pages() { ::munmap(data_, bytes_); }
  void* data() { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}

/// Lets MPI work for a while: every rank sends to every other, many times.
void progress() {
  for (int turn = 0; turn < 50; ++turn) {
    MPI_Barrier(MPI_COMM_WORLD);
    std::this_thread::sleep_for(2ms);
  }
}

TEST(Memory, OfASendThatNobodyTookIsKept) {
  const int rank = rank_in(MPI_COMM_WORLD), size = size_of(MPI_COMM_WORLD);
  if (size == 1) GTEST_SKIP() << "takes two ranks";
  auto duplicate = std::make_shared<comm::MpiDuplicate>(MPI_COMM_WORLD, 60s, nullptr);
  if (rank == 0) {
    {
      const auto transport = comm::mpi_transport(
          duplicate, comm::mail_control(std::make_unique<comm::MpiMailbox>(duplicate), 1s));
      Pages mine(kBytes), all(kBytes * size);
      std::memset(mine.data(), 0x5A, kBytes);
      EXPECT_THROW(transport->all_gather(mine.data(), all.data(), kBytes, {}, "states"), RankError);
    }  // all of it is gone
    MPI_Barrier(MPI_COMM_WORLD);
  } else {
    // Takes part only in the making of the transport until rank 0 has given up.
    auto mailbox = std::make_unique<comm::MpiMailbox>(duplicate);
    const auto control = comm::mail_control(std::move(mailbox), 60s);
    control->gather("", "find the machines");
    MPI_Barrier(MPI_COMM_WORLD);
    std::vector<char> got(kBytes);
    MPI_Recv(got.data(), static_cast<int>(kBytes), MPI_BYTE, 0, comm::kDataTag, duplicate->get(),
             MPI_STATUS_IGNORE);
    EXPECT_EQ(std::count(got.begin(), got.end(), 0x5A), static_cast<long>(kBytes));
    EXPECT_THROW(control->gather("", "after"), RankError);  // rank 0 has sent the reason
  }
  progress();
}

TEST(Memory, OfAReceiveThatDidNotBeginIsNotWritten) {
  const int rank = rank_in(MPI_COMM_WORLD), size = size_of(MPI_COMM_WORLD);
  if (size == 1) GTEST_SKIP() << "takes two ranks";
  auto duplicate = std::make_shared<comm::MpiDuplicate>(MPI_COMM_WORLD, 60s, nullptr);
  std::vector<char> late(kBytes, 0x5A);
  MPI_Request request = MPI_REQUEST_NULL;
  if (rank == 0) {
    const auto transport = comm::mpi_transport(
        duplicate, comm::mail_control(std::make_unique<comm::MpiMailbox>(duplicate), 1s));
    Pages mine(kBytes);
    {
      Pages all(kBytes * size);
      EXPECT_THROW(transport->all_gather(mine.data(), all.data(), kBytes, {}, "states"), RankError);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  } else {
    const auto control = comm::mail_control(std::make_unique<comm::MpiMailbox>(duplicate), 60s);
    control->gather("", "find the machines");
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Isend(late.data(), static_cast<int>(kBytes), MPI_BYTE, 0, comm::kDataTag, duplicate->get(),
              &request);
    EXPECT_THROW(control->gather("", "after"), RankError);
  }
  progress();
  if (request != MPI_REQUEST_NULL) {
    new std::vector<char>(std::move(late));  // no receive: it stays with MPI
  }
}

TEST(Memory, OfAMessageThatIsComingInIsKept) {
  const int rank = rank_in(MPI_COMM_WORLD), size = size_of(MPI_COMM_WORLD);
  if (size == 1) GTEST_SKIP() << "takes two ranks";
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  constexpr int kTag = 5;
  if (rank == 0) {
    auto mailbox = std::make_unique<comm::MpiMailbox>(comm, kTag);
    MPI_Barrier(MPI_COMM_WORLD);
    std::this_thread::sleep_for(50ms);  // the message is announced, and its sender idle
    for (int look = 0; look < 10; ++look) mailbox->next();
    mailbox.reset();
    MPI_Barrier(MPI_COMM_WORLD);
  } else {
    std::vector<char> message(kMessageBytes, 'x');
    MPI_Request request = MPI_REQUEST_NULL;
    if (rank == 1)
      MPI_Isend(message.data(), static_cast<int>(kMessageBytes), MPI_BYTE, 0, kTag, comm, &request);
    MPI_Barrier(MPI_COMM_WORLD);
    std::this_thread::sleep_for(500ms);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // in which MPI writes the rest of the message
  MPI_Comm_free(&comm);
}

TEST(ThreadLevel, LessThanIsNeededIsRefused) {
  EXPECT_NO_THROW(comm::check_thread_level(MPI_THREAD_FUNNELED, true));
  EXPECT_NO_THROW(comm::check_thread_level(MPI_THREAD_SERIALIZED, false));
  EXPECT_NO_THROW(comm::check_thread_level(MPI_THREAD_MULTIPLE, false));
  const auto refusal = [](int provided, bool on_main_thread) -> std::string {
    try {
      comm::check_thread_level(provided, on_main_thread);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal(MPI_THREAD_SINGLE, true), HasSubstr("MPI_THREAD_FUNNELED"));
  EXPECT_THAT(refusal(MPI_THREAD_SINGLE, false), HasSubstr("MPI_THREAD_SERIALIZED"));
  EXPECT_THAT(refusal(MPI_THREAD_FUNNELED, false), HasSubstr("MPI_THREAD_SERIALIZED"));
}

}  // namespace
}  // namespace longspan::tests

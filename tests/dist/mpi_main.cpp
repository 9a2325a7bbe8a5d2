// GoogleTest on many ranks: rank 0 prints. At the end of each test every rank tells every other its
// failures, so that a failure anywhere fails the test everywhere. Every rank comes to that
// exchange, which has a deadline: a rank that does not come ends the job.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "longspan/info.hpp"
#include "tests/dist/world.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSkip = 77;  // what CTest takes for skipped
constexpr int kVerdictTag = 77;
constexpr auto kLimit = std::chrono::seconds(100);  // longer than any deadline inside a test

int comm_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int comm_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// Every rank's text, or the end of the job.
std::vector<std::string> tell_all(const std::string& mine, const char* test) {
  const int rank = comm_rank(), size = comm_size();
  std::vector<std::string> texts(size);
  std::vector<MPI_Request> sends(size, MPI_REQUEST_NULL);
  for (int p = 0; p < size; ++p)
    if (p != rank)
      MPI_Isend(mine.data(), static_cast<int>(mine.size()), MPI_BYTE, p, kVerdictTag,
                MPI_COMM_WORLD, &sends[p]);
  std::vector<bool> came(size);
  came[rank] = true;
  const auto begin = Clock::now();
  for (int missing = size - 1, sent = 0; missing > 0 || !sent;) {
    for (int p = 0; p < size; ++p) {
      if (came[p]) continue;
      int found = 0, bytes = 0;
      MPI_Status status;
      MPI_Iprobe(p, kVerdictTag, MPI_COMM_WORLD, &found, &status);
      if (!found) continue;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      texts[p].resize(bytes);
      MPI_Recv(texts[p].data(), bytes, MPI_BYTE, p, kVerdictTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      came[p] = true;
      --missing;
    }
    MPI_Testall(size, sends.data(), &sent, MPI_STATUSES_IGNORE);
    if (Clock::now() - begin > kLimit) {
      for (int p = 0; p < size; ++p)
        if (!came[p]) std::fprintf(stderr, "rank %d did not end %s\n", p, test);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return texts;
}

/// Runs before GoogleTest's own printer at the end of a test, so what it adds still counts.
class Verdict final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { failures_.clear(); }

  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (part.failed())
      failures_ += std::string(part.file_name() ? part.file_name() : "?") + ":" +
                   std::to_string(part.line_number()) + ": " + part.message() + "\n";
  }

  void OnTestEnd(const testing::TestInfo& test) override {
    const auto texts = tell_all(failures_, test.name());
    for (int p = 0; p < comm_size(); ++p)
      if (p != comm_rank() && !texts[p].empty())
        ADD_FAILURE() << "on rank " << p << ":\n" << texts[p];
  }

  std::string failures_;
};

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  testing::InitGoogleTest(&argc, argv);
  if (longspan::tests::wants_gpus() && longspan::gpu_count() < comm_size()) {
    if (comm_rank() == 0)
      std::printf("Skipped: %d ranks want a GPU each, and there are %d.\n", comm_size(),
                  longspan::gpu_count());
    MPI_Finalize();
    return kSkip;
  }
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (comm_rank() != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new Verdict);
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}

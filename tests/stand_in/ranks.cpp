#include "tests/stand_in/ranks.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

using longspan::stand_in::Meeting;

struct ncclComm {
  std::shared_ptr<Meeting> meeting;
  int rank, size;
};

namespace longspan::stand_in {
namespace {

std::atomic<int> comms = 0;

struct Post {
  explicit Post(int size) : boxes(static_cast<std::size_t>(size)) {}
  std::mutex mutex;
  std::vector<std::deque<comm::Mailbox::Letter>> boxes;
};

class ThreadMailbox final : public comm::Mailbox {
 public:
  ThreadMailbox(std::shared_ptr<Post> post, int rank) : post_(std::move(post)), rank_(rank) {}
  ~ThreadMailbox() override {
    for (int to = 0; to < size(); ++to)
      if (to != rank_) put(to, {rank_, Letter::left});
  }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(post_->boxes.size()); }
  void post(int to, const std::string& text) override { put(to, {rank_, Letter::text, text}); }
  std::optional<Letter> next() override {
    const std::lock_guard lock(post_->mutex);
    auto& box = post_->boxes[static_cast<std::size_t>(rank_)];
    if (box.empty()) return std::nullopt;
    std::optional<Letter> letter = std::move(box.front());
    box.pop_front();
    return letter;
  }
  void flush(comm::milliseconds) noexcept override {}

 private:
  void put(int to, Letter letter) {
    const std::lock_guard lock(post_->mutex);
    post_->boxes[static_cast<std::size_t>(to)].push_back(std::move(letter));
  }
  std::shared_ptr<Post> post_;
  int rank_;
};

}  // namespace

std::vector<std::string> Meeting::meet(int rank, const std::string& text) {
  std::unique_lock lock(mutex_);
  texts_[static_cast<std::size_t>(rank)] = text;
  const unsigned turn = turn_;
  if (++there_ == texts_.size()) {
    there_ = 0;
    ++turn_;
    told_ = texts_;
    changed_.notify_all();
    return told_;
  }
  if (!changed_.wait_for(lock, std::chrono::seconds(30), [&] { return turn_ != turn; })) return {};
  return told_;
}

ncclComm_t nccl_comm(std::shared_ptr<Meeting> meeting, int rank, int size) {
  ++comms;
  return new ncclComm{std::move(meeting), rank, size};
}
int nccl_comms_alive() { return comms; }

std::vector<std::unique_ptr<comm::Control>> controls(int size, comm::milliseconds deadline) {
  const auto post = std::make_shared<Post>(size);
  std::vector<std::unique_ptr<comm::Control>> all;
  for (int rank = 0; rank < size; ++rank)
    all.push_back(comm::mail_control(std::make_unique<ThreadMailbox>(post, rank), deadline));
  return all;
}

void run_ranks(int size, const std::function<void(int)>& work) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&work, rank] {
      static_cast<void>(cudaSetDevice(rank));
      work(rank);
    });
}

}  // namespace longspan::stand_in

using longspan::stand_in::comms;

const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
const char* ncclGetLastError(ncclComm_t) { return "none"; }
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const bool all = !comm->meeting->meet(comm->rank, "").empty();
  ncclCommAbort(comm);
  return all ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  delete comm;
  --comms;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* send, void* recv, std::size_t count, ncclDataType_t,
                           ncclComm_t comm, cudaStream_t) {
  const auto all =
      comm->meeting->meet(comm->rank, std::string(static_cast<const char*>(send), count));
  for (std::size_t p = 0; p < all.size(); ++p)
    std::memcpy(static_cast<char*>(recv) + p * count, all[p].data(), count);
  return all.empty() ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclSend(const void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclRecv(void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclInvalidUsage; }

#include "tests/stand_in/ranks.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "comm/control/mailbox.hpp"
#include "comm/control/wire.hpp"
#include "longspan/element.hpp"

using longspan::stand_in::Meeting;

struct ncclComm {
  std::shared_ptr<Meeting> meeting;
  int rank, size;
  int splits = 0;
};

namespace longspan::stand_in {
namespace {

std::atomic<int> comms = 0;

struct Post {
  explicit Post(int size) : boxes(static_cast<std::size_t>(size)) {}
  std::mutex mutex;
  std::vector<std::deque<comm::Mailbox::Message>> boxes;
};

class ThreadMailbox final : public comm::Mailbox {
 public:
  ThreadMailbox(std::shared_ptr<Post> post, int rank) : post_(std::move(post)), rank_(rank) {}
  ~ThreadMailbox() override {
    for (int to = 0; to < size(); ++to)
      if (to != rank_) put(to, {rank_, Message::left});
  }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(post_->boxes.size()); }
  void post(int to, const std::string& text) override { put(to, {rank_, Message::text, text}); }
  std::optional<Message> next() override {
    const std::lock_guard lock(post_->mutex);
    auto& box = post_->boxes[static_cast<std::size_t>(rank_)];
    if (box.empty()) return std::nullopt;
    std::optional<Message> message = std::move(box.front());
    box.pop_front();
    return message;
  }
  void flush(comm::milliseconds) noexcept override {}

 private:
  void put(int to, Message message) {
    const std::lock_guard lock(post_->mutex);
    post_->boxes[static_cast<std::size_t>(to)].push_back(std::move(message));
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

std::shared_ptr<Meeting> Meeting::part(int split, int color, int size) {
  const std::lock_guard lock(mutex_);
  auto& one = parts_[{split, color}];
  if (!one) one = std::make_shared<Meeting>(size);
  return one;
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
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  using longspan::comm::pack, longspan::comm::unpack;
  const auto all =
      comm->meeting->meet(comm->rank, pack(std::to_string(color), std::to_string(key)));
  if (all.empty()) return ncclSystemError;
  ++comm->splits;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int p = 0; p < comm->size; ++p)
    if (const auto texts = unpack(all[static_cast<std::size_t>(p)]); std::stoi(texts[0]) == color)
      members.emplace_back(std::stoi(texts[1]), p);
  std::sort(members.begin(), members.end());
  const auto own = std::find(members.begin(), members.end(), std::pair(key, comm->rank));
  const int size = static_cast<int>(members.size());
  *made = longspan::stand_in::nccl_comm(comm->meeting->part(comm->splits, color, size),
                                        static_cast<int>(own - members.begin()), size);
  return ncclSuccess;
}

namespace {

/// The calls of a thread since ncclGroupStart.
struct Message {
  int peer;
  const void* from;
  void* to;
  std::size_t bytes;
};
thread_local int depth = 0;
thread_local std::vector<Message> messages;
thread_local ncclComm_t messages_of = nullptr;

std::size_t size_of(ncclDataType_t type) {
  return type == ncclInt8 ? 1 : type == ncclFloat32 ? 4 : 2;
}

/// Messages between two ranks arrive in the order of the calls, whose sizes must be alike.
ncclResult_t deliver(ncclComm_t comm, const std::vector<Message>& all) {
  std::vector<std::string> mine;
  for (const Message& message : all)
    if (message.from)
      mine.insert(mine.end(), {std::to_string(message.peer),
                               std::string(static_cast<const char*>(message.from), message.bytes)});
  const auto told = comm->meeting->meet(comm->rank, longspan::comm::pack_all(mine));
  if (told.empty()) return ncclSystemError;
  std::vector<std::size_t> read(told.size());
  for (const Message& message : all) {
    if (!message.to) continue;
    const auto peer = static_cast<std::size_t>(message.peer);
    const auto texts = longspan::comm::unpack(told[peer]);
    std::size_t& at = read[peer];
    while (at < texts.size() && texts[at] != std::to_string(comm->rank)) at += 2;
    if (at >= texts.size() || texts[at + 1].size() != message.bytes) return ncclInvalidUsage;
    std::memcpy(message.to, texts[at + 1].data(), message.bytes);
    at += 2;
  }
  return ncclSuccess;
}

ncclResult_t add(ncclComm_t comm, const Message& message) {
  messages_of = comm;
  messages.push_back(message);
  if (depth > 0) return ncclSuccess;
  return deliver(comm, std::exchange(messages, {}));
}

/// A message of no bytes still has a place.
char nothing;

}  // namespace

ncclResult_t ncclAllGather(const void* send, void* recv, std::size_t count, ncclDataType_t,
                           ncclComm_t comm, cudaStream_t) {
  const auto all =
      comm->meeting->meet(comm->rank, std::string(static_cast<const char*>(send), count));
  for (std::size_t p = 0; p < all.size(); ++p)
    std::memcpy(static_cast<char*>(recv) + p * count, all[p].data(), count);
  return all.empty() ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
  const std::size_t bytes = count * size_of(type);
  const auto all = comm->meeting->meet(
      comm->rank,
      std::string(static_cast<const char*>(send), bytes * static_cast<std::size_t>(comm->size)));
  if (all.empty()) return ncclSystemError;
  const longspan::DType dtype = type == ncclFloat32   ? longspan::fp32
                                : type == ncclFloat16 ? longspan::fp16
                                                      : longspan::bf16;
  for (std::size_t i = 0; i < count; ++i) {
    float sum = 0;
    const auto at = static_cast<std::int64_t>(count * static_cast<std::size_t>(comm->rank) + i);
    for (const std::string& text : all) sum += longspan::load_element(text.data(), dtype, at);
    longspan::store_element(recv, dtype, static_cast<std::int64_t>(i), sum);
  }
  return ncclSuccess;
}
ncclResult_t ncclBroadcast(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t) {
  const std::size_t bytes = count * size_of(type);
  const bool is_root = comm->rank == root;
  const auto all = comm->meeting->meet(
      comm->rank, is_root ? std::string(static_cast<const char*>(send), bytes) : std::string());
  if (all.empty()) return ncclSystemError;
  if (all[static_cast<std::size_t>(root)].size() != bytes) return ncclInvalidUsage;
  std::memcpy(recv, all[static_cast<std::size_t>(root)].data(), bytes);
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t, int peer,
                      ncclComm_t comm, cudaStream_t) {
  return add(comm, {peer, send ? send : &nothing, nullptr, count});
}
ncclResult_t ncclRecv(void* recv, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t) {
  return add(comm, {peer, nullptr, recv ? recv : &nothing, count});
}
ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth > 0 || messages.empty()) return ncclSuccess;
  return deliver(messages_of, std::exchange(messages, {}));
}

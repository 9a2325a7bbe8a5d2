// From the caller's NCCL communicator to ours: a split of it with all ranks, which longspan may
// abort without ending the caller's. There is no other channel, so control messages travel over it
// too, through GPU memory, and the roll cannot be called.
#include "longspan/nccl.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <system_error>
#include <thread>

#include "comm/environment.hpp"
#include "comm/nccl/transport.hpp"
#include "comm/threads.hpp"
#include "comm/wire.hpp"
#include "longspan/buffer.hpp"
#include "src/check.hpp"
#include "src/env.hpp"

namespace longspan {
namespace comm {
namespace {

class NcclControl final : public Control {
 public:
  NcclControl(std::shared_ptr<Link> link, int rank, int size, milliseconds deadline)
      : Control(deadline), link_(std::move(link)), rank_(rank), size_(size) {
    LONGSPAN_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~NcclControl() override {
    // A stream with stuck work would block its own end.
    if (!fate().failed()) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaStreamDestroy(stream_)));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  /// First the lengths, then the texts, each in a slot as long as the longest.
  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    fate().check();
    const auto lengths = exchange<std::uint64_t>({mine.size()}, step);
    const std::uint64_t longest = *std::max_element(lengths.begin(), lengths.end());
    if (longest == 0) return std::vector<std::string>(size_);
    std::vector<char> slot(longest);
    std::copy(mine.begin(), mine.end(), slot.begin());
    const auto all = exchange(slot, step);
    std::vector<std::string> texts(size_);
    for (int p = 0; p < size_; ++p) texts[p].assign(all.data() + p * longest, lengths[p]);
    return texts;
  }

  void check(const char*, milliseconds) override { fate().check(); }

  [[noreturn]] void timed_out(const char* step, milliseconds) override {
    fate().fail({ErrorKind::timeout, -1, step,
                 fmt::format("A rank did not come to '{}' within the deadline of {:g} s; over NCCL "
                             "alone it has no name. LONGSPAN_DEADLINE_S sets the deadline.",
                             step, deadline().count() / 1000.0)});
  }

  /// Every rank sees it, so all of them come here, and can tell each other over NCCL what they
  /// mean.
  [[noreturn]] void disagree(RunName run, const Failure& otherwise) override {
    if (!run) fail(otherwise);
    std::vector<std::string> mine;
    for (const auto& [name, value] : describe(run)) mine.insert(mine.end(), {name, value});
    std::vector<std::string> packed;
    try {
      packed = gather(pack_all(mine), "comparison of the runs");
    } catch (const Error&) {
      fail(otherwise);  // it did not come to that
    }
    for (int p = 1; p < size_; ++p)
      if (const auto text = difference(unpack(packed[0]), 0, unpack(packed[p]), p, otherwise.step))
        fail({ErrorKind::usage, p, otherwise.step, *text});
    fail(otherwise);
  }

  void tell(const Failure& failure) noexcept override { fate().note(failure); }

 private:
  template <class T>
  std::vector<T> exchange(const std::vector<T>& mine, const std::string& step) {
    const std::size_t bytes = mine.size() * sizeof(T);
    std::vector<T> all(mine.size() * size_);
    reserve(bytes * (size_ + 1));
    auto* send = static_cast<std::byte*>(buffer_.data());
    auto* recv = send + bytes;
    LONGSPAN_CUDA(cudaMemcpyAsync(send, mine.data(), bytes, cudaMemcpyHostToDevice, stream_));
    link_->queue(*this, stream_, step.c_str(), [&](ncclComm_t comm) {
      return ncclAllGather(send, recv, bytes, ncclInt8, comm, stream_);
    });
    link_->wait(*this, stream_, step.c_str());
    LONGSPAN_CUDA(cudaMemcpy(all.data(), recv, bytes * size_, cudaMemcpyDeviceToHost));
    return all;
  }

  void reserve(std::size_t bytes) {
    if (buffer_.bytes() < bytes) buffer_ = Buffer(Device::cuda, bytes);
  }

  std::shared_ptr<Link> link_;
  int rank_;
  int size_;
  cudaStream_t stream_ = nullptr;
  Buffer buffer_;
};

/// ncclCommSplit with a deadline: on a communicator with blocking calls it waits for all ranks, so
/// it runs on a thread that is left behind if a rank does not come.
ncclComm_t split(ncclComm_t comm, int rank, milliseconds deadline) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    bool nobody_waits = false;
    ncclComm_t child = nullptr;
    ncclResult_t result = ncclSuccess;
  };
  auto shared = std::make_shared<Shared>();
  const auto make = [=] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.splitShare = 0;
    ncclComm_t child = nullptr;
    ncclResult_t result = ncclCommSplit(comm, 0, rank, &child, &config);
    while (result == ncclInProgress) {
      std::this_thread::sleep_for(milliseconds(1));
      ncclCommGetAsyncError(comm, &result);
    }
    const std::lock_guard lock(shared->mutex);
    shared->child = child;
    shared->result = result;
    shared->done = true;
    shared->changed.notify_all();
    if (shared->nobody_waits && child != nullptr) ncclCommAbort(child);
  };
  start_thread("a split of the NCCL communicator", make).detach();

  std::unique_lock lock(shared->mutex);
  const std::string step = "make the communicator";
  if (!shared->changed.wait_for(lock, deadline, [&] { return shared->done; })) {
    shared->nobody_waits = true;
    throw RankError(ErrorKind::timeout, -1, step,
                    "A rank did not come to '" + step +
                        "' within the deadline; over NCCL alone it has no name.");
  }
  if (shared->result != ncclSuccess)
    throw BackendError(fmt::format("NCCL: ncclCommSplit returned {} ({}).",
                                   ncclGetErrorString(shared->result), ncclGetLastError(nullptr)));
  return shared->child;
}

}  // namespace
}  // namespace comm

Communicator from_nccl(ncclComm_t comm, CommOptions options) {
  if (options.device != Device::cuda)
    throw Unsupported(
        "from_nccl was asked for device host, but NCCL moves states on GPUs only: "
        "use device cuda, or from_mpi.");
  env_default("NCCL_NVLS_ENABLE", "0");
  const auto deadline = comm::deadline_of(options);
  int rank = 0, size = 0, device = 0;
  for (const ncclResult_t result :
       {ncclCommUserRank(comm, &rank), ncclCommCount(comm, &size), ncclCommCuDevice(comm, &device)})
    if (result != ncclSuccess)
      throw UsageError(fmt::format("from_nccl was given a communicator that NCCL rejects: {}.",
                                   ncclGetErrorString(result)));
  LONGSPAN_CUDA(cudaSetDevice(device));
  auto link = std::make_shared<comm::Link>(comm::split(comm, rank, deadline), deadline);
  auto control = std::make_unique<comm::NcclControl>(link, rank, size, deadline);
  link->settle(*control, "make the communicator");
  const comm::Place place = comm::find_place(*control);
  return Communicator(comm::nccl_transport(std::move(link), std::move(control), place));
}

}  // namespace longspan

#include "comm/nccl/control.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/control/wire.hpp"
#include "longspan/buffer.hpp"
#include "src/base/check.hpp"

namespace longspan::comm {
namespace {

class NcclControl final : public Control {
 public:
  NcclControl(std::shared_ptr<Link> link, int rank, int size, milliseconds deadline)
      : Control(deadline), link_(std::move(link)), rank_(rank), size_(size) {
    LONGSPAN_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~NcclControl() override {
    // A stream with stuck work would block its own destruction.
    if (!outcome().failed()) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaStreamDestroy(stream_)));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  /// Gathers first the lengths, then the texts, each in a slot as long as the longest.
  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    outcome().check();
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

  void check(const char*, milliseconds) override { outcome().check(); }

  [[noreturn]] void timed_out(const char* step, milliseconds) override {
    outcome().fail({ErrorKind::timeout, -1, step,
                    fmt::format("A rank did not come to '{}' within the deadline of {}; over NCCL "
                                "alone it has no name. LONGSPAN_DEADLINE_S sets the deadline.",
                                step, seconds(deadline()))});
  }

  /// Called on every rank, since every rank sees the difference. So all come here, and can exchange
  /// over NCCL what they were given.
  [[noreturn]] void disagree(RunName run, const Failure& otherwise) override {
    if (!run) fail(otherwise);
    std::vector<std::string> mine;
    for (const auto& [name, value] : describe({0, run})) mine.insert(mine.end(), {name, value});
    std::vector<std::string> packed;
    try {
      packed = gather(pack_all(mine), "comparison of the runs");
    } catch (const Error&) {
      fail(otherwise);  // the ranks could not exchange it
    }
    for (int q = 1; q < size_; ++q)
      for (int p = 0; p < q; ++p)
        if (const auto text = difference(unpack(packed[p]), name_of(p), unpack(packed[q]),
                                         name_of(q), otherwise.step))
          fail({ErrorKind::usage, q, otherwise.step, *text});
    fail(otherwise);
  }

  void tell(const Failure& failure) noexcept override { outcome().note(failure); }

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

}  // namespace

std::shared_ptr<Control> nccl_control(std::shared_ptr<Link> link, int rank, int size,
                                      milliseconds deadline) {
  return std::make_shared<NcclControl>(std::move(link), rank, size, deadline);
}

}  // namespace longspan::comm

// A stream for transfers that run while the callers' streams compute. One event forks a transfer
// from a caller's stream, and another joins it to one, so that a captured stream takes both streams
// into its graph.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace longspan::comm {

class SideStream {
 public:
  SideStream() = default;
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  /// Makes the stream, on the thread's current GPU, and the events of a few transfers.
  void make();

  cudaStream_t get() const { return stream_; }

  /// A number for a transfer. Its events exist already unless more are open than ever before.
  int take();
  /// The stream, which from here on follows the work of `from`, now or at its kept place.
  cudaStream_t fork(cudaStream_t from);
  /// Keeps the place of a stream for the next `forks` forks.
  void keep_place(cudaStream_t of, int forks);
  void forget_place() noexcept { places_ = 0; }
  /// All work of the stream belongs to this transfer, or comes before it.
  void mark(int number);
  /// `to` waits for the transfer.
  void join(int number, cudaStream_t to) const;
  bool is_done(int number) const;
  void give_back(int number) noexcept { marks_[static_cast<std::size_t>(number)].is_taken = false; }

  /// Starts a transfer after the work of `from`: `work(stream)` queues it. Returns its number.
  template <class Work>
  int start(cudaStream_t from, const Work& work) {
    const int number = take();
    try {
      work(fork(from));
      mark(number);
    } catch (...) {
      give_back(number);
      throw;
    }
    return number;
  }

  /// Its work may never end: nothing may wait for the stream, not even its destruction.
  void abandon() noexcept { is_abandoned_ = true; }

 private:
  struct Mark {
    cudaEvent_t event = nullptr;
    bool is_taken = false;
    bool is_captured = false;
  };
  Mark& at(int number) { return marks_[static_cast<std::size_t>(number)]; }
  const Mark& at(int number) const { return marks_[static_cast<std::size_t>(number)]; }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;  // read when it is waited for, so one is enough
  std::vector<Mark> marks_;
  int places_ = 0;  // forks that begin_ was recorded for
  bool is_abandoned_ = false;
};

}  // namespace longspan::comm

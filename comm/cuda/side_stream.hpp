// A stream beside the callers', on which transfers run while theirs compute. A transfer forks from
// a caller's stream by one event and is joined by another, so that a caller's stream that is
// captured takes both streams into its graph.
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

  /// A number for a transfer, whose events are there already unless more are open than ever before.
  int take();
  /// The stream, which from here on follows what `from` has, or had where its place was kept.
  cudaStream_t fork(cudaStream_t from);
  /// Keeps the place of a stream for so many forks to come.
  void keep_place(cudaStream_t of, int forks);
  void forget_place() noexcept { places_ = 0; }
  /// All that the stream has belongs to this transfer, or comes before it.
  void mark(int number);
  /// `to` waits for the transfer.
  void join(int number, cudaStream_t to) const;
  bool is_done(int number) const;
  void give_back(int number) noexcept { marks_[static_cast<std::size_t>(number)].is_taken = false; }

  /// Starts a transfer that follows what `from` has: `work(stream)` queues it. Returns its number.
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

  /// Work of it may never end: nothing may wait for the stream, not even its end.
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
  int places_ = 0;  // begin_ was recorded for so many forks
  bool is_abandoned_ = false;
};

}  // namespace longspan::comm

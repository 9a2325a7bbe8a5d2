#include "comm/cuda/side_stream.hpp"

#include <algorithm>

#include "src/base/check.hpp"

namespace longspan::comm {
namespace {

constexpr int kHighest = -1000;  // CUDA takes the highest priority that the GPU has
constexpr int kFirstMarks = 8;

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  LONGSPAN_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

/// While it lives, this thread may make calls that a capture would forbid.
class Relaxed {
 public:
  Relaxed() { exchange(); }
  ~Relaxed() { exchange(); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  void exchange() noexcept {
    static_cast<void>(LONGSPAN_CUDA_WORKED(cudaThreadExchangeStreamCaptureMode(&mode_)));
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

SideStream::~SideStream() {
  for (const Mark& mark : marks_)
    if (mark.event != nullptr)
      static_cast<void>(LONGSPAN_CUDA_WORKED(cudaEventDestroy(mark.event)));
  if (begin_ != nullptr) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaEventDestroy(begin_)));
  if (stream_ != nullptr && !is_abandoned_)
    static_cast<void>(LONGSPAN_CUDA_WORKED(cudaStreamDestroy(stream_)));
}

void SideStream::make() {
  if (stream_ != nullptr) return;
  const Relaxed relaxed;
  if (begin_ == nullptr) begin_ = make_event();
  marks_.resize(kFirstMarks);
  for (Mark& mark : marks_)
    if (mark.event == nullptr) mark.event = make_event();
  LONGSPAN_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, kHighest));
}

int SideStream::take() {
  auto free = std::find_if(marks_.begin(), marks_.end(), [](const Mark& m) { return !m.is_taken; });
  if (free == marks_.end()) {
    const Relaxed relaxed;
    const cudaEvent_t event = make_event();
    try {
      marks_.push_back({.event = event});
    } catch (...) {
      static_cast<void>(LONGSPAN_CUDA_WORKED(cudaEventDestroy(event)));
      throw;
    }
    free = marks_.end() - 1;
  }
  free->is_taken = true;
  return static_cast<int>(free - marks_.begin());
}

cudaStream_t SideStream::fork(cudaStream_t from) {
  if (places_ > 0)
    --places_;
  else
    LONGSPAN_CUDA(cudaEventRecord(begin_, from));
  LONGSPAN_CUDA(cudaStreamWaitEvent(stream_, begin_, 0));
  return stream_;
}

void SideStream::keep_place(cudaStream_t of, int forks) {
  LONGSPAN_CUDA(cudaEventRecord(begin_, of));
  places_ = forks;
}

void SideStream::mark(int number) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  LONGSPAN_CUDA(cudaStreamIsCapturing(stream_, &capture));
  at(number).is_captured = capture != cudaStreamCaptureStatusNone;
  LONGSPAN_CUDA(cudaEventRecord(at(number).event, stream_));
}

void SideStream::join(int number, cudaStream_t to) const {
  LONGSPAN_CUDA(cudaStreamWaitEvent(to, at(number).event, 0));
}

/// A captured event runs later and more than once, and CUDA forbids a query of it.
bool SideStream::is_done(int number) const {
  if (at(number).is_captured) return false;
  const Relaxed relaxed;
  const cudaError_t status = cudaEventQuery(at(number).event);
  if (status == cudaErrorNotReady) {
    // Not an error, but CUDA may keep it as the last one.
    if (cudaPeekAtLastError() == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
    return false;
  }
  LONGSPAN_CUDA_STATUS(status, "cudaEventQuery");
  return true;
}

}  // namespace longspan::comm

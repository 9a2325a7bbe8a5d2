#include "comm/nccl/link.hpp"

#include <fmt/format.h>

#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/cuda/stream.hpp"
#include "src/base/check.hpp"

namespace longspan::comm {
namespace {

constexpr int kSlots = 256;

constexpr milliseconds kLongestEnd{5000};

bool worked(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

/// Calls ncclCommDestroy, which waits until every rank of the node has come to it. A rank that
/// comes much earlier leaves the wait to a thread. Returns true where they all came.
bool destroy(ncclComm_t comm, int device) {
  std::packaged_task<bool()> task([comm, device] {
    static_cast<void>(LONGSPAN_CUDA_WORKED(cudaSetDevice(device)));
    return ncclCommDestroy(comm) == ncclSuccess;
  });
  auto done = task.get_future();
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error&) {  // no thread, and a wait here has no end
    ncclCommAbort(comm);
    return false;
  }
  return done.wait_for(kLongestEnd) == std::future_status::ready && done.get();
}

}  // namespace

/// Shared by two threads. The communicator is null after an abort.
struct Link::Handle {
  int device = 0;
  std::mutex mutex;
  ncclComm_t comm = nullptr;
  std::vector<cudaEvent_t> ends;  // by slot, recorded behind the work
  std::function<void()> on_abort;

  ~Handle() {
    for (cudaEvent_t end : ends)
      if (end != nullptr) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaEventDestroy(end)));
  }

  /// Takes the communicator; the caller ends it.
  ncclComm_t take() {
    const std::lock_guard lock(mutex);
    return std::exchange(comm, nullptr);
  }

  void call_on_abort() {
    std::function<void()> call;
    {
      const std::lock_guard lock(mutex);
      call = on_abort;
    }
    if (call) call();
  }
};

Link::Link(ncclComm_t comm, milliseconds patience) try : handle_(std::make_shared<Handle>()) {
  handle_->comm = comm;
  LONGSPAN_CUDA(cudaGetDevice(&handle_->device));
  handle_->ends.resize(kSlots, nullptr);
  for (cudaEvent_t& end : handle_->ends)
    LONGSPAN_CUDA(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
  watchdog_ = std::make_unique<Watchdog>(Watchdog::Duties{
      .deadline = patience,
      .slots = kSlots,
      .prepare =
          [handle = handle_] {
            static_cast<void>(LONGSPAN_CUDA_WORKED(cudaSetDevice(handle->device)));
            // Looking at an event must not break a capture that another thread has begun.
            auto mode = cudaStreamCaptureModeRelaxed;
            static_cast<void>(LONGSPAN_CUDA_WORKED(cudaThreadExchangeStreamCaptureMode(&mode)));
          },
      // An error is an end too: a wait for the stream reports it.
      .done = [handle = handle_](
                  int slot) { return cudaEventQuery(handle->ends[slot]) != cudaErrorNotReady; },
      .abort =
          [handle = handle_] {
            handle->call_on_abort();
            if (ncclComm_t doomed = handle->take()) ncclCommAbort(doomed);
          },
  });
} catch (...) {
  ncclCommAbort(comm);  // it was ours from the start
}

Link::~Link() { end(); }

bool Link::end() noexcept try {
  if (aborted_) return false;
  ncclComm_t comm = handle_->take();
  if (!comm) return false;
  // Finalising waits for queued work, and a peer may be missing, so its time is limited.
  Patience patient(kLongestEnd);
  ncclResult_t result = ncclCommFinalize(comm);
  while (result == ncclInProgress && !patient.over()) {
    patient.pause();
    if (ncclCommGetAsyncError(comm, &result) != ncclSuccess) break;
  }
  if (result == ncclSuccess) return destroy(comm, handle_->device);
  handle_->comm = comm;
  abort();
  return false;
} catch (...) {  // from a lock or no memory; the process ends the communicator
  return false;
}

void Link::abort() {
  aborted_ = true;
  watchdog_->abort();
}

void Link::on_abort(std::function<void()> call) {
  const std::lock_guard lock(handle_->mutex);
  handle_->on_abort = std::move(call);
}

ncclResult_t Link::state() const {
  const std::lock_guard lock(handle_->mutex);
  ncclResult_t state = ncclSuccess;
  if (handle_->comm) ncclCommGetAsyncError(handle_->comm, &state);
  return state;
}

void Link::check(Control& control, const char* step, milliseconds waited) {
  control.outcome().check();
  if (const auto expired = watchdog_->expired()) control.timed_out(expired->c_str(), waited);
  const ncclResult_t found = state();
  if (worked(found)) return;
  // A peer's end shows as a network error here; the roll call finds the peer.
  if (found == ncclRemoteError || found == ncclSystemError) control.timed_out(step, waited);
  control.fail({ErrorKind::backend, -1, step,
                fmt::format("NCCL failed at '{}': {} ({}).", step, ncclGetErrorString(found),
                            ncclGetLastError(nullptr))});
}

void Link::settle(Control& control, const char* step) try {
  Patience patient(control.patience());
  while (state() == ncclInProgress) {
    control.check(step, patient.waited());
    if (patient.over()) control.timed_out(step, patient.waited());
    patient.pause();
  }
  check(control, step, patient.waited());
} catch (...) {
  abort();
  throw;
}

void Link::queue(Control& control, cudaStream_t stream, const char* step, const Call& work) {
  call(control, step, work);
  watch(stream, step);
}

ncclComm_t Link::split(Control& control, int color, int key, const char* step) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.splitShare = 0;  // since an abort of one must not affect the other
  // NCCL may write it after this rank gave up: its memory must still exist then.
  auto place = std::make_unique<ncclComm_t>(nullptr);
  try {
    call(control, step, [&](ncclComm_t comm) {
      return ncclCommSplit(comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, place.get(), &config);
    });
  } catch (...) {
    static_cast<void>(place.release());
    throw;
  }
  return *place;
}

void Link::call(Control& control, const char* step, const Call& work) {
  control.outcome().check();
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(handle_->mutex);
    if (handle_->comm) result = work(handle_->comm);
  }
  if (!worked(result)) {
    abort();
    control.fail({ErrorKind::backend, -1, step,
                  fmt::format("NCCL refused '{}': {} ({}).", step, ncclGetErrorString(result),
                              ncclGetLastError(nullptr))});
  }
  settle(control, step);
}

std::optional<int> Link::slot_for(cudaStream_t stream) const {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  // It fails for the default stream while another stream is captured.
  if (!LONGSPAN_CUDA_WORKED(cudaStreamIsCapturing(stream, &capture))) return std::nullopt;
  if (capture != cudaStreamCaptureStatusNone) return std::nullopt;
  return watchdog_->free_slot();
}

void Link::open_watch(cudaStream_t stream, const char* step) {
  if (open_slot_) return;  // of a call that threw, or of the same work
  open_slot_ = slot_for(stream);
  if (open_slot_) watchdog_->watch(*open_slot_, step, true);
}

void Link::close_watch(Control& control, cudaStream_t stream, const char* step) {
  if (const auto slot = std::exchange(open_slot_, std::nullopt)) {
    LONGSPAN_CUDA(cudaEventRecord(handle_->ends[*slot], stream));
    watchdog_->close(*slot);
  }
  settle(control, step);
}

void Link::watch(cudaStream_t stream, const char* step) {
  const auto slot = slot_for(stream);
  if (!slot) return;
  LONGSPAN_CUDA(cudaEventRecord(handle_->ends[*slot], stream));
  watchdog_->watch(*slot, step);
}

void Link::wait(Control& control, cudaStream_t stream, const char* step) try {
  control.outcome().check();
  Patience patient(control.patience());
  wait_for_stream(stream, patient, [&] {
    control.check(step, patient.waited());
    check(control, step, patient.waited());
    if (patient.over()) control.timed_out(step, patient.waited());
  });
  check(control, step, patient.waited());  // an abort frees the stream, but is an error
} catch (const BackendError& error) {
  abort();
  control.fail({ErrorKind::backend, -1, step, error.what()});
} catch (...) {
  abort();
  throw;
}

}  // namespace longspan::comm

// One NCCL communicator, its watchdog, and the ways to wait for it. NCCL is used without blocking
// calls, so that the thread that queues work can also watch the deadline and the control plane. All
// aborts run on the watchdog's thread: an abort may block behind a kernel that does not end.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/control.hpp"
#include "comm/control/watchdog.hpp"

namespace longspan::comm {

class Link {
 public:
  using Call = std::function<ncclResult_t(ncclComm_t)>;

  /// Owns `comm` (not blocking), which belongs to the calling thread's current GPU.
  Link(ncclComm_t comm, milliseconds patience);
  ~Link();

  /// Calls NCCL, waits until NCCL has queued the work, and watches it. Work of a captured stream
  /// runs with the graph, and is watched by what waits for that.
  void queue(Control& control, cudaStream_t stream, const char* step, const Call& call);

  /// Begins to watch work that the caller is about to queue and that waits for other ranks. A call
  /// that queues it may block until that work ends, as the first launch of a kernel does.
  void open_watch(cudaStream_t stream, const char* step);
  /// The work is queued, and the watch ends with it. Throws what the watchdog or NCCL found.
  void close_watch(Control& control, cudaStream_t stream, const char* step);

  /// Splits off a part of the communicator, not blocking; null where color < 0. Collective. Nothing
  /// may be queued on the communicator that other ranks have not come to.
  ncclComm_t split(Control& control, int color, int key, const char* step);

  /// Waits for an NCCL call without a stream that is making the communicator.
  void settle(Control& control, const char* step);

  void wait(Control& control, cudaStream_t stream, const char* step);

  /// Soon frees the streams from NCCL's kernels.
  void abort();

  /// An abort also calls this on the watchdog's thread; it must not throw.
  void on_abort(std::function<void()> call);

  /// Ends the communicator, within seconds. Returns true where every rank of the node has come to
  /// this, for which ncclCommDestroy waits; false where that is unknown, or it was ended before.
  bool end() noexcept;

 private:
  struct Handle;
  ncclResult_t state() const;
  /// Calls NCCL, and waits until it is no longer in progress.
  void call(Control& control, const char* step, const Call& call);
  /// Throws the error that the watchdog or NCCL found.
  void check(Control& control, const char* step, milliseconds waited);
  /// A slot for a piece of work; none where there is nothing to watch.
  std::optional<int> slot_for(cudaStream_t stream) const;
  void watch(cudaStream_t stream, const char* step);

  std::shared_ptr<Handle> handle_;  // shared with the watchdog's thread
  std::unique_ptr<Watchdog> watchdog_;
  std::optional<int> open_slot_;  // from open_watch to close_watch
  bool aborted_ = false;
};

}  // namespace longspan::comm

// The frame of every call of the runtime: the lock, the requested error, the thread's last error,
// and its current GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "kernels/simulated/runtime/faults.hpp"

namespace longspan::simulated {

/// Threads get it in the order in which they ask. A thread that waits releases it between two
/// slices of the machine; a std::mutex it would nearly always get back before another thread wakes.
class FairMutex {
 public:
  void lock() {
    std::unique_lock own(mutex_);
    const std::uint64_t mine = next_++;
    changed_.wait(own, [&] { return served_ == mine; });
  }
  bool try_lock() {
    const std::lock_guard own(mutex_);
    if (next_ != served_) return false;
    ++next_;
    return true;
  }
  void unlock() {
    const std::lock_guard own(mutex_);
    ++served_;
    if (next_ != served_) changed_.notify_all();
  }
  /// For the holder: whether another thread asks for it.
  bool is_wanted() {
    const std::lock_guard own(mutex_);
    return next_ > served_ + 1;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_ = 0, served_ = 0;
};

using Lock = std::unique_lock<FairMutex>;

/// Guards the runtime and the machine. It outlives main, because threads do.
FairMutex& machine_mutex();

/// Waits while another thread loads the code of a kernel (launches.cpp), but for calls that only
/// ask or choose a device: the driver may serve one call at a time.
void wait_for_loads(Lock& lock, const char* name);

/// Of this thread.
int& current_device();
cudaError_t& last_error();

/// Stores an error as the thread's last one.
inline cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}

/// Runs body(lock) as a call of the runtime.
template <class Body>
cudaError_t call(const char* name, const Body& body) {
  if (is_made_to_fail(name)) return noted(cudaErrorMemoryAllocation);
  Lock lock(machine_mutex());
  wait_for_loads(lock, name);
  return noted(body(lock));
}

}  // namespace longspan::simulated

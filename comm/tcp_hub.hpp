// The post office of the TCP control plane: a thread of rank 0 that passes frames on and tells all
// ranks when a connection ends. It runs apart from rank 0's own work, so that a busy rank 0 does
// not keep the others from hearing of each other.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "comm/tcp_frames.hpp"

namespace longspan::comm {

class Hub {
 public:
  /// Listens on the port, of this machine's own loopback only if `local`, and starts. `key` must be
  /// the same on all ranks. Throws UsageError when the port is taken.
  Hub(int port, bool local, int size, const std::string& key);
  /// Passes frames on until everyone has left, at most for the linger.
  ~Hub();

  /// Rank 0's own end.
  Fd take_own_end() { return std::move(own_); }
  void set_linger(std::chrono::milliseconds linger) { linger_ms_ = linger.count(); }

 private:
  void run(Fd listener, Fd first, int size, const std::string& key);

  Fd own_;
  std::atomic<bool> closing_{false};
  std::atomic<long> linger_ms_{60'000};
  std::thread thread_;
};

}  // namespace longspan::comm

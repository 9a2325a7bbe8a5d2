// The post office of the TCP control plane: a thread of rank 0 that passes frames on and tells all
// ranks when a connection ends. It runs apart from rank 0's own work, so that a busy rank 0 does
// not keep the others from hearing of each other.
//
// A guest says hello, hears that it is welcome, and says that it heard: then it has its seat, and
// its end is the end of the rank. Until then it may vanish and come again. Strangers cost little:
// there is room for a few of them, for a short time, and for a short hello of each.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/tcp/frames.hpp"
#include "comm/tcp/hello.hpp"

namespace longspan::comm {

class Hub {
 public:
  /// The longest time without a seat, and the guests without one besides the ranks to come.
  static constexpr std::chrono::seconds kStay{5};
  static constexpr int kStrangers = 16;

  /// Passes on between the ranks of `ours`, who meet at these sockets.
  Hub(std::vector<Fd> listeners, const Hello& ours);
  /// Passes frames on until everyone has left, at most for the linger.
  ~Hub();

  /// Rank 0's own end.
  Fd take_own_end() { return std::move(own_); }
  void set_linger(std::chrono::milliseconds linger) { linger_ms_ = linger.count(); }
  /// Why it ended by itself, which ends all connections; empty: it did not.
  std::string trouble() const;

 private:
  void run(const std::vector<Fd>& listeners, Fd first, const Hello& ours);

  Fd own_;
  std::atomic<bool> closing_{false};
  std::atomic<long long> linger_ms_{60'000};
  mutable std::mutex mutex_;
  std::string trouble_;
  std::thread thread_;
};

}  // namespace longspan::comm

// The relay of the TCP control plane: a thread of rank 0 that passes frames on and tells all ranks
// when a connection ends. It runs apart from rank 0's own work, so that a busy rank 0 does not
// delay the others' messages.
//
// A guest says hello, is welcomed, and confirms. Then it has its seat, and its end is the end of
// the rank. Until then it may vanish and come again. Strangers cost little: there is room for a few
// of them, for a short time, and for a short hello of each.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/tcp/frames.hpp"
#include "comm/tcp/hello.hpp"

namespace longspan::comm {

class Hub {
 public:
  /// The longest time without a seat, and the guests without one besides the ranks to come.
  static constexpr std::chrono::seconds kStay{5};
  static constexpr int kStrangers = 16;

  /// Relays between the ranks of `ours`, which meet at these sockets.
  Hub(std::vector<Fd> listeners, const Hello& ours);
  /// Frames are relayed until every rank has left, at most for the linger. This waits for a moment.
  /// Then the thread goes on by itself, and the end of the process waits for it: rank 0 may be done
  /// with a communicator that others still use while they wait for rank 0 elsewhere.
  ~Hub();

  /// Rank 0's own end.
  Fd take_own_end() { return std::move(own_); }
  void set_linger(std::chrono::milliseconds linger) { shared_->linger_ms = linger.count(); }
  /// Why it ended by itself, which ends all connections; empty: it did not.
  std::string trouble() const;

 private:
  /// With the thread.
  struct Shared {
    const pid_t process = ::getpid();  // a fork has none of its threads
    std::atomic<bool> closing{false};
    std::atomic<long long> linger_ms{60'000};
    mutable std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::string trouble;

    bool wait(std::chrono::milliseconds limit);
  };
  class Lingering;
  static void run(Shared& shared, std::vector<Fd> listeners, Fd first, const Hello& ours);

  Fd own_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace longspan::comm

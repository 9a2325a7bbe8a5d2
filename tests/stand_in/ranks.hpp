// Ranks that are threads: a place where they meet, messages between them, and the base of NCCL's
// stand-in.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/control.hpp"
#include "nccl.h"

namespace longspan::stand_in {

/// Where all ranks meet repeatedly, and leave a text each.
class Meeting {
 public:
  explicit Meeting(int size) : texts_(static_cast<std::size_t>(size)) {}

  /// Every rank's text; nothing where some rank does not come within seconds.
  std::vector<std::string> meet(int rank, const std::string& text);

  /// Where a part of the ranks meets, those of one color of one split.
  std::shared_ptr<Meeting> part(int split, int color, int size);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_, told_;
  std::size_t there_ = 0;
  unsigned turn_ = 0;
  std::map<std::pair<int, int>, std::shared_ptr<Meeting>> parts_;
};

/// A communicator of NCCL's stand-in, which ncclCommDestroy or ncclCommAbort ends.
ncclComm_t nccl_comm(std::shared_ptr<Meeting> meeting, int rank, int size);
int nccl_comms_alive();

/// The control plane between threads.
std::vector<std::unique_ptr<comm::Control>> controls(int size, comm::milliseconds deadline);

/// work(rank) on a thread each, whose GPU is that of its number.
void run_ranks(int size, const std::function<void(int)>& work);

}  // namespace longspan::stand_in

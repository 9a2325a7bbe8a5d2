#include "kernels/simulated/runtime/nccl_comm.hpp"

#include <algorithm>
#include <utility>

#include "kernels/simulated/runtime/devices.hpp"
#include "kernels/simulated/runtime/streams.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {

std::string& nccl_error_text() {
  static auto* const text = new std::string("none");
  return *text;
}

std::shared_ptr<Comm> Comm::make(const std::string& name, int rank, int size, bool blocking) {
  std::shared_ptr<Comm> comm(new Comm);
  comm->rank_ = rank;
  comm->size_ = size;
  comm->device_ = current_device();
  comm->is_blocking_ = blocking;
  comm->segment_ = Segment::open(name, rank, size, device_on_node(comm->device_));
  return comm->segment_ == nullptr ? nullptr : comm;
}

/// Whether all ranks have joined.
bool Comm::is_made() {
  if (is_made_) return true;
  if (const auto parent = parent_; parent != nullptr) parent->look_for_split();
  if (segment_ == nullptr || !segment_->are_all_here()) return false;
  is_made_ = true;
  if (segment_->shares_a_gpu()) {
    nccl_error_text() = "two ranks of a communicator have one GPU";
    error_ = ncclInvalidUsage;
  }
  if (segment_->has_other_processes()) meet_other_processes();
  return true;
}

ncclResult_t Comm::state() {
  if (error_ != ncclSuccess) return error_;
  if (!is_made()) return ncclInProgress;
  look_for_split();
  if (!splitting_.empty()) return ncclInProgress;
  if (!put_off_.empty()) {
    for (const auto& queue : std::exchange(put_off_, {})) {
      const ncclResult_t result = queue();
      if (result != ncclSuccess) error_ = result;
    }
    return error_ != ncclSuccess ? error_ : ncclInProgress;
  }
  if (is_finalized_ && !is_idle()) return ncclInProgress;
  return error_;
}

ncclResult_t Comm::queue(std::vector<Piece> pieces, cudaStream_t stream, Then then) {
  if (error_ != ncclSuccess) return error_;
  if (!is_made() || is_finalized_ || !splitting_.empty() || !put_off_.empty()) {
    nccl_error_text() = "a communicator was used while an earlier call was in progress";
    return ncclInvalidArgument;
  }
  if (is_blocking_ || chance(0.5)) return queue_now(pieces, stream, then);
  put_off_.emplace_back([this, pieces = std::move(pieces), stream, then = std::move(then)] {
    return queue_now(pieces, stream, then);
  });
  return ncclInProgress;
}

ncclResult_t Comm::queue_now(const std::vector<Piece>& pieces, cudaStream_t handle,
                             const Then& then) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return ncclUnhandledCudaError;
  Work work;
  const auto self = shared_from_this();
  work.begin = [self, pieces, then]() -> Poll {
    if (self->is_aborted_) return [] { return Progress::ended; };
    auto transfer = std::make_shared<Transfer>(self->segment_, self->rank_, pieces);
    return [self, transfer, then] {
      const Progress progress = self->go_on(*transfer);
      if (progress == Progress::ended && then && !self->is_aborted_) then();
      return progress;
    };
  };
  work.queued = [self](const OperationPtr& operation, std::vector<OperationPtr>& after) {
    after.push_back(std::exchange(self->last_, operation));
  };
  const cudaError_t error = submit(*stream, std::move(work));
  if (error == cudaSuccess) return ncclSuccess;
  nccl_error_text() = std::string("Cuda failure '") + cudaGetErrorString(error) + "'";
  return ncclUnhandledCudaError;
}

/// A rank whose process has ended shows as an error, as when its connections close; operations that
/// wait for it still have to be aborted.
Progress Comm::go_on(Transfer& transfer) {
  if (is_aborted_) return Progress::ended;
  const Progress progress = transfer.go_on();
  if (progress == Progress::none && error_ == ncclSuccess && segment_->has_lost_a_rank()) {
    nccl_error_text() = "the process of another rank has ended";
    error_ = ncclRemoteError;
  }
  return progress;
}

ncclResult_t Comm::split(int color, int key, bool blocking, std::shared_ptr<Comm>& child) {
  if (const ncclResult_t now = state(); now != ncclSuccess) {
    if (now == ncclInProgress) nccl_error_text() = "a split while an earlier call was in progress";
    return now == ncclInProgress ? ncclInvalidArgument : now;
  }
  child = nullptr;
  if (color != NCCL_SPLIT_NOCOLOR) {
    child.reset(new Comm);
    child->device_ = device_;
    child->is_blocking_ = blocking;
    child->parent_ = shared_from_this();
  }
  splitting_.push_back({++splits_, {color, key}, child});
  segment_->announce(splits_, {color, key});
  return ncclSuccess;
}

/// Once all ranks have reported their wishes for a split, each knows its own part.
void Comm::look_for_split() {
  std::erase_if(splitting_, [this](const Split& split) {
    std::vector<std::pair<int, int>> members;  // key, rank here
    for (int r = 0; r < size_; ++r) {
      Segment::Announcement announced{};
      if (!segment_->has_announced(r, split.number, announced)) return false;
      if (announced.color == split.announced.color) members.emplace_back(announced.key, r);
    }
    if (split.child == nullptr) return true;
    std::sort(members.begin(), members.end());
    const auto own =
        std::find(members.begin(), members.end(), std::pair(split.announced.key, rank_));
    Comm& child = *split.child;
    child.rank_ = static_cast<int>(own - members.begin());
    child.size_ = static_cast<int>(members.size());
    child.segment_ = Segment::open(segment_->name() + "-" + std::to_string(split.number) + "-" +
                                       std::to_string(split.announced.color),
                                   child.rank_, child.size_, device_on_node(device_));
    child.parent_ = nullptr;
    if (child.segment_ == nullptr) child.error_ = ncclSystemError;
    return true;
  });
}

void Comm::finalize() {
  static_cast<void>(state());
  is_finalized_ = true;
}

void Comm::abort() {
  is_aborted_ = true;
  put_off_.clear();
  splitting_.clear();
  if (error_ == ncclSuccess) error_ = ncclInvalidUsage;  // returned to its later users
  if (segment_ != nullptr) segment_->leave(Segment::State::aborted);
}

}  // namespace longspan::simulated

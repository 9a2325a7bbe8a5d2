// A rank's side of a communicator. All functions are called with the machine's mutex held.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/nccl_transfer.hpp"

namespace longspan::simulated {

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  /// Null if there is no memory for it. It is in progress until all ranks have joined.
  static std::shared_ptr<Comm> make(const std::string& name, int rank, int size, bool blocking);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  bool is_blocking() const { return is_blocking_; }

  /// Its state: in progress, an error, or success. The call queues deferred operations.
  ncclResult_t state();

  /// Called when all pieces have arrived.
  using Then = std::function<void()>;

  /// Queues the transfer of these pieces after earlier work of the stream and of this communicator.
  /// A communicator that does not block may defer it until its state is queried.
  ncclResult_t queue(std::vector<Piece> pieces, cudaStream_t stream, Then then = {});

  /// Begins a split, whose result is in progress until all ranks have joined it; null: not part of
  /// it (NCCL_SPLIT_NOCOLOR).
  ncclResult_t split(int color, int key, bool blocking, std::shared_ptr<Comm>& child);

  void finalize();
  bool is_idle() const { return last_ == nullptr || last_->is_done(); }
  void leave() { segment_->leave(Segment::State::left); }
  bool have_all_left() const { return segment_->have_all_left(); }
  bool has_lost_a_rank() { return segment_->has_lost_a_rank(); }
  void abort();

 private:
  Comm() = default;
  bool is_made();
  void look_for_split();
  ncclResult_t queue_now(const std::vector<Piece>& pieces, cudaStream_t stream, const Then& then);
  Progress go_on(Transfer& transfer);

  std::shared_ptr<Segment> segment_;  // null: result of a split that is not complete
  int rank_ = 0, size_ = 0, device_ = 0;
  bool is_blocking_ = true, is_made_ = false, is_aborted_ = false, is_finalized_ = false;
  ncclResult_t error_ = ncclSuccess;
  OperationPtr last_;  // operations of a communicator run one after another, in every stream
  std::vector<std::function<ncclResult_t()>> put_off_;

  struct Split {
    std::uint32_t number;
    Segment::Announcement announced;
    std::shared_ptr<Comm> child;
  };
  std::shared_ptr<Comm> parent_;  // of which it will be a split
  std::uint32_t splits_ = 0;
  std::vector<Split> splitting_;
};

/// Text about the last error of this process.
std::string& nccl_error_text();

}  // namespace longspan::simulated

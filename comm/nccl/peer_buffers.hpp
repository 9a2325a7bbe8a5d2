// Memory that every rank of a node can write: a peer buffer of each rank, mapped into all processes
// (CUDA IPC over NVLink or PCIe peer access). src/base/peer_view.hpp describes its use in a kernel.
//
// Memory that a peer has mapped must not be freed, and ranks do not release a layer at one moment.
// So a rank that releases closes its own mappings of the others, keeps its own memory, and reports
// that at the next exchange about peer buffers. Memory that all have closed is then freed
// (PeerBufferSet). After a failure no rank knows what a peer still writes, and the process keeps
// the memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "src/base/peer_view.hpp"

namespace longspan::comm {

class PeerBuffers;

/// All peer buffers of one communicator, and the memory that peers have not closed yet.
/// Several threads may use it.
class PeerBufferSet {
 public:
  ~PeerBufferSet() { end(false); }

  /// Calls use(peer buffer) for each open one; none is opened or closed meanwhile.
  template <class Use>
  void for_each(const Use& use) {
    const std::lock_guard lock(mutex_);
    for (PeerBuffers* peer_buffers : open_) use(*peer_buffers);
  }

  /// Called where the communicator failed: frees kernels that wait, and from now on all memory is
  /// kept.
  void abort() noexcept;

  /// Whether peer buffers are, or will be, kept: this rank must then not report them as closed.
  bool failed() const;

  /// Called where the communicator ends. `together`: every rank has released all its peer buffers.
  void end(bool together) noexcept;

 private:
  friend class PeerBuffers;

  struct Remains {
    std::uint32_t number;  // of the peer buffers
    std::byte* memory;     // this rank's own
  };

  /// What this rank has closed, for the others; the second frees what all ranks have closed.
  std::string closed() const;
  void free_what_all_closed(const std::vector<std::string>& closed) noexcept;

  mutable std::mutex mutex_;
  std::vector<PeerBuffers*> open_;
  std::vector<Remains> remains_;
  std::uint32_t opened_ = 0;
  bool failed_ = false;
};

class PeerBuffers {
 public:
  /// Opens peer buffers. Collective. It is null on every rank, with the reason in `why`, where GPUs
  /// are not on one node or do not reach each other, ranks are too many, or a call fails on one of
  /// them. `set` is that of the communicator.
  static std::unique_ptr<PeerBuffers> open(
      Transport& world, std::size_t bytes, std::string& why,
      std::shared_ptr<PeerBufferSet> set = std::make_shared<PeerBufferSet>());

  /// Waits for the work of the GPU, which is bounded, as is every wait in a kernel.
  ~PeerBuffers();
  PeerBuffers(const PeerBuffers&) = delete;
  PeerBuffers& operator=(const PeerBuffers&) = delete;

  const PeerView& view() const { return view_; }

  /// The number of these among the peer buffers of a communicator, from 1 on, the same on every
  /// rank.
  std::uint32_t number() const { return number_; }

  /// Names the layer (comm::RunName) whose runs exchange through them.
  void serve(std::uint32_t layer) { layer_ = layer; }
  std::uint32_t layer() const { return layer_; }

  /// The report of an exchange kernel; the host sees it at any time.
  PeerReport report() const;

  /// Frees kernels that wait. Nothing can be exchanged any more; the memory stays mapped, since a
  /// peer may still write it.
  void abort() noexcept;

  /// An abort also calls this, perhaps more than once; it does not throw.
  void on_abort(std::function<void()> call) {
    const std::lock_guard lock(set_->mutex_);  // since an abort may come from another thread
    on_abort_ = std::move(call);
  }

 private:
  friend class PeerBufferSet;

  explicit PeerBuffers(std::shared_ptr<PeerBufferSet> set);
  void set_abort_word() noexcept;
  void allocate(std::uint64_t nonce);
  void map(int rank, const std::string& handle, std::uint64_t nonce);
  void make_words();
  bool is_quiet() const noexcept;
  bool close_mappings() noexcept;

  std::shared_ptr<PeerBufferSet> set_;
  std::function<void()> on_abort_;
  PeerView view_;
  std::uint64_t* report_ = nullptr;  // host-mapped, with the abort word behind it
  std::uint32_t* abort_ = nullptr;
  std::uint32_t number_ = 0;
  std::uint32_t layer_ = 0;
  int device_ = 0;
  bool shared_ = false;  // a peer may have mapped this rank's memory
  std::atomic<bool> aborted_ = false;
};

}  // namespace longspan::comm

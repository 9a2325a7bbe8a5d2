// Memory that every rank of a node can write: a window of each rank, mapped into all processes
// (CUDA IPC over NVLink or PCIe peer access). See src/peer_view.hpp for what a kernel does with it.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.hpp"
#include "src/peer_view.hpp"

namespace longspan::comm {

class Windows {
 public:
  /// Collective. Null on every rank, with the reason in `why`, where the ranks are not all on one
  /// node with GPUs that reach each other, or are too many.
  static std::unique_ptr<Windows> open(Transport& world, std::size_t bytes, std::string& why);
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  const PeerView& view() const { return view_; }

  /// What an exchange kernel reported; seen by the host at any time.
  const PeerReport& report() const { return *report_; }

  /// Frees kernels that wait. Nothing can be exchanged any more; the memory stays mapped, since a
  /// peer may still write it.
  void abort() noexcept;

 private:
  Windows() = default;
  PeerView view_;
  PeerReport* report_ = nullptr;  // host-mapped, with the abort word behind it
  std::uint32_t* abort_ = nullptr;
  bool aborted_ = false;
};

}  // namespace longspan::comm

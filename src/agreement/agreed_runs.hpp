// Compares the calls of one layer between ranks: its construction and its runs, which all ranks
// must describe alike (design contract 8). A run has a name and a description, whose hash travels
// with the data. The hash covers the layer's number, its options and the number of the run, so it
// detects ranks that run two layers in different orders. The transport, or the kernel that merges
// gathered states, detects a difference, and this class reports it.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/error.hpp"
#include "src/agreement/agreement.hpp"
#include "src/base/parts.hpp"

namespace longspan {

class AgreedRuns {
 public:
  /// Gives the layer its number among those of the communicator. Throws UsageError on every rank if
  /// ranks make different layers. Collective: all ranks call it in the same order of layers. `call`
  /// is the kind of layer and names its work in errors; `options` must be alike on all ranks.
  /// `world` and `call` outlive this.
  AgreedRuns(const Communicator& world, const char* call, NamedValues options);

  /// Allocates memory that host and kernels share. `contents`: the contents of small arrays are
  /// compared too. It may fail on some ranks only. The kernels outlive this.
  void allocate(const kernels::AttentionKernels& kernels, bool contents);
  /// Lays out the device memory that gathers what each rank reports of the run.
  void lay_out(Parts& memory);

  /// False for one rank alone, which has no other to compare with. It then begins no runs.
  bool are_compared() const { return history_ != nullptr; }
  std::uint32_t layer() const { return layer_; }

  /// Arguments for the kernels and collectives of a run.
  struct Begun {
    kernels::RunDigestParams
        own_digest;  // for AttentionKernels::write_run_digest, before the first exchange
    std::uint64_t* digests = nullptr;  // [ranks] for the collectives that exchange
    kernels::RunHeaders headers;       // for the merge of gathered states
  };
  /// Announces the next run to the transport, and queues the digest of its arrays.
  Begun begin(const RunDescription& description, Stream stream);

  /// Calls check(), which checks the arguments of the next run. If it throws, the other ranks,
  /// which may already wait in that run, are told why and which arguments this rank got: given() is
  /// its RunDescription.
  template <class Check, class Given>
  auto checked(Check check, Given given) const {
    try {
      return check();
    } catch (const Error& error) {
      try {
        if (history_) comm_.refuse(history_->describe_next(given()), error.what());
      } catch (...) {  // the caller gets the first error; the others wait until their deadline
      }
      throw;
    }
  }

  /// Throws, on every rank, an error with the difference that a merge found.
  void check() const;

 private:
  comm::Transport& comm_;
  const kernels::AttentionKernels* kernels_ = nullptr;
  const char* call_;
  std::shared_ptr<RunHistory> history_;    // the last runs, as this rank was asked for them
  std::shared_ptr<std::uint64_t> report_;  // [1] RunHeaders::reported
  std::uint64_t* digests_ = nullptr;       // [ranks]
  std::uint32_t layer_ = 0;
};

}  // namespace longspan

// Compares the calls of one layer of several ranks: its making and its runs, which all of them must
// describe alike (design contract 8). A run has a name and a description, of which a hash travels
// with the data. It covers the layer's number, its options and the number of the run, so that ranks
// that run two layers in different orders are found. What differs is found by the transport, or by
// the kernel that merges what was gathered, and reported here.
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
  /// Gives the layer its number among those of the communicator, and throws UsageError on every
  /// rank where ranks make different ones. Collective: all ranks come here, in the same order of
  /// layers. `call` says what kind of layer it is, and names its work in errors; `options` must be
  /// alike on all ranks. `world` and `call` outlive this.
  AgreedRuns(const Communicator& world, const char* call, NamedValues options);

  /// Takes memory that host and kernels share, with what lies in small arrays compared too where
  /// `contents` says so. It may fail on some ranks only. The kernels outlive this.
  void allocate(const kernels::AttentionKernels& kernels, bool contents);
  /// Lays out the memory of the device, where what every rank says is gathered.
  void lay_out(Parts& memory);

  /// False for one rank alone, whose runs are compared with no others. It then begins none.
  bool are_compared() const { return history_ != nullptr; }
  std::uint32_t layer() const { return layer_; }

  /// What the kernels and collectives of a run are told.
  struct Begun {
    kernels::SayParams say;         // for AttentionKernels::say, ahead of the first exchange
    std::uint64_t* said = nullptr;  // [ranks] for the collectives that exchange
    kernels::RunHeaders headers;    // for the merge of what was gathered
  };
  /// Names the next run to the transport, and queues the digest of its arrays.
  Begun begin(const RunDescription& description, Stream stream);

  /// Calls check(), which checks the arguments of the next run. Where it throws, the other ranks
  /// are told why, and what this rank was given: given() is its RunDescription. They may wait in
  /// that run.
  template <class Check, class Given>
  auto checked(Check check, Given given) const {
    try {
      return check();
    } catch (const Error& error) {
      try {
        if (history_) comm_.refuse(history_->describe_next(given()), error.what());
      } catch (...) {  // the caller hears of the first error; the others meet their deadline
      }
      throw;
    }
  }

  /// Throws, on every rank, an error with what a merge found to differ.
  void check() const;

 private:
  comm::Transport& comm_;
  const kernels::AttentionKernels* kernels_ = nullptr;
  const char* call_;
  std::shared_ptr<RunHistory> history_;    // the last runs, as this rank was asked for them
  std::shared_ptr<std::uint64_t> report_;  // [1] RunHeaders::reported
  std::uint64_t* said_ = nullptr;          // [ranks]
  std::uint32_t layer_ = 0;
};

}  // namespace longspan

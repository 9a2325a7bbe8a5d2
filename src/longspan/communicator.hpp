/// \file
/// The ranks that compute together. A Communicator is a cheap value over a shared transport: one
/// process alone (self), MPI or TCP on CPUs, NCCL on GPUs. Making one is collective. mpi.hpp and
/// nccl.hpp make one from a communicator that the caller already has.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "longspan/types.hpp"

namespace longspan {

class Communicator;

namespace comm {  // internal: comm/transport.hpp
class Transport;
Transport& transport_of(const Communicator& communicator);
}  // namespace comm

/// How ranks meet.
struct CommOptions {
  Device device = Device::host;  ///< where tensors lie and kernels run
  /// With Device::cuda: this rank's GPU, numbered as by cudaSetDevice. Below 0: the GPU of its
  /// local rank, or the current one for one process alone. UsageError if that GPU does not exist.
  int gpu = -1;
  /// Longest wait for a peer at any step; 0 takes LONGSPAN_DEADLINE_S (default 60 s).
  std::chrono::milliseconds deadline{0};
  /// Like Communicator::on_wait, but also asked while ranks meet.
  std::function<bool()> on_wait = nullptr;
};

/// The ranks that compute together, seen from one of them. Copies share the transport, which lives
/// as long as any copy or any layer made on it.
class Communicator {
 public:
  /// Internal, for transports in comm/. Callers use from_environment(), self() and the like.
  explicit Communicator(std::shared_ptr<comm::Transport> transport);

  /// This rank's number, 0 to size() - 1.
  int rank() const;
  /// How many ranks there are.
  int size() const;
  /// Where tensors lie and kernels run, on every rank.
  Device device() const;
  /// This rank's GPU; -1 on CPUs. Calls of longspan make it current while they run, and then
  /// restore the caller's choice.
  int gpu() const;
  /// Makes gpu() the calling thread's current GPU, for the caller's own allocations and launches.
  /// On CPUs it does nothing.
  void make_current() const;
  /// The longest wait for a peer at any step.
  std::chrono::milliseconds deadline() const;

  /// The number of ranks that share a machine, if every machine has equally many and they are
  /// neighbours; otherwise 0. Strategies of two levels take these ranks for a node. All ranks give
  /// the same answer.
  int ranks_per_node() const;
  /// One line for people: "Open MPI 4.1.4 | 4 ranks, 1 node".
  std::string describe() const;

  /// Every rank's text, in rank order. Blocks; for a missing peer it throws a RankError that names
  /// the peer and `step`.
  std::vector<std::string> gather(const std::string& mine, const std::string& step) const;

  /// Returns when every rank has called it.
  void barrier(const std::string& step) const { gather("", step); }

  /// The ranks that give the same color, as a new communicator, in the order of their keys and, for
  /// equal keys, of their ranks here. Returns nothing for color < 0: this rank is in no new
  /// communicator. Collective: ranks of every color call it. It blocks; if a rank does not come
  /// within the deadline, it throws a RankError that names the rank and the step "split of the
  /// communicator".
  ///
  /// On CUDA it may not be called while a stream is captured. The new communicator has its own
  /// deadline (of the same length) and its own failures: its end does not end this one. If this one
  /// ends, by abort or by a failure, everything that was split from it ends too. Its messages name
  /// ranks with both numbers, "rank 1 (5 of all)": the one in the new communicator, which
  /// RankError::rank() gives too, and the one in the communicator that all were split from. It
  /// keeps what it needs of this one alive. Only one thread at a time may use a communicator and
  /// what was split from it.
  std::optional<Communicator> split(int color, int key = 0) const;

  /// The bytes of queries, keys and states that this rank has received from other ranks since the
  /// communicator was made. CPUs count them as they arrive, GPUs as transfers are queued (one that
  /// a graph repeats counts once; exchanges through peer buffers are not counted). Communicators
  /// that were split from it count their own.
  std::uint64_t received_bytes() const;

  /// Tells the other ranks that this rank gives up, so that they end early with `why` instead of at
  /// their deadline. Also ends the communicators that were split from this one. Never throws.
  void abort(const std::string& why) const noexcept;

  /// Sets a callback for callers that must notice signals while they wait. `gives_up` is called at
  /// most ten times a second while a call waits for other ranks, on the thread that waits. If it
  /// returns true, the communicator ends on every rank, and the call throws a RankError with this
  /// rank. On CUDA, waits for a stream do not call it. Null, the default: no callback.
  void on_wait(std::function<bool()> gives_up) const;

 private:
  friend comm::Transport& comm::transport_of(const Communicator& communicator);
  std::shared_ptr<comm::Transport> transport_;
};

/// One process alone; needs neither MPI nor NCCL. `gpu` and its error are as in CommOptions.
/// Unsupported for cuda in a build without CUDA.
Communicator self(Device device = Device::host, int gpu = -1);

/// The ranks that the launcher started: mpirun (MPI is initialised here if it is not yet, and
/// finalised with the last communicator), torchrun or srun (RANK, WORLD_SIZE, MASTER_ADDR ... or
/// their SLURM_ equivalents). Without a launcher it is self(). UsageError if some of a launcher's
/// variables are set and others are missing, because the other ranks would wait for this one.
/// Without MPI, states travel over TCP on CPUs. On CUDA each rank takes CommOptions::gpu; two ranks
/// on one GPU are refused.
///
/// Without MPI, ranks meet at one port, which only one communicator holds at a time. While it is
/// alive, later ones meet over it. All ranks must therefore make and drop them in the same order,
/// on one thread at a time.
Communicator from_environment(CommOptions options = {});

/// What a launcher's variables tell this process if they make it one of several ranks, as in
/// "RANK=1, WORLD_SIZE=4"; otherwise empty. It makes no communicator and asks no other rank.
std::string launched_rank();

/// An all-gather of bytes: takes this rank's text and returns every rank's, in rank order. A text
/// may hold any bytes.
using ByteExchange = std::function<std::vector<std::string>(const std::string& mine)>;

/// `size` ranks that can exchange a few texts by a means of the caller's (a process group of
/// PyTorch, pipes, files, another communicator), which is used here and not kept. Needs no MPI, no
/// launcher and no agreed port: rank 0 listens at a free one, at the loopback if all ranks are on
/// one machine. States travel over TCP on CPUs, and over NCCL on GPUs, as in from_environment. A
/// process may have many of these.
///
/// Collective. Every rank calls `exchange` at most twice, and its errors pass through. It must have
/// its own deadline: that of `options` covers only what follows. UsageError on every rank if ranks
/// ask for different things, or if the texts do not come back in rank order.
Communicator from_exchange(int rank, int size, const ByteExchange& exchange,
                           CommOptions options = {});

/// Arguments by name, each value as text, for ranks to compare.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

/// Throws a UsageError on every rank if any value differs between ranks. The error names the
/// argument, two differing values and their ranks. Collective.
void agree(const Communicator& world, const NamedValues& arguments, const std::string& step);

}  // namespace longspan

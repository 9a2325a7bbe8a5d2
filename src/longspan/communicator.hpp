/// \file
/// Who computes together. A Communicator is a cheap value over a shared transport: one process
/// alone (self), MPI or TCP on processors, NCCL on GPUs. Making one is collective. Interop with
/// communicators that the caller already has is in mpi.hpp and nccl.hpp.
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

namespace comm {  // for the library's own floors: comm/transport.hpp
class Transport;
Transport& transport_of(const Communicator& communicator);
}  // namespace comm

/// How ranks come together.
struct CommOptions {
  Device device = Device::host;  ///< where tensors lie and kernels run
  /// Device cuda: this rank's GPU, as cudaSetDevice counts them; below 0 the GPU of its local rank,
  /// and for one process alone the current one. UsageError where there is no such GPU.
  int gpu = -1;
  /// Longest wait for a peer at any step; 0 takes LONGSPAN_DEADLINE_S (default 60 s).
  std::chrono::milliseconds deadline{0};
  /// What Communicator::on_wait would be given later: it is asked while ranks meet, too.
  std::function<bool()> on_wait = nullptr;
};

/// The ranks that compute together, seen from one of them. Copies share the transport, which ends
/// with the last of them and of the layers made on it.
class Communicator {
 public:
  /// For the library's own rooms of comm/; from_environment(), self() and the like make one.
  explicit Communicator(std::shared_ptr<comm::Transport> transport);

  /// This rank's number, 0 to size() - 1.
  int rank() const;
  /// How many ranks there are.
  int size() const;
  /// Where tensors lie and kernels run, on every rank.
  Device device() const;
  /// This rank's GPU; -1 on processors. Calls of longspan make it current while they run, and leave
  /// the caller's choice as it was.
  int gpu() const;
  /// Makes gpu() the calling thread's current GPU, for what the caller allocates and launches. On
  /// processors it does nothing.
  void make_current() const;
  /// The longest wait for a peer at any step.
  std::chrono::milliseconds deadline() const;

  /// The ranks that share a machine, where every machine has as many and they are neighbours, which
  /// strategies of two levels take for a node; else 0. All ranks give the same answer.
  int ranks_per_node() const;
  /// One line for people: "Open MPI 4.1.4 | 4 ranks, 1 node".
  std::string describe() const;

  /// Every rank's text, in rank order. Blocks; a missing peer becomes a RankError that names it and
  /// `step`.
  std::vector<std::string> gather(const std::string& mine, const std::string& step) const;

  /// Returns when every rank has come here.
  void barrier(const std::string& step) const { gather("", step); }

  /// The ranks that give the same color, as a communicator of their own, in the order of their keys
  /// and, where these are equal, of their ranks here. Nothing where color < 0: this rank is in
  /// none. Collective: ranks of every color come to it. It blocks; a rank that does not come within
  /// the deadline becomes a RankError that names it and the step "split of the communicator".
  ///
  /// On CUDA it may not be called while a stream is captured. The new communicator has its own
  /// deadline (of the same length) and its own failures: its end is not the end of this one, whose
  /// end, by abort or by a failure, is the end of everything that was split from it. Its messages
  /// name ranks with both numbers, "rank 1 (5 of all)": the one in the new communicator, which
  /// RankError::rank() gives too, and the one in the communicator that all were split from. It
  /// keeps what it needs of this one alive. One thread at a time uses a communicator and what was
  /// split from it.
  std::optional<Communicator> split(int color, int key = 0) const;

  /// The bytes of queries, keys and states that this rank has received from other ranks, since the
  /// communicator was made: on processors as they came, on GPUs as transfers were queued (one that
  /// a graph repeats counts once; exchanges through peer buffers are not counted). What was split
  /// from it counts its own.
  std::uint64_t received_bytes() const;

  /// Tells the others that this rank gives up, so that they end early with `why` instead of at
  /// their deadline. Ends what was split from this one as well. Never throws.
  void abort(const std::string& why) const noexcept;

  /// `gives_up` is asked ten times a second at most while a call waits for other ranks, on the
  /// thread that waits: true ends the communicator on every rank, and the call throws a RankError
  /// with this rank. For callers who must hear of signals meanwhile. On CUDA waits for a stream do
  /// not ask it. Null: nobody is asked, as in the beginning.
  void on_wait(std::function<bool()> gives_up) const;

 private:
  friend comm::Transport& comm::transport_of(const Communicator& communicator);
  std::shared_ptr<comm::Transport> transport_;
};

/// One process alone; needs neither MPI nor NCCL. `gpu` and its error as in CommOptions.
/// Unsupported for cuda in a build without CUDA.
Communicator self(Device device = Device::host, int gpu = -1);

/// The ranks that the launcher started: mpirun (MPI is initialised here if it is not yet, and
/// finalised with the last communicator), torchrun or srun (RANK, WORLD_SIZE, MASTER_ADDR ... or
/// their SLURM_ twins), or, when none of them is found, self(). UsageError where some of a
/// launcher's variables are set and others are missing, as the other ranks would wait for this one.
/// Without MPI states travel over TCP on processors. On CUDA each rank takes CommOptions::gpu; two
/// ranks on one GPU are refused.
///
/// Without MPI ranks meet at one port, which one communicator has at a time: where one of them is
/// alive, another meets over it, and so all ranks make and drop them in the same order, on one
/// thread at a time.
Communicator from_environment(CommOptions options = {});

/// What a launcher's variables say of this process where they make it one of several ranks, as in
/// "RANK=1, WORLD_SIZE=4"; else empty. It makes nothing, and asks no other rank.
std::string launched_rank();

/// Gathers bytes: every rank's text, in rank order, given every rank's own. Any bytes may be in it.
using ByteExchange = std::function<std::vector<std::string>(const std::string& mine)>;

/// `size` ranks that can exchange a few texts by a way of the caller's (a process group of PyTorch,
/// pipes, files, another communicator), which is used here and not kept. Needs no MPI, no launcher
/// and no port that is agreed on: rank 0 listens at one that is free, a machine's ranks at its
/// loopback. States travel over TCP on processors, and over NCCL on GPUs, as in from_environment. A
/// process may have many of these.
///
/// Collective. `exchange` is called twice at most, by every rank, and its own errors pass; it has
/// to have its own deadline, for what follows has that of `options`. UsageError on every rank where
/// ranks differ in what they ask for, and where what came back is not in rank order.
Communicator from_exchange(int rank, int size, const ByteExchange& exchange,
                           CommOptions options = {});

/// Arguments by name, each value as text; what ranks compare.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

/// Throws a UsageError on every rank if any value differs between ranks; it names the argument, two
/// differing values and their ranks. Collective.
void agree(const Communicator& world, const NamedValues& arguments, const std::string& step);

}  // namespace longspan

// What a communicator can do: a table of collectives. Strategies are written against it and name no
// library. Data collectives queue on the stream (on the host they block); `step` names the work for
// the message when a peer does not arrive. Each has a twin, start_..., that begins the transfer and
// returns, so that it goes on beside what is computed meanwhile.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/control/agreement.hpp"
#include "longspan/types.hpp"
#include "src/base/peer_view.hpp"
#include "src/base/put_flags.hpp"

namespace longspan {
class Communicator;
}

namespace longspan::comm {

class Transport;

/// One of several pieces that a shift moves together.
struct Piece {
  const void* send = nullptr;
  std::size_t sent = 0;
  void* recv = nullptr;
  std::size_t received = 0;
  /// Where the receiver of this rank's bytes has them, as a place of this rank's own receive
  /// buffer; null: at `recv`. Shifts into other memory have no use for it.
  void* place_there = nullptr;
};

/// The transport behind a communicator. It is valid as long as the communicator is.
Transport& transport_of(const Communicator& communicator);

/// What one data collective moves.
struct Collective {
  enum Kind : std::uint8_t { all_gather, all_to_all, shift, reduce_scatter };
  Kind kind = all_gather;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t bytes = 0;             // from one rank to one rank; of a shift, what is sent
  std::size_t received = 0;          // of a shift
  int place = 0;                     // the distance of a shift
  DType dtype = fp32;                // of what a reduce_scatter adds
  std::uint64_t* digests = nullptr;  // of an all_gather or all_to_all
};

/// A transfer that a collective has started. The memory that it sends and receives is its own until
/// it has ended.
///
/// wait(stream) makes the stream wait for it: on CUDA by an event, without waiting itself; on
/// processors it blocks until all has come, with the deadline. It throws what a blocking collective
/// would throw. A stream on CUDA that is captured takes the transfer into its graph; there, CUDA
/// refuses to end a capture that has not waited for every transfer started in it.
///
/// On GPUs transfers go on by themselves. On processors bytes move while a thread is inside of MPI,
/// or of a call of the TCP transport: what is small (a few KB, by MPI's settings; what the kernel's
/// buffers hold over TCP) travels at once; of what is larger, parts move with every call of test(),
/// of a collective or of a wait, for all transfers of the process (over TCP, of the communicator
/// and what was split from it). longspan has no thread for it: it would have to call MPI beside the
/// caller's own calls, which only MPI_THREAD_MULTIPLE allows. A caller that computes for long calls
/// test() between pieces of the work.
///
/// A transfer that goes without wait (dropped, or as an exception passes) still ends. On processors
/// its end waits for the peers, up to the deadline, and what it finds wrong is thrown by the next
/// call on the communicator. On CUDA nothing waits, and its memory is its own until the GPU's work
/// is done. It keeps the communicator alive, and is used by one thread at a time.
///
/// After a failure TCP writes nothing more. MPI writes nothing more, with one exception, as with
/// collectives that block: where a rank stopped in the middle of a message, and goes on later, the
/// rest of it still arrives. Memory that was received into is kept until the process ends where the
/// communicator has failed.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer&& other) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  ~Transfer();

  /// Waits. A second wait does nothing, nor does the wait of a Transfer that nothing was started
  /// for.
  void wait(Stream stream);

  /// Lets the transfer go on where that takes calls; returns true when it has ended. Throws what
  /// wait would. On a stream that is captured nothing runs, and it is always false.
  bool test();

 private:
  friend class Transport;
  Transfer(std::shared_ptr<Transport> transport, int number)
      : transport_(std::move(transport)), number_(number) {}

  std::shared_ptr<Transport> transport_;  // null: nothing is under way
  int number_ = -1;
};

/// The transfers of the pieces of one shift.
class Transfers {
 public:
  static constexpr int kMost = 4;

  void wait(Stream stream) {
    for (Transfer& part : parts_) part.wait(stream);
  }
  /// As Transfer::test. True: all have ended.
  bool test() {
    bool all = true;
    for (Transfer& part : parts_) all = part.test() && all;
    return all;
  }

 private:
  friend class Transport;
  std::array<Transfer, kMost> parts_;
};

class Transport;

/// Two communicators of a rank where the ranks are nodes of neighbours.
struct Levels {
  std::shared_ptr<Transport> node;   // the ranks of its node
  std::shared_ptr<Transport> nodes;  // of every node the rank that has its place there
};

class Transport : public std::enable_shared_from_this<Transport> {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Device device() const = 0;
  /// This rank's GPU; -1 on processors. The caller of a collective has made it current.
  virtual int gpu() const { return -1; }
  /// The ranks that share a machine, where every machine has as many and they are neighbours; else
  /// 0. All ranks give the same answer.
  virtual int ranks_per_node() const { return size(); }
  virtual std::chrono::milliseconds deadline() const = 0;
  virtual std::string describe() const = 0;
  /// The name of a rank in messages: "5", or "1 (5 of all)" in what was split from another
  /// communicator.
  virtual std::string name_of(int rank) const { return std::to_string(rank); }

  /// recv [size, bytes] = each rank's send [bytes]. It is in place when send == recv + rank *
  /// bytes.
  ///
  /// `digests` [size], in memory of the device, has every rank's agreement digest (a hash of what
  /// its run was given), of which this rank's own is filled in. It is gathered beside the data. A
  /// collective that blocks compares and throws UsageError; where the work is queued, the kernel
  /// that reads the data compares (kernels::RunHeaders). With null nothing is compared.
  void all_gather(const void* send, void* recv, std::size_t bytes, Stream stream, const char* step,
                  std::uint64_t* digests = nullptr) {
    run({.kind = Collective::all_gather,
         .send = send,
         .recv = recv,
         .bytes = bytes,
         .digests = digests},
        stream, step);
  }
  [[nodiscard]] Transfer start_all_gather(const void* send, void* recv, std::size_t bytes,
                                          Stream stream, const char* step,
                                          std::uint64_t* digests = nullptr) {
    return begin({.kind = Collective::all_gather,
                  .send = send,
                  .recv = recv,
                  .bytes = bytes,
                  .digests = digests},
                 stream, step);
  }

  /// Compares the digests of all ranks, as an all_gather of no data does; nothing where they are
  /// null.
  void compare(std::uint64_t* digests, Stream stream, const char* step) {
    if (digests != nullptr) all_gather(nullptr, nullptr, 0, stream, step, digests);
  }
  [[nodiscard]] Transfer start_compare(std::uint64_t* digests, Stream stream, const char* step) {
    return digests == nullptr ? Transfer()
                              : start_all_gather(nullptr, nullptr, 0, stream, step, digests);
  }

  /// recv[p] = send[rank] of rank p; both are [size, bytes]. `digests` is as in all_gather.
  void all_to_all(const void* send, void* recv, std::size_t bytes, Stream stream, const char* step,
                  std::uint64_t* digests = nullptr) {
    run({.kind = Collective::all_to_all,
         .send = send,
         .recv = recv,
         .bytes = bytes,
         .digests = digests},
        stream, step);
  }
  [[nodiscard]] Transfer start_all_to_all(const void* send, void* recv, std::size_t bytes,
                                          Stream stream, const char* step,
                                          std::uint64_t* digests = nullptr) {
    return begin({.kind = Collective::all_to_all,
                  .send = send,
                  .recv = recv,
                  .bytes = bytes,
                  .digests = digests},
                 stream, step);
  }

  /// Sends to rank + distance and receives from rank - distance, around the ring. What is sent and
  /// what is received may differ in size, and each pair of ranks agrees on its own. No message
  /// stands for 0 bytes: nothing is sent, and nothing is waited for.
  void shift(const void* send, std::size_t sent, void* recv, std::size_t received, int distance,
             Stream stream, const char* step) {
    run(shift_of(send, sent, recv, received, distance), stream, step);
  }
  [[nodiscard]] Transfer start_shift(const void* send, std::size_t sent, void* recv,
                                     std::size_t received, int distance, Stream stream,
                                     const char* step) {
    return begin(shift_of(send, sent, recv, received, distance), stream, step);
  }
  /// The same where all ranks send as much.
  void shift(const void* send, void* recv, std::size_t bytes, int distance, Stream stream,
             const char* step) {
    shift(send, bytes, recv, bytes, distance, stream, step);
  }
  [[nodiscard]] Transfer start_shift(const void* send, void* recv, std::size_t bytes, int distance,
                                     Stream stream, const char* step) {
    return start_shift(send, bytes, recv, bytes, distance, stream, step);
  }

  /// Starts shifts of several pieces (at most Transfers::kMost) by one distance, which GPUs move
  /// together.
  [[nodiscard]] virtual Transfers start_shifts(std::span<const Piece> pieces, int distance,
                                               Stream stream, const char* step) {
    Transfers transfers;
    for (std::size_t i = 0; i < pieces.size(); ++i)
      transfers.parts_.at(i) = start_shift(pieces[i].send, pieces[i].sent, pieces[i].recv,
                                           pieces[i].received, distance, stream, step);
    return transfers;
  }
  /// The transfers that are started next, so many, begin behind what the stream has now, and not
  /// behind what it is given until then, on GPUs: a kernel that computes beside them is queued
  /// first, as suits shifts into a receive buffer.
  virtual void keep_place(Stream, int /*starts*/) {}
  /// Lets transfers begin behind all that the stream has again, where fewer were started than a
  /// place was kept for.
  virtual void forget_place() noexcept {}

  /// recv [count] = the sum over all ranks p of send[rank] of rank p, where send is [size, count],
  /// of fp32, fp16 or bf16. It is in place when recv == send + rank * count.
  ///
  /// One process, MPI and TCP add in fp32 in the order of the ranks, from rank 0 on, and round
  /// once: the same bits in every run. NCCL adds in the order of its own algorithm, and rounds
  /// 16-bit partial sums on the way: it repeats its bits for one size, one set of GPUs and one
  /// setting of NCCL, and they are not those of the others.
  void reduce_scatter(const void* send, void* recv, std::size_t count, DType dtype, Stream stream,
                      const char* step) {
    run(sum_of(send, recv, count, dtype), stream, step);
  }
  [[nodiscard]] Transfer start_reduce_scatter(const void* send, void* recv, std::size_t count,
                                              DType dtype, Stream stream, const char* step) {
    return begin(sum_of(send, recv, count, dtype), stream, step);
  }

  /// Makes a communicator of the ranks that name the same color, ordered by key, and by rank where
  /// keys are equal. It is null where color < 0. It is collective over this one, and waits for its
  /// queued collectives; a rank that does not come is a RankError here.
  ///
  /// A child has its own deadline (of the same length), watch and roll call, and keeps what it
  /// needs of its parent alive. In its messages a rank is "rank 1 (5 of all)": its number in the
  /// child, and in the communicator that all were split from; RankError::rank() is the number in
  /// the child, -1 for a rank that is not in it.
  ///
  /// The end of a communicator is the end of all that were split from it, and of no other: a parent
  /// lives on when a child fails. A rank that died or left is found by both, each at its own next
  /// wait, and a rank that waits in one of them answers the roll call of the others, so that the
  /// one that is stuck is named. A communicator and what was split from it are used by one thread
  /// at a time.
  virtual std::shared_ptr<Transport> split(int color, int key) = 0;

  /// Makes the end of this communicator the end of the one that it was split from too; to be called
  /// before anything has failed. A rank that does not come is then looked for among all ranks of
  /// that one, within the same deadline, and errors number ranks as that one does.
  virtual void end_with_parent() {}

  /// Splits the ranks into nodes of so many neighbours, which divide them, and across the nodes.
  /// The first call is collective, as split is, and all layers share what it made: a communicator
  /// between GPUs takes memory and seconds. What ends one of the two ends this one.
  const Levels& levels(int ranks_per_node);

  /// Gives memory of every rank that kernels of all ranks can write, for exchanges of one layer; or
  /// null on every rank, with the reason in `why`. It is collective. wait() reports what those
  /// kernels find wrong. The memory ends with the last pointer to it.
  virtual std::shared_ptr<const PeerView> open_peer_buffers(std::uint32_t /*layer*/,
                                                            std::size_t /*bytes*/,
                                                            std::string& why) {
    why = "no kernels of several ranks here";
    return nullptr;
  }

  /// Gives memory of every rank, of equal size, into which shifts go without a kernel: by the copy
  /// engines of GPUs that reach each other, beside whatever computes. All ranks of such a shift
  /// receive at the same place of their memory, or would, where one receives nothing. It is null on
  /// every rank, with the reason in `why`, where there is no such memory; shifts go into any other
  /// all the same. It is collective, and ends with the last pointer to it.
  virtual std::shared_ptr<std::byte> open_receive_buffer(std::size_t /*bytes*/, std::string& why) {
    why = "no GPUs that reach each other here";
    return nullptr;
  }

  /// An exchange through receive buffers, into which kernels of each rank put what belongs to the
  /// others, no two to one place (MPI's post and start, complete and wait). It gives the counters
  /// by which they meet, in memory of the device. The kernels are watched from here until they end,
  /// as they wait for those of other ranks; a launch may block behind one that waits.
  [[nodiscard]] virtual PutRanks begin_puts(const std::byte* buffer, Stream stream,
                                            const char* step);
  /// All kernels are queued. `received` bytes come here.
  virtual void end_puts(const std::byte* buffer, std::size_t received, Stream stream,
                        const char* step);

  /// Where kernels of this rank write what `rank` has at `place`, a place of this rank's own
  /// receive buffer. Null where no kernel can.
  virtual std::byte* place_at(std::byte* /*place*/, int /*rank*/) { return nullptr; }

  /// Gives a new layer its number among those of this communicator, and keeps its log for the roll
  /// call.
  virtual std::uint32_t enlist(const std::shared_ptr<const RunLog>& log) = 0;
  /// Says that the collectives that follow belong to this run.
  virtual void begin(RunName run) = 0;
  /// Tells the other ranks what this rank was given for its next run, and why it refused that.
  virtual void refuse(const NamedValues& given, const std::string& why) = 0;
  /// Throws a UsageError, on every rank, that names what differs, where `rank` was given something
  /// else for `run` than this rank, as was seen at `step`.
  virtual void disagree(RunName run, int rank, const char* step) = 0;

  /// Throws where the communicator has failed, by all that is known without waiting. It is for work
  /// that is queued past the collectives, as exchanges through peer buffers are.
  virtual void check(const char* /*step*/) {}

  /// Blocks until the stream is done; past the deadline throws a RankError and aborts.
  virtual void wait(Stream stream, const char* step) = 0;

  /// Gathers every rank's text over the control plane; it blocks, up to the deadline.
  virtual std::vector<std::string> gather(const std::string& mine, const std::string& step) = 0;

  /// Gives up: tells the peers where possible, frees what is in flight, and makes every later call
  /// throw, here and in what was split from this one.
  virtual void abort(const std::string& why) noexcept = 0;

  /// See Communicator::on_wait; a transport that waits for nobody has no use for it.
  virtual void on_wait(std::function<bool()>) {}

  /// The bytes that this rank's data collectives have brought from other ranks: what was asked for,
  /// without headers and without digests. On processors they are counted as they
  /// come, on GPUs as the transfer is queued (one that a graph repeats counts once). What levels()
  /// made is counted with them; what was split from this transport otherwise counts its own.
  std::uint64_t received_bytes() const;

 protected:
  friend class Transfer;

  /// Starts a transfer behind what the stream has, and gives the number that it has until it is
  /// finished or dropped; the number is below 0 where it has ended already.
  virtual int start(const Collective& collective, Stream stream, const char* step) = 0;
  /// What start_shifts returns where one transfer moves all pieces.
  Transfers together(int number) {
    Transfers transfers;
    transfers.parts_[0] = {shared_from_this(), number};
    return transfers;
  }
  /// Does what Transfer::wait does. The transfer has ended, also where this throws.
  virtual void finish(int transfer, Stream stream) = 0;
  virtual bool test(int transfer) = 0;
  /// Drops a transfer that will not be waited for.
  virtual void drop(int transfer) noexcept = 0;

  void count_received(std::size_t bytes) { received_bytes_ += bytes; }

  /// Runs a collective that is waited for at once.
  virtual void run(const Collective& collective, Stream stream, const char* step) {
    finish(start(collective, stream, step), stream);
  }

 private:
  Transfer begin(const Collective& collective, Stream stream, const char* step) {
    std::shared_ptr<Transport> self = shared_from_this();
    const int number = start(collective, stream, step);
    return {std::move(self), number};
  }
  /// Throw UsageError for a rank that is to receive from itself more or less than it sends, and
  /// Unsupported if the type does not exist.
  Collective shift_of(const void* send, std::size_t sent, void* recv, std::size_t received,
                      int distance) const;
  static Collective sum_of(const void* send, void* recv, std::size_t count, DType dtype);

  std::uint64_t received_bytes_ = 0;
  std::map<int, Levels> levels_;  // by the ranks of a node
};

inline Transfer::~Transfer() {
  if (transport_) transport_->drop(number_);
}

inline Transfer& Transfer::operator=(Transfer&& other) noexcept {
  if (this != &other) {
    if (transport_) transport_->drop(number_);
    transport_ = std::move(other.transport_);
    number_ = other.number_;
  }
  return *this;
}

inline void Transfer::wait(Stream stream) {
  const std::shared_ptr<Transport> transport = std::move(transport_);
  if (transport) transport->finish(number_, stream);
}

inline bool Transfer::test() { return !transport_ || transport_->test(number_); }

}  // namespace longspan::comm

// What a communicator can do: a table of collectives. Strategies are written against it and name no
// library. Data collectives queue on the stream (on the host they block); `step` names the work in
// the error for a missing peer. Each has a twin, start_..., that begins the transfer and returns,
// so that it runs beside the computation.
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
  /// The receiver's place for this rank's bytes, as a place of this rank's own receive buffer;
  /// null: at `recv`. Shifts into other memory do not use it.
  void* place_there = nullptr;
};

/// The transport behind a communicator, valid as long as the communicator.
Transport& transport_of(const Communicator& communicator);

/// The data that one collective moves.
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

/// A transfer that a collective has started. Its send and receive memory belong to it until it has
/// ended.
///
/// wait(stream) makes the stream wait for it. On CUDA this is an event, and the call itself does
/// not wait; on CPUs it blocks until all has come, up to the deadline. It throws what a blocking
/// collective would throw. A captured CUDA stream takes the transfer into its graph; CUDA refuses
/// to end a capture that has not waited for every transfer started in it.
///
/// On GPUs transfers progress by themselves. On CPUs bytes move while a thread is inside MPI, or
/// inside a call of the TCP transport. Small messages (a few KB, by MPI's settings; over TCP what
/// the kernel's buffers hold) travel at once. Parts of larger ones move with every call of test(),
/// of a collective or of a wait. Each call moves all transfers of the process; over TCP, those of
/// the communicator and what was split from it. longspan has no thread for it: it would call MPI
/// beside the
/// caller's own calls, which only MPI_THREAD_MULTIPLE allows. A caller that computes for long calls
/// test() between pieces of the work.
///
/// A transfer without a wait (dropped, or during an exception) still ends. On CPUs its end waits
/// for the peers, up to the deadline, and the next call on the communicator throws its error. On
/// CUDA nothing waits, and its memory belongs to it until the GPU's work is done. It keeps the
/// communicator alive, and one thread at a time may use it.
///
/// After a failure TCP writes nothing more. MPI writes nothing more, with one exception, as with
/// blocking collectives: where a rank stopped in the middle of a message and goes on later, the
/// rest still arrives. Where the communicator has failed, receive memory is kept until the process
/// ends.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer&& other) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  ~Transfer();

  /// Waits. A second wait does nothing, nor does the wait of a Transfer without a transfer.
  void wait(Stream stream);

  /// Moves the transfer where that takes calls; returns true when it has ended. Throws what wait
  /// would. On a captured stream nothing runs, and it is always false.
  bool test();

 private:
  friend class Transport;
  Transfer(std::shared_ptr<Transport> transport, int number)
      : transport_(std::move(transport)), number_(number) {}

  std::shared_ptr<Transport> transport_;  // null: no transfer
  int number_ = -1;
};

/// The transfers of the pieces of one shift.
class Transfers {
 public:
  // Keys, values, the scales of each, their positions, and the report of the run: there and back.
  static constexpr int kMost = 12;

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

/// Two communicators of a rank where nodes are groups of neighbouring ranks.
struct Levels {
  std::shared_ptr<Transport> node;   // the ranks of its node
  std::shared_ptr<Transport> nodes;  // of every node, the rank at its place there
};

class Transport : public std::enable_shared_from_this<Transport> {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Device device() const = 0;
  /// This rank's GPU; -1 on CPUs. The caller of a collective has made it current.
  virtual int gpu() const { return -1; }
  /// The ranks that share a machine, where every machine has equally many and they are neighbours;
  /// else 0. All ranks give the same answer.
  virtual int ranks_per_node() const { return size(); }
  virtual std::chrono::milliseconds deadline() const = 0;
  virtual std::string describe() const = 0;
  /// The name of a rank in messages: "5", or "1 (5 of all)" in what was split from another
  /// communicator.
  virtual std::string name_of(int rank) const { return std::to_string(rank); }

  /// recv [size, bytes] = each rank's send [bytes]. In place when send == recv + rank * bytes.
  ///
  /// `digests` [size], in device memory, has every rank's agreement digest (a hash of what its run
  /// was given); this rank's own is filled in. It is gathered beside the data. A collective that
  /// blocks compares and throws UsageError. Where the work is queued, the kernel that reads the
  /// data compares (kernels::RunHeaders). Null compares nothing.
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

  /// Compares the digests of all ranks, as an all_gather without data does; null compares nothing.
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

  /// Sends to rank + distance and receives from rank - distance, around the ring. Sizes of what is
  /// sent and received may differ, and each pair of ranks agrees on its own. 0 bytes make no
  /// message: nothing is sent, and nothing is waited for.
  void shift(const void* send, std::size_t sent, void* recv, std::size_t received, int distance,
             Stream stream, const char* step) {
    run(shift_of(send, sent, recv, received, distance), stream, step);
  }
  [[nodiscard]] Transfer start_shift(const void* send, std::size_t sent, void* recv,
                                     std::size_t received, int distance, Stream stream,
                                     const char* step) {
    return begin(shift_of(send, sent, recv, received, distance), stream, step);
  }
  /// The same where all ranks send equally much.
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
  /// On GPUs, the next transfers (this many) begin after the work that the stream has now, and not
  /// after work that is queued until they start. So a kernel that computes beside them can be
  /// queued first, which suits shifts into a receive buffer.
  virtual void keep_place(Stream, int /*starts*/) {}
  /// Lets transfers again begin after all work of the stream, where fewer were started than a place
  /// was kept for.
  virtual void forget_place() noexcept {}

  /// recv [count] = the sum over all ranks p of send[rank] of rank p, where send is [size, count],
  /// of fp32, fp16 or bf16. In place when recv == send + rank * count.
  ///
  /// One process, MPI and TCP add in fp32 in rank order from rank 0 on, and round once: the same
  /// bits in every run. NCCL adds in the order of its own algorithm, and rounds 16-bit partial sums
  /// on the way. It repeats its bits for one size, one set of GPUs and one setting of NCCL, and
  /// they differ from the others'.
  void reduce_scatter(const void* send, void* recv, std::size_t count, DType dtype, Stream stream,
                      const char* step) {
    run(sum_of(send, recv, count, dtype), stream, step);
  }
  [[nodiscard]] Transfer start_reduce_scatter(const void* send, void* recv, std::size_t count,
                                              DType dtype, Stream stream, const char* step) {
    return begin(sum_of(send, recv, count, dtype), stream, step);
  }

  /// Makes a communicator of the ranks with the same color, ordered by key, and by rank where keys
  /// are equal. Null where color < 0. Collective over this one; it waits for this one's queued
  /// collectives. A missing rank is a RankError here.
  ///
  /// A child has its own deadline (of the same length), watch and roll call, and keeps what it
  /// needs of its parent alive. In its messages a rank is "rank 1 (5 of all)": its number in the
  /// child, and in the communicator that all were split from. RankError::rank() is the number in
  /// the child, -1 for a rank outside it.
  ///
  /// The end of a communicator ends all that were split from it, and no other: a parent lives on
  /// when a child fails. Both find a rank that died or left, each at its own next wait. A rank that
  /// waits in one of them answers the roll call of the others, so that the stuck rank is named. One
  /// thread at a time may use a communicator and what was split from it.
  virtual std::shared_ptr<Transport> split(int color, int key) = 0;

  /// Makes the end of this communicator also the end of its parent; call it before anything has
  /// failed. A missing rank is then looked for among all ranks of the parent, within the same
  /// deadline, and errors number ranks as the parent does.
  virtual void end_with_parent() {}

  /// Splits the ranks into nodes of `ranks_per_node` neighbours, which divide them, and across the
  /// nodes. The first call is collective, as split is, and all layers share its result: a
  /// communicator between GPUs takes memory and seconds. The end of one of the two ends this one.
  const Levels& levels(int ranks_per_node);

  /// Gives memory of every rank that kernels of all ranks can write, for exchanges of one layer; or
  /// null on every rank, with the reason in `why`. Collective. wait() reports the errors that those
  /// kernels find. The memory ends with the last pointer to it.
  virtual std::shared_ptr<const PeerView> open_peer_buffers(std::uint32_t /*layer*/,
                                                            std::size_t /*bytes*/,
                                                            std::string& why) {
    why = "no kernels of several ranks here";
    return nullptr;
  }

  /// Gives memory of every rank, of equal size, into which shifts go without a kernel: by the copy
  /// engines of GPUs that reach each other, beside any computation. All ranks of such a shift
  /// receive at the same place of their memory, also a rank that receives nothing. Null on every
  /// rank, with the reason in `why`, where that is impossible; shifts into other memory still work.
  /// Collective; it ends with the last pointer to it.
  virtual std::shared_ptr<std::byte> open_receive_buffer(std::size_t /*bytes*/, std::string& why) {
    why = "no GPUs that reach each other here";
    return nullptr;
  }

  /// An exchange through receive buffers: kernels of each rank put there what belongs to the
  /// others, no two to one place (MPI's post and start, complete and wait). It gives the counters
  /// by which they meet, in device memory. The kernels are watched from here until they end, since
  /// they wait for those of other ranks: a launch may block behind one that waits.
  [[nodiscard]] virtual PutRanks begin_puts(const std::byte* buffer, Stream stream,
                                            const char* step);
  /// All kernels are queued. `received` bytes come here.
  virtual void end_puts(const std::byte* buffer, std::size_t received, Stream stream,
                        const char* step);

  /// The address for kernels of this rank of `rank`'s memory at `place`, a place of this rank's own
  /// receive buffer. Null where no kernel can write there.
  virtual std::byte* place_at(std::byte* /*place*/, int /*rank*/) { return nullptr; }

  /// Gives a new layer its number in this communicator, and keeps its log for the roll call.
  virtual std::uint32_t enlist(const std::shared_ptr<const RunLog>& log) = 0;
  /// The collectives that follow belong to this run.
  virtual void begin(RunName run) = 0;
  /// Tells the other ranks what this rank was given for its next run, and why it refused it.
  virtual void refuse(const NamedValues& given, const std::string& why) = 0;
  /// Throws a UsageError, on every rank, that names what differs, where at `step` `rank` was found
  /// to have other arguments for `run` than this rank.
  virtual void disagree(RunName run, int rank, const char* step) = 0;

  /// Throws where the communicator is known, without waiting, to have failed. For work that is
  /// queued outside the collectives, as exchanges through peer buffers are.
  virtual void check(const char* /*step*/) {}

  /// Blocks until the stream is done; past the deadline aborts and throws a RankError.
  virtual void wait(Stream stream, const char* step) = 0;

  /// Gathers every rank's text over the control plane; it blocks, up to the deadline.
  virtual std::vector<std::string> gather(const std::string& mine, const std::string& step) = 0;

  /// Gives up: tells the peers where possible, frees work in flight, and makes every later call
  /// throw, here and in what was split from this one.
  virtual void abort(const std::string& why) noexcept = 0;

  /// See Communicator::on_wait; a transport that never waits ignores it.
  virtual void on_wait(std::function<bool()>) {}

  /// The bytes that this rank's data collectives have received from other ranks, without headers
  /// and digests. On CPUs they are counted as they come, on GPUs as the transfer is queued (a
  /// transfer that a graph repeats counts once). Transports of levels() are counted here; other
  /// children count their own.
  std::uint64_t received_bytes() const;

 protected:
  friend class Transfer;

  /// Starts a transfer after the stream's work, and returns its number until it is finished or
  /// dropped; below 0 where it has ended already.
  virtual int start(const Collective& collective, Stream stream, const char* step) = 0;
  /// The result of start_shifts where one transfer moves all pieces.
  Transfers together(int number) {
    Transfers transfers;
    transfers.parts_[0] = {shared_from_this(), number};
    return transfers;
  }
  /// Does the work of Transfer::wait. The transfer has ended, also where this throws.
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

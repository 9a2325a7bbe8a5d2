// What a communicator can do: a table of verbs. Strategies are written against it and name no
// library. Data verbs queue on the stream (on the host they block); `step` names the work for the
// message when a peer does not arrive.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/agreement.hpp"
#include "longspan/types.hpp"
#include "src/peer_view.hpp"

namespace longspan::comm {

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Device device() const = 0;
  virtual std::chrono::milliseconds deadline() const = 0;
  virtual std::string describe() const = 0;

  /// recv [size, bytes] = each rank's send [bytes]. In place when send == recv + rank * bytes.
  ///
  /// `said` [size], in memory of the device: what every rank says of its run (a hash of the run's
  /// description), of which this rank's own is filled in. It is gathered beside the data. A verb
  /// that blocks compares and throws UsageError; where the work is queued, who reads the data
  /// compares (kernels::RunHeaders). Null: nothing is compared.
  virtual void all_gather(const void* send, void* recv, std::size_t bytes, Stream stream,
                          const char* step, std::uint64_t* said = nullptr) = 0;
  /// recv[p] = send[rank] of rank p; both [size, bytes].
  virtual void all_to_all(const void* send, void* recv, std::size_t bytes, Stream stream,
                          const char* step) = 0;
  /// Sends to rank + distance and receives from rank - distance, around the ring.
  virtual void shift(const void* send, void* recv, std::size_t bytes, int distance, Stream stream,
                     const char* step) = 0;

  /// Memory of every rank that kernels of all ranks can write, for exchanges of one layer, or null
  /// on every rank, with the reason in `why`. Collective. wait() reports what those kernels find
  /// wrong. It ends with the last pointer to it.
  virtual std::shared_ptr<const PeerView> open_windows(std::uint32_t /*layer*/,
                                                       std::size_t /*bytes*/, std::string& why) {
    why = "no kernels of several ranks here";
    return nullptr;
  }

  /// The number of a new layer among those of this communicator, and its log for the roll call.
  virtual std::uint32_t enlist(const std::shared_ptr<const RunLog>& log) = 0;
  /// The verbs that follow are of this run.
  virtual void begin(RunName run) = 0;
  /// `rank` means another thing by `run` than this rank, as was seen at `step`: throws a UsageError
  /// that names what differs, on every rank.
  virtual void disagree(RunName run, int rank, const char* step) = 0;

  /// Throws where the communicator has failed, by all that is known without waiting: for work that
  /// is queued past the verbs, as exchanges through windows are.
  virtual void check(const char* /*step*/) {}

  /// Blocks until the stream is done; past the deadline throws a RankError and aborts.
  virtual void wait(Stream stream, const char* step) = 0;

  /// Control plane: every rank's text, blocking, with the deadline.
  virtual std::vector<std::string> gather(const std::string& mine, const std::string& step) = 0;

  /// Gives up: tells the peers where possible, frees what is in flight, and makes every later call
  /// throw.
  virtual void abort(const std::string& why) noexcept = 0;
};

}  // namespace longspan::comm

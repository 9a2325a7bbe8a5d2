// Keys and values of all ranks, put by each rank directly into the whole sequence of every other,
// between GPUs that reach each other:
//
//     a few multiprocessors   the first heads go    the next ones    ...
//     attention               ................................   waits on the GPU for what it
//                                                                reads next
//
// Own keys are read in place. Work tiles begin with the keys around their rows, which are mostly
// own ones, and some of the first tiles see no others, so there is work from the start. If the
// kernel of a run cannot wait for pieces, the run waits for all of them first.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "src/strategy/route.hpp"
#include "src/strategy/shared/head_shares.hpp"
#include "src/strategy/shared/put_exchange.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class KeyPuts {
 public:
  /// Opens the receive buffers, for `rows` keys of whole sequences, if the options do not choose
  /// another way and they are possible. Collective.
  KeyPuts(const LayerContext& layer, const TravellingKeys& keys, std::int64_t rows);

  bool is_open() const { return puts_.is_open(); }
  const ExchangeInfo& exchange() const { return puts_.info(); }
  /// Memory for whole sequences; also for runs that this does not support.
  const KeyBlock& whole_keys() const { return whole_; }

  /// Queues a run, with its result. Returns false, and queues nothing, for other runs than these:
  /// one sequence, whose length the host knows, of which every rank has a few stretches of
  /// neighbouring keys. All ranks decide alike. `copied` is memory for this rank's keys, if they
  /// cannot be sent in place.
  bool queue(Pass& pass, const KeyBlock& copied);

 private:
  struct Ways;  // of a run
  class Forward;

  int ranks() const { return layer_.comm.size(); }
  int rank() const { return layer_.comm.rank(); }

  std::optional<Ways> ways_of(const Run& run) const;
  kernels::KeyArrivals arrivals_of(const Ways& ways, const KeyBlock& own) const;
  kernels::RowPuts puts_of(const Run& run, const Ways& ways, const KeyBlock& own,
                           bool begins) const;
  std::size_t received(const Run& run, const Ways& ways) const;

  LayerContext layer_;
  const TravellingKeys& keys_;
  PutExchange puts_;
  KeyBlock whole_;
  Route route_;  // of the current run
  Underway underway_;
};

/// The pieces in which a rank sends keys of `bytes`.
HeadPieces pieces_of_keys(int heads, int kv_heads, double bytes);

}  // namespace longspan

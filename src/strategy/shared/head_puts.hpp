// The exchange by heads between GPUs that reach each other, for one sequence, beside the attention:
//
//     a few multiprocessors   the first heads go    the next    ...
//     attention               ..............................  its rows end at their owners
//
// A rank puts its rows of queries, keys and values directly into the whole sequences of the rank
// that has the heads: nothing is packed. One attention with all of the rank's heads begins with
// those that have arrived, and waits on the GPU for what it reads next (kernels::KeyArrivals). It
// stores finished rows in the memory of their owners, and one copy there makes the result. If the
// kernel of a run cannot wait, or cannot store rows on other ranks, the run waits for all heads
// first, and puts rows back when all are finished; the communication between ranks stays the same.
//
// Each of P ranks gets 1 / P of the heads, as with HeadExchange, which handles the runs that this
// does not.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "src/strategy/shared/head_exchange.hpp"
#include "src/strategy/shared/put_exchange.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class HeadPuts {
 public:
  /// Opens the receive buffers, if the options do not choose another way and they are possible.
  /// Collective; they include `exchange`'s memory for whole sequences.
  HeadPuts(const LayerContext& layer, HeadExchange& exchange);

  bool is_open() const { return puts_.is_open(); }
  const ExchangeInfo& exchange() const { return puts_.info(); }

  /// Queues a run that `exchange` has prepared, with its result. Returns false, and queues nothing,
  /// for other runs than these: one sequence, whose length the host knows, of which every rank has
  /// a few stretches of neighbouring rows and keys. All ranks decide alike.
  bool queue(Pass& pass);

 private:
  struct Way;  // of a run
  class Forward;

  std::optional<Way> way_of(const Run& run) const;

  int ranks() const { return layer_.comm.size(); }
  int rank() const { return layer_.comm.rank(); }
  bool has_values() const { return !layer_.options.values_in_keys; }  // beside keys

  kernels::KeyArrivals arrivals_of(const Way& way) const;
  kernels::RowPuts puts_of(const Way& way, bool begins) const;
  kernels::RowPlaces places_of(const Way& way) const;
  void end_in_place(Pass& pass) const;
  void end_where_rows_leave(Pass& pass, const Way& way) const;
  std::size_t received(const Way& way) const;
  std::size_t received_results(const Way& way) const;
  void take_back(const Run& run, const Way& way) const;
  void put_result(const Run& run, const Way& way, const kernels::MergeParams& asked,
                  const PutRanks& putters) const;

  LayerContext layer_;
  HeadExchange& exchange_;
  PutExchange puts_;
  Route route_;  // of the current run
  Underway underway_;
  std::byte* rows_ = nullptr;  // [own rows, heads, value_dim] finished rows, as received
  std::byte* lse_ = nullptr;   // [heads, own rows] of them
};

/// The cost of this, and of HeadExchange for runs that this does not support.
RunCost head_puts_cost(const Options& options, int ranks, const RunSize& size);

}  // namespace longspan

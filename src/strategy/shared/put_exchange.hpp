// The exchange of a run whose ranks put rows into each other's receive memory with a kernel
// (kernels::RowPuts), and the attention that runs beside it and waits for the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/key_arrivals.hpp"
#include "kernels/row_puts.hpp"
#include "src/base/parts.hpp"
#include "src/strategy/shared/receive_memory.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class PutExchange {
 public:
  /// `step` names the exchange in errors.
  PutExchange(const LayerContext& layer, const char* step) : layer_(layer), step_(step) {}

  /// Opens receive memory for the parts that lay_out(memory) takes, as open_receive_memory does.
  template <class LayOut>
  void open(const LayOut& lay_out) {
    buffer_ = open_receive_memory(layer_, info_, [&](Parts& memory) {
      lay_out(memory);
      lay_out_digests(memory);
    });
  }
  bool is_open() const { return buffer_ != nullptr; }
  const ExchangeInfo& info() const { return info_; }

  /// Sends the ranks' reports of a run before the rows.
  void compare(Pass& pass) const { pass.compare_in(digests_, layer_.comm.rank()); }

  /// Queues the puts before the attention; with `puts.beside` the attention runs beside them and
  /// waits for `arrivals`. Fills in the common fields of both.
  void put(const Pass& pass, kernels::RowPuts& puts, kernels::KeyArrivals& arrivals) const;
  /// Queues the attention of the run up to the phase `last`.
  void attend(const Pass& pass, const kernels::RowPuts& puts, Phase last) const;
  /// The counters by which kernels synchronise. The run is watched from here on. Throws if the
  /// communicator has failed, with `step`.
  PutRanks begin(const Run& run, const char* step) const {
    return layer_.comm.begin_puts(buffer_.get(), run.stream, step);
  }
  /// All kernels are queued. `received` is the number of received bytes.
  void end(const Run& run, std::size_t received) const {
    layer_.comm.end_puts(buffer_.get(), received, run.stream, step_);
  }

 private:
  void lay_out_digests(Parts& memory);

  LayerContext layer_;
  const char* step_;
  std::shared_ptr<std::byte> buffer_;  // null: not open; zeroed when it is made
  std::uint64_t* digests_ = nullptr;   // [ranks] each rank's report of the run
  unsigned* done_ = nullptr;           // kernels::RowPuts::done
  ExchangeInfo info_;
};

}  // namespace longspan

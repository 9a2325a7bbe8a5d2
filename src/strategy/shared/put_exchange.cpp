#include "src/strategy/shared/put_exchange.hpp"

namespace longspan {

using kernels::KeyArrivals;
using kernels::RowPuts;

void PutExchange::lay_out_digests(Parts& memory) {
  digests_ = memory.take_array<std::uint64_t>(static_cast<std::size_t>(layer_.comm.size()));
  done_ = memory.take_array<unsigned>(RowPuts::kMostPieces);
}

void PutExchange::put(const Pass& pass, RowPuts& puts, KeyArrivals& arrivals) const {
  const Run& run = pass.run;
  comm::Transport& comm = layer_.comm;
  run.enter(Phase::exchange);
  puts.digest = pass.own_digest;
  puts.among = begin(run, step_);
  for (int p = 0; p < comm.size(); ++p)
    puts.digests[p] = reinterpret_cast<std::uint64_t*>(
        comm.place_at(reinterpret_cast<std::byte*>(digests_ + comm.rank()), p));
  puts.done = done_;
  arrivals.flags = puts.among.flags[comm.rank()];

  if (puts.beside) run.enter(Phase::attend);  // nothing may come between the kernels
  layer_.kernels.put_rows(puts, run.stream);
}

void PutExchange::attend(const Pass& pass, const RowPuts& puts, Phase last) const {
  if (!puts.beside) pass.run.enter(Phase::attend);
  pass.attend_to(pass.merge, last, layer_.kernels);
}

}  // namespace longspan

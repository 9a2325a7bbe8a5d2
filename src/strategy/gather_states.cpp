// gather-states: keys stay where they are, and the small partial states travel.
//
//     queries (all ranks')  ->  state over my keys  ->  every rank's state  ->  one merge
//
// Every rank merges the same states in the same order, so replicated results are bitwise equal.
#include "src/strategy/job.hpp"

namespace longspan {
namespace {

/// Gathers what each rank says of its run beside the data.
void gather(Job& job, const void* send, void* recv, std::int64_t bytes, const char* step) {
  job.comm.all_gather(send, recv, static_cast<std::size_t>(bytes), job.stream, step, job.said);
}

/// Brings every rank's query rows here, in the order of the whole q.
void gather_queries(Job& job) {
  const std::int64_t slot_bytes = job.row_capacity * job.row_bytes;
  std::byte* mine = job.gathered + job.query_shard.rank * slot_bytes;

  if (job.query_shard.layout == Layout::listed) {
    gather(job, job.query_shard.table, job.row_map, job.row_capacity * 8,
           "gather of query positions");
  } else {
    job.kernels.map_rows(
        {job.query_shard, job.attend.batch, job.query_shard.ranks, job.row_capacity, job.row_map},
        job.stream);
  }
  job.kernels.place_rows({job.own_q, mine, nullptr, job.own_rows, job.row_bytes}, job.stream);
  gather(job, mine, job.gathered, slot_bytes, "gather of queries");
  job.kernels.place_rows(
      {job.gathered, job.ordered, job.row_map, job.query_shard.ranks * job.row_capacity,
       job.row_bytes, job.attend.tokens},
      job.stream);
}

}  // namespace

void gather_states(Job& job) {
  const bool alone = job.comm.size() == 1;  // then no state has to travel
  const kernels::StateSlots& states = job.attend.state;
  const bool by_windows = job.peers != nullptr && states.rows <= job.window_rows;
  if (!alone && !by_windows) job.kernels.say(job.say, job.stream);
  if (job.shard_queries) {
    job.enter(Phase::exchange);
    gather_queries(job);
  }

  job.enter(Phase::attend);
  if (alone && job.kernels.attend_finished(job.attend, job.merge, job.stream)) return;
  if (by_windows) {
    job.comm.check("attention");  // no verb does; the step is that of Attention::wait
    kernels::ExchangeParams exchange{*job.peers, job.merge, job.window_rows};
    exchange.hash = job.say.hash;
    exchange.contents = job.say.contents;
    exchange.run = job.merge.headers.run;
    exchange.pushed = !job.apart && job.kernels.is_decode(job.attend);
    if (exchange.pushed && !job.timed &&
        job.kernels.attend_exchanged(job.attend, exchange, job.stream))
      return;
    job.kernels.attend(job.attend, job.stream);
    job.enter(Phase::exchange);
    job.kernels.exchange(exchange, job.stream);
    return;
  }
  job.kernels.attend(job.attend, job.stream);

  job.enter(Phase::exchange);
  gather(job, states.data + job.attend.slot * states.slot_bytes(), states.data, states.slot_bytes(),
         "gather of states");

  job.enter(Phase::merge);
  job.kernels.merge(job.merge, job.stream);
}

}  // namespace longspan

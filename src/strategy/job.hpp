// What a strategy is given: one run, already checked, with the workspace laid out. Strategies are
// the same for every backend and name no library.
#pragma once

#include <functional>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// Where the time goes, in the order of a run.
enum class Phase : int { attend, exchange, merge };

struct Job {
  const kernels::Backend& kernels;
  comm::Transport& comm;
  Stream stream;

  kernels::AttendParams attend;  // state and slot: this rank's place among the gathered states
  kernels::MergeParams merge;    // of all ranks' states into the result

  // With sharded queries: where the ranks' rows are gathered and put in order for `attend`.
  bool shard_queries = false;
  Shard query_shard;
  const std::byte* own_q = nullptr;  // [own_rows, row_bytes]
  std::int64_t own_rows = 0;         // query rows on this rank
  std::int64_t row_capacity = 0;     // most on any rank
  std::int64_t row_bytes = 0;        // [heads, dim] of q
  std::byte* gathered = nullptr;     // [ranks, row_capacity, row_bytes]
  std::byte* ordered = nullptr;      // [tokens, row_bytes]
  std::int64_t* row_map = nullptr;   // [ranks, row_capacity] place of each gathered row

  // Windows of the ranks, where states can travel through them; see kernels/exchange.hpp.
  const PeerView* peers = nullptr;
  std::int64_t window_rows = 0;  // most states of an exchange
  // What travels must not depend on what a rank alone was asked for: `apart` is of all ranks alike,
  // `timed` is not.
  bool apart = false;  // attention and exchange in kernels of their own
  bool timed = false;  // the same on this rank, so that each phase has its time

  // What this rank says of its run: `say` writes it to said[rank], and it travels with the data.
  kernels::SayParams say;
  std::uint64_t* said = nullptr;  // [ranks]

  /// Marks that the stream has come to the start of `phase`.
  std::function<void(Phase)> enter;
};

/// out = merge over the ranks, in the fixed order, of each rank's state over its own keys.
void gather_states(Job& job);

}  // namespace longspan

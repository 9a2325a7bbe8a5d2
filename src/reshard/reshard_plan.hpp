// Plans which keys go from which rank to which when a cache is resharded. A pair of ranks exchanges
// the keys that the first holds by the old rule and the second by the new one, ordered by sequence
// and position. Both ranks compute this without communication.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/move_keys.hpp"
#include "longspan/reshard.hpp"

namespace longspan {

/// Adds the runs of keys of a sequence of `length` keys that `from` and `to` both hold, as local
/// keys of both. Neither is `listed`.
void add_common_runs(const Shard& from, const Shard& to, std::int64_t length, std::int32_t sequence,
                     std::vector<kernels::KeyRun>& runs);

/// The plan of one rank. Keys travel as rows in one buffer of `rows`: first those that leave, then
/// those that stay, then those that arrive.
struct ReshardPlan {
  /// The keys for the rank d places after this one in the ring, or from the rank d places before
  /// it.
  struct Part {
    std::int64_t first_run = 0, runs = 0;
    std::int64_t first_row = 0, rows = 0;
  };
  /// Keys between a cache and the buffer.
  struct Side {
    std::vector<kernels::KeyRun> runs;
    std::vector<Part> parts;          // [ranks] by the distance d; part 0 stays
    std::vector<std::int64_t> start;  // [batch] this rank's keys before each sequence
    std::vector<std::int64_t> keys;   // [batch] keys of this rank
  };
  Side leaving;   // from the old cache to the buffer
  Side arriving;  // from the buffer to the new cache
  std::int64_t rows = 0;
};

/// Makes the plan of rank `rank` of `ranks`, for options that were checked.
ReshardPlan plan_reshard(const ReshardOptions& options, int rank, int ranks);

/// The part of a sequence that rank `rank` of the communicator holds; empty if the rank holds no
/// part of the cache.
Shard shard_of(const CacheRanks& cache, int rank, int sequence, std::int64_t length);
bool holds(const CacheRanks& cache, int rank);

}  // namespace longspan

// How many keys and query rows the sequences of a call have, on all ranks and on this one: from the
// caller, or else from the ranks' reports of their parts.
#pragma once

#include <cstdint>
#include <vector>

#include "longspan/communicator.hpp"
#include "longspan/options.hpp"
#include "python/src/call.hpp"
#include "python/src/plans.hpp"

namespace longspan::python {

/// Lengths of the whole sequences that the call does not give: what all ranks hold together.
struct Totals {
  std::int64_t keys = 0, queries = 0;
  std::int64_t most_queries = 0;  // that a rank has: an upper bound, the same on all ranks
  // [ranks + 1] where parts in rank order begin that differ from the contiguous rule.
  std::vector<std::int64_t> key_ends, query_ends;
};

/// Asks the other ranks where it must, which is collective. Parts whose lengths differ from their
/// rule are an InputError on every rank, except contiguous ones where `any_parts` allows it.
Totals totals_of(const Communicator& world, const AttendCall& call, const Options& options,
                 bool any_parts);

/// The numbers of query_table, padded with -1 to the `entries` rows of one rank that a layer takes.
/// InputError for a table of other numbers than `rows`, and for invalid numbers.
std::vector<std::int64_t> listed_rows(const AttendCall& call, std::int64_t rows,
                                      std::int64_t entries);

/// The rows of each sequence's result that the rank gets, for results by rows. InputError where
/// only a GPU can read it.
std::int64_t own_rows(const AttendCall& call, const Sharding& rule, const Communicator& world);

/// Sets lengths in the arguments, and arrays of them where a batch has none. `batch`: sequences.
void set_lengths(AttentionArgs& args, const AttendCall& call, const Totals& totals,
                 bool sharded_queries, std::int64_t batch, Device device, UniformArrays& arrays);

}  // namespace longspan::python

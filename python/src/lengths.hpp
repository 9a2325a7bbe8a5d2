// How many keys and query rows the sequences of a call have, on all ranks and on this one: what the
// caller says, and what the ranks say of their parts where nobody does.
#pragma once

#include <cstdint>
#include <vector>

#include "longspan/communicator.hpp"
#include "longspan/options.hpp"
#include "python/src/call.hpp"
#include "python/src/plans.hpp"

namespace longspan::python {

/// Lengths of the whole sequences that nobody has given: what all ranks hold together.
struct Totals {
  std::int64_t keys = 0, queries = 0;
  std::int64_t most_queries = 0;  // that a rank has: an upper bound, alike on all ranks
  // [ranks + 1] where parts in rank order begin that are not those of the contiguous rule.
  std::vector<std::int64_t> key_ends, query_ends;
};

/// Asks the other ranks where it must, which is collective. Parts of other lengths than their rule
/// gives are an InputError on every rank, but for contiguous ones where `any_parts` allows it.
Totals totals_of(const Communicator& world, const Call& call, const Options& options,
                 bool any_parts);

/// The numbers of query_table, -1 past them, as a layer for `entries` rows of one rank takes it.
/// InputError for a table of other numbers than `rows`, and of numbers that no table has.
std::vector<std::int64_t> listed_rows(const Call& call, std::int64_t rows, std::int64_t entries);

/// The rows of the result that the rank gets of each sequence, of results by rows. InputError where
/// only a GPU can read it.
std::int64_t own_rows(const Call& call, const Sharding& rule, const Communicator& world);

/// Lengths into the arguments; arrays of them where a batch has none. `batch` of the sequences.
void set_lengths(AttentionArgs& args, const Call& call, const Totals& totals, bool sharded_queries,
                 std::int64_t batch, Device device, UniformArrays& arrays);

}  // namespace longspan::python

// What must hold before anything runs. Each refusal names what was asked, what was found, and what
// to do.
#pragma once

#include "longspan/attention.hpp"

namespace longspan {

/// UsageError for options that make no sense; Unsupported for what longspan cannot do.
void check_options(const Options& options);

/// InputError for tensors and arrays that do not fit the options or each other. On the host the
/// arrays of lengths are checked too; on a GPU they are not in reach.
void check_request(const Request& request, const Options& options, const Communicator& world);

/// Every option as text, for agree().
NamedValues describe(const Options& options);

/// What the ranks' requests must have in common, likewise.
NamedValues describe(const Request& request, bool shard_queries);

}  // namespace longspan

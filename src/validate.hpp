// What must hold before anything runs. Each refusal names what was asked, what was found, and what
// to do.
#pragma once

#include <cstdint>

#include "longspan/attention.hpp"
#include "src/tensor_checks.hpp"

namespace longspan {

/// UsageError for options that make no sense; Unsupported for what longspan cannot do.
void check_options(const Options& options);

/// InputError for tensors and arrays that do not fit the options or each other; the rank's cache,
/// as kernels see it. On the host lengths and shards are checked too; on a GPU they are not in
/// reach. What lies in block tables is left to Backend::check_arrays.
CacheView check_request(const Request& request, const Options& options, const Communicator& world);
/// Request::new_k and new_v with the cache they belong to.
Append append_of(const Request& request);
CacheView check_append(const Append& tokens, const Options& options, const Communicator& world);

/// Host only: query_start and the lengths of a batch whose keys lie in `cache` as `shard` says.
/// `rows`: of the whole q. max_kv_len 0: no bound.
void check_lengths(const kernels::Batch& batch, std::int64_t rows, const Shard& shard,
                   const CacheView& cache, std::int64_t max_kv_len);

/// Every option as text, for agree().
NamedValues describe(const Options& options);

/// What the ranks' requests must have in common, likewise.
NamedValues describe(const Request& request, bool shard_queries);

}  // namespace longspan

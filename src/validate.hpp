// What must hold before anything runs. Each refusal names what was asked, what was found, and what
// to do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "longspan/attention.hpp"
#include "src/tensor_checks.hpp"

namespace longspan {

/// UsageError for options that make no sense, or sizes that no memory of `ranks` ranks holds;
/// Unsupported for what longspan cannot do.
void check_options(const Options& options, int ranks = 1);

/// What a mask, and the numbers of a score, must be; `refuse` throws the caller's kind of error.
void check_mask(const Mask& mask, void (*refuse)(const std::string&));
void check_score(std::optional<float> scale, float softcap, void (*refuse)(const std::string&));

/// InputError for a request of attend() that does not say what options to make of it.
void check_one_call(const Request& request);

/// InputError for tensors and arrays that do not fit the options or each other; the rank's cache,
/// as kernels see it. On the host lengths and shards are checked too; on a GPU they are not in
/// reach. What lies in block tables is left to ServingKernels::check_arrays.
CacheView check_request(const Request& request, const Options& options, const Communicator& world);
/// Request::new_k and new_v with the cache they belong to.
Append append_of(const Request& request);
CacheView check_append(const Append& tokens, const Options& options, const Communicator& world);

/// Host only: query_start and the lengths of a batch whose keys lie in `cache` as `shard` says.
/// `rows`: of the whole q. max_kv_len 0: no bound.
void check_lengths(const kernels::Batch& batch, std::int64_t rows, const Shard& shard,
                   const CacheView& cache, std::int64_t max_kv_len);

/// Every option that ranks must give alike, as text, for agree(). agreement.hpp has the same of a
/// run, and the list of what need not be alike.
NamedValues describe(const Options& options);

}  // namespace longspan

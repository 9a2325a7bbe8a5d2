// Checks that must pass before anything runs. Each refusal names what was asked, what was found,
// and what to do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "longspan/attention.hpp"
#include "longspan/machine.hpp"
#include "src/arguments/array_checks.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {

/// Throws UsageError for options that make no sense and for an invalid number of ranks, and
/// Unsupported for what longspan cannot do.
void check_values(const Options& options, int ranks);
/// The same for the options of a layer: also for sizes that no memory of `ranks` ranks can hold.
void check_options(const Options& options, int ranks = 1);

/// Throws UsageError for an invalid number of host threads.
void check_threads(int threads);

/// Throws UsageError for constants from which no time can be predicted.
void check_machine(const Machine& machine);

/// Check what indices are, a mask, and the numbers of a score over heads of `head_dim`; `refuse`
/// throws the caller's kind of error.
void check_index_options(const IndexOptions& o, void (*refuse)(const std::string&));
void check_mask(const Mask& mask, void (*refuse)(const std::string&));
void check_score(const ScoreOptions& score, int head_dim, void (*refuse)(const std::string&));

/// Checks, on the host only, the effect of the scales and slopes of a call on its scores:
/// InputError if scores would leave fp32 and become NaN.
void check_score_factors(const ScoreOptions& score, int head_dim, const RunArrays& arrays,
                         int heads, int kv_heads);

/// Throws InputError for arguments of attend() that do not determine the options.
void check_one_call(const AttentionArgs& args, DType kv);

/// Checked arguments as kernels take them.
struct Checked {
  CacheView cache;  // of this rank
  RunArrays arrays;
};

/// Returns the same arguments with q, out and lse as batch_rows() views them.
AttentionArgs with_batch_rows(const AttentionArgs& args);

/// The values of a run or an append: with Options::values_in_keys the first columns of k, where v
/// is left out or is just that; otherwise v. InputError for another v.
Tensor values_of(const Tensor& k, const Tensor& v, const Options& options);

/// Throws InputError for tensors and arrays that do not fit the options or each other. On the host
/// it also checks lengths and tables, which it cannot read on a GPU. ServingKernels::check_arrays
/// checks the contents of block tables.
Checked check_attention(const AttentionArgs& args, const Options& options,
                        const Communicator& world);
/// The same for a backward, whose arguments with_batch_rows() has viewed; Unsupported for runs that
/// have no gradients.
Checked check_gradients(const GradientArgs& args, const Options& options,
                        const Communicator& world);
GradientArgs with_batch_rows(const GradientArgs& args);
/// AttentionArgs::new_k and new_v, with the cache that they belong to.
Append append_of(const AttentionArgs& args);
Checked check_append(const Append& tokens, const Options& options, const Communicator& world);

/// Checks query_start only, on the host only. `rows` are those of the whole q.
void check_starts(const kernels::Batch& batch, std::int64_t rows);

/// Checks, on the host only, query_start and the lengths of a batch whose keys lie in `cache` by
/// the rule `shard`. `rows` are those of the whole q. With max_kv_len 0 there is no bound.
void check_lengths(const kernels::Batch& batch, std::int64_t rows, const Shard& shard,
                   const CacheView& cache, std::int64_t max_kv_len);

/// Checks that the one sequence fits the cache, as far as the rule and the length in the shard
/// tell. Not for ranges, whose table may lie on a GPU.
void check_room(const Shard& shard, const CacheView& cache);

/// Lists every option that ranks must give alike, as text, for agree(). agreement.hpp does the same
/// for a run, and lists what may differ.
NamedValues describe(const Options& options, const std::string& bf16_products = "");
/// Lists those of them that determine how keys and queries are distributed.
NamedValues describe_shardings(const Options& options);

}  // namespace longspan

// One run, of attend() or of a layer, as Python gives it: its arrays, its lengths, and the places
// of its results.
//
// Arrays of four dimensions are flash-attention's, [batch, tokens, heads, head_dim]; the library
// has them with tokens and heads exchanged.
#pragma once

#include <cstdint>
#include <list>
#include <string>

#include "longspan/attention.hpp"
#include "python/src/arguments.hpp"
#include "python/src/arrays.hpp"
#include "python/src/options.hpp"
#include "python/src/plans.hpp"

namespace longspan::python {

/// The arguments of a run: those of the table, and of Python alone. `causal` is a bool in attend(),
/// flags of sequences or None in a layer.
inline constexpr NameList kRun = [] {
  NameList names;
  add_run_arguments(names);
  // cache_batch_idx is a table of pages, of which each is a whole row of the cache. What shard()
  // remembers of k and q (python/longspan/_shards.py): tokens of the arrays that they
  // were cut from, or None; and what contradicts the call, or None.
  for (const char* const name : {"return_lse", "stream", "whole_keys", "whole_queries",
                                 "contradiction", "cache_batch_idx", "cu_seqlens_k_new"})
    names.add(name);
  return names;
}();

/// "[2, 3]".
std::string shape_text(const Tensor& t);

/// Dense copies of arrays of one call, made by the arrays' own library.
class DenseCopies {
 public:
  /// `stream` is the caller's own, or None.
  explicit DenseCopies(nb::handle stream) : on_other_stream_(!stream.is_none()) {}

  /// From here on the tensor of `array` is that of a copy. InputError where none can be made: the
  /// library has no function for it, or on a GPU it does not know the stream.
  void take(Array& array, const char* name);
  /// The same where rows have gaps or run backwards, or sequences do not follow each other.
  void take_unless_flat(Array& array, const char* name);
  /// The same for a k and v without pages where the sequences of a batch do not lie a whole number
  /// of keys apart, the same in both. Values that are the first columns of the keys stay so.
  void take_unless_cache(Array& k, Array& v);
  /// The same where the elements of a row do not follow each other, or a dimension runs backwards.
  void take_unless_plain(Array& array, const char* name);

 private:
  bool on_other_stream_;
  std::list<nb::object> made_;
  std::list<Array> views_;
};

/// A count of rows or keys, -1 for None. Throws InputError for an invalid count.
std::int64_t count_of(nb::handle given, const char* name);
template <Literal kLiteral>
std::int64_t count_of(Argument<kLiteral> given) {
  return count_of(given, given.kName);
}

/// [batch, tokens, kv_heads, dim] as [batch tokens, kv_heads, dim]; anything else as it is. Throws
/// InputError where the sequences do not follow each other in memory.
Tensor flat(Tensor t, const char* name);

/// [batch, tokens, ...] of flash-attention as the library has it, with tokens and heads exchanged;
/// a tensor of three dimensions as it is.
Tensor exchanged(Tensor t);

/// Makes cache_batch_idx [sequences] a block table of one column: a row of the cache [rows,
/// capacity, kv_heads, head_dim] is a page. InputError for another shape, and on CPUs for rows that
/// the cache lacks, and for one row of two sequences that are written.
void become_table(Array& rows, const Tensor& cache, std::int64_t sequences, bool writes);

/// The arrays of one run, and the places of its results.
struct AttendCall {
  /// TypeError for an object that is not an array, InputError where extents do not fit each other.
  explicit AttendCall(const Arguments<kRun>& given);

  bool batched() const { return q.tensor().dims == 4; }
  std::int64_t batch() const { return batched() ? q.tensor().shape[0] : 1; }
  std::int64_t tokens() const { return q.tensor().shape[batched() ? 1 : 0]; }
  std::int64_t heads() const { return q.tensor().shape[batched() ? 2 : 1]; }
  std::int64_t head_dim() const { return q.tensor().shape[batched() ? 3 : 2]; }
  std::int64_t kv_heads() const {
    const Tensor& t = k.tensor();
    return t.shape[t.dims == 5 ? 1 : t.dims - 2];
  }
  std::int64_t value_dim() const {
    const Tensor& t = v.tensor();
    return t.shape[k.tensor().dims == 5 ? 2 : t.dims - 1];
  }
  /// Keys of each sequence on this rank, where no length is given.
  std::int64_t own_keys() const;

  /// Checks that arrays are on the communicator's GPU. The library checks the device itself.
  void check_gpu(int gpu) const;

  /// Checks the types of k and v where `kv` says that their rows carry scales: bytes, or else
  /// floats.
  void check_types(DType kv) const;

  /// Copies q, k, v and the new keys and values where they cannot be read in place: rows that
  /// travel must be dense, and the sequences of a batch at equal steps of keys. Arrays that are
  /// written are never copied. InputError where no copy can be made.
  void make_readable(bool sharded_queries);

  /// Results, in the caller's arrays or new ones: the part that the rank gets.
  void make_results(const Options& options, const Communicator& world);

  /// Everything but the lengths, which other ranks may have to report.
  AttentionArgs args() const;
  /// The same of one sequence of a batch.
  AttentionArgs args_of(std::int64_t sequence) const;
  /// The same for backward, whose out and lse are those that a run has written. TypeError where one
  /// is missing.
  AttentionArgs args_of_backward() const;

  /// Whether the new keys are those of other rows than q's, of which all ranks have `rows`: then
  /// they are appended ahead of the run.
  bool appends_ahead(std::int64_t rows) const;
  /// That append, of a run whose lengths are set. The run is then without new keys.
  Append append_of(AttentionArgs& run, std::int64_t batch, Device device,
                   UniformArrays& arrays) const;

  /// The result for Python: out, or out and lse.
  nb::object finish();
  bool needs_wait() const { return out.needs_wait() || lse.needs_wait(); }

  Array q;
  Stream stream;  // of the call
  Array k, v, causal, cu_seqlens_q, cache_seqlens, block_table, cu_seqlens_k_new, k_new, v_new,
      q_descale, k_descale, v_descale, out_scale, alibi_slopes, sinks, qq_bias, documents,
      bidirectional, prefix_lens, cache_leftpad, seqused_q, indices, topk_length, rotary_cos,
      rotary_sin, key_table, query_table, dropout_seed, dropout_sequences, given_out, given_lse;
  std::int64_t total_keys, total_queries, whole_keys, whole_queries;
  std::string contradiction;
  bool skip_decode, return_lse;
  bool by_rows_of_cache = false;  // block_table is cache_batch_idx: a page is a row of the cache
  Result out, lse;

 private:
  /// A batch of no sequences is one sequence without keys and queries, so that the ranks still
  /// agree on the run; the results have no elements.
  void leave_out_sequences();

  DenseCopies copies_;
};

}  // namespace longspan::python

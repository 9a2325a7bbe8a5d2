// Describes the shape of a decode benchmark, and the contents of its tensors. Caches of many GB are
// filled from a block of random rows (Pattern maps positions to rows); new tokens and queries are
// random. Everything is a function of the seed and the global position: the same for every number
// of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "launcher/problem/growing.hpp"
#include "launcher/problem/inputs.hpp"
#include "launcher/problem/problem.hpp"
#include "longspan/storage.hpp"

namespace longspan::launcher {

struct DecodeShape {
  Options options;  // of the attention; its sizes come from the fields below
  int batch = 1;
  int tokens = 1;  // new tokens of each sequence in a step
  int layers = 1;
  int caches = 1;  // layer i uses cache i mod caches
  int page = 0;    // keys in a page; 0: no pages
  Layout layout = Layout::interleaved;
  std::int64_t block = kSegment;
  std::int64_t kv_len = 0;  // of each sequence before the first step
  std::int64_t steps = 1;   // the steps that fit
  std::uint64_t seed = 0;

  DType kv_dtype() const { return options.dtypes.of_kv(); }
  std::int64_t rows() const { return std::int64_t{batch} * tokens; }  // of a layer's queries
  std::int64_t length_after(std::int64_t done) const { return kv_len + done * tokens; }
  Shard shard(int rank, int ranks) const { return {layout, rank, ranks, kv_len, block}; }
  /// The room for local keys of a sequence on every rank.
  std::int64_t capacity(int ranks) const;
  /// The bytes of a key, or of a value, of all kv heads.
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(options.kv_heads *
                                    storage_of(kv_dtype()).row_bytes(options.head_dim));
  }
  /// The bytes of one cache on one rank, keys and values.
  std::size_t cache_bytes(int ranks) const {
    return 2 * static_cast<std::size_t>(batch * capacity(ranks)) * row_bytes();
  }
  /// The same as a double, which no size overflows.
  double bytes_of_cache(int ranks) const {
    return 2.0 * batch * static_cast<double>(capacity(ranks)) * static_cast<double>(row_bytes());
  }
  /// The options of a layer that runs this.
  Options fitted() const;
};

/// The keys, or the values, of all caches.
struct CacheInputs {
  Source fresh;                  // [caches * rows, kv_heads, dim] new tokens, as they are appended
  Source stored;                 // the same tokens in the cache's type
  std::vector<float> scale;      // [1] where the cache is fp8, or none
  std::vector<std::byte> block;  // [pattern rows, kv_heads, dim] in the cache's type
  std::int64_t twist = 0;

  Pattern pattern(int cache) const;
};

/// A sequence in one layer, and one kv head with the query heads that read it.
struct DecodeSample {
  int layer = 0, sequence = 0, kv_head = 0;
};

struct DecodeInputs {
  CacheInputs k, v;
  Source q;  // [layers * rows, heads, dim]

  explicit DecodeInputs(const DecodeShape& shape);
};

/// Draws `count` samples: the first and the last, and the others by `draw`.
std::vector<DecodeSample> draw_samples(const DecodeShape& shape, int count, std::uint64_t draw);

/// Makes the samples a problem of `count` sequences with one kv head each, for the judge, after
/// `done` steps. It refers to shape and inputs.
Problem sampled(const DecodeShape& shape, const DecodeInputs& inputs,
                const std::vector<DecodeSample>& samples, std::int64_t done);

/// The samples' part of the outputs of all layers [layers * rows, heads].
Answer sampled(const DecodeShape& shape, const std::vector<DecodeSample>& samples,
               const Answer& outputs);

}  // namespace longspan::launcher

// The memory of a backward on one rank, and its steps that know no other rank: the terms of rows,
// fp32 sums of dq, dk and dv, and the one rounding at the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class GradientMemory {
 public:
  /// fp32 gradients of the keys and values of one rank: those of values behind those of keys.
  struct KeySums {
    std::byte* data = nullptr;
    std::int64_t rows = 0;
  };

  /// `keys` outlives this.
  GradientMemory(const LayerContext& layer, const TravellingKeys& keys)
      : GradientMemory(layer, keys, &layer.bounds) {}
  /// The same, with scratch for attentions up to `largest`; null: without attentions.
  GradientMemory(const LayerContext& layer, const TravellingKeys& keys,
                 const kernels::AttendParams* largest);

  /// The bytes of its memory for runs of that size, without the scratch of its kernels.
  static double workspace_bytes(const Options& options, int ranks, const RunSize& size);
  /// The bytes of the sums of rows, or of keys, of that number.
  static double row_sum_bytes(const Options& options, double rows);
  static double key_sum_bytes(const Options& options, double keys);
  /// `dq_bytes`: at least so many for the sums of rows.
  void lay_out(Parts& memory, std::int64_t dq_bytes = 0);

  /// Queues what a backward starts with: the terms of own rows, their part of the gradients of
  /// sinks, and where sequences begin in the sums of own keys.
  void begin(const Pass& pass, const GradientArgs& args) const;

  /// This rank's rows and keys, from the start of their sums on.
  kernels::GradientParams params(const Pass& pass, const GradientArgs& args) const;
  /// Points them at the sums of keys; `start` [batch] is where sequences begin there.
  void give_key_sums(kernels::GradientParams& p, const KeySums& sums,
                     const std::int64_t* start) const;
  /// Lets kernels store the gradients of a block that has all rows and keys, where they can and
  /// nothing else is to be done with the sums. Returns whether they will.
  bool store_by_kernels(kernels::GradientParams& p, const Pass& pass,
                        const GradientArgs& args) const;
  KeySums own_keys(const Run& run) const;
  const std::int64_t* own_key_starts() const { return key_starts_; }
  kernels::RowTerm* terms(const Pass& pass) const {
    return pass.terms != nullptr ? pass.terms : terms_;
  }
  /// Sums of dq for `rows` rows in memory.
  kernels::GradientSums row_sums(std::byte* memory, std::int64_t rows) const;
  kernels::GradientSums own_rows(std::int64_t rows) const { return row_sums(dq_, rows); }

  std::int64_t row_sum_bytes(std::int64_t rows) const;
  std::int64_t key_sum_bytes(std::int64_t rows) const;
  /// to += from, sums of `bytes` bytes.
  void add(void* to, const void* from, std::int64_t bytes, Stream stream) const;

  /// Ends a backward with the sums of own rows, which have room for `rows`, and of own keys: rounds
  /// and stores them, unless kernels have `stored` them, and the gradients of sinks; or hands them
  /// to the strategy that the backward is a part of.
  void finish(const Pass& pass, const GradientArgs& args, std::int64_t rows,
              bool stored = false) const;

 private:
  /// The tensor of dk or dv. Its dimensions are [keys, kv_heads, dim], or with 4 of them [batch,
  /// capacity, kv_heads, dim].
  static kernels::TokenRows key_rows(const Tensor& to);
  kernels::StoreGradientParams storing(const Pass& pass, const GradientArgs& args) const;
  void store_rows(const Pass& pass, const GradientArgs& args, std::int64_t rows) const;
  void store_keys(const Pass& pass, const GradientArgs& args) const;
  void store_sinks(const Pass& pass, const GradientArgs& args) const;
  int group() const { return layer_.bounds.heads / layer_.bounds.kv_heads; }
  std::int64_t k_bytes(std::int64_t rows) const;
  /// This rank's part of the gradients of sinks, [heads] padded.
  float* sink_part(int rank) const;
  /// Gathers all parts, and returns their sum.
  float* add_up_sinks(Stream stream) const;

  LayerContext layer_;
  const TravellingKeys& keys_;
  std::size_t scratch_bytes_ = 0;
  kernels::RowTerm* terms_ = nullptr;   // [tokens, heads]
  std::byte* dq_ = nullptr;             // sums of this rank's rows
  std::byte* own_keys_ = nullptr;       // sums of this rank's keys and values
  std::int64_t* key_starts_ = nullptr;  // [batch] first row of each sequence in them
  std::byte* sinks_ = nullptr;          // [ranks] parts of the gradients of sinks
  std::byte* scratch_ = nullptr;
};

}  // namespace longspan

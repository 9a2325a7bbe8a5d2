// Keys and values as they travel between ranks: each rank's share side by side, sequence after
// sequence, [rows, kv_heads, head_dim] and [rows, kv_heads, value_dim], from a cache of any form.
// What is stored so already is sent from where it lies; anything else is copied first.
//
// On processors, and for one sequence on GPUs whose length the host is told, every rank knows how
// many keys each rank has, and transfers have that size. On GPUs lengths in memory of the device
// have a bound instead, by the layer's limits, and that is what travels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "src/strategy/shared/most_rows.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// Why no memory can be had for keys that travel; empty where it can.
std::string refuse_travelling_keys(const Options& options, int ranks);

/// Keys and values of one rank, side by side. It does not own them.
struct KeyBlock {
  std::byte* k = nullptr;             // [rows, kv_heads, head_dim]
  std::byte* v = nullptr;             // [rows, kv_heads, value_dim]
  std::int64_t* start = nullptr;      // [batch] first row of each sequence
  std::int64_t* positions = nullptr;  // [rows] of listed keys; else null
};

/// Whether the receiver's query rows may see keys of the owner, by what this processor can tell of
/// lengths and masks on `device`. All ranks give the same answer.
bool may_see(const Run& run, Device device, int receiver, int owner);

/// The keys of the one sequence from the first to the last that rows of `receiver` see, or all of
/// them where this processor cannot tell on `device`. All ranks give the same answer.
Interval keys_seen(const Run& run, Device device, int receiver);

/// Queues the write of new keys into the cache, where they must be there before a run.
void append_new_keys(const Layer& layer, Pass& pass);

class TravellingKeys {
 public:
  explicit TravellingKeys(const Layer& layer);

  /// The rows of a block of one rank, at most.
  std::int64_t block_rows() const { return block_rows_; }
  /// Takes memory for a block of so many rows.
  KeyBlock take_block(Parts& memory, std::int64_t rows) const;
  /// Takes what a run needs besides.
  void lay_out(Parts& memory);

  /// Throws Unsupported, on every rank, for a run whose keys cannot travel, and InputError for one
  /// that is beyond the layer's limits. `strategy` is who asks.
  void check(const Run& run, const char* strategy) const;

  /// Makes the run's keys ready to be sent: new ones are in the cache, and own rows have their
  /// starts.
  void begin(Pass& pass) const;

  /// The rows that rank `rank` sends to others in this run: what it has, or their bound.
  std::int64_t rows_of(const Run& run, int rank) const;
  /// Whether `receiver` has rows that see keys of `owner`. All ranks give the same answer; where it
  /// is not known, it is true.
  bool are_seen(const Run& run, int receiver, int owner) const;

  /// Whether this rank's keys must be copied before they can be sent.
  bool must_copy(const Run& run) const;
  /// This rank's keys where they lie, where must_copy is false.
  KeyBlock in_place(const Run& run) const;
  /// Copies this rank's keys to `block`.
  void copy_to(const Run& run, const KeyBlock& block) const;
  /// This rank's keys as they can be sent: where they lie, or copied to `room`.
  KeyBlock own_keys(const Run& run, const KeyBlock& room) const;
  /// Makes the keys of the attention those of a block, which `shard` says the places of.
  void attend_to(Pass& pass, const KeyBlock& block, const Shard& shard) const;
  /// Makes the starts of the sequences in a block that rank `rank` has filled.
  void find_starts(const Run& run, int rank, const KeyBlock& block) const;

  /// Makes the starts of whole sequences, or of such a part of each, one after the other.
  void find_whole_starts(const Run& run, const KeyBlock& block, const Shard& part = {}) const;
  /// Copies the block of rank `rank` to where its keys stand in whole sequences, or in such a part
  /// of each. A null part of `to` leaves keys or values out.
  void copy_in_order(const Run& run, int rank, const KeyBlock& from, const KeyBlock& to,
                     const Shard& part = {}) const;

  /// What attends to, or copies from, the block of rank `rank`.
  kernels::KvRows keys_in(const KeyBlock& block) const;
  kernels::KvRows values_in(const KeyBlock& block) const;
  Shard shard_of(const Run& run, int rank, const KeyBlock& block) const;

  std::int64_t key_bytes() const { return row_bytes(layer_.bounds.head_dim); }
  std::int64_t value_bytes() const { return row_bytes(layer_.bounds.value_dim); }

 private:
  std::int64_t row_elements(int dim) const { return std::int64_t{layer_.bounds.kv_heads} * dim; }
  std::int64_t row_bytes(int dim) const {
    return row_elements(dim) * static_cast<std::int64_t>(size_of(layer_.bounds.kv_dtype));
  }
  bool is_listed() const { return layer_.options.keys.layout == Layout::listed; }
  /// Whether this processor can tell how many keys each rank has of each sequence.
  bool knows_lengths(const Run& run) const;

  /// A bound of the keys that rank `rank` has of any sequence.
  /// The keys of a rank in a run of so many sequences, at most.
  std::int64_t most_rows(std::int64_t batch) const;
  std::int64_t longest(const Run& run, int rank) const {
    return is_listed() ? run.listed_keys[rank] : most_keys_;
  }

  Layer layer_;
  std::int64_t most_keys_;              // of a sequence, on any rank
  std::int64_t block_rows_;             // of all sequences
  std::int32_t* row_starts_ = nullptr;  // [batch + 1] of this rank's share of the queries
};

}  // namespace longspan

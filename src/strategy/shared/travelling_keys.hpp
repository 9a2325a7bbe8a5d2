// Keys and values as they travel between ranks: each rank's share contiguous, sequence after
// sequence, [rows, kv_heads, head_dim] and [rows, kv_heads, value_dim], from a cache of any form.
// Keys already stored like that are sent in place; others are copied first.
//
// On CPUs, and on GPUs for one sequence whose length the host knows, every rank knows how many keys
// each rank has, and transfers have that size. On GPUs, lengths in device memory are unknown to the
// host; transfers then have the size of a bound from the layer's limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "longspan/storage.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/shared/most_rows.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// Why memory for travelling keys cannot be allocated; empty if it can.
std::string refuse_travelling_keys(const Options& options, int ranks);

/// Keys and values of one rank, contiguous. It does not own them.
struct KeyBlock {
  std::byte* k = nullptr;             // [rows, kv_heads, head_dim]
  std::byte* v = nullptr;             // [rows, kv_heads, value_dim]; none with values_in_keys
  std::int64_t* start = nullptr;      // [batch] first row of each sequence
  std::int64_t* positions = nullptr;  // [rows] of listed keys; else null
};

/// Whether the receiver's query rows may see keys of the owner, as far as this CPU knows lengths
/// and masks on `device`. All ranks give the same answer.
bool may_see(const Run& run, Device device, int receiver, int owner);

/// The keys of the one sequence from the first to the last that rows of `receiver` see, or all of
/// them if this CPU does not know on `device`. All ranks give the same answer.
Interval keys_seen(const Run& run, Device device, int receiver);

/// Queues the write of new keys into the cache, if they must be in it before a run.
void append_new_keys(const LayerContext& layer, Pass& pass);

class TravellingKeys {
 public:
  explicit TravellingKeys(const LayerContext& layer);

  /// The most rows of a block of one rank.
  std::int64_t block_rows() const { return block_rows_; }
  /// Takes memory for a block of `rows` rows.
  KeyBlock take_block(Parts& memory, std::int64_t rows) const;
  /// Takes the other memory of a run.
  void lay_out(Parts& memory);

  /// Throws Unsupported, on every rank, for a run whose keys cannot travel, and InputError for one
  /// beyond the layer's limits. `strategy` is the name of the caller.
  void check(const Run& run, const char* strategy) const;

  /// Prepares the run's keys for sending: writes new ones into the cache, and computes the starts
  /// of own rows.
  void begin(Pass& pass) const;

  /// The rows that rank `rank` sends to others in this run: their exact number, or a bound.
  std::int64_t rows_of(const Run& run, int rank) const;
  /// Whether `receiver` has rows that see keys of `owner`. All ranks give the same answer; if it is
  /// unknown, it is true.
  bool are_seen(const Run& run, int receiver, int owner) const;

  /// Whether this rank's keys must be copied before they can be sent.
  bool must_copy(const Run& run) const;
  /// This rank's keys in place, if must_copy is false.
  KeyBlock in_place(const Run& run) const;
  /// Copies this rank's keys to `block`.
  void copy_to(const Run& run, const KeyBlock& block) const;
  /// This rank's keys for sending: in place, or copied to `room`.
  KeyBlock own_keys(const Run& run, const KeyBlock& room) const;
  /// Points the attention at the keys of a block, whose positions follow from `shard`.
  void attend_to(Pass& pass, const KeyBlock& block, const Shard& shard) const;
  /// Computes the starts of the sequences in a block that rank `rank` has filled.
  void find_starts(const Run& run, int rank, const KeyBlock& block) const;

  /// A transfer of keys, values and, if keys are listed, their positions: at most this many pieces.
  static constexpr std::size_t kPieces = 3;
  /// Writes its pieces, and returns their number. Own keys are sent, and `to` receives those of the
  /// rank at -distance.
  std::size_t list_pieces(const Run& run, const Move& move, const KeyBlock& own, const KeyBlock& to,
                          comm::Piece* pieces) const;

  /// Computes the starts of whole sequences, or of such a part of each, one after another.
  void find_whole_starts(const Run& run, const KeyBlock& block, const Shard& part = {}) const;
  /// Copies the block of rank `rank` to its place in whole sequences, or in such a part of each. A
  /// null part of `to` leaves keys or values out.
  void copy_in_order(const Run& run, int rank, const KeyBlock& from, const KeyBlock& to,
                     const Shard& part = {}) const;

  /// The rows of a block of rank `rank`, for attention or copies.
  kernels::KvRows keys_in(const KeyBlock& block) const;
  kernels::KvRows values_in(const KeyBlock& block) const;
  Shard shard_of(const Run& run, int rank, const KeyBlock& block) const;

  std::int64_t key_bytes() const { return row_bytes(layer_.bounds.head_dim); }
  /// 0 if values travel in their keys.
  std::int64_t value_bytes() const { return has_values() ? row_bytes(layer_.bounds.value_dim) : 0; }
  /// Whether values travel beside keys: they are not in them (Options::values_in_keys).
  bool has_values() const { return !layer_.options.values_in_keys; }

 private:
  /// Dense rows, one after the other.
  kernels::KvRows rows_at(std::byte* data, int dim) const {
    return {data, layer_.bounds.kv_dtype, layer_.bounds.kv_heads, dim};
  }
  std::int64_t row_bytes(int dim) const {
    return layer_.bounds.kv_heads * storage_of(layer_.bounds.kv_dtype).row_bytes(dim);
  }
  bool is_listed() const { return layer_.options.keys.layout == Layout::listed; }
  /// The keys that a rank lists. On GPUs a rank knows its own number only.
  std::int64_t listed_of(const Run& run, int rank) const {
    return rank == layer_.comm.rank() ? run.arrays.keys.listed : run.listed_keys[rank];
  }
  /// Whether this CPU knows how many keys each rank has of each sequence.
  bool knows_lengths(const Run& run) const;

  /// A bound of the keys that rank `rank` has of any sequence. The most keys of a rank in a run of
  /// `batch` sequences.
  std::int64_t most_rows(std::int64_t batch) const;
  std::int64_t longest(const Run& run, int rank) const {
    return is_listed() ? listed_of(run, rank) : most_keys_;
  }

  LayerContext layer_;
  std::int64_t most_keys_;              // of a sequence, on any rank
  std::int64_t block_rows_;             // of all sequences
  std::int32_t* row_starts_ = nullptr;  // [batch + 1] of this rank's share of the queries
};

}  // namespace longspan

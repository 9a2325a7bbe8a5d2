// How much of an attention there is to compute, by the mask and the lengths, and how evenly it is
// shared. Work is counted in pairs of a row and a key that it sees; shares of it in tiles of them,
// since a kernel computes a tile of which anything is seen:
//
//     tile   128 packed rows (the query heads of a group, row after row) by 128 keys
//
// A rank that shares keys has its own keys, 128 by 128 as they lie, and all rows in order; one that
// shares rows has its own rows and all keys in order. Of long shares some tiles stand for those
// beside them.
#pragma once

#include <cstdint>
#include <vector>

#include "longspan/mask.hpp"
#include "longspan/strategy.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// Sequences of a run that are alike. Their rows are the last positions.
struct Sequences {
  std::int64_t rows = 0, keys = 0;  // of each of them
  double count = 1;

  std::int64_t first_row() const { return keys - rows; }
};

/// The sequences of a run, those that are alike together. Of hundreds of lengths the middle one of
/// neighbours stands for them.
std::vector<Sequences> sequences_of(const RunSize& size);

/// The visible pairs of a row and a key.
double visible_pairs(const Mask& mask, const std::vector<Sequences>& batch);

/// The visible tiles of the rank that has most of them, over the mean, where each sequence is dealt
/// out by the same rule. `group` query heads share a kv head. Of thousands of ranks some are looked
/// at, the first and the last among them.
double balance_of(const Sharding& dealt, Balanced by, const Mask& mask,
                  const std::vector<Sequences>& batch, int group, int ranks);

}  // namespace longspan

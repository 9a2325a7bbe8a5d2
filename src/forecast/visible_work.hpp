// How much work an attention has, by the mask and the lengths, and how evenly ranks share it. Work
// is counted in visible pairs of a row and a key. Shares of it are counted in tiles, since a kernel
// computes a whole tile if any pair in it is visible:
//
//     tile   128 packed rows (the query heads of a group, row after row) by 128 keys
//
// A rank that shares keys has its own keys, 128 by 128 in their order, and all rows in order. One
// that shares rows has its own rows and all keys in order. VisibleBlocks says which tiles a tile of
// the rank forms visible tiles with. Long shares are sampled: some tiles stand for their
// neighbours.
#pragma once

#include <cstdint>
#include <vector>

#include "longspan/mask.hpp"
#include "longspan/strategy.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// Sequences of a run with the same sizes.
struct Sequences {
  std::int64_t rows = 0, keys = 0;  // of each of them
  double count = 1;
};

/// The sequences of a run, grouped by size. Of hundreds of different lengths, neighbours are
/// represented by their middle one.
std::vector<Sequences> sequences_of(const RunSize& size, const Mask& mask);

/// The number of visible pairs of a row and a key.
double visible_pairs(const Mask& mask, const std::vector<Sequences>& batch);

/// The visible tiles of the rank that has most of them, over the mean, if each sequence is
/// distributed by the same rule. `group` query heads share a kv head. Of thousands of ranks only
/// some are computed, the first and the last among them.
double balance_of(const Sharding& dealt, Balanced by, const Mask& mask,
                  const std::vector<Sequences>& batch, int group, int ranks);

}  // namespace longspan

// Dropout: which weights of a softmax are kept. A weight is kept by a function of the seed, the
// offset, the number of its sequence, its head, and the positions of its row and its key in the
// whole sequence, so that neither ranks nor strategies nor tiles change the mask. With the
// generator Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2,
// 3; SC 2011),
//
//     (k0, k1, ...) = philox(counter (offset low, offset high, 0, 0), key (seed low, seed high))
//     (u0, u1, u2, u3) = philox(counter (key / 4, row, head, sequence), key (k0, k1))
//     kept: u of key % 4 >= floor(p 2^32)
//
// all in words of 32 bits, a row before the first key modulo 2^32. docs/guides/training.md has the
// same in NumPy. Host and CUDA run these functions.
#pragma once

#include <cstdint>

#include "longspan/types.hpp"

namespace longspan::kernels {

struct PhiloxWords {
  std::uint32_t word[4];

  /// The word of the key at a position. By selection, so that words stay in a GPU's registers.
  LONGSPAN_HD constexpr std::uint32_t of(std::int64_t position) const {
    const std::uint32_t even = (position & 2) != 0 ? word[2] : word[0];
    const std::uint32_t odd = (position & 2) != 0 ? word[3] : word[1];
    return (position & 1) != 0 ? odd : even;
  }
};

/// The words that make a generator of its own for a seed and an offset.
struct PhiloxKey {
  std::uint32_t low = 0, high = 0;

  static constexpr std::uint32_t kLowStep = 0x9e3779b9u, kHighStep = 0xbb67ae85u;
};

inline constexpr std::uint32_t kPhiloxFirst = 0xd2511f53u, kPhiloxThird = 0xcd9e8d57u;
inline constexpr int kPhiloxRounds = 10;

LONGSPAN_HD constexpr PhiloxWords philox(PhiloxWords c, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t a = std::uint64_t{kPhiloxFirst} * c.word[0],
                        b = std::uint64_t{kPhiloxThird} * c.word[2];
    c = {{static_cast<std::uint32_t>(b >> 32) ^ c.word[1] ^ key.low, static_cast<std::uint32_t>(b),
          static_cast<std::uint32_t>(a >> 32) ^ c.word[3] ^ key.high,
          static_cast<std::uint32_t>(a)}};
    key.low += PhiloxKey::kLowStep;
    key.high += PhiloxKey::kHighStep;
  }
  return c;
}

/// The key of a seed and an offset.
LONGSPAN_HD constexpr PhiloxKey dropout_key(std::uint64_t seed, std::uint64_t offset) {
  const PhiloxWords made =
      philox({{static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32), 0, 0}},
             {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return {made.word[0], made.word[1]};
}

/// One row of weights, of one head of one sequence.
struct DropoutRow {
  PhiloxKey key;
  std::uint32_t sequence = 0;
  std::uint32_t head = 0;
  std::uint32_t row = 0;  // its position

  /// The words of the keys at positions 4 block to 4 block + 3.
  LONGSPAN_HD constexpr PhiloxWords four(std::int64_t block) const {
    return philox({{static_cast<std::uint32_t>(block), row, head, sequence}}, key);
  }
  /// The word of one key.
  LONGSPAN_HD constexpr std::uint32_t one(std::int64_t position) const {
    return four(position / 4).of(position);
  }
};

/// The dropout of a run.
struct Dropout {
  bool on = false;
  std::uint32_t threshold = 0;         // floor(p 2^32): of words that drop their weights
  float scale = 1;                     // of weights that are kept: 1 / (1 - p)
  double wide_scale = 1;               // the same for products of fp64
  int first_head = 0;                  // the number of head 0 in the mask
  int seeds = 0;                       // entries of `seed`; with 1 the offset is 0
  const std::int64_t* seed = nullptr;  // [1] or [2] seed and offset, in memory of the device;
                                       // null: the next two
  std::int64_t own_seed = 0, own_offset = 0;
  const std::int32_t* sequences = nullptr;  // [batch] their numbers in the mask; null: the indices

  LONGSPAN_HD explicit operator bool() const { return on; }

  LONGSPAN_HD PhiloxKey key() const {
    if (seed == nullptr)
      return dropout_key(static_cast<std::uint64_t>(own_seed),
                         static_cast<std::uint64_t>(own_offset));
    return dropout_key(static_cast<std::uint64_t>(seed[0]),
                       seeds > 1 ? static_cast<std::uint64_t>(seed[1]) : 0);
  }
  /// The row at `position` of a head of sequence b; `key` is key().
  LONGSPAN_HD DropoutRow row(PhiloxKey key, int b, int head, std::int64_t position) const {
    return {key, static_cast<std::uint32_t>(sequences != nullptr ? sequences[b] : b),
            static_cast<std::uint32_t>(first_head + head), static_cast<std::uint32_t>(position)};
  }
  LONGSPAN_HD constexpr bool keeps(std::uint32_t word) const { return word >= threshold; }
  /// The factor of a weight.
  LONGSPAN_HD constexpr float factor(std::uint32_t word) const {
    return keeps(word) ? scale : 0.0f;
  }
};

/// The threshold of a probability p in [0, 1).
constexpr std::uint32_t dropout_threshold(double p) {
  return static_cast<std::uint32_t>(p * 0x1p32);  // exact; the conversion rounds down
}

}  // namespace longspan::kernels

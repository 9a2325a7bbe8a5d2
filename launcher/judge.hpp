// How good an answer is: sampled rows against the float64 oracle. The ranks share the work by
// (kv head, row), and every rank gets the same judgement.
//
//     16 bits   an element is wrong when |err| > 2 * the largest error that plain attention in the
//               same dtype makes on the same rows
//     fp32      |out - exact| must be below 2e-6 |exact| by norm; an element is wrong as above, or
//               where that is more, when |err| > 2e-6 * the largest |exact| of the rows
//     lse       wrong when |err| > 2e-6 * max(1, |exact|)
//
// With fp8_products plain attention rounds its probabilities to e4m3, and the bound of an lse is
// 2^-8 max(1, |exact|): the tensor cores keep some 14 bits of a sum of products of e4m3, so a score
// of order 1 is off by some 2^-9.
//
// The bounds are the same for every number of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "launcher/problem.hpp"

namespace longspan::launcher {

struct Judgement {
  std::int64_t rows = 0;      // compared, each with all its heads
  double max_error = 0;       // of an element of out
  double relative_error = 0;  // |out - exact| / |exact|, over all compared elements
  double plain_error = 0;     // max_error of plain attention in the same dtype
  double lse_error = 0;       // largest error of an lse
  double bound = 0;           // of an element's error
  std::int64_t wrong = 0;     // elements of out and lse beyond their bounds
  bool right = true;
};

/// Up to `count` of the problem's rows (-1: all), ascending: the first and last of each sequence
/// while there is room, the others spread by the seed.
std::vector<std::int64_t> sample_rows(const Problem& problem, std::int64_t count,
                                      std::uint64_t seed);

/// Collective.
Judgement judge(const Communicator& world, const Problem& problem, const Answer& answer,
                const std::vector<std::int64_t>& rows);

}  // namespace longspan::launcher

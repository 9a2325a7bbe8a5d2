// Judges an answer: sampled rows against the float64 oracle. The ranks share the work by (kv head,
// row), and every rank gets the same judgement. An error is right up to the largest of
//
//     any dtype   what rounding in fp32 may do to this row with these scores (rounding.hpp): it is
//                 large only where large scores, of which none has all the weight, amplify it
//     16 bits     2 * the largest error that plain attention in the same dtype makes on the rows
//     fp32        the same, or 2e-6 * the largest |exact| of the rows
//     lse         2e-6 * max(1, |exact|)
//
// and in fp32 |out - exact| by norm is right up to the larger of 2e-6 |exact| and the norm of the
// first.
//
// With fp8_products plain attention rounds its probabilities to e4m3, and the bound of an lse is
// 2^-8 max(1, |exact|): the tensor cores keep some 14 bits of a sum of products of e4m3, so a score
// of order 1 is off by some 2^-9.
//
// The bounds are the same for every number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launcher/problem/problem.hpp"

namespace longspan::launcher {

/// The error with the largest error / bound.
struct Farthest {
  double error = 0, bound = 0;
  void add(const Farthest& other);
};

/// The errors of one gradient.
struct GradientErrors {
  const char* name;
  double max_error = 0;    // of an element
  double plain_error = 0;  // the largest of plain fp32, on the same elements
  double largest = 0;      // exact element
  std::int64_t wrong = 0;  // elements beyond their bounds
  Farthest farthest;
};

struct Judgement {
  std::int64_t rows = 0;      // rows compared, each with all its heads
  double max_error = 0;       // of an element of out
  double relative_error = 0;  // |out - exact| / |exact|, over all compared elements
  double relative_bound = 0;  // of relative_error; 0 where there is none
  double plain_error = 0;     // max_error of plain attention in the same dtype
  double lse_error = 0;       // largest error of an lse
  double bound = 0;           // of an element's error, where scores amplify nothing
  Farthest element, lse;
  std::int64_t wrong_elements = 0, wrong_lse = 0;  // beyond their bounds
  std::vector<GradientErrors> gradients;           // with a backward: dq, dk, dv and dsinks
  std::int64_t wrong = 0;                          // all
  bool right = true;
};

/// Samples up to `count` of the problem's rows (-1: all), ascending: the first and last of each
/// sequence while there is room, the others spread by the seed.
std::vector<std::int64_t> sample_rows(const Problem& problem, std::int64_t count,
                                      std::uint64_t seed);

/// The same of its keys, where the problem goes back; otherwise none.
std::vector<std::int64_t> sample_keys(const Problem& problem, std::int64_t count,
                                      std::uint64_t seed);

/// How many kv heads a rank judges side by side: as many as fit in 1 GiB of keys and values in
/// float64, and at least one.
int heads_at_once(const Options& options, double kv_len);

/// Judges these rows of an answer and, where the problem goes back, the gradients of these rows and
/// keys. Collective.
Judgement judge(const Communicator& world, const Problem& problem, const Answer& answer,
                const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys = {});

/// Judges several answers to one problem, whose rows of gather_rows are these: the oracle is asked
/// once. Collective.
std::vector<Judgement> judge_gathered(const Communicator& world, const Problem& problem,
                                      const std::vector<Answer>& answers,
                                      const std::vector<std::int64_t>& rows);

/// The worse of two judgements of other rows.
Judgement worse(const Judgement& a, const Judgement& b);

/// The errors in figures.
std::string complaint(const Judgement& judgement);

}  // namespace longspan::launcher

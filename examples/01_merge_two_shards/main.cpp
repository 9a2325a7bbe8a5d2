// One query on six keys in two shards. Each shard gives a partial state
//
//     m = max s,   l = sum exp(s - m),   o = sum exp(s - m) v
//
// and one merge gives the answer over all six keys. This uses only the algebra
// (longspan/state.hpp): no ranks, no kernels, nothing to link. Internally, scores are in base 2, so
// exp becomes exp2.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>

#include <longspan/state.hpp>

namespace {

constexpr int kDim = 2;  // of a value

struct Key {
  float score;  // q . k, scaled
  float value[kDim];
};

struct State {
  longspan::Stats stats = longspan::empty_stats();
  float o[kDim] = {};
};

// [merge]
State merge(const State& a, const State& b) {
  const longspan::Fold fold = longspan::fold(a.stats, b.stats);
  State merged{fold.stats};
  for (int d = 0; d < kDim; ++d) merged.o[d] = fold(a.o[d], b.o[d]);
  return merged;
}

/// A key by itself is a state too: (s, 1, v). Folding the keys of a shard gives its state.
State attend(std::span<const Key> shard) {
  State state;
  for (const Key& key : shard) {
    const State one{{key.score * longspan::kLog2E, 1.0f}, {key.value[0], key.value[1]}};
    state = merge(state, one);
  }
  return state;
}
// [/merge]

void print(const char* name, const State& s) {
  std::printf("%-8s max %6.3f  sum %5.3f  o (%6.3f, %6.3f)\n", name, s.stats.max * longspan::kLn2,
              s.stats.sum, s.o[0], s.o[1]);
}

}  // namespace

int main() {
  const Key keys[] = {{0.5f, {1, 0}},  {2.0f, {0, 1}},  {-1.0f, {1, 1}},
                      {3.0f, {2, -1}}, {0.0f, {-1, 0}}, {1.5f, {0, 3}}};
  const std::span all(keys);

  const State left = attend(all.first(4)), right = attend(all.last(2));
  const State both = merge(left, right);
  const longspan::Finish finish = longspan::finish(both.stats);
  print("left", left);
  print("right", right);
  print("merged", both);

  // The same in one piece, in float64.
  double sum = 0, out[kDim] = {};
  for (const Key& key : keys) {
    sum += std::exp(double{key.score});
    for (int d = 0; d < kDim; ++d) out[d] += std::exp(double{key.score}) * key.value[d];
  }
  double error = std::abs(finish.lse - std::log(sum));
  for (int d = 0; d < kDim; ++d)
    error = std::fmax(error, std::abs(finish(both.o[d]) - out[d] / sum));

  std::printf("out (%.6f, %.6f)  lse %.6f\n", finish(both.o[0]), finish(both.o[1]), finish.lse);
  std::printf("float64 (%.6f, %.6f)  lse %.6f\n", out[0] / sum, out[1] / sum, std::log(sum));

  // Merging is commutative to the bit, and an empty shard changes nothing.
  const State swapped = merge(right, left), padded = merge(both, State{});
  const bool same = swapped.stats.sum == both.stats.sum && swapped.o[0] == both.o[0] &&
                    padded.stats.sum == both.stats.sum && padded.o[1] == both.o[1];
  std::printf("swapped and padded with an empty shard: %s bits\n", same ? "the same" : "OTHER");
  return same && error < 1e-6 ? EXIT_SUCCESS : EXIT_FAILURE;
}

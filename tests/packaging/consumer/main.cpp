// One process alone attends to three keys with equal scores: the result is the mean of the values.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <longspan/longspan.hpp>

int main() {
  constexpr int kDim = 16, kKeys = 3;
  std::vector<float> q(kDim, 1.0f), k(kKeys * kDim, 0.5f), v(kKeys * kDim), out(kDim, -1.0f);
  for (int key = 0; key < kKeys; ++key)
    for (int d = 0; d < kDim; ++d) v[key * kDim + d] = static_cast<float>(key * d);

  longspan::attend(longspan::self(), {.q = {q.data(), {1, 1, kDim}},
                                      .k = {k.data(), {kKeys, 1, kDim}},
                                      .v = {v.data(), {kKeys, 1, kDim}},
                                      .out = {out.data(), {1, 1, kDim}},
                                      .total_keys = kKeys});
  for (int d = 0; d < kDim; ++d)
    if (!(out[d] > d - 1e-5f && out[d] < d + 1e-5f)) return EXIT_FAILURE;
  std::printf("longspan %s: the mean of the values, as it should be\n", LONGSPAN_VERSION);
}

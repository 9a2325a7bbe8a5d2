// Grids that are made for a GPU take hours where CPUs simulate one (docs/contributing/testing.md),
// so a test skips cases there. Its seed decides which: other schedules keep others.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <random>

namespace longspan::tests {

/// What one test skips. Work is in milliseconds of a CPU, estimated from the shape of a case and
/// not measured, so that a seed keeps the same cases on every machine.
class Reduction {
 public:
  explicit Reduction(std::uint64_t seed) : random_(seed) {}

  /// The first case that is small enough is kept, the others with falling probability.
  bool leaves_out(double work) {
    const double draw = std::uniform_real_distribution<double>()(random_);
    const bool small_enough = work <= kLargest;
    const bool kept = small_enough && (kept_ == 0 || draw < std::exp(-spent_ / kUsual));
    spent_ += kept ? work : 0;
    ++(kept ? kept_ : left_out_);
    return !kept;
  }

  /// Such a test would test nothing.
  bool left_out_all() const { return kept_ == 0 && left_out_ > 0; }

 private:
  // The sum grows with the logarithm of the number of cases: 5 kUsual of a thousand small ones.
  static constexpr double kUsual = 150, kLargest = 1000;

  std::mt19937_64 random_;
  double spent_ = 0;
  int kept_ = 0, left_out_ = 0;
};

/// For the running test: set where kernels are simulated (tests/simulator/schedules.cpp), and never
/// on a GPU, where every case runs.
inline std::optional<Reduction>& reduction() {
  static std::optional<Reduction> now;
  return now;
}

/// Whether the test skips this case.
inline bool is_left_out(double work) { return reduction() && reduction()->leaves_out(work); }

/// `full`, or `small` in the simulator, where all cases of size `full` are too large.
template <class T>
T reduced(T full, T small) {
  return reduction() ? small : full;
}

#define LONGSPAN_NEEDS_MORE_THAN_A_SIMULATOR(why)                                        \
  do {                                                                                   \
    if (::longspan::tests::reduction()) GTEST_SKIP() << "not in the simulator: " << why; \
  } while (0)

/// The work of attention in one call: the products of rows, which come in tiles, with all keys, and
/// the making of the inputs. Masks save less than their part, since cases of few rows cost the
/// same.
template <class Lengths>
double work_of_attention(const Lengths& q_lens, const Lengths& kv_lens, int heads, int kv_heads,
                         int dim, int ranks) {
  double products = 0, keys = 0;
  for (std::size_t b = 0; b < q_lens.size(); ++b) {
    const double rows = static_cast<double>(q_lens[b]) * heads / kv_heads;
    products += std::ceil(rows / 16) * 16 * kv_lens[b];
    keys += kv_lens[b];
  }
  return 2 * ranks + 5e-6 * products * kv_heads * dim + 1e-4 * keys * kv_heads * dim;
}

/// The work of the Hopper kernel for the same: its tiles are larger.
constexpr double kOnHopper = 0.4;

}  // namespace longspan::tests

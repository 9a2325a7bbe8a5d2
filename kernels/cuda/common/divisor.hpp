// Divides by a number that the host knows, with a product and a shift. A division on the device is
// a long chain of dependent instructions.
#pragma once

#include <cstdint>

#include "longspan/types.hpp"

namespace longspan::kernels::cuda {

/// Computes n / d for n < 2^31. With 2^(L-1) < d <= 2^L and m = 2^(31+L) / d + 1, the error of n m
/// / 2^(31+L) is below n / 2^31 of 1 / d: too small to reach the next integer (Granlund and
/// Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  std::uint32_t value = 1;
  std::uint32_t multiplier = 1u << 31;  // with the shift, those of 1; the last bit is left out
  std::uint32_t shift = 31;

  Divisor() = default;
  explicit Divisor(std::uint32_t d) : value(d) {
    std::uint32_t log2 = 0;
    while (std::uint64_t{1} << log2 < d) ++log2;
    shift = 31 + log2;
    multiplier = static_cast<std::uint32_t>((std::uint64_t{1} << shift) / d + 1);
  }
  LONGSPAN_HD std::uint32_t operator()(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{n} * multiplier >> shift);
  }
  LONGSPAN_HD friend int operator/(int n, const Divisor& by) {
    return static_cast<int>(by(static_cast<std::uint32_t>(n)));
  }
  LONGSPAN_HD friend int operator%(int n, const Divisor& by) {
    return n - n / by * static_cast<int>(by.value);
  }
};

}  // namespace longspan::kernels::cuda

// Division that rounds up.
#pragma once

#include <cstdint>

namespace longspan {

/// The least number of pieces of `by` that hold n. n is not negative, and `by` is positive.
constexpr std::int64_t divided_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

}  // namespace longspan

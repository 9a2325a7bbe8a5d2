// The two products of a tile of a few rows (decode), directly from the cache. Packing pays off if
// many rows share it; here it would take longer than reading the keys. The arithmetic is that of
// multiply-inl.hpp, a chain in the order of the depth for each element, and so are the bits. They
// are in few_rows.cpp, separate from attend_tile.cpp, so that both compile in parallel.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_FEW_ROWS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_FEW_ROWS_INL
#undef LONGSPAN_HOST_FEW_ROWS_INL
#else
#define LONGSPAN_HOST_FEW_ROWS_INL
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/host/tile.hpp"
#include "longspan/types.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// Some keys, or values, of one head.
struct FewKeys {
  const std::byte* rows[kFewKeys];
  const std::byte* ahead[kFewKeys];  // rows to prefetch meanwhile
  int count;                         // for keys a multiple of 16
};

inline constexpr bool kHasFewRows = LONGSPAN_HOST_FEW_ROWS;

/// scores[r, j] = q[r] . key j, of keys of `type`.
void score_few(DType type, const FewKeys& keys, int dim, const float* q, int rows, float* scores);

/// o[r] += sum of weights[r, j] value j, of values of `type`: the chains continue those of the keys
/// before. `dim` is a multiple of 16.
void weigh_few(DType type, const FewKeys& values, int dim, const float* weights, int rows, float* o,
               std::ptrdiff_t o_stride);

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target

#include "kernels/row_puts.hpp"

#include <algorithm>

#include "longspan/error.hpp"
#include "src/base/divided_up.hpp"

namespace longspan::kernels {

void RowPuts::add(const StridedCopy& copy, std::int64_t part_width, int every) {
  if (copy.bytes() == 0) return;
  if (blocks == kMostBlocks)
    throw InputError("more blocks of rows are put at once than one kernel takes");
  block[blocks++] = {copy, std::min(part_width, copy.width), every};
}

void RowPuts::divide() {
  // Enough to keep a warp's loads in flight together, even for wide rows.
  constexpr std::int64_t kUnitBytes = 8 << 10, kLeastRows = 4;
  std::int64_t widest = 1, longest = 0;
  for (int i = 0; i < blocks; ++i) {
    widest = std::max(widest, block[i].part_width);
    longest = std::max(longest, block[i].copy.rows);
  }
  rows_a_unit = std::max(kUnitBytes / widest, kLeastRows);
  units = divided_up(longest, rows_a_unit) * blocks;
}

}  // namespace longspan::kernels

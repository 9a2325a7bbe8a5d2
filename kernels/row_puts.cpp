#include "kernels/row_puts.hpp"

#include <algorithm>
#include <limits>

#include "longspan/error.hpp"
#include "src/divided_up.hpp"

namespace longspan::kernels {

void RowPuts::add(const StridedCopy& copy, std::int64_t part_width, int every) {
  if (copy.bytes() == 0) return;
  if (blocks == kMostBlocks || copy.width > std::numeric_limits<int>::max())
    throw InputError("more rows, or wider ones, are put at once than one kernel takes");
  StridedCopy part = copy;
  part.width = std::min(part_width, copy.width);
  // The last part may be narrower than the others.
  const int most = std::min(word_of(part), word_of(copy));
  block[blocks++] = {copy.from,
                     copy.to,
                     copy.from_pitch,
                     copy.to_pitch,
                     copy.rows,
                     static_cast<int>(copy.width),
                     static_cast<int>(part.width),
                     every,
                     most};
}

void RowPuts::divide() {
  constexpr int kUnitBytes = 8 << 10;  // enough for a warp's loads to be under way together
  int widest = 1;
  std::int64_t longest = 0;
  for (int i = 0; i < blocks; ++i) {
    widest = std::max(widest, block[i].part_width);
    longest = std::max(longest, block[i].rows);
  }
  rows_a_unit = std::max(kUnitBytes / widest, 1);
  units = divided_up(longest, std::int64_t{rows_a_unit}) * blocks;
}

}  // namespace longspan::kernels

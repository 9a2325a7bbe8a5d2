// Finished rows with their lse as they travel between ranks: a slot for each rank or sender, with
// rows [rows, heads, value_dim] and then their lse [rows, heads].
#pragma once

#include "kernels/params.hpp"
#include "longspan/storage.hpp"

namespace longspan {

struct FinishedSlot {
  std::int64_t rows = 0;
  int heads = 1;
  int dim = 0;
  DType dtype = DType::fp32;

  std::int64_t lse_at() const { return align(rows * heads * storage_of(dtype).row_bytes(dim)); }
  std::int64_t bytes() const { return lse_at() + align(rows * heads * 4); }

  kernels::TokenRows out(std::byte* slot) const { return {slot, std::int64_t{heads} * dim, dim}; }
  kernels::TokenLse lse(std::byte* slot) const {
    return {reinterpret_cast<float*>(slot + lse_at()), heads, 1};
  }

  /// Describes the copy of the rows in `slots` equal slots; the caller adds the destination.
  kernels::PackOutputsParams take_from(std::byte* first, int slots) const {
    const auto apart = static_cast<std::uint32_t>(slots > 1 ? rows : 0);
    kernels::PackOutputsParams p;
    p.tokens = rows * slots;
    p.heads = heads;
    p.dim = dim;
    p.dtype = dtype;
    p.from = out(first);
    p.from.gap = {storage_of(dtype).elements(bytes()) - rows * heads * dim, apart};
    p.from_lse = lse(first);
    p.from_lse.gap = {bytes() / 4 - rows * heads, apart};
    return p;
  }

 private:
  /// Aligns to 16 bytes, which the kernels move at once.
  static std::int64_t align(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }
};

}  // namespace longspan

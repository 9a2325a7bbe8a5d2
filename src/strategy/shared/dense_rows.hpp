// Tensors from which blocks of some rows and some heads are copied.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/strided_copy.hpp"

namespace longspan {

/// A tensor [rows, heads, columns], dense.
struct DenseRows {
  std::byte* data;
  int heads;
  std::int64_t head_bytes;  // of one head of one row

  std::int64_t pitch() const { return heads * head_bytes; }
  std::byte* at(std::int64_t row, int head) const {
    return data + row * pitch() + head * head_bytes;
  }
};

/// The copy of `heads` heads of `rows` rows, which begin at (from_row, from_head) and (to_row,
/// to_head).
inline StridedCopy block(const DenseRows& from, std::int64_t from_row, int from_head,
                         const DenseRows& to, std::int64_t to_row, int to_head, std::int64_t rows,
                         int heads) {
  return {from.at(from_row, from_head),
          to.at(to_row, to_head),
          from.pitch(),
          to.pitch(),
          heads * from.head_bytes,
          rows};
}

}  // namespace longspan
